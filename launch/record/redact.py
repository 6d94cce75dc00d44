"""What may stand in a receipt: no secrets, no host names, no addresses, no paths of this machine."""

import base64
import hashlib
import html
import ipaddress
import json
import os
import re
import shlex
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.compile.plan import SECTIONS
from nam_megatron.features.names import FEATURES

# A variable is secret by a word of its name (`AWS_SECRET_ACCESS_KEY`) or by its name's end (`HFTOKEN`).
SAID_BY = "KEYS?|TOKENS?|SECRETS?|PASS|PASSPHRASE|PASSWD|PASSWORD|PW|CREDENTIALS?|AUTH|COOKIE|DSN|PAT|JWT|BEARER|NETRC"
SECRET_WORD = re.compile(
    rf"(^|_)({SAID_BY})(_|$)"
    r"|(KEY|TOKEN|SECRET|PASSWORD|PASSWD)$",
    re.IGNORECASE,
)
# Secrets by their shape, wherever they come from. What is given, a value after a name or a header, keeps its name. Whatever may repeat is
# counted, or a line of dashes would be looked at for minutes.
SECRET_SHAPE = re.compile(
    r"(?<![^\W_])(?:hf_[^\W_]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|gl(?:pat|dt|rt|cbt)-[\w-]{16,}|sk-[\w-]{16,}|[sr]k_(?:live|test)_\w{10,}"
    r"|nvapi-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|xapp-[\w-]{10,}|(?:AKIA|ASIA|AROA|AIDA|AGPA|ANPA|LTAI)[0-9A-Za-z]{12,}|AIza[\w-]{30,}"
    r"|ya29\.[\w.-]{16,}|1//0[\w-]{16,}|GOCSPX-[\w-]{16,}|\d{1,20}-\w{16,64}\.apps\.googleusercontent\.com|\w{3}8Q~[\w.~-]{20,}"
    r"|SG\.[\w-]{16,64}\.[\w-]{16,}|npm_\w{30,}|pypi-[\w-]{16,}|do[opr]_v1_\w{16,}|dapi[0-9a-f]{32}|shp(?:at|ca|pa|ss)_\w{16,}"
    r"|sq0\w{3}-[\w-]{16,}|key-[0-9a-f]{32}|hv[sbr]\.[\w-]{16,}|s\.[A-Za-z0-9]{24}(?!\w)|\w{14}\.atlasv1\.[\w-]{16,}|AGE-SECRET-KEY-1\w{16,}"
    r"|PMAK-[\w-]{16,}|NRAK-\w{16,}|lin_api_\w{16,}|gl[sc]a?_\w{30,}|gsk_\w{30,}|r8_\w{30,}|ntn_\w{30,}|xai-\w{30,}|pplx-\w{30,}|pcsk_\w{30,}"
    r"|tskey-[\w-]{16,}|lsv2_\w{30,}|pscale_\w{30,}|whsec_\w{16,}|sbp_\w{30,}|dp\.[a-z]{2,5}\.\w{30,}|fm[12]_[\w+/=]{30,}|figd_[\w-]{30,}"
    r"|pat\w{14}\.[0-9a-f]{40,}|wandb_v1_\w{16,}|(?:LS0tLS1CRUdJTi|b3BlbnNzaC1rZXkt)[\w+/=]{16,}|[0-9a-f]{32}-us\d{1,2}(?!\d)"
    r"|(?:SK|AC)[0-9a-f]{32}|(?:IQoJb3JpZ2lu|FwoGZXIvYXdz)[\w+/=]{16,}|eyJ(?:[\w-]{8,}(?:\.[\w-]+){1,2}|[\w-]{16,})|arn:aws[\w:/+=,.@-]+)"
    r"|(?:(?<=\.slack\.com/services/)|(?<=\.slack\.com/triggers/)|(?<=\.slack\.com/workflows/))[\w/]{16,}|(?<=telegram\.org/bot)[^\s/]{8,}|(?<=/webhookb2/)[^\s\"'<>]{16,}|(?<=/api/webhooks/)\d{16,20}/[\w-]{30,}"
    r"|\$(?:apr1|2[aby]|[156y]|argon2\w{1,2})\$[\w./$=,+-]{16,}"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY[A-Z ]{0,40}-----[\s\S]*?(?:-----END [A-Z ]{0,40}-----|\Z)"
)
BEGINNINGS = (
    "hf_", "gh", "github_pat_", "gl", "sk", "rk_", "nvapi-", "xox", "xapp-", "akia", "asia", "aroa", "aida", "agpa", "anpa", "ltai",
    "aiza", "ya29", "1//0", "gocspx-", "googleusercontent", "8q~", "sg.", "npm_", "pypi-", "_v1_", "dapi", "shp", "sq0", "key-",
    "hv", "s.", ".atlasv1.", "pmak-", "nrak-", "lin_api_", "r8_", "ntn_", "xai-", "pplx-", "pcsk_", "lsv2_", "pscale_", "whsec_", "sbp_",
    "dp.", "fm1_", "fm2_", "figd_", "pat", "ls0tls1", "b3blbnnz", "-us", "webhook", "slack.com", "ac", "eyj", "arn:aws", "$", "-----begin",
    "iqoj", "fwog", "telegram.org",
)  # fmt: skip
# Those that begin with nothing of their own: bot tokens, ids of clouds, a secret access key.
LONG_SHAPE = re.compile(
    r"(?<![\w/+=.-])(?:\d{8,10}:[\w-]{35}(?![\w-])|[\w-]{24,28}\.[\w-]{6}\.[\w-]{27,}|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
    r"|(?=[\w/+]{0,39}[a-z])(?=[\w/+]{0,39}[A-Z])(?=[\w/+]{0,39}\d)[A-Za-z0-9/+]{40}(?![\w/+=]))"
    # A long word in which letters and digits take turns, but for hashes and names of kernels.
    r"|(?<!\w)(?!_?ZN|(?:[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64})(?![A-Za-z0-9]))"
    r"(?=\d{0,24}(?:[A-Za-z]{1,32}\d{1,24}){3})[A-Za-z0-9]{32,}(?![A-Za-z0-9])"
    # The same behind a vendor's word or two, and of every sort of character a shorter one.
    r"|(?<![\w/.$-])(?!_?ZN)(?:[A-Za-z][A-Za-z0-9]{1,11}[_$-]){1,2}(?:(?=[^\W\d_]{0,24}\d)(?=\w{0,24}[a-z])(?=\w{0,24}[A-Z])[A-Za-z0-9]{20,}"
    r"|(?=\d{0,24}(?:[A-Za-z]{1,32}\d{1,24}){3})[A-Za-z0-9]{32,})(?:[_$][A-Za-z0-9]{8,}){0,2}(?![A-Za-z0-9])"
)
ENCODED = re.compile(r"(?<![\w+/])[\w+/-]{24,}={0,2}")  # what may be base64 of a text that names a secret
ESCAPED = re.compile("%[0-9A-F]{2}")
LONG = re.compile(r"[\w/+-]{24}|\d{8}[:-]")
SECRET_NAME = (
    r"(?:pass(?:word|wd|phrase)?|pwd|secret|token|api[_-]?key|apikey|access[_-]?key(?:[_-]?id)?|auth|credentials?|signature|sig"
    r"|private[_-]?key|account[_-]?key|shared[_-]?key|shared[_-]?access[_-]?(?:key|signature)|encryption[_-]?key|client[_-]?id|tenant[_-]?id"
    r"|subscription[_-]?id|psk|passcode|pat|dsn|jwt|bearer|pw|key[_-]?pair[_-]?id|security[_-]?token|session[_-]?id)"
)
# Up to the quote that it began with, or in one word.
QUOTED = r"(?:(?<=\")[^\"\r\n]+|(?<=')[^'\r\n]+|[^\s\"']+)"
MORE = r"(?:[\"']\s{0,4}\+?\s{0,4}[\"'][^\s\"']+)*"  # of a text in pieces
APART = r"(?:[ \t]{0,40}|\s{0,8})"
GIVEN = re.compile(
    rf"(?i)((?:^|[^a-z])(?:[\w-]{{0,40}}[_-])?(?:(?:access|session|refresh|secret|client|api|db|user|pg){{1,2}})?{SECRET_NAME}"
    rf"(?:[_.-]?(?:key|token|secret|id|value|cookie|base|string)){{0,2}}[\"']?{APART}(?:=>|:{{0,2}}=|:|%3D|：){APART}(?:\x1b\[[\d;]{{0,8}}m)?\(?[\"']?)(?![\"']?<){QUOTED}{MORE}"
    rf"(?:\s=\s[\"']?[^\s\"']+)?"  # behind its type
)
# "the password is ...", "your API key ...": letters and digits, or it is a word of the sentence.
SAID = re.compile(
    r"(?i)((?:^|[^a-z])(?:pass(?:word|wd|phrase|wort)|pw|secret|token|(?:api|access|secret|private)[ _-]key|(?-i:PASS|AUTH))"
    r"(?: for \w{1,20})?(?:\s{1,4}is)?\s{0,4}[:=]?\s{1,4}[\"']?)(?=[^\s\"']{0,64}[a-z])(?=[^\s\"']{0,64}\d)(?!<)[^\s\"']{8,}"
)
# The wider net: whatever ends like a secret's name, whatever parts it from its value (quotes, brackets, tags, arrows, cells of a table,
# colours, dots, a call, the `value` beside a `name`), and a value of letters and digits. Parts of a checkpoint are called keys, too.
PARTED = (
    r"(?:\x1b\[[\d;]{0,12}m|%(?:25){0,2}(?:3D|3A|22)|\b[a-z]{0,12}val(?:ue)?\b|\b(?:is|was|set|with|to|provided|content|invalid|int)\b|<-|<?\b\w{1,16}\((?=[\"'])|\b[a-z]{1,12}\(\d{1,6}\)"
    r"|\bb(?=[\"'])|[&!]{1,2}\w{1,20}\s|</?\w{1,16}>|<!\[CDATA\[|\[\w{1,12}\]|\.{2,64}+|[ \t]{1,40}+|:\s\w{1,16}\s=|"
    r"[\"'`(\[{*\\\s\x00,;:=?>|\])}\u2190-\u21ff\u2500-\u257f\u200b\ufeff\uff1d\uff1a-]){1,16}"
)
NOUN = r"(?:pass(?:word|wd|phrase)|(?<=[_-])pass|secret|token|credentials?|key|signature)"
NO_PART = r"(?!(?:decoder|model|module|optimizer|embedding|mtp|output_layer|lm_head|layers)[._])"
NAMED = re.compile(
    rf"(?i)({NOUN}(?:[_-]?(?:id|value|key|token|secret|data|cookie))?s?{PARTED})"
    rf"{NO_PART}(?!\[\w{{1,16}}\]:)(?![\w.-]{{0,64}}{NOUN}s?[\"'\s])"
    rf"(?=[^\s\"'<]{{0,64}}[a-z])(?=[^\s\"'<]{{0,64}}\d)(?:[^\s\"'<]{{12,}}|[A-Za-z0-9!@#%^*~+/-]{{8,}}(?![\w.(\[])){MORE}"
)
# A variable of another process, whose values nobody knows: `HF_TOKEN_2=...`, but `TRAIN_TOKENS=1.2e+12`.
VARIABLE = re.compile(
    rf"((?<![A-Z0-9_])(?:[A-Z0-9]{{1,20}}_){{0,6}}(?:{SAID_BY})(?:_[A-Z0-9]{{1,20}}){{0,6}}[\"']?\s{{0,4}}[=:]\s{{0,4}}[\"']?)"
    rf"(?!<){NO_PART}(?![-+]?[\d.]{{1,40}}[eE][-+]?\d{{1,3}}(?![^\s\"',;)\]}}]))(?=[^\s\"']{{0,64}}[A-Za-z])(?=[^\s\"']{{0,64}}\d)[^\s\"']{{8,}}"
)
# The value before its name.
VALUE_FIRST = re.compile(
    rf"(?i)(\bvalue[\"']?\s{{0,4}}[:=]\s{{0,4}}[\"'])[^\"'\r\n]+(?=[\"'],?\s{{0,4}}[\"']?(?:name|key)[\"']?\s{{0,4}}[:=]\s{{0,4}}[\"']?[\w.-]{{0,60}}{NOUN})"
)
KEY_HEX = re.compile(
    r"(?i)((?:^|[^a-z])(?:key|logged in with)[\"']?\s{0,4}[:= ]\s{0,4}[\"']?)[0-9a-f]{32,64}(?![0-9a-z])"
)
HEADER = re.compile(
    r"(?i)(\b(?:proxy-)?authorization[\"']?\s{0,8}[:=]\s{0,8}[\"']?(?:\w{1,20}\s{1,8})?|\b(?:set-)?cookie[\"']?\s{0,8}:\s{0,8}"
    r"|\bx-(?:[\w-]{0,40}?)(?:token|key|secret)[\"']?\s{0,8}:\s{0,8})(?!<secret>)[^\"'\r\n]+"
)
SCHEME = re.compile(
    r"(?i)(\b(?:bearer|basic|digest|negotiate)\s{1,8})(?:[^\s\"']{16,}|(?=[^\s\"']{0,64}[\d=_])[\w.~+/=-]{6,})"
)
NETRC = re.compile(
    r"(?i)(\blogin\s{1,8}\S{1,200}\s{1,8}password\s{1,8}|\s-(?:p|pw|storepass|keypass)\s{1,8}|--(?:[\w-]{0,40}[_-])?(?:password|token|secret|api[_-]key)\s{1,8}"
    r"|\bmysql\w{0,8}\s(?:\S{1,100}\s){0,8}?-p|\s(?:-u\s{0,8}|--user[\s=]{1,8})[\"']?[^\s:@/\"']{1,100}:|--from-literal[\s=]\w{1,40}="
    r"|\b(?:sshpass|redis-cli|openssl|ssh-keygen|ldap\w{1,12}|7z|zip)\s(?:\S{1,100}\s){0,8}?-"
    r"(?:(?:[pakNwP]|pass(?:in|out)?)\s{1,4}|p)(?:pass:)?[\"']?"
    r"|[\"'](?:-p[\"'],\s{0,4}[\"']|(?:-u|--user)[\"'],\s{0,4}[\"'][^\s:@/\"']{1,100}:)|\b(?:wandb|vault|cargo)\s{1,4}login\s{1,4}"
    r"|\bmc\s(?:alias\sset|config\shost\sadd)(?:\s\S{1,200}){3}\s|(?:login|token)[^\n]{0,200}<<<\s{0,4}[\"']?"
    r"|\becho\s(?:-n\s)?[\"']?(?=\S{1,400}\s{0,4}\|[^\n]{0,200}(?:login|stdin|token))"
    r"|(?:password|passphrase)\s(?:for\s|\()[^\n:]{1,40}(?:://[^\n:]{1,100})?:\s|\s-U\s{0,4}[\"']?[^\s%]{1,60}%"
    # A name and a password beside it: of a call, in a line of ~/.pgpass, of a jar of cookies; and what a server hands back in a URL.
    r"|auth\w{0,12}\s{0,2}[=:(]\s{0,2}\(?[\"'][^\"'\n]{1,100}[\"'],\s{0,4}[\"']|:(?:5432|\*):[\w*.-]{1,64}:[\w*.-]{1,64}:"
    r"|\t(?:TRUE|FALSE)\t\S{1,200}\t(?:TRUE|FALSE)\t\d{1,20}\t\S{1,200}\t|[?&#](?:code|id_token|ticket|assertion)="
    r"|\b(?:requirepass|masterauth|(?-i:AUTH)[ \t]\w{1,40}(?=[ \t]))\s{1,4}|\bidentified\s{1,4}by\s{1,4}[\"']?"
    r"|\bauth\s{1,4}(?:plain|login)\s{1,4}"
    r"|\sclone\s{1,8}[^\s:@/]{1,100}:(?=[^\s@]{1,200}@))\S+"
)
# Of one line: values of columns that SQL names before them, and all of a Kubernetes secret.
COLUMN = rf"(?:[\w.-]{{0,60}}?{SECRET_NAME}(?:[_-]?(?:key|token|secret|id|value))?|[\w. -]{{1,60}}?key)"
INSERTED = re.compile(
    rf"(?i)(\binsert\s[^()]{{1,100}}\((?:[^()]{{0,400}}[^\w()])?{COLUMN}(?:[^\w()][^()]{{0,400}})?\)\s{{0,8}}values\s{{0,8}}\()[^\r\n]+"
)
KUBERNETES = re.compile(r"((?:[\"'](?:stringD|d)ata[\"']:|\bcookies[\"']?\s{0,4}[=:])\s{0,4}\{)[^{}\r\n]+")
# Of which words one stands in whatever a pattern finds.
NEEDS = {
    HEADER: ("authorization", "cookie", "x-"),
    SCHEME: ("bearer", "basic", "digest", "negotiate"),
    GIVEN: ("pass", "pwd", "secret", "token", "key", "auth", "credential", "sig", "id", "psk", "pat", "dsn", "jwt", "bearer", "pw"),
    SAID: ("pass", "pw", "secret", "token", "key", "auth"),
    NAMED: ("pass", "secret", "token", "credential", "key", "signature"),
    VARIABLE: tuple(word.removesuffix("S?").lower() for word in SAID_BY.split("|")),
    KEY_HEX: ("key", "logged in with"),
    VALUE_FIRST: ("value",),
    NETRC: ("password", "token", "secret", "api-key", "api_key", " clone ", "-p", "-u", "literal", "redis-cli", "openssl", "ssh-keygen",
            "ldap", "identified", "auth", "login", "requirepass", "stdin", "passphrase", "-storepass",
            "-keypass", "mc ", ":5432:", "e\t", "code=", "ticket=",
            "assertion="),
    INSERTED: ("insert",),
    KUBERNETES: ('"secret"', "'secret'", "cookies"),
}  # fmt: skip
DIGITS = str.maketrans("123456789", "0" * 9)
KNOWN = 10_000  # lines that are remembered
LONGEST_ROW = 1000  # characters
KEY_BEGINS = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY[A-Z ]{0,40}-----")
# What stands before the text of a line, in a log or in a difference.
BEFORE = r"(?:\[\w{1,16}\]:\s|\d{1,5}: |\d{4}-\d\d-\d\d[ T][\d:.,]{5,16} (?:[A-Z]{1,10} )?)?"
KEY_LINE = re.compile(
    r"[\s\"'+-]*(?:[A-Za-z0-9+/=]{1,76}|[\w-]+: \S.{0,76}|-----END [A-Z ]*-----.*)?(?:\\[nr]|[\"',\\)}\s])*"
)
# A name whose value stands below it: in a block of YAML, or as `value:` under a `name:`, as Kubernetes has it.
BELOW = re.compile(
    rf"(?im)(?:^|[^a-z])(?:access|session|refresh|secret|client|api|db|user|pg){{0,2}}(?:{SECRET_NAME}|[\w.-]{{0,40}}{NOUN}s?)(?:[_-]?(?:key|token|secret|id|value))?"
    r"[\"']?[ \t]*:(?:[ \t]+[!&]\S{1,64}){0,2}[ \t]+[|>][-+\d]{0,2}[ \t]*(?:#.*)?\r?$"
)
# A row of names, or the columns of an SQL statement; a name of a secret among them; and what parts the cells of such rows.
HEADS = re.compile(rf"(?im)(?:^|[|│┃,;\t(\"'`]|  )[ \"'`]{{0,8}}{COLUMN}[\"'`]?[ ]{{0,8}}(?:[\r|│┃,;\t)]|  |$)")
LISTED = re.compile(r"(?i)\b(?:insert|copy)\s[^()]{1,100}(\()[^()]{1,1000}(?=\))")
PARTS = (*map(re.compile, ("[|│┃]", "\t", ",", ";", " {2,}")), re.compile("[,\t]"))
CELL, FRAME = re.compile(rf"[\"'`]?(?:({COLUMN})|[^\W\d][\w .-]{{0,60}})?[\"'`]?", re.IGNORECASE), " |│┃\r"
PLAIN_CELL = re.compile(r"\W*[\d.,:%+-]*(?:[eE][+-]?\d{1,3})?\W*|\W*\w{1,7}\W*")
MANIFEST = re.compile(r"[ \t\"'-]*(?:apiVersion[\"']?:\s{1,4}[\"']?v1|kind[\"']?:\s{1,4}[\"']?Secret)\b")
MANIFEST_LINE = re.compile(r"[\"']?[\w./-]{1,80}[\"']?:(?:\s|$)|[\s{}\[\],]*$")
MANIFEST_DATA = re.compile(r"[\"']?(?:stringD|d)ata[\"']?:\s{0,4}\{?\s{0,4}$")
NAME_ABOVE = re.compile(r"(?m)\b(?:name|key)[\"']?\s{0,4}:\s{1,4}[\"']?([\w.-]{1,80})[\"']?,?\s{0,4}$")
VALUE_BELOW = re.compile(r"[\"']?val(?:ue)?[\"']?\s{0,4}:\s{1,4}(?:([|>][-+\d]{0,2})\s*$)?")
# A name that ends its line, or a value that does, and what opens or goes on with one: a word of letters and digits stands below it.
OPENS = re.compile(
    rf"(?im)(?:{NOUN}|{SECRET_NAME})(?:[_-]?(?:id|value|key|token|secret))?s?(?!\w)"
    r"(?:[^\w\n]{0,16}[rbf]?(?P<quote>\"\"\"|''')(?:(?!(?P=quote))[^\n])*$"
    r"|[\"']?</\w{1,16}>[ \t]*\r?$|[^\n]{0,40}<<[-~]?[ \t]*[\"'\\]?\w{1,40}[\"']?[ \t]*\r?$"
    r"|(?:[^\w\n]{0,16}[\"'`:=>|(\[{\\]|\)|(?: is)?)[ \t]*\r?$)"
)
GOES_ON = re.compile(
    rf"[-+:\s\"'`(\[\u2500-\u257f]*(?:<\w{{1,16}}>|\w{{1,16}}\s{{0,4}}[=:]\s{{0,4}}[\"']?|\w{{1,16}}\(\d{{1,6}}\)\s[\"'])?{NO_PART}(?=[^\s\"'<]{{0,64}}[A-Za-z]|\d{{12}})(?=[^\s\"'<]{{0,64}}\d)[^\s\"'<]{{8,}}(?:\\|[\"'`)\],;}}\s]|</\w{{1,16}}>)*"
    r"|[^\n]{1,200}\binput_value=[^\n]*"  # of pydantic
)
WEB_TOKEN = re.compile(r"\beyJ[\w.-]{8,}\\?\r?$", re.MULTILINE)  # broken over lines
DENT = re.compile(rf"{BEFORE}([ \t+-]*)")
IN_URL = re.compile(r"(?<=://)[^/\s@:]{0,200}:\S{0,400}@|(?<=://)[^/\s@]{1,200}@")
# Variables that are recorded: those that the software that trains reads, and no others.
RECORDED = re.compile(
    r"^(?:(?:NCCL|TORCH|TORCHDYNAMO|TORCHINDUCTOR|INDUCTOR|TORCHELASTIC|PYTORCH|ATEN|AOT|DCP|CUDA|CUBLAS|CUBLASLT|CUDNN|CUTE|CUTEDSL|CUTLASS"
    r"|NVTE|NVIDIA|FP4|TRITON|TILELANG|MAMBA|QUACK|MEGATRON|FLA|FLASH|OMP|GOMP|KMP|MKL|DNNL|ONEDNN|OPENBLAS|UCX|UCC|FI|GLOO|NVSHMEM|TOKENIZERS"
    r"|LD|MALLOC)(?:_|$)|DISABLE_ADDMM_CUDA_LT$|ENABLE_\w*TMA_|PYTHON(?:OPTIMIZE|PATH)$)"
)
# Of those, the values that say nothing but how. Any other variable is known by its name.
PLAIN_VALUE = re.compile(r"\d{1,6}|true|false|on|off|yes|no|none|(?:INIT|NET|INFO|WARN|VERSION|TRACE|ALL|COLL|GRAPH)(?:,[A-Z]{2,8})*"
    r"|expandable_segments:(?:True|False)|\d{1,3}(?:\.\d{1,4}){1,3}a?(?:-\d{1,3})?", re.IGNORECASE)  # fmt: skip
SET = "<set>"  # of a variable that is recorded and whose value is not; `<set 1a2b3c4d>` tells in one folder whether it was the same
# Whose values are known for what they are; any other variable's may be a secret under a name that does not say so.
ORDINARY = re.compile(
    r"^(HOME|PWD|OLDPWD|PATH|HOSTNAME|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|LC_\w+|SHLVL|_|COLUMNS|LINES|MAIL|EDITOR|PAGER|VISUAL|DISPLAY|TZ"
    r"|LS_COLORS|LESS\w*|XDG_\w+|PYTHON\w+|CONDA_\w+|VIRTUAL_ENV\w*|SLURM_\w+|PYTEST_\w+|MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE)$"
)
PATHS = re.compile(r"(?:/[\w.@+ -]*)+(?::(?:/[\w.@+ -]*)+)*:?")
# Two parts at least, and no `https://`. What a shell or Python quotes a path with ends it.
PART = r"[^\s/'\"`:,;=()\[\]{}<>|]+"
ABSOLUTE = re.compile(rf"(?<![\w.<>/-])(?!(?<=:)//)/+(?!(?:proc|sys|dev)/){PART}(?:/{PART})+/?")
FILE_URL = re.compile(r"(?<=file:)//+(?=[^\s/])")
IPV4 = re.compile(r"(?<![\w.])(\d{1,3}(?:\.\d{1,3}){3})(?![\w.])")
PORT = re.compile(r":\d")
PRIVATE = tuple(
    map(ipaddress.IPv4Network, ("10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"))
)
NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
# A shorter value is not looked for in texts: it would be found everywhere. Characters, and digits where there is nothing else.
SHORT, SHORT_NUMBER, SHORT_UNNAMED = 4, 8, 6
WORDS = {"true", "false", "none", "null", "auto"}
MARK, HOST, ADDRESS, TEXT = "<secret>", "<host>", "<address>", "<text>"
ONE_MARK = r"<(?:secret|host|address|text|set|checkout|receipts|scratch|durable|python|packages|home|(?:path|set) [0-9a-f]{8})>"
MARKS, PLACED = re.compile(rf"{ONE_MARK}(?:[/:,]{ONE_MARK})*"), re.compile(r"(<[a-z]+>)/(.+)", re.DOTALL)
WORD = re.compile(r"\w+")
TOKEN = re.compile(rf"(?P<mark>{ONE_MARK})|\w+|[^\x00-\x7f]+")
# Numbers, and names that are a kind and a number: of versions, GPUs, NICs, links, file systems.
FIGURE = re.compile(
    r"\d{1,9}|\d+(?:[eE]\d{1,3})|(?:cu|cuda|python|post|rc|dev|NV|GPU|NIC|v|H|A|B|GH|GB|sm|bond|eth|ib)\d{1,4}a?|mlx5_(?:bond_)?\d{1,3}|\d{1,3}[KMG]"
    r"|[0-9A-Fa-f]{2}|000[0-9A-Fa-f]{5}|\d{1,5}(?:x\d{1,5}){1,2}|ext[234]|nfs4?|\d+[TZ]"
    r"|\d{1,3}(?:a|b|rc)\d{1,2}|SXM\d|PCIe|HBM\de?|\d{1,4}GB|\d{1,2}X|[EHNQX]DR|Gb|sec|[xz]fs|btrfs|tmpfs|lustre|gpfs|ceph|wekafs|virtiofs"
    r"|[ADEGMR]{1,64}"  # layers
)
MADE_OF, HASH8 = re.compile(r"(?<![\w+])([\w+]+):$"), re.compile("[0-9a-f]{8}")
LONG_NUMBER = re.compile(r"(?<![\w.])(?:\d[ -]?){12,}")
# Bytes in hexadecimal digits, of a network card's address or of a key; a place on the PCI bus has fewer, a list of numbers no letter.
BYTES = re.compile(r"(?<![^\W_])(?=[\d:;, -]{0,48}[A-Fa-f])(?:[0-9A-Fa-f]{2}[:;, -]{1,2}){5,}[0-9A-Fa-f]{2}(?![^\W_])")
# Keys whose values are hashes that we made.
HASHES = (
    "revision", "tree", "sha256", "diff_sha256", "nam_megatron", "launch", "uuid", "seal", "before", "id", "startup",
)  # fmt: skip
MENDED = "mends"  # {name: hash}: what stood, which `<text>` would make alike
HASH = re.compile(r"[0-9a-f]{7,64}")


class Redactor:
    """Takes secrets, hosts, addresses and paths out of text.

    environ: whose secret values are looked for everywhere. places: name -> folders that it stands for. hosts: more names than this
    host's own. salt: makes the marks of paths those of one folder of receipts.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        places: Mapping[str, Iterable[Path]] | None = None,
        hosts: Iterable[str] = (),
        salt: str = "",
    ):
        named = {part for k, v in environ.items() if SECRET_WORD.search(k) for part in (v, *_lines(v)) if telling(part)}
        unnamed = {
            part for k, v in environ.items() if not ORDINARY.match(k) for part in (v, *_lines(v)) if maybe_secret(part)
        }
        encoded = {form for value in named | unnamed for form in _encoded(value)}
        by_length = partial(sorted, key=len, reverse=True)
        self._named, self._secrets = by_length(named), by_length(named | unnamed | encoded)
        self._salt = salt
        found = {
            str(p): name
            for name, paths in (places or {}).items()
            for path in paths
            for p in (path, os.path.realpath(path))
        }
        # The longest first, so that a folder inside another one keeps its own name; `/x` alone would be found everywhere.
        self._places = sorted(((p, n) for p, n in found.items() if len(p) > 3), key=lambda pn: -len(pn[0]))
        names = {socket.gethostname(), *hosts}
        names |= {name.split(".")[0] for name in names}
        known = sorted(re.escape(n) for n in names if n and n != "localhost")
        # With the domain that may follow: `node1.cluster.example`. One of two letters is looked for before a port alone.
        spelled = [rf"{n}(?:\.[\w-]+)*" + (r"(?![\w-])" if len(n) > 2 else r"(?=:\d)") for n in known]
        self._hosts = re.compile(rf"(?<![\w-])(?:{'|'.join(spelled)})") if spelled else None

    def secrets(self, text: str) -> str:
        """`text` without secrets; hosts and paths stay."""
        found = (span for value in self._secrets for span in _found(value, text))
        return _hidden(text, [*shapes(text), *below(text), *found])

    def valued(self, text: str) -> bool:
        """Whether a secret value of the environment stands in `text`."""
        return any(value in text for value in self._secrets)

    def betrays(self, word: str) -> bool:
        """Whether a word of a command line holds a secret: the value of a variable that is called one, or something of its shape."""
        return any(value in word for value in self._named if published(value) != value) or shapeless(word) != word

    def text(self, text: str) -> str:
        """`text` without anything that names this machine."""
        text = self.secrets(text)
        for path, name in self._places:
            text = re.sub(re.escape(path) + r"(?![\w.-])", name, text)
        text = ABSOLUTE.sub(self._unnamed, FILE_URL.sub(" /", text))
        text = IPV4.sub(_address, text)
        return self._hosts.sub(HOST, text) if self._hosts else text

    def tree(self, node: Any, whole: bool = False) -> Any:
        """Plain data for a receipt: of every text only words that stand in our own files, numbers, and marks. Keys that are names stay.

        whole: a text with any other word is left out whole, as what a person wrote is.
        """
        if isinstance(node, str):
            return self.shown(node, whole)
        if isinstance(node, Mapping):
            shown: dict[str, Any] = {}
            for k, v in node.items():
                key = first = k if NAME.fullmatch(k) and self.secrets(k) == k else self.shown(k, whole)
                again = 1
                while key in shown:  # two keys may be one without their words
                    again += 1
                    key = f"{first} #{again}"
                hashes = [*v.values()] if k == MENDED and isinstance(v, Mapping) else [v] * (k in HASHES)
                shown[key] = v if hashes and all(map(_is_hash, hashes)) else self.tree(v, whole)
            return shown
        return [self.tree(v, whole) for v in node] if isinstance(node, (list, tuple)) else node

    def shown(self, text: str, whole: bool) -> str:
        """`text` for a receipt. `KEY=VALUE` keeps a key that is ours."""
        text = self.text(text)
        if (shown := published(text)) == text or not whole:
            return shown
        key, sign, value = text.partition("=")
        if sign and published(key) == key:
            return f"{key}={self.shown(value, whole)}"
        if found := PLACED.fullmatch(text):
            return f"{found[1]}/{self._mark(found[2])}"
        return text if MARKS.fullmatch(text) else TEXT

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables that a receipt records: by name, with a value where it says nothing but how; of others a mark of it.

        A mark has the folder's salt in it, which nobody else knows; a variable that is called a secret has none.
        """
        kept = {k: v for k, v in sorted(environ.items()) if RECORDED.search(k)}
        return {k: self._value(k, v) for k, v in kept.items()}

    def _value(self, name: str, value: str) -> str:
        if SECRET_WORD.search(name) and not name.endswith("_IB_PKEY"):  # a partition of the network
            return SET
        if PLAIN_VALUE.fullmatch(value) and self.secrets(value) == value:
            return value
        return f"<set {self._salted(value)}>" if self._salt else SET

    def _unnamed(self, found: re.Match[str]) -> str:
        return self._mark(found[0])

    def _mark(self, path: str) -> str:
        """A path as a mark by which two receipts of a folder can tell whether it was the same one."""
        return f"<path {self._salted(path.rstrip('/'))}>"

    def _salted(self, text: str) -> str:
        return hashlib.sha256((self._salt + text).encode("utf-8", "surrogateescape")).hexdigest()[:8]


@dataclass(frozen=True)
class Rows:
    """Rows below one of names. part: what parts their cells; of those there are `count`, and from `secret` on they are hidden."""

    part: re.Pattern[str]
    count: int
    secret: int

    @classmethod
    def named(cls, line: str, begin: int) -> "Rows | None":
        """Those below this line, where it has names and a secret's among them."""
        if len(line) > LONGEST_ROW or not HEADS.search(line):
            return None
        listed = LISTED.search(line)
        for part in PARTS[-1:] if listed else PARTS[:-1]:
            cells = cls.cells(part, line[: listed.end()] if listed else line, listed.end(1) if listed else begin)
            found = [CELL.fullmatch(cell.strip()) for _, cell in cells]
            secret = [at for at, name in enumerate(found) if name and name[1]]
            if len(cells) > 1 and all(found) and secret:
                return cls(part, len(cells), secret[0])
        return None

    def start(self, line: str, begin: int) -> int | None:
        """Where the secrets of a row begin, 0 where it has none; None where it is no such row."""
        cells = self.cells(self.part, line[:LONGEST_ROW], begin)
        if line.strip() and not WORD.search(line, begin):  # a rule
            return 0
        if not self.count <= len(cells) <= self.count + 2:
            return None
        return 0 if all(PLAIN_CELL.fullmatch(cell) for _, cell in cells[self.secret :]) else cells[self.secret][0]

    @staticmethod
    def cells(part: re.Pattern[str], line: str, begin: int) -> list[tuple[int, str]]:
        begin, end = len(line) - len(line[begin:].lstrip(FRAME)), len(line.rstrip(FRAME))
        bounds = [(found.start(), found.end()) for found in part.finditer(line, begin, end)]
        starts, ends = [begin, *(last for _, last in bounds)], [*(first for first, _ in bounds), end]
        return [(first, line[first:last]) for first, last in zip(starts, ends, strict=True)]


class Below:
    """Finds the values of secrets that a line above names."""

    def __init__(self) -> None:
        self._dent: int | None = None  # of the name whose block goes on
        self._named = False
        self._open: int | None = None  # how far a word that goes on is indented at least
        self._rows: Rows | None = None
        self._manifest = False  # of Kubernetes, of a secret for all we know

    def __bool__(self) -> bool:
        return (
            self._dent is not None or self._named or self._open is not None or self._rows is not None or self._manifest
        )

    def start(self, line: str) -> int | None:
        """Where in this line such a value begins; the lines are given in their order."""
        dent = DENT.match(line)
        assert dent
        named, self._named = self._named, False
        if self._dent is not None:
            if not line[dent.end() :].strip():
                return None
            if len(dent[1]) > self._dent + 1:  # a step's line begins with a space
                return dent.end()
            self._dent = None
        if self._open is not None and line[dent.end() :].strip():
            if len(dent[1]) >= self._open and GOES_ON.fullmatch(line, dent.end()):
                return dent.end()
            self._open = None
        if self._rows and (start := self._rows.start(line, dent.end())) is not None:
            return start or None
        if rows := Rows.named(line, dent.end()):
            self._rows = rows
            return None
        self._rows = None
        kept = self._manifest and MANIFEST_LINE.match(line, dent.end())
        self._manifest = bool(kept or MANIFEST.match(line, dent.end()))
        if self._manifest and MANIFEST_DATA.match(line, dent.end()):
            self._dent = len(dent[1])
            return None
        if named and (value := VALUE_BELOW.match(line, dent.end())):
            self._dent = len(dent[1]) if value[1] else None
            return None if value[1] else value.end()
        if BELOW.search(line):
            self._dent = len(dent[1])
            return None
        self._named = (name := NAME_ABOVE.search(line)) is not None and bool(
            SECRET_WORD.search(re.sub(r"[.-]", "_", name[1])) or re.search(rf"(?i){NOUN}s?$", name[1])
        )
        if found := OPENS.search(line):
            self._open = 0
            return found.end("quote") if found["quote"] and found.end("quote") < len(line) else None
        if WEB_TOKEN.search(line):
            self._open = 0
            return None
        if any(
            found.end() == len(line.rstrip("\"' \t\r"))
            for pattern in (GIVEN, NAMED)
            for found in pattern.finditer(line)
        ):
            self._open = 0 if line.endswith("\\") else len(dent[1]) + 1
        return None


class Stream:
    """Takes secrets out of text that comes line by line: a key of several lines is one secret.

    What talks most repeats itself but for its numbers. A line that had nothing in it has nothing in it with other digits in the same
    places, unless these are a value of the environment.
    """

    def __init__(self, redactor: Redactor):
        self._redactor, self._in_key, self._before, self._below = redactor, False, "", Below()
        self._harmless: set[str] = set()  # lines, every digit a 0

    def lines(self, said: Sequence[str]) -> list[str]:
        """Many at once: one look tells that there is nothing in them, as there mostly is not."""
        if self._in_key or self._below or self._redactor.valued("\n".join(said)):
            return [self.line(line) for line in said]
        fresh = {form: line for line in said if (form := line.translate(DIGITS)) not in self._harmless}
        text = "\n".join(fresh.values())
        if KEY_BEGINS.search(text) or names_below(text) or shapeless(text) != text:
            return [self.line(line) for line in said]
        self._know(fresh)
        return list(said)

    def _know(self, harmless: Iterable[str]) -> None:
        if len(self._harmless) > KNOWN:
            self._harmless.clear()
        self._harmless.update(form for form in harmless if len(form) < 1000)

    def line(self, text: str) -> str:
        form = text.translate(DIGITS)
        in_block, start = bool(self._below), self._below.start(text)
        if start is not None:
            return text[:start] + MARK
        if not self._in_key and not in_block and form in self._harmless and not self._redactor.valued(text):
            return text
        # Behind what stood before its first line, whatever that is: a clock, a rank, a mark of a quotation.
        if self._in_key and KEY_LINE.fullmatch(text, len(self._before) if form.startswith(self._before) else 0):
            self._in_key = "-----END" not in text
            return MARK
        begins = KEY_BEGINS.search(text)
        self._before = form[: begins.start()] if begins else ""
        self._in_key = begins is not None and "-----END" not in text[begins.end() :]
        if (shown := self._redactor.secrets(text)) == text and not self._below:
            self._know((form,))
        return shown


def telling(value: str) -> bool:
    """Whether a secret can be told from ordinary text."""
    return len(value) >= (SHORT_NUMBER if value.isdecimal() else SHORT) and value.lower() not in WORDS


def maybe_secret(value: str) -> bool:
    """Whether the value of a variable may be a secret although its name does not say so: no path, no number, none of our own words."""
    return len(value) >= SHORT_UNNAMED and not PATHS.fullmatch(value) and published(value) != value


def shapeless(text: str) -> str:
    """`text` without what has the shape of a secret."""
    return _hidden(text, [*shapes(text)])


def shapes(text: str) -> Iterator[tuple[int, int]]:
    """Where something has the shape of a secret. Each pattern sees all of the text: one may know more of what another would hide half."""
    lower = text.lower()  # looking for a few words first is ten times as fast as a pattern that begins with any
    if any(word in lower for word in BEGINNINGS):
        yield from (found.span() for found in SECRET_SHAPE.finditer(text))
    if LONG.search(text):
        yield from (found.span() for found in LONG_SHAPE.finditer(text))
        yield from (found.span() for found in ENCODED.finditer(text) if (said := _decoded(found[0])) != shapeless(said))
    if "://" in text:
        yield from ((found.start(), found.end() - 1) for found in IN_URL.finditer(text))
    for pattern, words in NEEDS.items():
        if any(word in lower for word in words):
            yield from ((found.end(1), found.end()) for found in pattern.finditer(text))


def names_below(text: str) -> bool:
    if NAME_ABOVE.search(text) or ("eyJ" in text and WEB_TOKEN.search(text)) or "apiVersion" in text or "kind" in text:
        return True
    lower = text.lower()
    patterns = (BELOW, OPENS, GIVEN, NAMED, HEADS)
    return any(word in lower for word in NEEDS[GIVEN]) and any(p.search(text) for p in patterns)


def below(text: str) -> Iterator[tuple[int, int]]:
    """Where values stand that a line above names."""
    if names_below(text):
        lines, end = Below(), 0
        for line in text.splitlines(keepends=True):
            bare = line.rstrip("\r\n")
            if (start := lines.start(bare)) is not None:
                yield end + start, end + len(bare)
            end += len(line)


def _found(value: str, text: str) -> Iterator[tuple[int, int]]:
    at = text.find(value)
    while at >= 0:
        yield at, at + len(value)
        at = text.find(value, at + len(value))


def _hidden(text: str, spans: list[tuple[int, int]]) -> str:
    """`text` with a mark for each of these places; of those that overlap for all at once."""
    if not spans:
        return text
    shown: list[str] = []
    end = 0
    for first, last in sorted(spans):
        if first > end or not shown:
            shown += [text[end:first], MARK]
        end = max(end, last)
    return "".join((*shown, text[end:]))


def _lines(value: str) -> list[str]:
    return [line.strip() for line in value.splitlines()]


def _encoded(value: str) -> Iterator[str]:
    """The forms in which a secret travels: in a URL, in JSON, in hexadecimal digits, in base64 at any of its three places."""
    raw = value.encode("utf-8", "surrogateescape")
    if len(raw) < SHORT_UNNAMED:  # the forms of a short one are short, too, and found everywhere
        return
    percent, once = (quote(raw, safe=""), quote(raw), quote_plus(raw)), json.dumps(value)
    lower = (ESCAPED.sub(lambda found: found[0].lower(), text) for text in percent)
    # Of other programs: a page, a shell, Python's bytes, JSON within JSON.
    others = {html.escape(value), shlex.quote(value), repr(raw)[2:-1], ascii(value)[1:-1], json.dumps(once)[3:-3]}
    yield from {*percent, *lower, *others, once[1:-1], repr(value)[1:-1]} - {value, f"'{value}'"}
    yield from (raw.hex(), raw.hex().upper())
    for place in range(3):
        text = base64.b64encode(bytes(place) + raw).decode()
        # Characters that are of this secret alone, whatever stands before and after it.
        inner = text[(0, 2, 3)[place] : len(text) - (0, 3, 2)[(place + len(raw)) % 3]]
        yield from {inner, inner.replace("+", "-").replace("/", "_")}


def _decoded(word: str) -> str:
    """The text that a word is in base64; none where it is not."""
    try:
        return base64.b64decode(word + "=" * (-len(word) % 4), b"-_" if {"-", "_"} & {*word} else None, True).decode(
            "ascii"
        )
    except ValueError:
        return ""


@cache
def vocabulary() -> frozenset[str]:
    """Every word of this checkout's own programs and configs: a receipt says no others."""
    here = Path(__file__).parents[1]
    files = [*here.rglob("*.py"), *here.rglob("*.toml"), *(here.parent / "nam_megatron").rglob("*.py")]
    files += [
        file
        for folder in (here.parent / "conf", here.parent / "nam_megatron" / "conf")
        for file in folder.rglob("*.yaml")
    ]
    words = {w for f in files for w in (f.stem, *WORD.findall(f.read_text(encoding="utf-8", errors="replace")))}
    return frozenset(words | {part for word in words for part in word.split("_")})


def published(text: str) -> str:
    """`text` with `<text>` for every word that is not one of ours, and for long numbers."""
    known = vocabulary()

    def shown(m: re.Match[str]) -> str:
        ours = m["mark"] or m[0] in known or FIGURE.fullmatch(m[0]) or _of_model(m)
        return m[0] if ours else TEXT

    return LONG_NUMBER.sub(TEXT, TOKEN.sub(shown, BYTES.sub(TEXT, text)))


def _of_model(word: re.Match[str]) -> bool:
    """Whether it is the hash of `--nam-model`, behind what the model is made of."""
    before = MADE_OF.search(word.string, 0, word.start())
    if before is None or not HASH8.fullmatch(word[0]):
        return False
    return {*before[1].split("+")} <= {*KINDS, *FEATURES, *SECTIONS}


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and HASH.fullmatch(value) is not None


def _address(found: re.Match[str]) -> str:
    """A private address, or one with a port; any other four numbers are more likely a version."""
    try:
        address = ipaddress.IPv4Address(found[1])
    except ValueError:
        return found[0]
    hidden = any(address in network for network in PRIVATE) or (
        PORT.match(found.string, found.end()) and not address.is_loopback
    )
    return ADDRESS if hidden else found[0]
