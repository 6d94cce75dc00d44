"""Two tiers: CI runs `-m "not slow"`, and all of it the night and a release."""

from collections import defaultdict

import pytest

SLOW_ALONE = pytest.StashKey[list[str]]()  # what `few` has returned, of all that is collected


def few(items: list[pytest.Item]) -> list[str]:
    """Makes slow what `few` does not leave to the quick tier: few(2) two cases of a test as far apart as they are, few("a-", "b-") those
    whose names begin so. Returns the files, and such tests, of which nothing is quick."""
    cases, quick = defaultdict(list), defaultdict(bool)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for name, of in cases.items():
        if mark := of[0].get_closest_marker("few"):
            (first, *_), n = mark.args, len(of)
            kept = {i * n // first for i in range(first)} if isinstance(first, int) else ()
            for i, item in enumerate(of):
                if i not in kept and not (isinstance(first, str) and item.callspec.id.startswith(mark.args)):
                    item.add_marker("slow")
        for item in of:
            for whole in (name.partition("::")[0], name)[: 1 + bool(mark)]:
                quick[whole] |= item.get_closest_marker("slow") is None
    return [name for name, found in quick.items() if not found]
