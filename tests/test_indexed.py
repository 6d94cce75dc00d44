"""What a dataset's index says before anything starts: a share in which Megatron would look for tokens for ever is refused by its name."""

import os
import shutil
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from command import warm
from megatron.core.datasets.blended_megatron_dataset_builder import _get_size_per_split_per_dataset
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import normalize
from megatron.training import training

from nam_megatron.compile.lower import translate
from nam_megatron.data import identity, indexed
from nam_megatron.errors import Refused
from nam_megatron.recipe import load
from nam_megatron.train import unfit_data


def dataset(prefix: Path, lengths: list[int], dtype: type = numpy.uint16) -> str:
    """Documents of so many tokens each."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype)
    for length in lengths:
        builder.add_document(numpy.full(length, 7, dtype), [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def refused(*words: str, root: Path = Path()) -> list[tuple[str, str | None]]:
    found = unfit_data(translate(load("nam56r_smoke", words)).plan, root)
    return [(problem.message, problem.key) for problem in found]


@pytest.mark.parametrize("key", ["parts", "valid_parts"])
@pytest.mark.parametrize("how", [os.symlink, os.link, shutil.copy, None])
def test_one_dataset_under_two_names_is_no_blend(tmp_path, how, key):
    """It would weigh twice, or be evaluated on what it trains on."""
    names = [dataset(tmp_path / "a", [50]), dataset(tmp_path / "c", [51]), f"{tmp_path}/b"]
    for end in ("bin", "idx") if how else ():
        how(f"{names[0]}.{end}", f"{names[2]}.{end}")
    names[2] = names[2] if how else f"{tmp_path}/./a"
    parts = [f"{{weight: 1, path: {name}}}" for name in names]
    mixed = {"parts": parts[:2], "valid_parts": parts[1:2]} | {key: [parts[2]] if key == "valid_parts" else parts[::2]}
    words = [f"data.{name}=[{','.join(said)}]" for name, said in mixed.items()]

    def hashed() -> object:
        found = load(
            "nam56r_smoke", ("data=blend", "data.tokenizer=t", "data.split=null", "schedule.eval_steps=1", *words)
        )
        return identity.tree(found.data) if how else translate(found)

    with pytest.raises(Refused, match=r"are one dataset|has `.*/a` twice|which is trained on"):
        hashed()


def of(prefix: str, *words: str, split: str = "99,1,0") -> list[tuple[str, str | None]]:
    return refused("data=indexed", f"data.path={prefix}", "data.tokenizer=t", f"data.split='{split}'", *words)


@pytest.mark.parametrize(
    ("documents", "split", "named"),
    [
        (4, "99,1,0", "validation"),  # evaluations or none: Megatron builds it for no samples, too
        (49, "99,1,0", "validation"),
        (4, "70,0,1", "test"),
        (4, "1,99,0", "training"),
        (1, "50,50,0", "training"),  # half to even: round(0.5) is 0
        (50, "99,1,0", "validation"),
        (51, "99,1,0", None),
        (4, "100,0,0", None),
        (1, "1,0,0", None),
        (4, "0.5,0.25,0.25", None),
    ],
)
def test_a_share_without_documents_is_refused_by_its_name(tmp_path, documents, split, named):
    found = of(dataset(tmp_path / "a", [5] * documents), split=split)
    one = "" if documents == 1 else "s"
    told = f"`{tmp_path}/a` has {documents} document{one}, and the {named} share of `{split}` none of them"
    assert found == ([(told, "data.split")] if named else [])


def test_each_part_of_a_blend_is_looked_at(tmp_path):
    large, small = (dataset(tmp_path / name, [5] * n) for name, n in (("large", 400), ("small", 4)))

    def blend(split: str, *paths: str) -> list[tuple[str, str | None]]:
        parts = ",".join(f"{{weight: {i + 0.5}, path: {path}}}" for i, path in enumerate(paths))
        return refused("data=blend", f"data.parts=[{parts}]", "data.tokenizer=t", f"data.split='{split}'")

    assert blend("99,1,0", large) == blend("100,0,0", large, small) == blend("1,1,1", small, large) == []
    for paths in ((large, small), (small, large)):
        ((message, key),) = blend("99,1,0", *paths)
        assert f"`{small}` has 4 documents, and the validation share" in message and key == "data.split"
    ((message, key),) = blend("1,0,0", large, f"{tmp_path}/gone")
    assert message == f"`{tmp_path}/gone.idx` is not there" and key == "data.parts"


def test_folders_that_may_not_be_looked_into_are_said_by_their_keys(tmp_path, monkeypatch):
    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    words = ("data=indexed", f"data.path={tmp_path}/a", f"data.tokenizer={tmp_path}", "data.split='1,0,0'")
    plan = translate(load("nam56r_smoke", words)).plan
    monkeypatch.setattr(Path, "is_file", closed)
    monkeypatch.setattr(Path, "iterdir", lambda path: (closed(path) for _ in "once"))
    assert [(problem.key, problem.message) for problem in unfit_data(plan)] == [
        ("data.tokenizer", f"`{tmp_path}` cannot be read: Permission denied"),
        ("data.path", f"`{tmp_path}/a.idx` cannot be read: Permission denied"),
    ]


def test_datasets_for_validation_alone_are_looked_at_whole(tmp_path):
    large, small = (dataset(tmp_path / name, [5] * n) for name, n in (("large", 400), ("small", 1)))

    def apart(path: str) -> list[tuple[str, str | None]]:
        parts, valid = (f"[{{weight: 1, path: {one}}}]" for one in (large, path))
        words = (f"data.parts={parts}", f"data.valid_parts={valid}", "data.split=null", "data.tokenizer=t")
        return refused("data=blend", *words, "schedule.eval_steps=1")

    assert apart(small) == []
    ((message, key),) = apart(f"{tmp_path}/gone")
    assert message == f"`{tmp_path}/gone.idx` is not there" and key == "data.valid_parts"


def test_documents_without_tokens_are_none(tmp_path):
    nothing = dataset(tmp_path / "nothing", [0] * 400)
    assert [m for m, _ in of(nothing)] == [
        f"`{nothing}` has 400 documents without a token in the {name} share of `99,1,0`"
        for name in ("training", "validation")
    ]
    ends = dataset(tmp_path / "ends", [5] * 396 + [0] * 4)  # the last hundredth
    ((message, key),) = of(ends)
    assert "in the validation share" in message and key == "data.path"
    assert of(ends, split="100,0,0") == of(dataset(tmp_path / "mixed", [0, 5] * 200)) == []


def test_passes_beyond_count_are_refused(tmp_path):
    """They are counted in a loop, and each one's order is kept."""
    tiny, steps = dataset(tmp_path / "tiny", [1]), "schedule.train_steps=10000000"
    ((message, key),) = of(tiny, steps, "schedule.decay_steps=10000000", split="1,0,0")
    assert "the training share" in message and "has 1 tokens, and would be read" in message and key == "data.path"
    assert of(tiny, split="1,0,0") == []  # a pass a token of two steps
    for samples, tokens in product(range(9), range(1, 40)):  # each sample's last label is the next one's first token
        read = indexed._passes(samples, tokens, 4) * tokens
        assert read - tokens < 4 * samples + 1 <= read


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda p: p.with_suffix(".idx").unlink(), "a.idx` is not there"),
        (lambda p: p.with_suffix(".bin").unlink(), "a.bin` is not there"),
        (lambda p: p.with_suffix(".idx").write_bytes(b""), "a.idx` is no index of Megatron's"),
        (lambda p: p.with_suffix(".idx").write_bytes(b"x" * 99), "a.idx` is no index of Megatron's"),
        (lambda p: os.truncate(p.with_suffix(".idx"), 50), "a.idx` is cut off: 50 bytes of"),
        (lambda p: os.truncate(p.with_suffix(".idx"), p.with_suffix(".idx").stat().st_size - 1), "a.idx` is cut off: "),
        (lambda p: os.truncate(p.with_suffix(".bin"), 3), "a.bin` is cut off: 3 bytes of 50"),
        (lambda p: os.truncate(p.with_suffix(".bin"), 60), "a.bin` is longer than `a.idx` says: 60 bytes of 50"),
        (lambda p: edit(p, 63, 1), "a.idx` has a sequence that does not lie within the 50 bytes"),  # 256 bytes further
        (lambda p: edit(p, 61, 255), "a.idx` has a sequence that does not lie within the 50 bytes"),  # before the first
        (lambda p: edit(p, 62, 0), "a.idx` has sequences that share tokens of"),  # 10 bytes earlier
        (lambda p: edit(p, 37, 255), "a.idx` has a sequence of -"),  # the first length's sign
        (lambda p: edit(p, 9, 2), "a.idx` is of version 2, and Megatron reads 1"),
        (lambda p: edit(p, 17, 7), "a.idx` says that tokens are of type 7"),
        (lambda p: (p.with_suffix(".idx").unlink(), os.mkfifo(p.with_suffix(".idx"))), "a.idx` is a pipe"),
        (lambda p: (p.with_suffix(".bin").unlink(), p.with_suffix(".bin").mkdir()), "a.bin` is a folder"),
    ],
)
def test_an_index_that_is_none(tmp_path, spoil, said):
    prefix = dataset(tmp_path / "a", [5] * 5)
    spoil(Path(prefix))
    ((message, key),) = of(prefix, split="1,0,0")  # once, and not for each share
    assert said in message and key == "data.path"


def test_documents_in_another_order_than_their_file_has_them_are_read(tmp_path):
    prefix = dataset(tmp_path / "a", [5] * 5)
    for at, byte in ((54, 10), (62, 0)):  # the first two change places
        edit(Path(prefix), at, byte)
    assert of(prefix, split="1,0,0") == []


def edit(prefix: Path, at: int, byte: int) -> None:
    data = bytearray(prefix.with_suffix(".idx").read_bytes())
    data[at] = byte
    prefix.with_suffix(".idx").write_bytes(data)


def test_an_index_without_sequences(tmp_path):
    dataset(tmp_path / "a", [5])
    header = bytearray((tmp_path / "a.idx").read_bytes()[: indexed.HEADER.size])
    header[18:26], header[26:34] = bytes(8), (1).to_bytes(8, "little")
    (tmp_path / "a.idx").write_bytes(header + bytes(8))
    (tmp_path / "a.bin").write_bytes(b"")
    assert of(str(tmp_path / "a"), split="1,0,0") == [(f"`{tmp_path}/a` has 0 documents", "data.path")]


def test_links_and_relative_paths_are_the_trainers(tmp_path):
    dataset(tmp_path / "a", [5] * 400)
    for end in ("bin", "idx"):
        (tmp_path / f"b.{end}").symlink_to(tmp_path / f"a.{end}")
    words = ("data=indexed", "data.path=b", "data.tokenizer=t")
    assert refused(*words, root=tmp_path) == []
    assert refused(*words)[0][0] == "`b.idx` is not there"
    (tmp_path / "t").mkdir()
    os.mkfifo(pipe := tmp_path / "t" / "tokenizer.json")
    assert refused(*words, root=tmp_path) == [(f"`{pipe}` is a pipe, and no file", "data.tokenizer")]


def test_shares_are_cut_where_megatron_cuts_them():
    draw = numpy.random.default_rng(0)
    splits = ["99,1,0", "98,1,1", "1,1,1", "0.1,0.2,0.7", "969,30,1", "33.3,33.3,33.4"]
    splits += [",".join(f"{x:.3g}" for x in draw.random(3) * 100) for _ in range(200)]
    for split in splits:
        theirs = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
        ours = [ends if ends[0] < ends[1] else None for ends in indexed._ends(split)]
        assert ours == theirs, split


def test_as_many_samples_are_counted_as_megatron_asks_for(monkeypatch):
    words = ("train_steps=10", "decay_steps=10", "eval_interval=4", "eval_steps=3")
    data = ("data=indexed", "data.path=x", "data.tokenizer=t", "data.split='8,1,1'")
    recipe = load("nam56r_smoke", [*data, *(f"schedule.{word}" for word in words)])
    asked = {
        "train_iters": 10,
        "eval_interval": 4,
        "eval_iters": 3,
        "global_batch_size": recipe.schedule.global_batch_size,
    }
    asked |= dict.fromkeys(
        ("train_samples", "full_validation", "skip_train", "start_eval_at_iter", "phase_transition_iterations")
    )
    monkeypatch.setattr(training, "get_args", lambda: SimpleNamespace(**asked))
    found = (share.samples for share in indexed.shares(recipe.data, recipe.schedule))
    assert tuple(found) == training.get_train_valid_test_num_samples()


def test_a_blends_parts_are_asked_for_as_much_as_megatron_asks_for():
    weights, sizes = (0.7, 0.2, 0.1), [64_000, 6_400]
    parts = [SimpleNamespace(path=f"{n}", weight=weight) for n, weight in enumerate(weights)]
    every = [
        (name, size, (n / 2, (n + 1) / 2)) for n, (name, size) in enumerate(zip(indexed.NAMES, sizes, strict=False))
    ]
    theirs = _get_size_per_split_per_dataset(
        normalize(list(weights)), sizes, GPTDatasetConfig.mid_level_dataset_surplus
    )
    assert [share.samples for share in indexed._mixed("parts", parts, every)] == [n for part in theirs for n in part]


def test_what_translates_is_refused_where_the_index_is_there(tmp_path):
    prefix = dataset(tmp_path / "a", [5] * 4)
    words = ("conf=nam56r_smoke", "data=indexed", f"data.path={prefix}", "data.tokenizer=t")
    done = warm(*words)
    assert done.code == 2 and not done.out
    assert "the validation share of `99,1,0` none of them @ data.split" in done.err
    assert warm(*words, "data.split='100,0,0'").code == 0
    shutil.move(f"{prefix}.idx", tmp_path / "elsewhere.idx")  # on the training host
    assert warm(*words).code == 0


def test_each_file_beside_a_tokenizer_that_names_tokens_decides_by_itself(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    seen = [identity._tokenizer(tmp_path)[identity.SPECIAL]]
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        (tmp_path / name).write_text('{"eos_token": "a"}')
        seen.append(identity._tokenizer(tmp_path)[identity.SPECIAL])
    assert all(one not in seen[:i] for i, one in enumerate(seen))


def test_both_ends_of_a_file_too_large_to_be_hashed_whole_decide(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "WHOLE", 4 * 16)
    monkeypatch.setattr(identity, "BLOCK", 16)
    path, seen = tmp_path / "a", set()
    for at in (None, 0, 999):
        text = bytearray(1000)
        if at is not None:
            text[at] = 1
        path.write_bytes(text)
        seen.add(identity.content(path))
    assert len(seen) == 3


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "spiece.model"])
def test_whatever_a_tokenizer_is_called_its_words_are_hashed(tmp_path, name):
    (tmp_path / "model.safetensors").write_text("weights")
    seen = []
    for words in ("a", "b"):
        (tmp_path / name).write_text(words)
        seen.append(identity._tokenizer(tmp_path))
    assert seen[0].keys() == seen[1].keys() == {f"tokenizer/{name}"} and seen[0] != seen[1]
