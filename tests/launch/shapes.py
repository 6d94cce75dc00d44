"""A generator of secrets and of the lines that carry them, instead of a list of vendors: how a value is made, how it is called, how it is
quoted, and what is printed around it, each drawn by itself."""

import base64
import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

HEX, B62 = "0123456789abcdef", string.ascii_letters + string.digits
ALPHABETS = {
    "hex": HEX, "HEX": HEX.upper(), "letters and digits": B62, "lower case": string.ascii_lowercase + string.digits,
    "upper case": string.ascii_uppercase + string.digits, "base64": B62 + "+/", "base64 of URLs": B62 + "-_",
    "base32": string.ascii_uppercase + "234567", "base85": "".join(chr(c) for c in range(33, 118) if chr(c) not in "\"'`\\<>&#;,=/"),
    "words": "",
}  # fmt: skip
# where nothing says what it is, a hash looks like hex
BARE = ("letters and digits", "lower case", "upper case", "base32")
# What a variable, a key or a flag may be called: a secret by a word of it.
NOUNS = (
    "password", "passwd", "passphrase", "secret", "token", "api_key", "apikey", "access_key", "private_key", "secret_key", "auth_token",
    "client_secret", "credentials", "signing_key", "webhook_secret", "refresh_token", "encryption_key", "service_key", "license_key",
)  # fmt: skip
OWNERS = ("", "acme_", "zed.prod.", "my-db-", "runpod_", "modal_", "x1_", "ADO_", "TEAMS_")
CASES: tuple[Callable[[str], str], ...] = (
    str.lower,
    str.upper,
    lambda t: t.replace("_", "-"),
    lambda t: t.title().replace("_", ""),
)


def value(dice: random.Random, kind: str) -> str:
    """At least 16 characters, of more than letters, so that it is no word."""
    if kind == "words":
        return "-".join("".join(dice.choices(string.ascii_lowercase, k=dice.randint(4, 7))) for _ in range(4)) + str(
            dice.randint(10, 99)
        )
    text = "".join(dice.choices(ALPHABETS[kind], k=dice.choice((16, 20, 24, 32, 40, 43, 64, 88))))
    return text[:-2] + ("7" if "7" in ALPHABETS[kind] else "2") + text[-1] if kind != "base85" else f"a{text}7"


@dataclass(frozen=True)
class Shape:
    """A line that carries a secret. kinds: how it was drawn, by which a leak is told."""

    line: str
    secret: str
    kinds: tuple[str, ...]


def _named(name: str, text: str, dice: random.Random) -> dict[str, str]:
    ansi = dice.choice(("\x1b[0m", "\x1b[1;32m", "\x1b[38;5;208m"))
    return {
        "NAME=": f"{name}={text}",
        "export": f"export {name}='{text}'",
        "yaml": f"  {name}: {text}",
        "json": json.dumps({"user": "u", name: text}),
        "python": repr({name: text}),
        "environ": f"environ({{'A': 'b', '{name.upper()}': '{text}'}})",
        "tuple": f"[('{name}', '{text}'), ('a', 'b')]",
        "keyword": f"Client(name='x', {name}='{text}')",
        "toml": f'{name} = """{text}"""',
        "xml": f"<{name}>{text}</{name}>",
        "xml attribute": f'<add key="{name}" value="{text}"/>',
        "flag": f"run --{name} {text} --fast",
        "flag =": f"run --{name}={text} --fast",
        "query": f"GET https://h.example/x?a=1&{quote(name)}={quote(text, safe='')}&b=2",
        "encoded": f"next=https%3A%2F%2Fh.example%2F%3F{quote(name)}%3D{quote(text, safe='')}",
        "ANSI": f"{ansi}{name}{ansi}: {ansi}{text}{ansi}",
        "ANSI =": f"{name}{ansi}={ansi}{text}",
        "table": f"| {name} | {text} |",
        "arrow": f"{name} -> {text}",
        "header": f"X-{name}: {text}",
        "sentence": f"the {name} is {text}",
        "properties": f"{name}\\={text}",
        "markdown": f"**{name}**: `{text}`",
        "bytes": f"{name}=b'{text}'",
        "wrapped": f"Config({name}=SecretStr('{text}'))",
        "name and value": json.dumps([{"name": name, "value": text}]),
        "value and name": json.dumps({"value": text, "name": name}),
        "JSON in JSON": json.dumps(json.dumps({name: text})),
        "form": f'<input value="{text}" name="{name}">',
        "key and value": f"<entry><key>{name}</key><value>{text}</value></entry>",
        "anchor": f"{name}: &it {text}",
        "tag": f"{name}: !!str {text}",
        "data": f"{name}-data: {text}",
        "call": f'Config {{ {name}: Some("{text}") }}',
        "perl": f"$ENV{{'{name}'}} = '{text}';",
        "make": f"{name} ?= {text}",
        "arguments": f"  {name} {'.' * 20} {text}",
        "asked": f"{name} [hidden]: {text}",
        "no width": f"{name}\u200b\uff1d{text}",
        "encoded twice": f"next={name}%253D{quote(quote(text, safe=''), safe='')}",
        "typed": f"{name}: str = '{text}'",
        "logged": f"Logged param {name} with value {text}",
        "aligned": f"{name}{' ' * 20}:{' ' * 12}{text}",
        "arrow of one character": f"{name} \u2192 {text}",
        "semicolons": f"user;u;{name};{text}",
        "cookie of a framework": f"{name}_cookie={text}",
        "locals below": f"  connect({name})\n     \u2502  \u2514 '{text}'",
        "sentences": f"set {name} to {text}; {name} was {text}",
        "of R": f"{name} <- '{text}'",
        "of pydantic": f"{name}\n  Input should be an integer [type=int, input_value='{text}', input_type=str]",
        # Of several lines, the secret on one below its name, or broken in two.
        "name above": f"- name: {name}\n  value: {text}",
        "plist": f"<key>{name}</key>\n<string>{text}</string>",
        "variable": f'variable "{name}" {{\n  default = "{text}"\n}}',
        "dump": f'["{name}"]=>\n  string(20) "{text}"',
        "quoted key": f'? "{name}"\n: "{text}"',
        "below, of a task": f"3: {name}:\n3:   {text}",
        "below, with the time": f"2026-01-01 12:00:00,1 INFO {name}:\n2026-01-01 12:00:00,1 INFO   {text}",
        "toml below": f'{name} = """\n{text}\n"""',
        "toml in two": f'{name} = """{text[:4]}\\\n  {text[4:]}"""',
        "python below": f"{name} = (\n    '{text}'\n)",
        "heredoc": f"export {name}=$(cat <<EOF\n{text}\nEOF\n)",
        "heredoc of a file": f"cat > ~/.{name} <<'EOF'\n{text}\nEOF",
        "yaml below": f"{name}:\n  {text}\nnext: 1",
        "yaml list": f'{name}s:\n  - "{text}"',
        "json below": f'"{name}": [\n  "{text}"\n]',
        "flag below": f"run --{name} \\\n  {text} \\\n  --fast",
        "xml below": f"<{name}>\n  {text}\n</{name}>",
        "prompt": f"Enter your {name}:\n{text}",
        "said below": f"Give me the {name}\n{text}",
        # In rows below a row of names.
        "csv": f'user,{name},host\n"Doe, J.",{text},h1\nann,{text},h2',
        "tabs": f"user\t{name}\nbob\t{text}",
        "markdown table": f"| user | {name} |\n|------|------|\n| bob | {text} |",
        "psql": f" user | {name} \n------+------\n bob  | {text}\n(1 row)",
        "drawn table": f"[rank0]: ┃ user ┃ {name} ┃\n[rank0]: ┡━━━━━━╇━━━━━┩\n[rank0]: │ bob  │ {text} │",
        "columns": f"NAME     {name}\nbob      {text}",
        "insert": f"INSERT INTO users (name, {name}) VALUES ('bob', '{text}');",
        "insert below": f"insert into users (name, {name}) values\n(1, '{text}'),\n(2, '{text}');",
        "copy": f"COPY users (name, {name}) FROM stdin;\nbob\t{text}\n\\.",
    }


def _unnamed(text: str) -> dict[str, str]:
    return {
        "URL": f"cloning https://svc:{quote(text, safe='')}@git.example/x.git",
        "URL with @": f"cloning https://svc:a@{text.replace('/', '_')}@git.example/x.git",
        "URL without a user": f"amqp://:{quote(text, safe='')}@mq.example/x",
        "bearer": f"Authorization: Bearer {text}",
        "basic": f"authorization: Basic {base64.b64encode(f'u:{text}'.encode()).decode()}",
        "cookie": f"Set-Cookie: sid={text}; Path=/",
        "?key=": f"GET https://h.example/v1/models?key={quote(text, safe='')}",
        "netrc": f"machine h.example login u password {text}",
        "curl": f"curl -u svc:{text} https://h.example",
        "bare": f"connecting with {text} to the bucket",
        "curl =": f"curl --user=svc:{text} -usvc:{text} https://h.example",
        "tools": f"sshpass -p'{text}' redis-cli -a {text} openssl rsa -passin pass:{text} ssh-keygen -N {text}",
        "list of words": repr(["docker", "login", "-p", text, "curl", "-u", f"svc:{text}"]),
        "sql": f"create user u identified by '{text}'",
        "kubectl": f"kubectl create secret generic x --from-literal=y={text}",
        "wandb": f"wandb login {text}; vault login {text}",
        "asked for": f"Password for 'https://u@h.example': {text}",
        "cookies of Python": f"get(url, cookies={{'session': '{text}'}})",
        "stores of Java": f"keytool -storepass {text} -keypass {text}",
        "pair": f"get(url, auth=('user', '{text}')); HTTPBasicAuth('user', '{text}')",
        "into a pipe": f"echo {text} | docker login --password-stdin",
        "minio": f"mc alias set m https://h.example ACCESS {text}",
        "jar": f"h.example\tTRUE\t/\tTRUE\t1790000000\tsid\t{text}",
        "pgpass": f"db.example:5432:prod:svc:{text}",
        "handed back": f"GET https://h.example/cb?code={quote(text, safe='')}&state=x",
        "protocol": f"> USER svc\n> PASS {text}\n> AUTH {text}\nAUTH default {text}\nrequirepass {text}",
        "Kubernetes": f"apiVersion: v1\ndata:\n  x: {base64.b64encode(text.encode()).decode()}\n  y: {text}\nkind: Secret",
        "Kubernetes, kind first": f"kind: Secret\nmetadata:\n  name: x\nstringData:\n  x: {text}",
        "Kubernetes in JSON": json.dumps({"data": {"x": text}, "kind": "Secret"}),
        "docker": f"docker login -u svc -p {text} registry.example",
    }


def drawn(dice: random.Random) -> Shape:
    kind = dice.choice(list(ALPHABETS))
    secret = value(dice, kind)
    name = dice.choice(CASES)(dice.choice(OWNERS) + dice.choice(NOUNS))
    carriers = _named(name, secret, dice) | _unnamed(secret)
    carrier = dice.choice(list(carriers))
    if carrier == "bare" and (kind not in BARE or len(secret) < 32):
        return drawn(dice)
    return Shape(carriers[carrier], secret, (carrier, kind))


def shown(shape: Shape, text: str) -> bool:
    """Whether a text shows enough of the secret to use it: as it is, or as it was spelled in the line; 12 characters of it in a row."""
    forms = {
        shape.secret,
        quote(shape.secret, safe=""),
        quote(quote(shape.secret, safe=""), safe=""),
        json.dumps(shape.secret)[1:-1],
        base64.b64encode(f"u:{shape.secret}".encode()).decode(),
    }
    return any(form[i : i + 12] in text for form in forms for i in range(max(1, len(form) - 11)))
