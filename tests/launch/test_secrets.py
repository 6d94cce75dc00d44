"""A sweep over classes of secrets: none reaches receipt.json, log or sbatch, wherever it comes from. And no weak one blinds the parser."""

import base64
import html
import json
import random
import shlex
import string
import time
from urllib.parse import quote

import pytest
import stand_in
from command import warm
from presets import NAMES
from test_run import Launcher

from launch.app import kept, telltale
from launch.record import outcome, receipt
from launch.record.redact import Redactor, Stream
from launch.run.process import LONGEST
from launch.run.run import Log
from nam_megatron.recipe import load

DICE = random.Random(17)


def some(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    """Looks like a key: of every sort of character, never a word."""
    text = "".join(DICE.choice(alphabet) for _ in range(count - 3))
    return text + {16: "a1f"}.get(len(alphabet), "9aZ" if "Z" in alphabet and "a" in alphabet else alphabet[-3:])


HEX, UPPER = "0123456789abcdef", string.ascii_uppercase + string.digits
# class -> (a line that carries it, the secret in it). Made here, so that no scanner takes this file for a leak.
ODD = "ü'\"w<d9-Xq7"
BY_SHAPE: dict[str, tuple[str, str]] = {}


def shape(name: str, line: str, secret: str) -> None:
    BY_SHAPE[name] = (line.format(secret), secret)


for name, secret in {
    "Hugging Face token": "hf_" + some(34), "GitHub token": "ghp_" + some(36),
    "GitHub fine-grained": "github_pat_" + some(40),
    "GitLab token": "glpat-" + some(20), "OpenAI key": "sk-" + some(40), "OpenAI project key": "sk-proj-" + some(40),
    "Anthropic key": "sk-ant-api03-" + some(40), "Stripe key": "sk_live_" + some(24), "NVIDIA key": "nvapi-" + some(40),
    "Slack token": "xoxb-" + some(24), "Slack app": "xapp-1-" + some(24), "AWS key id": "AKIA" + some(16, UPPER),
    "AWS session id": "ASIA" + some(16, UPPER), "AWS role id": "AROA" + some(16, UPPER), "AWS secret key": some(40),
    "AWS ARN": "arn:aws:iam::123456789012:role/" + some(12), "Google API key": "AIza" + some(35),
    "Google OAuth": "ya29." + some(40),
    "Google client secret": "GOCSPX-" + some(28), "Google client id": f"1234567890-{some(32)}.apps.googleusercontent.com",
    "Azure client secret": "abc8Q~" + some(34), "Azure tenant": "-".join(some(n, HEX) for n in (8, 4, 4, 4, 12)),
    "SendGrid key": f"SG.{some(22)}.{some(43)}", "npm token": "npm_" + some(36), "PyPI token": "pypi-AgEI" + some(60),
    "DigitalOcean token": "dop_v1_" + some(64, HEX), "Databricks token": "dapi" + some(32, HEX),
    "Vault token": "hvs." + some(24),
    "Terraform token": f"{some(14)}.atlasv1.{some(60)}", "age key": "AGE-SECRET-KEY-1" + some(58, UPPER), 
    "Telegram bot": "123456789:" + some(35),
    "Grafana token": "glsa_" + some(32), "Mailgun key": "key-" + some(32, HEX), "Twilio key": "SK" + some(32, HEX),
    "JSON web token": f"eyJ{some(20)}.eyJ{some(30)}.{some(43)}",
}.items():  # fmt: skip
    shape(name, "connecting with {} to the bucket", secret)
for name, line in {
    "bearer header": "Authorization: Bearer {}", "bearer alone": "got 401 for bearer {}",
    "basic header": "authorization: Basic {}",
    "token header": "{{'Authorization': 'token {}'}}", "api key header": "X-Api-Key: {}",
    "cookie": "Cookie: session={}",
    "password=": "dsn host=db password={} port=1", "PASSWORD:": "PASSWORD: {}",
    "json password": '{{"db_password": "{}"}}',
    "flag with a space": "run --password {} now", "flag with =": "run --api-key={}",
    "client secret": "client_secret={}&grant=x",
    "credentials in a URL": "s3 endpoint https://me:{}@store.example/x", "database URL": "postgres://svc:{}@db/x",
    "AWS presigned URL": "GET https://b.s3.example/k?X-Amz-Expires=60&X-Amz-Signature={}",
    "GCS presigned URL": "GET https://s.example/b/k?X-Goog-Signature={}",
    "Azure SAS": "https://a.blob.example/c?sv=2024&sig={}",
    "Azure account key": "DefaultEndpointsProtocol=https;AccountKey={};X=y",
    "CloudFront": "https://d.example/f?Signature={}&Key-Pair-Id=K",
    "netrc": "machine api.example login user password {}", "access_key": "aws_secret_access_key = {}",
    "encoded =": "next=a%26token%3D{}",
}.items():  # fmt: skip
    shape(name, line, some(24))

# Those that an inspection found in a log.
for name, secret in {
    "Groq key": "gsk_" + some(52), "Replicate token": "r8_" + some(37),
    "Notion token": "ntn_" + some(46), "xAI key": "xai-" + some(80),
    "Perplexity key": "pplx-" + some(48), "Pinecone key": "pcsk_" + some(60), "Tailscale key": "tskey-auth-" + some(40),
    "LangSmith key": "lsv2_pt_" + some(32, HEX) + "_0123456789",
    "Grafana cloud": "glc_" + some(60), "New Relic key": "NRAK-" + some(27, UPPER),
    "PlanetScale token": "pscale_tkn_" + some(43), "webhook secret": "whsec_" + some(32),
    "Supabase token": "sbp_" + some(40, HEX),
    "Doppler token": "dp.pt." + some(43), "Fly token": "fm2_" + some(99),
    "Vault's old token": "s." + some(24), "Figma token": "figd_" + some(40),
    "Airtable token": f"pat{some(14)}.{some(64, HEX)}", "Alibaba key": "LTAI" + some(20),
    "Mailchimp key": some(32, HEX) + "-us12",
    "W&B key of today": "wandb_v1_" + some(77),
    "kubeconfig key": "LS0tLS1CRUdJTiBSU0" + some(99), "OpenSSH key in base64": "b3BlbnNzaC1rZXkt" + some(99),
    "Google refresh token": "1//0" + some(60),
    "tenant in capitals": "-".join(some(n, "0123456789ABCDEF") for n in (8, 4, 4, 4, 12)),
    "a key behind a word": "my_hf_" + some(34),
    "a vendor's word": "tgp_v1_" + some(40), "a short one of every sort": "as-" + some(22), "AWS session": "IQoJb3JpZ2lu" + some(200),
}.items():  # fmt: skip
    shape(name, "connecting with {} to the bucket", secret)
for name, line in {
    "Slack's hook": "POST https://hooks.slack.com/services/T01234567/B01234567/{}",
    "Discord's hook": "https://discord.com/api/webhooks/123456789012345678/x{}yy123456789",
    "key in words": "your API key is {}", "password in words": "the password is {}",
    "passphrase": "passphrase for key: {}", "pw": "pw: {}",
    "flag of a name": "train --hf_token {} x", "flag of two names": "train --wandb-api-key {} x",
    "curl": "curl -u svc:{} https://x/y",
    "curl, in long": "curl --user svc:{} https://x/y",
    "mysql": "mysql -uroot -p{} prod", "clone": "git clone svc:{}@git.example:x.git", "raw header": "Authorization: {}",
    "header in a dict": "{{'authorization': '{}'}}",
    "quoted, with blanks": 'password="hunter two {}"', "behind a semicolon": "password=abc;{}",
    "behind a comma": "password: abc,{}", "one word": "accessKeySecret={}",
    "JSON of AWS": '"SessionToken" : "{}"', "PGPASSWORD": "PGPASSWORD=a&{} psql",
}.items():  # fmt: skip
    shape(name, line, some(30))
shape("bearer of letters", "sent Bearer {}", "".join(DICE.choice(string.ascii_letters) for _ in range(30)))
shape("Kaggle's file", '{{"username":"u","key":"{}"}}', some(32, HEX))
shape("W&B's own word", "wandb: logged in with {}", some(40, HEX))

# class -> (variable, value, the line that shows it, what must not be seen)
WORDY = "correct-horse-Xq7-staple"
AMONG = base64.b64encode(f"u:{WORDY}:x".encode()).decode()
SLASHED = "~~~???>>>~~~ ok ???~~~>>>"  # whose base64 has a `+` or a `/` in each place
SLASHES = base64.urlsafe_b64encode(SLASHED.encode())[2:-4].decode()
BY_VALUE = {
    "a variable that says secret": ("WANDB_API_KEY", some(40, HEX), "{}", None),
    "a variable that does not": ("MY_SETTINGS", some(20), "using {}", None),
    "a passphrase without a name": ("GREETING", WORDY, "using {}", None),
    "a short password": ("DB_PASSWORD", "x7#q", "tried {}", None),
    "of the recorded ones": ("NCCL_SOCKET_IFNAME", some(20), "NCCL said {}", None),
    "base64": ("HF_TOKEN", WORDY, "sent " + base64.b64encode(WORDY.encode()).decode(), base64.b64encode(WORDY.encode())[2:-6].decode()),
    "base64 in the middle": ("HF_TOKEN", WORDY, f"sent {AMONG}", AMONG[4:-8]),
    "base64 of URLs": ("HF_TOKEN", SLASHED, "sent " + base64.urlsafe_b64encode(SLASHED.encode()).decode(), SLASHES),
    "hexadecimal": ("HF_TOKEN", WORDY, "sent " + WORDY.encode().hex(), WORDY.encode().hex()),
    "in a URL": ("HF_TOKEN", "p/w d+Xq7?", "sent " + quote("p/w d+Xq7?", safe=""), quote("p/w d+Xq7?", safe="")),
    "in JSON": ("HF_TOKEN", 'p"w\\d9-Xq7', "sent " + json.dumps('p"w\\d9-Xq7'), 'p\\"w'),
    "in JSON within JSON": ("HF_TOKEN", ODD, "sent " + json.dumps(json.dumps(ODD)), "w<d9-Xq7"),
    "of a program that writes bytes": ("HF_TOKEN", ODD, f"sent {ODD.encode()}", "w<d9-Xq7"),
    "of one that writes ASCII": ("HF_TOKEN", ODD, f"sent {ODD!a}", "w<d9-Xq7"),
    "on a page": ("HF_TOKEN", ODD, "sent " + html.escape(ODD), "d9-Xq7"),
    "in a shell": ("HF_TOKEN", ODD, "+ login " + shlex.quote(ODD), "w<d9-Xq7"),
    "in a URL of small digits": ("HF_TOKEN", "p/w d+Xq7?", "sent p%2fw%20d%2bXq7%3f", "w%20d%2bXq7"),
    "one of several lines": ("SERVICE_CONFIG", f"first\n{some(20)}\nlast", "{}", None),
}  # fmt: skip
PEM = [
    "-----BEGIN OPENSSH PRIVATE KEY-----",
    *(some(64) for _ in range(4)),
    some(20) + "==",
    "-----END OPENSSH PRIVATE KEY-----",
]


def written(tmp_path, lines: list[str], environ: dict[str, str]) -> tuple[str, str]:
    """(log, receipt.json) of a run that says `lines` in every place there is."""
    redactor = Redactor(environ, salt="s")
    text = "\n".join(lines)
    made = receipt.open_receipt(
        tmp_path / "receipts", "x",
        {
            "words": [f"data.path={text}", text], "environ": redactor.environ(environ | {"NCCL_DEBUG_FILE": text}),
            "recipe": {"data": {"path": text}, "cluster": {"waivers": {"git": text}}, "schedule": {"save": f"/data/{text}"}},
            "job": {"command": ["python", f"--load={text}"], "overlay": {"TMPDIR": {"value": f"/x/{text}", "why": text}}},
            "findings": [{"name": "stale", "level": "fail", "message": f"PID 5 ({text}) runs"}], "host": {"driver": text},
        },
        redactor,
    )  # fmt: skip
    with Log(made.folder / receipt.LOG, redactor) as log:
        for line in lines:
            log.write(log.without_secrets([line]))
        for line in lines:
            log.write(log.without_secrets([f"RuntimeError: {line}"]))
            log.write(log.without_secrets([f"error: {line}"]))
    made.seal("failed", outcome.of_run(made.folder, made.content))
    return (made.folder / receipt.LOG).read_text(), (made.folder / receipt.FILE).read_text()


@pytest.mark.few(1)
@pytest.mark.parametrize("piece", ["token ....", "key .", "-", "_", "1-", "x-", "://a:", "token-", "password "])
def test_no_line_takes_long(piece):
    """One of dashes took minutes, while the trainer waited for its pipe."""
    line = (piece * LONGEST)[:LONGEST] + " pass id login ://@ authorization"
    began = time.process_time()
    Redactor({}).secrets(line)
    assert time.process_time() - began < 20


@pytest.mark.parametrize("name", BY_SHAPE)
def test_a_secret_by_its_shape(tmp_path, name):
    line, secret = BY_SHAPE[name]
    for text in written(tmp_path, [line], {}):
        assert secret not in text and secret[-12:] not in text
    (problem,) = telltale(["conf=nam56r", f"data.path={line}"], {})
    assert problem.key == "data.path" and secret not in problem.message


@pytest.mark.parametrize("name", BY_VALUE)
def test_a_secret_of_the_environment(tmp_path, name):
    variable, value, line, hidden = BY_VALUE[name]
    shown = value.splitlines()[len(value.splitlines()) // 2]
    for text in written(tmp_path, [line.format(shown) if "{}" in line else line], {variable: value}):
        assert (hidden or shown) not in text and shown not in text


def test_a_key_of_several_lines(tmp_path):
    for text in written(tmp_path, PEM, {}):
        assert not any(line in text for line in PEM[1:-1])


def test_a_key_ends_where_another_line_begins():
    """At its end, at a step, at a text: what follows is shown, whatever it looks like, and a step always."""
    begin, inner, end, step, mark = PEM[0], PEM[1], PEM[-1], stand_in.step_line(1, 3), "<secret>"
    for said, shown in (
        ([begin, inner, end, "zebra"], [mark, mark, mark, "zebra"]),
        ([begin, inner, step, "zebra"], [mark, mark, step, "zebra"]),
        ([begin, "a line: of none", "zebra"], [mark, "a line: of none", "zebra"]),
        ([begin, inner, "zebra"], [mark, mark, mark]),
        ([f"{begin} {end}", "zebra"], [mark, "zebra"]),
        (["zebra", begin, inner], ["zebra", mark, mark]),
    ):
        stream, whole = Stream(Redactor({})), Stream(Redactor({}))
        assert [line for text in said for line in stream.lines([text])] == whole.lines(said) == shown


@pytest.mark.parametrize(
    "before", ["2026-01-01 12:00:00,1 INFO ", "[rank1]: ", "3: ", "  '", "+", "> ", '{"log": "', "I1 t.py:8] "]
)
def test_a_key_of_several_lines_behind_what_a_log_has_before_each(before):
    stream = Stream(Redactor({}))
    shown = [stream.line(before + line + {"'": "\\n'", '"': '"}'}.get(before[-1], "")) for line in PEM]
    assert not any(line[:12] in text for line in PEM[1:-1] for text in shown)
    assert stream.line("zebra") == "zebra"


@pytest.mark.parametrize(
    ("above", "inner", "after"),
    [
        (["password: |"], ["  correct horse", "", "  battery"], "staple: 1"),
        (["+ api_key: !!str >-2  # ours"], ["+    correct", "+      horse"], "+ staple: 1"),
        (["[rank1]: - 'token': |"], ["[rank1]:     correct"], "[rank1]:   staple: 1"),
        (["- name: DB_PASS", "  value: |"], ["    correct"], "- name: staple"),
        (["zebra:", "  secret: |+"], ["    horse"], stand_in.step_line(1, 3)),
    ],
)
def test_what_stands_below_the_name_of_a_secret(above, inner, after):
    """In a block of YAML, as a whole text and line by line, up to the line that is no part of it."""
    said = [*above, *inner, after]
    stream, whole = Stream(Redactor({})), Stream(Redactor({}))
    shown = Redactor({}).secrets("\n".join(said)).split("\n")
    assert [line for text in said for line in stream.lines([text])] == whole.lines(said) == shown
    assert [bool(line) for line in inner] == ["<secret>" in line for line in shown[len(above) : -1]]
    assert shown[-1] == after and not any(word in "".join(shown) for word in ("correct", "horse", "battery"))


def test_a_value_below_a_name_is_one_where_the_name_is_a_secrets():
    text = "- name: {}\n  value: zebra\n- name: LR\n  value: horse"
    assert Redactor({}).secrets(text.format("DB_PASS")) == text.format("DB_PASS").replace("zebra", "<secret>")
    assert Redactor({}).secrets(text.format("DB_HOST")) == text.format("DB_HOST")


def test_how_many_classes_there_are():
    assert len(BY_SHAPE) + len(BY_VALUE) + 1 >= 40


def test_a_secret_in_a_step_line_is_hidden_like_any_other(tmp_path):
    """Whatever looks like a secret there is taken out: figures come from the events."""
    secret = some(20)
    line = stand_in.step_line(1, 3) + f" {secret}: 5 | note {secret} |"
    reading = stand_in.reading("built", 0, 0, device=0, node=0, bus="b", name=f"GPU {secret}", note=secret)
    with Log(tmp_path / receipt.LOG, Redactor({"MY_SETTINGS": secret})) as log:
        log.write(log.without_secrets([line]))
        log.write(log.without_secrets([reading]))
    assert secret not in (tmp_path / receipt.LOG).read_text()


def test_a_token_of_a_tokenizer_is_no_secret():
    assert not list(telltale(["feature.fim.prefix_token=<fim_prefix>", "'feature.fim.pad_token=<|pad|>'"], {}))


@pytest.mark.few(2)
@pytest.mark.parametrize("verb", ["show format=sbatch", "show format=torchrun", "run", "check"])
def test_no_command_takes_a_secret_as_a_word(verb):
    secret = "hf_" + some(34)
    ran = warm(
        *verb.split(),
        "conf=nam56r_smoke",
        f"schedule.save=/x/{secret}",
        "schedule.save_interval=1",
        module="launch.__main__",
    )
    assert ran.code == 2 and secret not in ran.out + ran.err, ran.err
    assert "word 3 of the command line" in ran.err or "word 2 of the command line" in ran.err


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_no_preset_of_ours_holds_one(name):
    assert not list(kept(load(name), {}))


def test_no_preset_takes_a_secret_as_a_value(tmp_path):
    """It stood in plan.json, which anybody could read, and on each rank's command line."""
    secret = "hf_" + some(34)
    (tmp_path / "preset").mkdir()
    text = f'# @package _global_\ndefaults: [nam56r_smoke, _self_]\npreset: {{name: mine, about: "with {secret}"}}\n'
    text += f"schedule: {{save: /x/{secret}, save_interval: 1}}\n"
    (tmp_path / "preset" / "mine.yaml").write_text(text)
    ran = warm("check", "--config-dir", str(tmp_path), "conf=mine", module="launch.__main__")
    assert ran.code == 2 and secret not in ran.out + ran.err, ran.err
    assert all(f"holds a secret @ {key}" in ran.err for key in ("preset.about", "schedule.save")), ran.err


def test_a_whole_run_that_says_them_all(tmp_path):
    """As it is started and sealed, with every class in its environment, in what its trainer prints and in what the checkout differs by."""
    lines = [line for line, _ in BY_SHAPE.values()] + PEM
    (tmp_path / "says").write_text("\n".join([*lines, *(f"ValueError: {line}" for line in lines)]))
    values = {
        f"{variable}_{i}" if "_" in variable else variable: value
        for i, (variable, value, *_) in enumerate(BY_VALUE.values())
    }
    ours = ["+++ b/conf/cluster/mine.yaml", "@@ -0,0 +1,9 @@", "+nodes: 2", "-gpus_per_node: 8"]
    (tmp_path / "diff").write_text(
        "\n".join([*ours, *(f"+{line}" for line in lines), *(f"+A={v}" for v in values.values())])
    )
    texts = {"STAND_IN_SAYS": str(tmp_path / "says"), "STAND_IN_DIFF": str(tmp_path / "diff")}
    launcher = Launcher.start(tmp_path / "receipts", "steps=5 code=1", **texts, **values)
    assert launcher.wait() == 1, launcher.err
    (folder,) = receipt.folders(tmp_path / "receipts")
    found = receipt.read(folder)
    assert found["outcome"]["end"] == "failed" and found["outcome"]["figures"]["steps"] == 5
    assert found["outcome"]["errors"][-1]["what"] == "ValueError"
    assert (folder / receipt.DIFF).read_text().splitlines()[: len(ours)] == ours
    everything = "".join(f.read_text(errors="replace") for f in folder.iterdir() if f.is_file()) + launcher.out
    leaked = [name for name, (_, secret) in BY_SHAPE.items() if secret in everything]
    leaked += [v for v in values.values() for line in v.splitlines() if len(line) > 5 and line in everything]
    assert not leaked and not any(line in everything for line in PEM[1:-1])
