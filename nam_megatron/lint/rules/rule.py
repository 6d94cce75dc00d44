"""What a rule is, and what it finds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nam_megatron.lint.model import Model
from nam_megatron.lint.values import Args

WRONG, FAIL, COST, FRAGILE, DEFAULT, OPEN = "wrong model", "will fail", "cost", "fragile", "default", "open"
SEVERITIES = {
    WRONG: "Megatron trains another model than the flags say, or than the published model whose name the launch has. "
    "It gives no warning, or only a line in the log",
    FAIL: "Megatron refuses or crashes: at the start, or at the first step",
    COST: "slower, or more memory, than the flags suggest",
    FRAGILE: "works with 0.19.2, but is deprecated, has no effect, or has another default in the next Megatron",
    DEFAULT: "a default of Megatron that the launch did not choose, and that newer models seldom have",
    OPEN: "this text is not enough to decide it",
}
Verdict = bool | str | Iterable[str] | None
When = Callable[[Args, Model], Verdict]

# Where Megatron 0.19.2 does it.
VALIDATE, PARSER = "training/arguments.py validate_args", "training/arguments.py parse_args"
CONFIG, FROM_ARGS = (
    "core/transformer/transformer_config.py",
    "training/argument_utils.py core_transformer_config_from_args",
)
HYBRID, PATTERN = "core/models/hybrid/hybrid_model.py", "core/models/hybrid/hybrid_layer_allocation.py"
DSA = "core/transformer/experimental_attention_variant/dsa.py"
MOE = "core/transformer/moe/"


@dataclass(frozen=True)
class Rule:
    """A trap.

    about: the arguments it is about, by Megatron's names, or environment variables; `|` separates, the first that is said is shown.
    when: False, True, or texts: one finding for each. A text is the finding's detail, or with tabs `flag, detail, fix`. A rule that
        asks for a value that is not known finds nothing.
    """

    id: str
    severity: str
    about: str
    when: When
    message: str
    fix: str
    source: str


@dataclass(frozen=True)
class Finding:
    """A rule that applies. lines: where the text says the flag."""

    id: str
    severity: str
    flag: str
    message: str
    fix: str
    detail: str = ""
    lines: tuple[int, ...] = ()


LACKS = "without `--"  # a finding's detail where the launch lacks a flag beside another one


def without(flag: str) -> str:
    """A finding's flag where the launch lacks it."""
    return f"without {flag}"


def listed(value: object) -> list:
    """Of an argument that takes one value or several."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def each(a: Args, names: Iterable[str]) -> list[str]:
    """A finding for each of `names` that the launch gives."""
    return [f"{a.written(n)}\t" for n in a.sure(*names)]


def off(a: Args, name: str) -> bool:
    """Whether a flag's value asks for nothing: off, or its default, unless that is a strength, which a person says who wants it."""
    value, default = a.value(name), a.target.by_dest[name].default
    strength = (
        isinstance(value, float) and value not in (0, 1) and a.launch.kind in ("shell", "yaml") and not a.elsewhere
    )
    return value == "" or value is False or (value == default and not strength)
