"""Hydra composes one config of conf/ and of folders of one's own, with words laid over it; what it refuses is said in our words."""

import pickle
import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigTypeError

from nam_megatron import migrate
from nam_megatron.blocks.kinds import LETTERS
from nam_megatron.compile import files
from nam_megatron.compile.sources import Sources, Word, clipped, leads_nowhere, literal, word
from nam_megatron.conf import conf_dir, short
from nam_megatron.errors import Problem, Refused, likely, raise_if
from nam_megatron.recipe.keys import SWITCHED, keys_at, keys_hint, whole_hint
from nam_megatron.words.setting import leaves

SEARCH = "hydra.searchpath"

# Words for runs that look like presets (docs/glossary.md): what each names.
NO_PRESETS = {
    "current": "what a wave of runs took as its baseline, another preset in the next wave",
    "head": "whatever was launched from HEAD, so a revision and no recipe",
    "v19c": "the tag of a wave of runs",
}
# Keys that a person makes up within, and how one is written.
MAPPINGS = {
    "allow": '`allow.LAW="why"`, by its name in docs/laws.md',
    "cluster.waivers": '`cluster.waivers.CHECK="why"`, by its name in docs/preflight.md',
}
# What commands call the preset beside which they lay this one, and what a person may.
OTHER_PRESETS = ("diff", "against", "compare")


def composed(config_name: str, texts: Sequence[str], commands: Sequence[str] = ()) -> tuple[DictConfig, Sources]:
    """The config of that name, and where each of its keys was said.

    Args:
        config_name: in conf/.
        texts: Hydra overrides; `hydra.searchpath` names folders of one's own.
        commands: keys of the command that are none of the recipe's.

    Raises:
        Refused: whatever Hydra raises, it raises over what it was given.
    """
    rest, folders, absent = searched(texts)
    words = _read(rest, folders)
    raise_if(_misused(words))
    before = GlobalHydra.instance().hydra  # a caller inside a Hydra app gets its own back
    GlobalHydra.instance().clear()
    try:
        with files.searching(folders), initialize_config_dir(str(conf_dir()), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            values, choices = [], []
            for said in words:
                if _value(said, folders):
                    values.append(said.override)
                else:
                    choices.append(said.text)
            kept, merged = _merged(loader, config_name, choices, folders)
            config = pickle.loads(kept)
            loader._apply_overrides_to_config(values, config)
    except Refused:
        raise
    except ConfigCompositionException as err:
        raise Refused(_uncomposed(err, words, folders, commands)) from None
    except Exception as err:
        raise Refused(problem(err)) from None
    finally:
        GlobalHydra.instance().hydra = before
    return config, Sources(config_name, words, merged, folders, absent)


def _value(said: Word, folders: Sequence[Path]) -> bool:
    """Whether a word changes a key behind all files, and nothing of which files those are."""
    group = said.override.key_or_group
    is_group = any((root / group).is_dir() for root in (conf_dir(), *folders))
    return (isinstance(said.value, dict) or not is_group) and not group.startswith("hydra")


# What Hydra made of the files of each choice, and the files that it looked for, as they were.
_known: dict[tuple[str, ...], tuple[files.Seen, bytes, list[Any]]] = {}


def _merged(loader: Any, config_name: str, choices: list[str], folders: Sequence[Path]) -> tuple[bytes, Sequence[Any]]:
    """The config of all files, pickled, and those in order; merged once for as long as none is written to and none is added."""
    where = tuple(str(path.absolute()) for path in (conf_dir(), *folders))
    key = (config_name, *choices, "in", *where)
    if (found := _known.get(key)) and files.unchanged(found[0]):
        return found[1:]
    merge, order = loader._compose_config_from_defaults_list, list[Any]()

    def noted(defaults: Sequence[Any], repo: Any) -> DictConfig:  # Hydra would say it again, from the start
        order.extend(defaults)
        return merge(defaults=defaults, repo=repo)

    loader._compose_config_from_defaults_list = noted
    seen: files.Seen = {}
    files.Folders.seen = seen
    config = compose(config_name, overrides=choices)
    _known[key] = seen, pickle.dumps(config), order
    return _known[key][1:]


def _read(texts: Sequence[str], folders: Sequence[Path]) -> list[Word]:
    try:
        return [word(text, folders) for text in texts]
    except Refused:
        raise
    except Exception as err:
        raise Refused(problem(err)) from None


def searched(texts: Sequence[str]) -> tuple[list[str], list[Path], list[str]]:
    """Words without those that name folders of one's own, those folders, and those among them that are none. Raises Refused."""
    rest, named = list[str](), list[str]()
    for text in texts:
        if not re.match(r"[+~]*hydra[./]", text):
            rest.append(text)
        elif text.lstrip("+").startswith(f"{SEARCH}="):
            named += _folders(text)
        else:
            hint = f"leave it out; `{SEARCH}=[FOLDER]` names folders of your own, and `--multirun` runs a sweep"
            raise Refused(f"`{clipped(text)}`: nothing reads this", hint=hint, law="word-unread")
    plain = [name.removeprefix("file://") for name in named]
    # `pkg://` too: whose word a key is, is read from files.
    absent = [name.removeprefix("pkg://") for name in plain if not Path(name).is_dir()]
    return rest, [Path(name) for name in plain if Path(name).is_dir()], absent


def _folders(text: str) -> list[str]:
    value = _read([text], ())[0].value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        message = f"`{SEARCH}` is a list of folders, not `{value}`"
        raise Refused(message, hint=f"write `{SEARCH}=[FOLDER]`", law="search-no-list")
    return value


def points(texts: Sequence[str], writes: bool) -> list[list[str]]:
    """The words of each point of a sweep, in order; of a line without one, itself.

    writes: the command's `out` names a folder, of which each point gets one below it: `out=DIR/0-optim.lr=0.0001`.
    """
    raise_if(_endless(texts))
    said = [swept(text) or [text] for text in texts]
    found = []
    for number, words in enumerate(product(*said)):
        name = ",".join(word.lstrip("+") for word, all_of in zip(words, said, strict=True) if len(all_of) > 1)
        folder = f"{number}-{re.sub(r'[^\w.,=+-]', '_', name)}"[:200]
        found.append(
            [
                _below(word, folder) if name and writes and word.lstrip("+").startswith("out=") else word
                for word in words
            ]
        )
    return found


def _endless(texts: Sequence[str]) -> Iterator[Problem]:
    """Words that Hydra's sweepers take and that list no values: `interval(1,2)`, `glob(*)`."""
    for said in _read(texts, ()):
        if said.override.is_sweep_override() and not swept(said.text):
            key = said.override.key_or_group
            hint = f"name the values: `{key}=A,B`" + ("" if said.chooses else f", or `{key}=range(1,4)`")
            message = f"`{clipped(said.text)}` does not say which values to sweep over"
            yield Problem(message, hint=hint, law="several-values")


def _below(text: str, folder: str) -> str:
    """The word `out=DIR` for a folder in DIR."""
    said = _read([text], ())[0].value
    return text if said is None else f"{text.partition('=')[0]}={literal(f'{said}/{folder}')}"


def swept(text: str) -> list[str]:
    """What one word of a sweep says at each of its values; nothing of a word that has one."""
    try:
        override = word(text, ()).override
        values = override.sweep_string_iterator() if override.is_sweep_override() else ()
        return [f"{override.get_key_element()}={value}" for value in values]
    except Exception:  # an interval, or no word at all: refused when it is composed
        return []


def _misused(words: Sequence[Word]) -> Iterator[Problem]:
    """What Hydra would refuse without a key, or without what to do."""
    for said in words:
        group = said.override.key_or_group
        yield from filter(None, map(migrate.moved, leaves(said.key, said.value)))
        if said.override.is_sweep_override():
            _, _, value = said.text.partition("=")
            text = f"one text `'{group}=\"{clipped(value)}\"'`"
            hint = f"a list is `KEY=[a,b]`, {text}; to sweep, add `--multirun` as the last word"
            yield Problem(f"`{clipped(said.text)}` has several values", hint=hint, law="several-values")
        elif not said.chooses or said.takes or not (conf_dir() / group).is_dir():
            continue
        elif not isinstance(said.value, (str, list)):
            hint = "write GROUP=NAME; `--help` lists both"
            yield Problem("a group of configs takes the name of one of them", hint=hint, law="value-no-name")
        elif said.override.is_add() and group in files.in_use():
            hint = SWITCHED if group == "feature" else f"leave the `+` out: `{group}=NAME`"
            yield Problem(f"the recipe has a `{group}` already", key=group, hint=hint, law="group-there-already")
        elif not said.override.is_add() and group not in files.in_use():
            message = f"no `{group}` is in use"
            yield Problem(
                message, key=group, hint=f"to lay one over the preset: `+{group}=NAME`", law="group-not-in-use"
            )


def _no_choice(group: str, wanted: str, options: Sequence[str], folders: Sequence[Path]) -> Problem:
    name = wanted.rpartition("/")[2].removesuffix(".yaml")  # a path, as a shell completes it
    if group == "preset" and name.lower() in NO_PRESETS:
        hint = f"name the preset that was run; its receipt says which. There are: {', '.join(options)}"
        message = f"`{wanted}` is no preset but {NO_PRESETS[name.lower()]}"
        return Problem(message, key=group, hint=hint, law="file-unknown")
    there = (Path(wanted), Path(f"{wanted}.yaml"), *(folder / f"{name}.yaml" for folder in folders))
    found = next((path for path in there if path.suffix == ".yaml" and path.is_file()), None)
    if found and name not in options:
        lies = found.absolute().parent.name == group
        home = found.parent.parent if lies else next(iter(folders), found.parent)
        move = "" if lies else f"move it to `{home / group / name}.yaml`, then "
        word = f"{'conf' if group == 'preset' else group}={name}"
        hint = f"a {group} is named, and not its file: {move}`--config-dir {home} {word}`"
        return Problem(f"no {group} `{wanted}`, and `{found}` is a file", key=group, hint=hint, law="file-unknown")
    if group == "preset" and (wanted.endswith(".json") or "/" in wanted) and not likely(name, options):
        hint = "`conf=` takes a config.json of Hugging Face, a folder with one, or a NAME; your own: `--config-dir FOLDER conf=NAME`"
        path = Path(wanted)
        what = "`config.json` in" if path.is_dir() else "`config.json` or preset" if path.exists() else "file"
        return Problem(f"there is no {what} `{clipped(wanted)}`", key=group, hint=hint, law="file-unknown")
    close = likely(name, options)
    if group == "cluster" and close and re.sub(r"\d", "", close) == re.sub(r"\d", "", name):
        close = None  # another number is another machine
    meant = f"did you mean `{close}`? " if close else ""
    where = f"would be `{folders[0] / group / name}.yaml`" if folders else "is found by `--config-dir FOLDER`"
    own = "" if close else f"; one of your own {where}"
    hint = SWITCHED if group == "feature" else f"{meant}there are: {', '.join(options)}{own}"
    return Problem(f"no {group} `{wanted}`", key=group, hint=hint, law="file-unknown")


def _uncomposed(
    err: ConfigCompositionException, words: Sequence[Word], folders: Sequence[Path], commands: Sequence[str]
) -> Problem:
    """What Hydra refused while it merged files and words. commands: keys of the command that are none of the recipe's."""
    if isinstance(err, MissingConfigException):
        return _missing(err, folders)
    key = getattr(err.__cause__, "full_key", None)
    whole = next((said.key for said in reversed(words) if key and f"{said.key}.".startswith(f"{key}.")), None)
    if key and whole:
        return _unknown_override(key, whole, commands)
    if twice := re.match(r"Multiple values for ([\w/]+)\S*\. To override a value use 'override \S+: (\S+)'", str(err)):
        group, second = twice.groups()
        hint = f"name both in one list, `/{group}@_global_: [OTHER, {second}]`; a file within another is `/{group}/{second}@_global_`"
        message = f"two files lay something of the group `{group}` by their `defaults`, the second `{second}`"
        return Problem(message, hint=hint, law="group-laid-twice")
    if isinstance(err.__context__, ConfigTypeError):
        hint = "write `SECTION: {KEY: VALUE}` there"
        return Problem(f"`{_inside(err)}` has a list where a section belongs", hint=hint, law="section-as-a-list")
    added = (said.key for said in words if said.override.is_add() and f"'{said.key}'" in str(err))
    if there := next(added, None):
        return Problem(f"`{there}` is there already", key=there, hint="leave the `+` out", law="key-there-already")
    return problem(err)


def _missing(err: MissingConfigException, folders: Sequence[Path]) -> Problem:
    wanted = err.missing_cfg_file or ""
    group, _, name = wanted.partition("/")
    for link in (folder / f"{wanted.removesuffix('.yaml')}.yaml" for folder in folders):
        if link.is_symlink():
            return leads_nowhere(link)
    there = [] if "/" in name else sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
    if options := there if err.options is None else err.options:  # none where it is one of a list
        return _no_choice(group, name, options, folders)
    hint = "another of a group is `override /GROUP: NAME`, an overlay `/overlay@_global_: NAME`"
    message = f"`{_inside(err)}` has `{wanted}` in its `defaults`, and there is no such file"
    return Problem(message, hint=hint, law="file-unknown")


def _inside(err: Exception) -> str:
    """The file over which Hydra raises, of which its error has no attribute."""
    found = re.match(r"In '?([^':]+)'?: ", str(err))
    return found[1] if found else "a config file"


def problem(err: Exception) -> Problem:
    """An error of Hydra or OmegaConf in our words."""
    first = (str(err).strip() or type(err).__name__).splitlines()[0].rstrip(".")
    if isinstance(err, OverrideParseException):
        if re.fullmatch(r"\w+", err.override):
            return Problem(
                f"`{err.override}` is no KEY=VALUE",
                hint=f"a preset is `conf={err.override}`",
                law="override-unreadable",
            )
        at = Path(err.override)
        for name, hint in (
            ("config.json", "a published model is `conf={}`"),
            ("receipt.json", "a run's page is `python -m launch report {}`"),
            ("plan.json", "run.sh beside it starts it; `python -m nam_megatron.budget {}` says what it costs"),
        ):
            if at.name == name or (at / name).is_file():
                said = hint.format(at if at.name == name else at / name)
                return Problem(f"`{clipped(err.override)}` is no KEY=VALUE", hint=said, law="override-unreadable")
        if at.is_file():
            said = f"`python -m nam_megatron.lint {at}` says what it trains, and with `recipe=NAME.yaml` makes a preset of it; "
            said += f"its memory: `python -m nam_megatron.budget {at}`"
            return Problem(f"`{clipped(err.override)}` is no KEY=VALUE", hint=said, law="override-unreadable")
        hint = "it is read as KEY=VALUE; a value with blanks or signs needs quotes of its own: KEY=\"'...'\""
        return Problem(f"cannot read the override `{clipped(err.override)}`", hint=hint, law="override-unreadable")
    if isinstance(err, RecursionError):
        return Problem(
            "a config file includes itself, or nests too deeply",
            hint="look at its `defaults` and anchors",
            law="config-too-deep",
        )
    if isinstance(err, OSError) and err.filename:
        message = f"cannot read `{short(Path(err.filename))}`: {err.strerror}"
        return Problem(message, hint="check the name and its permissions", law="file-error")
    if isinstance(err, (AssertionError, LookupError, TypeError, AttributeError)):
        first = f"Hydra cannot make sense of this: {type(err).__name__}{f', {err}' if str(err) else ''}"
    hint = "`--help` lists groups and keys, `--cfg job` prints the composed config"
    return Problem(first, key=getattr(err, "full_key", None), hint=hint, law="not-composed")


def _unknown_override(key: str, whole: str, commands: Sequence[str]) -> Problem:
    """key: as far as it is none; whole: as it was written."""
    *parents, last = key.split(".")
    at = ".".join(parents) or None
    if example := MAPPINGS.get(key):
        message = f"`{key}` is a mapping: of each its reason"
        return Problem(message, key=key, hint=f"write {example}", law="value-no-mapping")
    if parents == ["model", "letters"] and last in LETTERS:
        kinds = ", ".join(LETTERS[last])
        way = f"write `{last}` into `model.pattern`, and add its kind: `+{key}=KIND`, one of {kinds}"
        return Problem(f"the pattern has no `{last}`", key=at, hint=way, law="key-unread")
    if last in keys_at(parents):  # of a model of one's own, or of a kind that its file leaves out
        return Problem(f"no file gives `{last}`", key=at, hint=f"to add it: `+{key}=...`", law="key-of-no-file")
    if hint := whole_hint([whole, key]):
        return Problem(f"unknown key `{last}`", key=at, hint=hint, law="key-unknown")
    also = () if parents else ("conf", *commands)
    theirs = [name for name in also if name in OTHER_PRESETS and last in OTHER_PRESETS]
    close = theirs[0] if theirs else likely(last, (*keys_at(parents), *also))
    meant = f", did you mean `{close}`?" if close else ""
    return Problem(f"unknown key `{last}`{meant}", key=at, hint=keys_hint(() if close else parents), law="key-unknown")
