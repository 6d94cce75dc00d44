"""Types of command-line words, for argparse: what is out of bounds is named before anything runs."""

import argparse
from collections.abc import Callable


def count(word: str) -> int:
    """From 1 to a billion."""
    if not (word.isascii() and word.isdigit() and 0 < int(word) < 10**9):
        raise argparse.ArgumentTypeError(f"`{word}` is no positive integer")
    return int(word)


def whole(word: str) -> int:
    """From 0 to the largest of 63 bits."""
    if not (word.isascii() and word.isdigit() and len(word) < 20 and int(word) < 2**63):
        raise argparse.ArgumentTypeError(f"`{word}` is no integer from 0")
    return int(word)


def between(least: float, most: float, *, beside: float | None = None) -> Callable[[str], float]:
    """A number from `least` to `most`, or `beside`."""

    def number(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = float("nan")
        if not (least <= value <= most or value == beside):
            also = "" if beside is None else f", and not {beside:g}"
            raise argparse.ArgumentTypeError(f"`{word}` is no number from {least:g} to {most:g}{also}")
        return value

    return number
