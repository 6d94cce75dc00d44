"""The tokenizer: byte-level BPE of the `tokenizers` library, in the folder form that Megatron's HuggingFaceTokenizer reads."""

import base64
import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nam_megatron.data.manifest import AROUND, TOKENS
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.words.regular import irregular

END = "<|endoftext|>"
# The names that conf/feature/fim.yaml expects. One token pads all: Megatron takes the tokenizer's padding out of the loss.
PAD = "<fim_pad>"
SPECIAL = (END, "<fim_prefix>", "<fim_middle>", "<fim_suffix>", PAD)
FILE, CONFIG = TOKENS, "tokenizer_config.json"
# Ids of a published folder's generation_config.json or config.json, which no tokenizer's file has: `copy` keeps them in CONFIG.
ENDS = "generation_ends"
MOST_GROWTH = 1000.0  # of a text; one of a few bytes that doubles thirty times fills a host
MOST_BYTES = 256 << 20
MOST_ADDED = 4096  # characters of an added token; the library takes minutes to get ready for one of 200,000


def train(texts: Iterable[str], entries: int, progress: bool) -> Tokenizer:
    """A tokenizer of exactly `entries` entries, the special ones first.

    Bytes are the alphabet, so every text can be encoded and comes back unchanged. Digits stand alone (a number is not one of many
    entries); otherwise words, punctuation and runs of blanks are merged as GPT-2's pattern parts them.

    Raises:
        Refused: the texts have too few different pairs for so many entries.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (reached := tokenizer.get_vocab_size()) != entries:
        hint = f"give more text, or a vocabulary: `--entries {reached}`"
        raise Refused(f"these texts give a tokenizer of {reached} entries, not {entries}", hint=hint)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer's folder, whole or not at all.

    Raises:
        Refused: `folder` is there and not empty.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "extra_special_tokens": [t for t in SPECIAL if t not in (END, PAD)],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,  # else the library warns at every longer text
    }
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        (part / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (part / FILE).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # its own `save` hides a full disk
        part.rename(folder)
    except OSError as err:
        if err.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise Refused(taken(folder)) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def taken(folder: Path) -> Problem:
    return Problem(f"`{folder}` exists and is not empty", hint="name another folder")


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, ours or somebody's; the names of special tokens inside a text are text to it.

    Raises:
        Refused: the folder cannot be read, names code, has no end of document, or has ids that are not 0, 1, 2, ...
    """
    raise_if(irregular((folder / FILE, folder / CONFIG)))
    try:
        if (folder / FILE).stat().st_size > MOST_BYTES:
            raise ValueError(f"`{FILE}` has more than {MOST_BYTES >> 20} MiB")
        tree = json.loads((folder / FILE).read_text(encoding="utf-8"))
        longest = max((len(str(one.get("content"))) for one in tree.get("added_tokens") or ()), default=0)
        if longest > MOST_ADDED:
            raise ValueError(f"one of `added_tokens` in `{FILE}` has {longest} characters, more than {MOST_ADDED}")
        with _no_panic():
            tokenizer = Tokenizer.from_file(str(folder / FILE))
        config = _config(folder)
    except Exception as err:  # the library raises Exception itself
        hint = "`python -m nam_megatron.data tokenizer` makes one"
        said = f"{err.strerror}: `{err.filename}`" if isinstance(err, OSError) else err
        raise Refused(f"`{folder}` holds no tokenizer: {said}", hint=hint) from None
    # A pre-tokenizer gets what the normalizer has made.
    before = _growth(tree.get("normalizer")) * _growth(tree.get("pre_tokenizer"))
    if (times := max(before, _growth(tree.get("decoder")))) > MOST_GROWTH:
        said = f"the tokenizer in `{folder}` may make a text {f'{times:.0f}' if times < 1e6 else 'a million'} times as long"
        raise Refused(
            said, hint=f"take what replaces a text out of `normalizer`, `pre_tokenizer` and `decoder` of `{FILE}`"
        )
    if "auto_map" in config:
        said = f"the tokenizer in `{folder}` is code of its own (`auto_map` of `{CONFIG}`), which is not run"
        raise Refused(said, hint=f"`{FILE}` may do without: remove the key if it does")
    if named(folder, tokenizer).get("eos") is None:
        said = (
            f"the tokenizer in `{folder}` has no end of a document: no `eos_token` of `{CONFIG}` is one of its entries"
        )
        raise Refused(said, hint="name it there, or make one: `python -m nam_megatron.data tokenizer`")
    ids = tokenizer.get_vocab().values()
    if max(ids) + 1 != len(ids):
        raise Refused(f"the tokenizer in `{folder}` has {len(ids)} entries and the id {max(ids)}")
    tokenizer.encode_special_tokens = True
    # A file keeps what its last caller had set, and would cut or fill every document without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text's tokens, without what a tokenizer would put around it. Raises Refused: its patterns give up on the text."""
    try:
        with _no_panic():
            return tokenizer.encode(text, add_special_tokens=False).ids
    except RuntimeError as err:
        said = f"the tokenizer breaks down on a text that begins with {json.dumps(text[:40])}: {str(err)[:200]}"
        raise Refused(said, hint="a pattern of its `pre_tokenizer` or `normalizer` goes back too often") from None


@contextlib.contextmanager
def _no_panic() -> Iterator[None]:
    """What the library raises where it breaks down is no Exception, and its type has no place to be imported from."""
    try:
        yield
    except BaseException as err:
        if type(err).__name__ != "PanicException":
            raise
        raise RuntimeError(str(err)) from None


def _growth(stage: Any) -> float:
    """How many times as long a text may become in a normalizer, a pre-tokenizer or a decoder."""
    if not isinstance(stage, dict):
        return 1.0
    inner = stage.get("normalizers") or stage.get("pretokenizers") or stage.get("decoders")
    if isinstance(inner, list):
        return prod(map(_growth, inner))
    if stage.get("type") == "ByteLevel":  # a byte that no text shows is a character of two
        return 2.0
    if charsmap := stage.get("precompiled_charsmap"):
        # The size of a trie, the trie, and what it leads to, each with a zero behind it.
        raw = base64.b64decode(charsmap)
        return float(max(1, *map(len, raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0"))))
    content = str(stage.get("content") or stage.get("prepend") or "")
    pattern = stage.get("pattern")
    found = pattern.get("String") if isinstance(pattern, dict) else None
    # A regular expression may find something at every character.
    return max(1.0, len(content) / len(found)) if isinstance(found, str) and found else 1.0 + len(content)


def named(folder: Path, tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of what the folder's config names: `eos`, which ends documents, and `pad`."""
    known = _known(tokenizer, {name: _config(folder).get(f"{name}_token") for name in ("eos", "pad")})
    return {name: tokenizer.token_to_id(text) for name, text in known.items()}


def ends(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """Ids that end a generated text: `eos`, and what the model was published with beside it. Raises Refused for one that is no token."""
    own, entries = named(folder, tokenizer)["eos"], tokenizer.get_vocab_size()
    found: list[Any] = []
    for name, key in ((CONFIG, ENDS), ("generation_config.json", "eos_token_id"), ("config.json", "eos_token_id")):
        raise_if(irregular((path := folder / name,)))
        try:
            if not found and path.exists():
                said = json.loads(path.read_text(encoding="utf-8")).get(key)
                found = said if isinstance(said, list) else [said] * (said is not None)
                if wrong := [end for end in found if type(end) is not int or not 0 <= end < entries]:
                    raise ValueError(
                        f"`{key}` has {json.dumps(wrong[0])}, and the tokenizer the ids 0 to {entries - 1}"
                    )
        except (OSError, ValueError, AttributeError, RecursionError) as err:
            hint = "get it again, or take it away: it says which tokens end a text"
            raise Refused(f"`{path}` cannot be understood: {err}", hint=hint) from None
    return list(dict.fromkeys(found if own in found else (own, *found)))


def copy(folder: Path, to: Path) -> None:
    """Write a tokenizer's two files as it is used here, so that every reader of them has the tokens of the data: ours byte for byte; those
    of others without what they put around a text, and with a config that names no class of their own and no token that is not in the file.

    Raises:
        Refused: as `load`.
    """
    tokenizer, said = load(folder), _config(folder)
    tree = json.loads((folder / FILE).read_text(encoding="utf-8"))
    plain = tree | dict.fromkeys(AROUND[:2])
    if tokenizer.num_special_tokens_to_add(is_pair=False):
        plain |= dict.fromkeys(AROUND)
    more = said.get("extra_special_tokens") or said.get("additional_special_tokens") or []
    more = _known(tokenizer, dict(enumerate(more.values() if isinstance(more, dict) else more)))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
    }
    # No `bos_token`: no document has one, and who finds it named begins texts with it.
    config |= _known(tokenizer, {f"{name}_token": said.get(f"{name}_token") for name in ("eos", "pad", "unk")})
    config |= {"extra_special_tokens": list(more.values())}
    if len(ending := ends(folder, tokenizer)) > 1:
        config[ENDS] = ending
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    elif said.get("chat_template"):
        config["chat_template"] = said["chat_template"]
    for name, was, now in ((FILE, tree, plain), (CONFIG, said, config)):
        if was == now:
            shutil.copyfile(folder / name, to / name)
        else:
            (to / name).write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _known(tokenizer: Tokenizer, said: dict[Any, Any]) -> dict[Any, str]:
    """Names of tokens, each a text or a mapping with its `content`, that are entries of the tokenizer."""
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in said.items()}
    return {
        key: text for key, text in texts.items() if isinstance(text, str) and tokenizer.token_to_id(text) is not None
    }


def _config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"`{CONFIG}` is no mapping")
    return config
