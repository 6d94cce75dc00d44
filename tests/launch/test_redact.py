"""What reaches a receipt: no secret, no host, no address, no path."""

import importlib.util
import json
import re
import string
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from launch.record import receipt
from launch.record.redact import FIGURE, RECORDED, SAID_BY, SHORT, Redactor, published, shapeless, telling

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
    "NCCL_IB_HCA", "TORCH_LOGS", "CUDA_HOME", "NVTE_DEBUG", "OMP_NUM_THREADS", "HF_TOKEN", "NCCL_AUTH", "NCCL_TOKENS", "TORCH_KEY",
]  # fmt: skip
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


def test_what_torchs_compilers_read_is_recorded():
    """But for names of reports, and a compiler's."""
    root = Path(importlib.util.find_spec("torch").origin).parent
    told = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\(|env_name_\w+=)\s*["'](\w+)["']""")
    names = {n for part in ("_dynamo", "_inductor") for n in told.findall((root / part / "config.py").read_text())}
    assert {"TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS", "TORCHINDUCTOR_USE_FAST_MATH", "INDUCTOR_POST_FUSION_SVG"} <= names
    reports = "LOG_|DUMP_|MAST_|ROLE_RANK|CXX|PT2_COMPILE_ID|AOTINDUCTOR_RE|AOTINDUCTOR_RAISE|UNSAFE_SKIP_FSDP"
    assert not {n for n in names if not RECORDED.search(n) and not re.match(reports, n)}
    assert RECORDED.search("FLA_TRIL_PRECISION")  # of flash-linear-attention: the GEMMs of a delta net in TF32


@given(
    st.dictionaries(st.text(string.ascii_uppercase + "_", min_size=1, max_size=20), st.text(max_size=30), max_size=8),
    st.text(),
)
def test_no_environment_is_a_traceback(environ, text):
    redactor = Redactor(environ, {"<home>": [Path("/home/x")]})
    assert redactor.environ(environ).keys() == {k for k in environ if RECORDED.search(k)}
    redactor.text(text)


# One for each alternative of a pattern, of characters that are in no other: what finds them is that alternative, and its word of those
# that are looked for first. The second part is what is still seen, the third the shortest secret of this shape.
NUMBER = "7" * 40
SHAPES = [
    *(("", f"{begin}{NUMBER[:16]}") for begin in (
        "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "gldt-", "glrt-", "glcbt-", "sk-", "nvapi-", "GOCSPX-",
        "hvs.", "hvb.", "hvr.", "pypi-", "dop_v1_", "dor_v1_", "doo_v1_", "AGE-SECRET-KEY-1", "PMAK-", "lin_api_", "ya29.",
        "sq0atp-", "shpat_", "shpca_", "shppa_", "shpss_", "77777777777777.atlasv1.",
    )),
    *(("", f"{begin}{NUMBER[:12]}") for begin in ("AKIA", "ASIA", "AROA", "AIDA", "AGPA", "ANPA")),
    *(("", f"{begin}{NUMBER[:10]}") for begin in ("sk_live_", "sk_test_", "rk_live_", "rk_test_", "xapp-")),
    *(("", f"xox{kind}-{NUMBER[:10]}") for kind in "abeprs"),
    *(("", f"{begin}{NUMBER[:32]}") for begin in ("dapi", "key-", "SK", "AC")),
    ("", f"glsa_{NUMBER[:30]}"),
    ("", f"AIza{NUMBER[:30]}"), ("", f"npm_{NUMBER[:30]}"), ("", f"1-{NUMBER[:16]}.apps.googleusercontent.com"),
    ("", f"7778Q~{NUMBER[:20]}"),
    ("", f"SG.{NUMBER[:16]}.{NUMBER[:16]}"), ("", f"eyJ{NUMBER[:8]}.{NUMBER[:8]}.7"), ("", "arn:aws:x"),
    ("", "-----BEGIN PRIVATE KEY-----\n7\n-----END PRIVATE KEY-----"), ("", "-----BEGIN EC PRIVATE KEY-----\n7"),
    ("", f"77777777:{NUMBER[:35]}"), ("", f"7777777777:{NUMBER[:35]}"), ("", f"{NUMBER[:24]}.777777.{NUMBER[:27]}"),
    ("", "77777777-7777-7777-7777-777777777777"), ("", "aZ7" + "7" * 37), ("", "/+aZ7" + "7" * 35),
    *((f"{name}=", "7") for name in (
        "pass", "password", "passwd", "passphrase", "pwd", "secret", "token", "api_key", "api-key", "apikey", "access_key", "access-key-id",
        "auth", "credential", "credentials", "signature", "sig", "private_key", "account_key", "shared_key", "shared_access_key",
        "shared-access-signature", "encryption_key", "client_id", "tenant_id", "subscription_id", "key_pair_id", "security_token",
        "session_id", "my_secret_key", "db-token-value", "token_id", "x.password",
    )),
    *((f"password{sign}", "7") for sign in ("=", ":", " => ", "%3D", " = \"", ": '", "'=", '"=')),
    ("Authorization: x ", "7"), ("proxy-authorization=x ", "7"), ("'authorization': 'x ", "7"), ("cookie: ", "7"), ("set-cookie: ", "7"),
    ("x-my-token: ", "7"), ("x-key: ", "7"), ("x-a-secret: ", "7"),
    *((f"{scheme} ", "7" * 6) for scheme in ("bearer", "basic", "digest", "negotiate")),
    ("login me password ", "7"), *((f" {flag} ", "7") for flag in ("-p", "-pw", "--password", "--token", "--secret", "--api-key")),
    *((f"the {word} ", "x7777777") for word in ("password", "passwort", "pw", "secret", "token", "api key", "private-key")),
    *((f"{word} is ", "x7777777") for word in ("secret", "secret for me", "access_key")),
    ("https://", "me:7@"), ("https://", "7@"), ("s3://", ":7@"),
]  # fmt: skip


def test_a_host_of_two_letters_is_found_before_a_port():
    shown = Redactor({}, hosts=("h1",)).text
    assert shown("--rdzv-endpoint=h1:29500 h1.example:1 on h1") == "--rdzv-endpoint=<host>:29500 <host>:1 on h1"
    assert shown("sha1:5, ah1:29500, h1b:1") == "sha1:5, ah1:29500, h1b:1"


def test_a_host_is_found_with_its_domain_and_without():
    redactor = Redactor({}, hosts=("node7.rack2.example",))
    for text in ("node7.rack2.example: ok", "node7 [0] NCCL INFO", "from node7.rack2: x"):
        assert "node7" not in redactor.text(text)
    assert redactor.text("anode7 node70 node7b") == "anode7 node70 node7b"


@pytest.mark.parametrize(("before", "secret"), SHAPES, ids=[f"{b}{s}"[:40].replace("\n", " ") for b, s in SHAPES])
def test_secrets_are_known_by_their_shape(before, secret):
    marked = "<secret>@" if secret.endswith("@") else "<secret>"
    assert shapeless(f"{before}{secret}") == f"{before}{marked}"
    assert Redactor({}).betrays(f"{before}{secret}")


def test_a_value_goes_on_where_it_is_indented_beyond_its_name():
    lines = ["  token: zQ8xk2Lm9Pw4", "   rT5vB7nC1dF3", "  rT5vB7nC1dF3"]
    assert Redactor({}).text("\n".join(lines)).split("\n") == ["  token: <secret>", "   <secret>", lines[2]]


@pytest.mark.parametrize(
    "text",
    [
        f"hf_{NUMBER[:15]}", f"AKIA{NUMBER[:11]}", f"sk_live_{NUMBER[:9]}", f"AIza{NUMBER[:29]}", f"dapi{NUMBER[:31]}", "a" * 40, "7" * 40,
        f"aZ7{'7' * 38}", f"aZ7{'7' * 36}", f"7777777:{NUMBER[:35]}", f"77777777:{NUMBER[:34]}", "77777777-7777-7777-7777-77777777777",
        "bearer 77777", "bearer of news", "basic training", "passed=7", "tokens per second: 7", "monkey=7", "https://example.org/x",
        "me@example.org", "tokenizer_hf_no_include_special_tokens ... False", "design: 7", "-----BEGIN CERTIFICATE-----",
    ],
)  # fmt: skip
def test_what_is_shorter_or_a_word_is_no_secret(text):
    assert shapeless(text) == text and not Redactor({}).betrays(text)


# Variables -------------------------------------------------------------------------------------------------------------------------------

SECRET = """
KEY KEYS TOKEN TOKENS SECRET SECRETS PASS PASSPHRASE PASSWD PASSWORD PW CREDENTIAL CREDENTIALS AUTH COOKIE DSN PAT JWT BEARER NETRC
"""
OURS = """
NCCL TORCH TORCHINDUCTOR TORCHELASTIC PYTORCH CUDA CUBLAS CUDNN CUTE NVTE NVIDIA TRITON TILELANG MAMBA MEGATRON FLASH OMP KMP MKL UCX UCC
FI GLOO NVSHMEM TOKENIZERS LD MALLOC TORCHDYNAMO INDUCTOR ATEN AOT DCP CUBLASLT CUTEDSL CUTLASS FP4 QUACK GOMP DNNL ONEDNN OPENBLAS
"""
PLAIN = """
0 123456 true FALSE on off yes no none INIT NET INFO WARN VERSION TRACE ALL COLL GRAPH INIT,NET expandable_segments:True
expandable_segments:False 12.9 1.2.3.4 9.0a 1.2-3
"""


def test_variables_are_recorded_by_name_and_their_values_where_they_say_how():
    names = OURS.split()
    environ = {f"{name}_X": "1" for name in names} | {name: "1" for name in names}
    assert Redactor({}).environ(environ) == environ
    assert Redactor({}).environ(
        {"PYTHONPATH": "1", "PYTHONOPTIMIZE": "1", "PYTHONPATHS": "1", "PYTHONHOME": "1"}
    ).keys() == {"PYTHONPATH", "PYTHONOPTIMIZE"}
    assert Redactor({}).environ({"XNCCL_X": "1", "NCCLX": "1", "PATH": "1", "A_NCCL": "1"}) == {}
    for value in PLAIN.split():
        assert Redactor({}).environ({"NCCL_X": value}) == {"NCCL_X": value}
    for value in ("1234567", "truest", "x", "", "1 2", "INIT,init9", "1.2.3.4.5"):
        assert Redactor({}).environ({"NCCL_X": value}) == {"NCCL_X": "<set>"}


def test_variables_are_secret_by_a_word_of_their_name():
    """Their values are looked for everywhere, and never recorded."""
    for word in SECRET.split():
        for name in (f"NCCL_{word}", f"NCCL_{word}_X", f"nccl_{word.lower()}"):
            redactor = Redactor({name: "none" * 2})
            assert redactor.environ({name.upper(): "none"}) == {name.upper(): "<set>"}, name
            assert redactor.betrays("nonenone") and redactor.secrets("say nonenone") == "say <secret>", name
    for end in ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD"):
        assert Redactor({}).environ({f"NCCL_MY{end}": "1"}) == {f"NCCL_MY{end}": "<set>"}
    assert not Redactor({"NCCL_MONKEYS": "nonenone", "NCCL_PATH": "nonenone"}).betrays("nonenone")


ORDINARY = """
HOME PWD OLDPWD PATH HOSTNAME USER LOGNAME SHELL TERM LANG LANGUAGE LC_ALL SHLVL _ COLUMNS LINES MAIL EDITOR PAGER VISUAL DISPLAY TZ
LS_COLORS LESS LESSOPEN XDG_X PYTHONPATH CONDA_X VIRTUAL_ENV VIRTUAL_ENV_PROMPT SLURM_X PYTEST_X MASTER_ADDR MASTER_PORT RANK WORLD_SIZE
"""


def test_the_value_of_a_variable_that_nobody_knows_may_be_a_secret():
    for name in ORDINARY.split():
        assert Redactor({name: "zebra-crossing"}).secrets("a zebra-crossing") == "a zebra-crossing", name
    for name in ("MINE", "HOMES", "XHOME", "RANKS", "TERMINAL"):
        assert Redactor({name: "zebra-crossing"}).secrets("a zebra-crossing") == "a <secret>", name
        # a name that says so, and a person would know
        assert not Redactor({name: "zebra-crossing"}).betrays("a zebra-crossing")
    for value in ("zebra", "/data/zebra", "/a/zebra:/b/zebra", "resume", "12.5"):  # short, paths, our own words
        assert Redactor({"MINE": value}).secrets(f"a {value}") == f"a {value}"
    assert Redactor({"MINE": "zebra1"}).secrets("a zebra1") == "a <secret>"


@pytest.mark.parametrize(
    ("value", "found"),
    [("abc", False), ("abcd", True), ("1234567", False), ("12345678", True), ("True", False), ("auto", False)],
)
def test_a_value_that_is_too_short_is_found_everywhere(value, found):
    assert Redactor({"MY_KEY": value}).secrets(f"x{value}x") == ("x<secret>x" if found else f"x{value}x")


def test_values_of_two_keys_that_are_one_without_their_words_are_both_kept():
    assert Redactor({}).tree({"zebraword one": 1, "yakword one": 2, "one": 3}) == {
        "<text> one": 1,
        "<text> one #2": 2,
        "one": 3,
    }
    for keys in (["zebraword #1", "yakword #1"], ["zebraword one #2", "yakword one", "oxword one"]):
        assert sorted(Redactor({}).tree({key: place for place, key in enumerate(keys)}).values()) == [*range(len(keys))]


def test_a_secret_is_no_key_either():
    kept = Redactor({"MY_TOKEN": "supersecretvalue1"}).tree({"supersecretvalue1": 1, "steps": 2})
    assert list(kept) == ["<secret>", "steps"]


FIGURES = """
123456789 1e300 1E3 cu128 cuda12 python312 post1 rc1 dev1234 NV18 GPU7 NIC3 v2 H100 A100 B200 GH200 GB300 sm90a bond0 eth1 ib0 mlx5_0
mlx5_bond_3 141G 16K 512M 9F 0000A1B2 224x224 ext4 nfs nfs4 4T 10Z 25a3 25b12 1rc2 SXM5 PCIe HBM3e HBM3 80GB 16X EDR HDR NDR QDR XDR Gb sec
zfs xfs btrfs tmpfs lustre gpfs ceph wekafs virtiofs AEMEAEMEAEMR 4096x12288x16384
"""


def test_figures_and_names_with_a_number_are_shown():
    """Of versions, devices, links and file systems, whether our files say them or not. What only looks like one is not."""
    for word in FIGURES.split():
        assert FIGURE.fullmatch(word) and published(word) == word, word
    for word in (
        "1234567890",
        "1e3000",
        "cu12345",
        "zH100",
        "mlx6_0",
        "1234G",
        "9FF",
        "0000A1B2C",
        "ext5",
        "1GBs",
        "SXMx",
        "AEMX",
        "yfs",
    ):
        assert not FIGURE.fullmatch(word), word
    assert [published(f"zebraword{mark}x") for mark in "-. "] == [f"<text>{mark}x" for mark in "-. "]
    assert published("--nam-model precision+mamba2:59ab04d1") == "--nam-model precision+mamba2:59ab04d1"
    assert published("fp8+word:59ab04d1 fp8:59ab04d1x") == "fp8+word:<text> fp8:<text>"
    assert published("00010000:18:00.0 597eec67") == "00010000:18:00.0 <text>"  # of a bus, and what may be a password
    assert published("12345678901") == published("1234-5678-9012-3456") == published("0c:42:A1:03:46:1e") == "<text>"
    assert (
        published("\U0001f511\u2801\u200b\ue000") == "<text>" and published("10,11,12,13,14,15") == "10,11,12,13,14,15"
    )


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
        ("999.1.2.3:29500 10.1.2.256", "999.1.2.3:29500 10.1.2.256"),
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


def test_what_lies_in_a_known_folder_is_shown_as_a_mark_in_it():
    """Two receipts of a folder can tell whether it was the same file."""
    redactor = Redactor({}, PLACES, salt="s")
    shown = [redactor.shown(f"--load=/fast/x/zebra/{name}", whole=True) for name in ("a", "a", "b")]
    assert re.fullmatch(r"--load=<checkout>/<path [0-9a-f]{8}>", shown[0]) and shown[0] == shown[1] != shown[2]
    assert Redactor({}, PLACES, salt="t").shown("--load=/fast/x/zebra/a", whole=True) != shown[0]
    assert redactor.shown("--load=/fast/x", whole=True) == "--load=<checkout>"
    assert redactor.shown("--load=a zebra", whole=True) == "--load=<text>"
    assert redactor.shown("--load=a zebra", whole=False) == "--load=a <text>"


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


@pytest.mark.parametrize("word", ["true", "None", "FALSE", "null", "auto"])
def test_an_ordinary_word_is_no_secret_that_texts_are_searched_for(word):
    redactor = Redactor({"API_TOKEN": word})
    assert redactor.text(f"cache is {word} here") == f"cache is {word} here"


@pytest.mark.parametrize(
    "address", ["10.1.2.3", "100.64.1.2", "169.254.3.4", "172.16.9.9", "172.31.255.254", "192.168.1.1"]
)
def test_an_address_of_a_private_network_is_hidden(address):
    assert address not in Redactor({}).text(f"rank 0 at {address} port 29500")


@pytest.mark.parametrize("word", SAID_BY.replace("S?", "S").split("|"))
def test_what_names_a_secret_variable_names_it_in_a_log(word):
    """Of another process, whose values nobody knows: in any place of the name."""
    for name in (word, f"ACME_{word}", f"{word}_ACME", f"ACME_{word}_2"):
        for line in (
            "{}=aB3dE6gH9jK2mN5p",
            "export {}='aB3dE6gH9jK2mN5p'",
            "{}: aB3dE6gH9jK2mN5p",
            '{{"{}": "aB3dE6gH9jK2mN5p"}}',
        ):
            assert "aB3d" not in Redactor({}).secrets(line.format(name))


@pytest.mark.parametrize(
    "line",
    [
        '"api_keys": ["{}"]', '"token": {{"value": "{}", "ttl": 3}}', '"SecretString": "{}"', "<password><![CDATA[{}]]></password>",
        "x.py\0--api-key\0{}", "token set to {}", "passcode: {}", "db.password.value={}",
        "https://a.webhook.office.com/webhookb2/{}/IncomingWebhook/{}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("secret", ["XrBg8CXL0M9iq1cvmlyfbdcJ", "a6vIuB1Hvx7", "0f3c9d2e7b"])
def test_what_an_attack_had_shown_is_hidden(line, secret):
    assert secret not in Redactor({}).secrets(line.format(secret, secret))


@pytest.mark.parametrize(
    "line",
    [
        "MAX_TOKENS=4096", "EOS_TOKEN='</s>'", "keys [1, 2, 3], tokens [65,536]", "TRAIN_TOKENS=1.0000e+12", "KEY='-1.25e-05'",
        "KEY=decoder.layers.0.mlp.linear_fc1",
    ],
)  # fmt: skip
def test_names_of_tokens_hide_no_figures(line):
    assert Redactor({}).secrets(line) == line
