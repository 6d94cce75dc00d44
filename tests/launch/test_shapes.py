"""The redactor against secrets that nobody listed: drawn value by value and line by line (shapes.py)."""

import random
from pathlib import Path

import pytest
import shapes
from hypothesis import given
from hypothesis import strategies as st
from test_secrets import written

from launch.record.redact import Redactor, Stream

HERE = Path(__file__).parent
COUNT = 4000


def test_what_is_drawn_shows_its_secret():
    """A generator whose lines hid their secrets themselves would find nothing."""
    dice = random.Random(5)
    drawn = [shapes.drawn(dice) for _ in range(COUNT)]
    assert all(shapes.shown(shape, shape.line) for shape in drawn)
    assert len({shape.kinds for shape in drawn}) > 350  # carriers times alphabets


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_secret_with_a_name_is_in_a_log(seed):
    """And of those that nothing names, a long word of letters and digits, one in fifty."""
    dice, redactor = random.Random(seed), Redactor({})
    drawn = [shapes.drawn(dice) for _ in range(COUNT)]
    leaked = [
        shape
        for shape in drawn
        for text in (redactor.secrets(shape.line), "\n".join(map(Stream(redactor).line, shape.line.split("\n"))))
        if shapes.shown(shape, text)
    ]
    assert [shape for shape in leaked if shape.kinds[0] != "bare"] == []
    assert len(leaked) <= 0.02 * sum(shape.kinds[0] == "bare" for shape in drawn) + 1


def test_no_secret_whatever_is_in_a_receipt(tmp_path):
    dice = random.Random(9)
    drawn = [shape for _ in range(100) if "\n" not in (shape := shapes.drawn(dice)).line]
    log, content = written(tmp_path, [shape.line for shape in drawn], {})
    assert [shape for shape in drawn if shapes.shown(shape, content)] == []
    assert sum(shapes.shown(shape, log) for shape in drawn) <= 1


@pytest.mark.parametrize(
    "line",
    [
        *sorted(set((HERE / "megatron_0_19_cpu.log").read_text(encoding="utf-8").splitlines())),
        'RuntimeError: Missing key(s) in state_dict: "decoder.layers.0.self_attention.linear_qkv.weight", "mtp.layers.0.enorm.weight"',
        "KeyError: 'model.layers.3.mixer.dt_bias'",
        "Unexpected key decoder.layers.3.mlp.router.expert_bias",
        "tokens per GPU: 25514.3, consumed tokens: 12345678901234",
        "token_dispatcher=alltoall, tokenizer: HuggingFaceTokenizer",
        "commit 0123456789abcdef0123456789abcdef01234567",
        f"sha256 {'ab12' * 16}",
        "step, tokens, loss\n1, 40960000, 6.931E+00\n token | id | logit\n-------+----+------\n hello |  5 | 1.250000e-03",
        "_ZN7cutlass13device_kernelIN4gemm6kernel13GemmUniversalIN4cute5tupleIJiiiiEEE",
        "triton_red_fused__to_copy_add_mul_native_layer_norm_backward_sum_12",
    ],
)
def test_what_a_trainer_says_is_shown(line):
    assert Redactor({}).secrets(line) == line


@given(st.text(), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6))
def test_marks_stand_where_the_secrets_were(text, spans):
    """Whatever overlaps: what is in no span is shown in its order, and nothing of a span is."""
    from launch.record.redact import MARK, _hidden

    spans = [(min(a, b), max(a, b)) for a, b in spans if max(a, b) <= len(text) and a != b]
    covered = {i for first, last in spans for i in range(first, last)}
    assert _hidden(text, spans).replace(MARK, "") == "".join(c for i, c in enumerate(text) if i not in covered).replace(
        MARK, ""
    )
    assert _hidden(text, spans).count(MARK) >= (1 if covered else 0)


def test_a_line_that_is_known_hides_what_it_did_not_have_before():
    """Lines are remembered but for their digits: a value of the environment is looked for in each, and other letters are another line."""
    stream = Stream(Redactor({"MY_TOKEN": "12345678"}))
    for say in (stream.lines, lambda said: [stream.line(line) for line in said]):
        assert say(["step 00000000 of it"] * 2) == ["step 00000000 of it"] * 2
        assert say(["step 12345678 of it", "step 11111111 of it"]) == ["step <secret> of it", "step 11111111 of it"]
        assert say(["token: abc"]) == ["token: <secret>"] == say(["token: abc"])
    begin, inner = "-----BEGIN RSA PRIVATE KEY-----", "x" * 64
    assert stream.lines([inner]) == [inner]
    assert stream.lines([begin, inner]) == ["<secret>"] * 2  # though it was harmless by itself
    assert Stream(Redactor({})).lines([inner, begin, inner]) == [inner, "<secret>", "<secret>"]
