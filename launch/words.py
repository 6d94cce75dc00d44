"""The command line of the verbs that take no recipe: names, and KEY=VALUE."""

from collections.abc import Iterable, Sequence

from nam_megatron.errors import Refused, likely


def parse(words: Sequence[str], keys: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """(names, options). A leading `--` of an option is allowed; `--anyway` is short for `anyway=true`.

    Raises:
        Refused: an option that is not one of `keys`.
    """
    keys, names, options = tuple(keys), [], {}
    for word in words:
        flag = word.startswith("--")
        key, sign, value = word.removeprefix("--").partition("=")
        if not flag and not sign:
            names.append(word)
        elif key in keys:
            options[key] = value if sign else "true"
        else:
            close = likely(key, keys)
            raise Refused(
                f"no option `{key}`",
                hint=f"did you mean `{close}`?" if close else f"there are: {', '.join(keys) or 'none'}",
            )
    return names, options


def whole(key: str, word: str, most: int) -> int:
    """`word` as a number from 1 to `most`, of nine digits at most. Raises Refused."""
    if not (word.isascii() and word.isdecimal() and len(word) < 10 and 1 <= int(word) <= most):
        raise Refused(f"`{word}` is no number from 1 to {most:,}", key=key)
    return int(word)
