"""What we change upstream, as one queue: patches of installed files, then mends of a process that trains. `launch patch list` prints it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launch.host.patches import TRAILERS, Queue, trailers
from nam_megatron.mends import Mend

FORMATS = ("text", "markdown")
PAGE = """# What we change upstream

Megatron-Core, Megatron-Bridge and Triton are the pinned releases, but for what stands here. Made by
`python -m launch patch list format=markdown > docs/mends.md`; a test holds it to that.

A **patch** changes an installed file: `python -m launch patch apply`. A **mend** stands in the place of a function while a run trains, in
whichever trainer's hands: a record in [series.py](../nam_megatron/mends/series.py) and a file of its name beside it. Mends are installed in
the order of this page. Each knows the SHA-256 of the source of its places; a trainer that finds another source there ends with code 2
before anything of the same moment is installed, and names the mend. A receipt has the mends that its plan needs (`mends`), and those that
the trainer said stood (`outcome.mends`).

After an update of a project: is the fault gone (`Drop-when`)? Then the record and its file go. If not, read what changed at the place, run
its tests, and write down the new hash.
"""


@dataclass(frozen=True)
class Change:
    """One entry of the queue. what: on one line, what kind of change it is and when it holds. trailers: by TRAILERS. places: (place, hash)
    of what a mend is about; a patch has its own."""

    name: str
    what: str
    trailers: Mapping[str, str]
    places: tuple[tuple[str, str], ...] = ()


def changes(queues: Sequence[Queue], series: Sequence[Mend]) -> Iterator[Change]:
    for queue in queues:
        for name in queue.series:
            said = trailers((queue.folder / name).read_text(encoding="utf-8"))
            yield Change(
                name.removesuffix(".patch"), f"patch of {queue.name}", {key: said.get(key, "") for key in TRAILERS}
            )
    for mend in series:
        who = "both trainers" if len(mend.trainers) > 1 else f"trainer {mend.trainers[0]}"
        said = dict(
            zip(
                TRAILERS,
                (mend.fault, ", ".join(mend.upstream) or "none known", mend.drop_when, ", ".join(mend.tests)),
                strict=True,
            )
        )
        yield Change(
            mend.name, f"mend, {who}, when {mend.moment}", said, tuple((p.name, p.sha256) for p in mend.places)
        )


def text(found: Sequence[Change]) -> Iterator[str]:
    for change in found:
        yield f"{change.name}: {change.what}"
        yield from (f"    {key}: {value}" for key, value in change.trailers.items())
        yield from (f"    Place: {place} {sha256[:12]}" for place, sha256 in change.places)


def markdown(found: Sequence[Change]) -> Iterator[str]:
    yield PAGE.rstrip("\n")
    for change in found:
        yield f"\n## {change.name}\n\n{change.trailers[TRAILERS[0]]} ({change.what})\n"
        yield from (f"- {key}: {value}" for key, value in list(change.trailers.items())[1:])
        yield from (f"- Place: `{place}` {sha256}" for place, sha256 in change.places)
