"""What reaches a receipt: no secret, no host, no address, no path."""

import json
import re
import string
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from launch import receipt
from launch.redact import RECORDED, SHORT, Redactor, telling

SECRET_NAMES = st.sampled_from(
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "MYPASSWORD",
        "NCCL_AUTH",
        "GH_PAT",
        "NCCL_TOKENS",
        "db_passwd",
        "TORCH_KEY",
    ]
)
VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=SHORT, max_size=40)
OTHER_NAMES = st.sampled_from(
    ["NCCL_IB_HCA", "TORCH_LOGS", "CUDA_HOME", "NVTE_DEBUG", "PATH", "HOME", "OMP_NUM_THREADS"]
)


@given(SECRET_NAMES, VALUES, OTHER_NAMES, VALUES, VALUES)
def test_a_secret_of_the_environment_reaches_no_receipt(tmp_path_factory, name, secret, other, before, after):
    """Wherever it is repeated: in another variable, a command, a log line, a key."""
    assume(telling(secret) and secret == secret.strip())
    lines = [line.strip() for line in secret.splitlines()]
    parts = [part for part in (secret, *lines) if telling(part)]
    assume(not any(part in json.dumps(VOCABULARY) or part in "<secret><path><host><address>@" for part in parts))
    environ = {name: secret, other: before + secret + after}
    redactor = Redactor(environ, hosts=("node1",))
    content = {
        "environ": redactor.environ(environ),
        "job": {"command": ["python", f"--x={before}{secret}{after}"], f"{before} {secret}": {"deep": [secret]}},
    }
    opened = receipt.open_receipt(tmp_path_factory.mktemp("r", numbered=True), "x", content, redactor)
    opened.seal("failed", {"errors": [before + secret, secret + after]})
    written = receipt.read(opened.folder)
    texts = list(strings({k: v for k, v in written.items() if k not in receipt.OURS and k not in ("seal", "closed")}))
    for part in parts:
        assert not any(part in text for text in texts), part


VOCABULARY = [
    "NCCL_IB_HCA",
    "TORCH_LOGS",
    "CUDA_HOME",
    "NVTE_DEBUG",
    "OMP_NUM_THREADS",
    "HF_TOKEN",
    "NCCL_AUTH",
    "NCCL_TOKENS",
    "TORCH_KEY",
]
VOCABULARY += ["environ", "job", "command", "python", "--x=", "deep", "outcome", "errors", "end", "failed"]


def strings(node):
    if isinstance(node, dict):
        for key, value in node.items():
            yield key
            yield from strings(value)
    elif isinstance(node, list):
        for value in node:
            yield from strings(value)
    elif isinstance(node, str):
        yield node


@given(
    st.dictionaries(st.text(string.ascii_uppercase + "_", min_size=1, max_size=20), st.text(max_size=30), max_size=8),
    st.text(),
)
def test_no_environment_is_a_traceback(environ, text):
    redactor = Redactor(environ, {"<home>": [Path("/home/x")]})
    assert redactor.environ(environ).keys() == {k for k in environ if RECORDED.search(k)}
    redactor.text(text)


@pytest.mark.parametrize(
    "text",
    [
        "hf_abcdefghijklmnopqrstuv", "token ghp_0123456789abcdefghij0123", "github_pat_11ABCDEFG0123456789_x", "sk-abcdefghijklmnop1234",
        "AKIAIOSFODNN7EXAMPLE", "glpat-abcdefghij0123456789", "nvapi-abcdefghij0123456789", "xoxb-1234567890-abc",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w", "https://user:pa55@host/x",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    ],
)  # fmt: skip
def test_secrets_are_known_by_their_shape(text):
    assert "<secret>" in Redactor({}).text(f"it said {text} twice")
    assert "pa55" not in Redactor({}).text(text) and "MIIE" not in Redactor({}).text(text)


PLACES = {"<scratch>": [Path("/fast/x/scratch")], "<checkout>": [Path("/fast/x")], "<home>": [Path("/home/me")]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/fast/x/scratch/tmp", "<scratch>/tmp"),
        ("--load=/fast/x/conf", "--load=<checkout>/conf"),
        ("/fast/xy/z", "<path>"),
        ('File "/home/me/a b', 'File "<home>/a b'),
        ("in node7, node7.cluster.example: node77 my-node7", "in <host>, <host>: node77 my-node7"),
        ("tcp://10.1.2.3:29500 [::ffff:192.168.0.9]", "tcp://<address>:29500 [::ffff:<address>]"),
        ("34.1.2.3:29500", "<address>:29500"),
        ("127.0.0.1:29500 cuBLAS 13.1.0.3 and 0.1.2.3", "127.0.0.1:29500 cuBLAS 13.1.0.3 and 0.1.2.3"),
        ("845.1 ms/step, 1/2 of a/b/c, n/a, 20/ 100 | x", "845.1 ms/step, 1/2 of a/b/c, n/a, 20/ 100 | x"),
        ("LD=/a/b:/c/d,'/e/f'", "LD=<path>:<path>,'<path>'"),
        ("https://pytorch.org/docs/stable", "https://pytorch.org/docs/stable"),
        ("file:///data/deep/x.bin", "file: <path>"),
        ("/proc/self/status", "/proc/self/status"),
    ],
)
def test_nothing_names_the_machine(text, expected):
    assert re.sub(r"<path \w{8}>", "<path>", Redactor({}, PLACES, ("node7",)).text(text)) == expected


def test_one_path_has_one_mark():
    redactor = Redactor({})
    assert redactor.text("/data/a/b/") == redactor.text("/data/a/b") != redactor.text("/data/a/c")


def test_a_host_named_like_our_own_words_does_no_harm(tmp_path):
    redactor = Redactor({"MY_KEY": "open"}, hosts=("sealed", "lineage", "completed"))
    opened = receipt.open_receipt(tmp_path, "x", {"lineage": {"host": "sealed"}}, redactor)
    assert receipt.read(opened.folder)["state"] == "open"
    opened.seal("completed", {})
    assert receipt.read(opened.folder)["lineage"] == {"host": "sealed"}
    assert receipt.read(opened.folder)["outcome"]["end"] == "completed"
