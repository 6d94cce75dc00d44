"""What a law is, and what is said where a recipe breaks one. Imports none of the things that laws are about."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nam_megatron.errors import Problem

MATHS, CONTRADICTION, REFUSES, WRONG, OURS, UNTRIED, UNKNOWN, MACHINE = (
    "maths", "contradiction", "megatron refuses", "megatron is wrong", "not built", "untried", "not understood", "machine"
)  # fmt: skip
CATEGORIES = {
    MATHS: "no program could train this as written",
    CONTRADICTION: "the recipe says two things that exclude each other, or one that nothing would read",
    REFUSES: "Megatron, or a library below it, stops: at the start, in the first step or when it saves",
    WRONG: "Megatron would train something else, and say nothing",
    OURS: "a kernel or a layer that was chosen does not do this; mostly another one does",
    UNTRIED: "nobody has tried it, or the try proved nothing; whoever wants it all the same says why: `'allow.ID=WHY'`",
    UNKNOWN: "a word, key, value or file that means nothing here",
    MACHINE: "this machine, its packages or its files are not what the command needs",
}
ARITHMETIC, ITSELF = "arithmetic", "the recipe alone"  # sources of MATHS and CONTRADICTION that need no other
NO_SOURCE = "nobody has run it"
SOURCES = {MATHS: ARITHMETIC, CONTRADICTION: ITSELF, UNTRIED: NO_SOURCE}

# What a predicate answers: whether the law is broken, and if it knows more the words to say it with, once or several times. `key` and
# `way` among them stand in the place of the law's own.
Words = Mapping[str, object]
Verdict = object


@dataclass(frozen=True, kw_only=True)
class Law:
    """A rule about what a recipe may say.

    id: stable, says what is wrong. key: where it is said. when: the predicate. It takes what it is about by name, and is asked only where
    all of that stands: kinds and features (`moe`, `fp8`), sections (`model`, `parallel`), and `feature`, `plan`, `recipe`, `target`.
    says, way: the message and the ways out, with fields of all these in braces, or words of the predicate's. source: where it is known
    from: a file of Megatron 0.19.2, a paper, a doc of ours. title: the message where no recipe is at hand, if its words do not say enough.
    """

    id: str
    category: str
    key: str
    when: Callable[..., Verdict]
    says: str
    way: str | None = None
    source: str = ""
    title: str = ""

    @property
    def stated(self) -> str:
        """What is wrong, without a recipe: names in capitals stand for its values."""
        return self.title or general(self.says)

    @property
    def ways(self) -> str:
        """The ways out, without a recipe."""
        return general(self.way or "")

    @cached_property
    def about(self) -> tuple[str, ...]:
        """The names of what it is about."""
        code = self.when.__code__
        return code.co_varnames[: code.co_argcount]

    @property
    def known_from(self) -> str:
        return self.source or SOURCES[self.category]


@dataclass(frozen=True, slots=True)
class Found:
    """A refusal of another place than a plan: whoever reads a recipe, a command line or a machine makes it, and names the id.

    stated: what is wrong, in general; the message has the values.
    """

    id: str
    category: str
    stated: str


def general(text: str) -> str:
    """A message or a way out without a recipe: names in capitals stand for its values."""
    text = re.sub(r"\{or_\w+\}", "", text)  # one more way, that not every recipe has
    named = re.sub(r"\{(?:\w+\.)*(\w+)[^{}]*\}(?!\})", lambda match: match[1].upper(), text)
    return named.replace("{{", "{").replace("}}", "}")


def met(law: Law, facts: Mapping[str, Any]) -> bool:
    """Whether `facts` break a law, of which all stands."""
    return any(True for _ in _each(law.when(*(facts[name] for name in law.about))))


def broken(law: Law, facts: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem for each way in which `facts` (name -> what stands, see `Law.when`) break a law; none where something does not stand."""
    if all(name in facts for name in law.about):
        for words in _each(law.when(*(facts[name] for name in law.about))):
            yield _problem(law, {**facts, **words})


def _each(verdict: Verdict) -> Iterable[Words]:
    if isinstance(verdict, Mapping):
        return (verdict,)
    if isinstance(verdict, Iterator):
        return verdict
    return ({},) if verdict else ()


def _problem(law: Law, words: Words) -> Problem:
    way = str(words.get("way", law.way or "")).format_map(words) or None
    if law.category == UNTRIED:
        way = f"{way}; or {'have it all the same' if law.source else 'be the first to try it'}: `'allow.{law.id}=WHY'`"
    key = str(words.get("key", law.key))
    return Problem(law.says.format_map(words), key=key, hint=way, law=law.id)
