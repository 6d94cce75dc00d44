"""Which models of NAM52's pattern have the published "4.1B" parameters: python benchmarks/nam52.py

AEME tiled to 52 layers stands; of NAM52 nothing else is published. The attention and the mixer are chosen, and at most one width is another
than NAM56R's; each model that the tool accepts is counted as the budget counts it. Writes the table of docs/presets.md between its marks.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from nam_megatron.budget.static import by_kind, parameters
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.recipe import load

DOCS = Path(__file__).parent.parent / "docs" / "presets.md"
PRESET = "nam52_h200_dense_no_mhc_recovery_v1"
BEGIN, END = "<!-- begin: nam52 -->\n", "<!-- end -->"
ATTENTION = {
    "GQA": (),
    "MLA": ("model.letters.A=mla",),
    "MLA, DSA at 8 to 11": ("model.letters.A=mla", "model.substitute=[{letter: A, ranks: [8, 9, 10, 11], kind: dsa}]"),
}
MIXER = {"Mamba-3": (), "Mamba-2": ("lane=native_dp",)}
# What may have another width. In the first, heads of 64 follow it, Mamba's too: twice as many for Mamba-3's expansion.
WIDTHS: dict[str, Sequence[int]] = {
    "hidden size, all heads with it": range(2560, 4097, 128),
    "hidden size alone": range(2560, 4097, 128),
    "expert width": range(512, 1025, 64),
    "shared expert": range(0, 4097, 512),
    "vocabulary": range(16384, 131073, 16384),
}
SAME = {"hidden": 3584, "expert": 896, "shared": 1024, "vocabulary": 65536}


def said(choice: str, value: int, mixer: str) -> tuple[str, ...]:
    heads, size = value // 64, f"model.hidden_size={value}"
    mamba = f"model.blocks.mamba3.heads={2 * heads}" if mixer == "Mamba-3" else f"model.blocks.mamba2.heads={heads}"
    return {
        "hidden size, all heads with it": (size, f"model.num_attention_heads={heads}", mamba),
        "hidden size alone": (size,),
        "expert width": (f"model.blocks.moe.expert_hidden_size={value}",),
        "shared expert": (f"model.blocks.moe.shared_expert_hidden_size={value}",),
        "vocabulary": (f"model.vocab_size={value}",),
    }[choice]


def models(widths: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """(attention, mixer, what else, overrides)"""
    for (attention, a), (mixer, m) in product(ATTENTION.items(), MIXER.items()):
        yield attention, mixer, "", (*a, *m)
        yield attention, mixer, "tied embeddings", (*a, *m, "model.tied_embeddings=true")
        yield attention, mixer, "mHC, 4 streams", (*a, *m, "feature.mhc.streams=4")
        for choice, values in widths.items() if attention != "MLA, DSA at 8 to 11" else ():
            for v in values:
                if v != SAME[choice.split()[0]]:
                    yield attention, mixer, f"{choice} {v}", (*a, *m, *said(choice, v, mixer))


def rows(widths: Mapping[str, Sequence[int]] = WIDTHS) -> Iterator[str]:
    """A row of the table for each model that rounds to 4.1 billion parameters, in total or less those of both ends."""
    yield "| attention | mixer | what is not NAM56R's | parameters | without embedding and output layer |"
    yield "|---|---|---|---|---|"
    for attention, mixer, what, overrides in models(widths):
        try:
            plan = translate(load(PRESET, overrides)).plan
        except Refused:
            continue
        total = parameters(plan)[0]
        inner = total - by_kind(plan)["ends"]
        if "4.1" in (f"{total / 1e9:.1f}", f"{inner / 1e9:.1f}") or not overrides:
            yield f"| {attention} | {mixer} | {what} | {total:,} | {inner:,} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    head, begin, rest = DOCS.read_text().partition(BEGIN)
    assert begin, f"{DOCS} has no place for the table"
    _, end, tail = rest.partition(END)
    DOCS.write_text(head + begin + "\n".join(rows()) + "\n" + end + tail)


if __name__ == "__main__":
    main()
