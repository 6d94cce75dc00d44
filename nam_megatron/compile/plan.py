"""Stage 2, Recipe -> Plan: letters become layers.

`number` is Megatron's layer number, from 1 over the whole model; `rank` counts within a letter, from 0; a `segment` is
a pipe-separated piece of the pattern, and pipeline rank r holds the segments r, r + pipeline, ...
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from nam_megatron.blocks import Block
from nam_megatron.blocks.kinds import KINDS, LETTERS
from nam_megatron.errors import Problem, Refused, counted, raise_if
from nam_megatron.recipe import Recipe, resolve, value_at
from nam_megatron.recipe.site import site
from nam_megatron.words.setting import Config, Package
from nam_megatron.words.site import Layer, Site

SECTIONS = ("parallel", "precision", "data")  # that a trainer may not serve, beside kinds and features


@dataclass(frozen=True, slots=True)
class Substitution:
    """A block other than the one the family was designed with."""

    letter: str
    designed: str
    standing: str
    numbers: tuple[int, ...]
    by: str


@dataclass(frozen=True, slots=True)
class Seam:
    """A block or feature that something is missing of: here, or in stock Megatron. `numbers`: the layers it concerns."""

    owner: str
    missing: str
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    layers: tuple[Layer, ...]
    mtp: tuple[str, ...]  # kinds of one depth; empty without MTP
    index_reuse: tuple[int, int] | None  # Megatron's (topk freq, skip offset) for the shared DSA index

    @cached_property
    def site(self) -> Site:
        """What kinds, features and sections may know of it."""
        return site(self.recipe, self.kinds, self.layers, self.mtp, self.index_reuse, self.pattern)

    @property
    def mtp_depths(self) -> int:
        mtp = self.recipe.feature.mtp
        return mtp.depths if mtp else 0

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Every kind that stands anywhere, MTP included."""
        return frozenset(layer.kind for layer in self.layers) | frozenset(self.mtp)

    @cached_property
    def segments(self) -> tuple[tuple[Layer, ...], ...]:
        return tuple(tuple(group) for _, group in groupby(self.layers, key=lambda l: l.segment))

    @property
    def longest_stage(self) -> int:
        """Layers of the pipeline rank that has most."""
        return max(self.stage_lengths)

    @property
    def stage_lengths(self) -> tuple[int, ...]:
        """Layers per pipeline rank."""
        ranks = self.recipe.parallel.pipeline
        return tuple(sum(len(s) for s in self.segments[r::ranks]) for r in range(ranks))

    @cached_property
    def reusing_layers(self) -> tuple[Layer, ...]:
        return tuple(l for l in self.layers if l.source is not None)

    @cached_property
    def pattern(self) -> str:
        """Megatron's hybrid layer pattern, pipes and MTP suffixes included."""
        main = "|".join("".join(KINDS[l.kind].symbol for l in s) for s in self.segments)
        suffix = "".join(KINDS[k].symbol for k in self.mtp)
        return "/".join([main, *[suffix] * self.mtp_depths])

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The configs of the kinds that speak to Megatron: those that stand, and those they stand on."""
        return tuple(self.recipe.blocks.all())

    def numbers(self, kind: str) -> tuple[int, ...]:
        return tuple(l.number for l in self.layers if l.kind == kind)

    @cached_property
    def variants(self) -> dict[str, tuple[int, ...]]:
        """The layers that differ from others of their kind by more than their number: `window 128` -> 1, 5, 9."""
        said = [(self.site.blocks.of(l.kind).variant(l), l.number) for l in self.layers]
        return {name: tuple(n for of, n in said if of == name) for name in dict.fromkeys(of for of, _ in said) if name}

    @cached_property
    def letter_counts(self) -> dict[str, int]:
        return dict(sorted(Counter(l.letter for l in self.layers).items()))

    @cached_property
    def substitutions(self) -> tuple[Substitution, ...]:
        """Where the lane puts another block than the family's design."""
        model, lane = self.recipe.model, self.recipe.lane
        found = []
        for letter in LETTERS:
            designed, here = getattr(model.letters, letter), getattr(lane.blocks, letter, None)
            numbers = tuple(l.number for l in self.layers if l.letter == letter)
            if here not in (None, designed) and designed and numbers:
                found.append(Substitution(letter, designed, here, numbers, f"lane {lane.name}"))
        return tuple(found)

    @cached_property
    def departures(self) -> tuple[str, ...]:
        """Where the parallel layout is not the lane's own; part of the run's identity."""
        lane, p = self.recipe.lane, self.recipe.parallel
        pairs = {
            "tensor": (lane.tensor, p.tensor), "sequence": (lane.sequence, p.sequence), "pipeline": (1, p.pipeline),
            "virtual_pipeline": (1, p.virtual_pipeline), "context": (1, p.context), "expert": (1, p.expert),
            "expert_tensor": (1, p.expert_tensor),
        }  # fmt: skip
        return tuple(f"{name}={is_}" for name, (said, is_) in pairs.items() if said != is_)

    @cached_property
    def ours(self) -> tuple[Seam, ...]:
        """Layers and features that stock Megatron, given this plan's arguments, would train as others, with the reason."""
        told = ((b.kind, b.ours(self.site)) for b in self.blocks if b.kind in self.kinds)
        seams = [Seam(kind, why, self.numbers(kind)) for kind, why in told if why]
        seams += [Seam(f.name, why) for f in self.recipe.feature.all() if (why := f.ours(self.site))]
        return tuple(seams)

    @cached_property
    def alone(self) -> tuple[Seam, ...]:
        """What stock Megatron, given this plan's arguments, stops at or gets wrong although it has the model, with the reason."""
        return tuple(Seam(name, why) for name, part in self._sections() for why in part.alone(self.site))

    @cached_property
    def packages(self) -> tuple[Package, ...]:
        """Packages beside Megatron-Core and Transformer Engine."""
        return tuple(dict.fromkeys(package for _, part in self._sections() for package in part.packages()))

    def _sections(self) -> Iterator[tuple[str, Config]]:
        """The parts of the recipe that a trainer has to serve, by their names: the kinds that stand, features, and the rest."""
        r = self.recipe
        yield from ((block.kind, block) for block in self.blocks if block.kind in self.kinds)
        yield from ((feature.name, feature) for feature in r.feature.all())
        yield from ((name, getattr(r, name)) for name in SECTIONS)

    @cached_property
    def bridges_alone(self) -> tuple[Problem, ...]:
        """What Megatron-Bridge's trainer knows and Megatron's does not."""
        hint = "`python -m nam_megatron.nemo finetune`, or `python -m launch run ... trainer=bridge`"
        r = self.recipe
        told = {
            "schedule.pretrained": (r.schedule.pretrained is not None, "starts from no pretrained weights"),
            "feature.lora.rank": (r.feature.lora is not None, "has no adapters"),
            "data.name": (r.data.sft, "reads no prompts and answers"),
        }
        return tuple(
            Problem(f"Megatron's own trainer {what}", key=key, hint=hint, law="trainer-of-megatron")
            for key, (so, what) in told.items()
            if so
        )

    @cached_property
    def not_built(self) -> tuple[Seam, ...]:
        """Seams without a torch side: the plan can be read, not trained."""
        seams = [
            Seam(b.kind, b.missing, self.numbers(b.kind)) for b in self.blocks if b.kind in self.kinds and b.missing
        ]
        seams += [Seam(f.name, f.missing) for f in self.recipe.feature.all() if f.missing]
        return tuple(seams)


def plan(recipe: Recipe) -> Plan:
    """Lay the layers out.

    Raises:
        Refused: a letter, rank, cut or depth that cannot be, with every finding.
    """
    raise_if(resolve.missing(recipe))
    letters, pipes = resolve.letters(recipe)
    kinds = resolve.kinds(recipe, letters)
    sources = _sources(recipe, kinds)
    cuts = _cuts(recipe, len(letters), pipes, sources)
    ranks: Counter[str] = Counter()
    layers = []
    for number, (letter, kind) in enumerate(zip(letters, kinds, strict=True), 1):
        segment = bisect_left(cuts, number)
        layers.append(Layer(number, letter, kind, ranks[letter], segment, sources.get(number)))
        ranks[letter] += 1
    return Plan(recipe, tuple(layers), resolve.mtp(recipe, kinds), _index_reuse(recipe, kinds, sources))


def _sources(recipe: Recipe, kinds: list[str]) -> dict[int, int]:
    """Layer -> the layer whose top-k it reuses."""
    found: dict[int, int] = {}
    for block in recipe.blocks.all():
        numbers = [n for n, kind in enumerate(kinds, 1) if kind == block.kind]
        every = getattr(block, block.share_by) if block.share_by else 1
        found |= {n: numbers[i - i % every] for i, n in enumerate(numbers) if i % every}
    return found


def _index_reuse(recipe: Recipe, kinds: list[str], sources: dict[int, int]) -> tuple[int, int] | None:
    """Megatron's (freq, offset) that gives exactly `sources`.

    Layer n computes iff max(n - offset, 0) % freq == 0, else it reuses layer n - (n - offset) % freq
    (megatron-core 0.19.2, experimental_attention_variant/dsa.py: is_dsa_skip_topk_layer, source_dsa_compute_layer).
    """
    if not sources:
        return None
    kind = kinds[next(iter(sources)) - 1]
    numbers = [n for n, other in enumerate(kinds, 1) if other == kind]
    offset = numbers[0]
    for freq in range(2, len(kinds) + 2):
        if all(n - (n - offset) % freq == sources.get(n, n) for n in numbers):
            return freq, offset
    block, key = recipe.blocks.of(kind), KINDS[kind].at(KINDS[kind].share_by or "")
    message = (
        f"{block.title} layers {', '.join(map(str, numbers))} are not spaced so that Megatron can share one top-k among "
        f"{value_at(recipe, key)}"
    )
    raise Refused(message, key=key, hint=f"set `{key}=1`", law="shared-top-k-uneven")


def _cuts(recipe: Recipe, depth: int, pipes: list[int], sources: dict[int, int]) -> list[int]:
    """Layer numbers after which a pipeline segment ends. Written pipes are checked; otherwise legal cuts are placed."""
    p = recipe.parallel
    want = p.pipeline * p.virtual_pipeline
    if p.virtual_pipeline > 1 and p.pipeline == 1:
        message = "virtual pipeline stages without pipeline parallelism"
        raise Refused(message, key="parallel.virtual_pipeline", hint="set it to 1", law="virtual-stages-alone")
    if pipes:
        problems = []
        if len(pipes) + 1 != want:
            problems.append(
                Problem(
                    f"the pattern has {len(pipes) + 1} pipeline segments and the layout {want} (pipeline {p.pipeline} x virtual "
                    f"{p.virtual_pipeline})",
                    key="model.pattern",
                    hint=f"write {want - 1} `|`, or none and let the planner cut",
                    law="segments-against-layout",
                )
            )
        for layer, source in sources.items():
            if any(source <= cut < layer for cut in pipes):
                there, here = (sum(n > cut for cut in pipes) for n in (source, layer))
                problems.append(
                    Problem(
                        f"layer {layer} (dsa) reuses the top-k of layer {source}, which is in pipeline segment {there}, not {here}",
                        key="model.pattern",
                        hint="cut so that each segment starts its own group, or set `model.blocks.dsa.full_every=1`",
                        law="segment-parts-top-k",
                    )
                )
        raise_if(problems)
        return pipes
    if want > depth:
        said = f"{want} pipeline segments of {depth} layers"
        raise Refused(said, key="parallel.pipeline", hint="use fewer stages", law="stages-beyond-layers")
    parted = {n for layer, source in sources.items() for n in range(source, layer)}
    return list(_best_cuts(depth, want, [n for n in range(1, depth) if n not in parted]))


def _best_cuts(depth: int, want: int, legal: list[int]) -> tuple[int, ...]:
    """The legal cuts into `want` segments with the shortest longest segment, then the least uneven ones."""
    if len(legal) < want - 1:
        message = (
            f"no {want - 1} legal pipeline cuts: only {len(legal)} places do not part a group of layers sharing a top-k"
        )
        hint = "use fewer stages or set `model.blocks.dsa.full_every=1`"
        raise Refused(message, key="parallel.pipeline", hint=hint, law="no-legal-cuts")
    ends = [*legal, depth]
    # Fewer segments than wanted can be cut further, so the length alone decides what can be reached.
    longest = bisect_left(range(depth), True, key=lambda length: _fewest(ends, length) <= want)
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # end -> (sum of squares, cuts) of k segments
    for k in range(1, want + 1):
        step = {}
        for end in ends if k < want else [depth]:
            if end < depth - (want - k) * longest or end > k * longest:
                continue
            starts = [s for s in best if end - longest <= s < end]
            if starts:
                squares, cuts = min((best[s][0] + (end - s) ** 2, best[s][1]) for s in starts)
                step[end] = (squares, cuts if end == depth else (*cuts, end))
        best = step
    return best[depth][1]


def _fewest(ends: list[int], longest: int) -> float:
    """How few segments of at most `longest` layers reach the last end; infinite where none do."""
    count, start, last = 1, 0, 0
    for end in ends:
        if end - start > longest:
            count, start = count + 1, last
            if end - start > longest:
                return float("inf")
        last = end
    return count


def composition(p: Plan) -> str:
    """What stands, in one line: `MLA 4, MoE 22, ...` by kind, and the features that own layers or tensors."""
    words = [f"{title} {count}" for title, count, _ in parts(p)]
    words += [f"{name} at {counted(len(numbers), 'layer')}" for name, numbers in p.variants.items()]
    if p.mtp:
        words.append(f"MTP {p.mtp_depths}")
    fp8 = p.recipe.feature.fp8
    words.append(fp8.said(p.site) if fp8 else p.recipe.precision.params)
    features = (f for f in p.recipe.feature.all() if f is not fp8)
    words += [f.name.replace("_", " ") for f in features if f.named or f.missing or f.ours(p.site)]
    return ", ".join(words)


def identity(p: Plan) -> str:
    """What a run is, in one line: model family, what stands, lane, departures from the lane."""
    departs = f" ({', '.join(p.departures)})" if p.departures else ""
    untried = f" [untried: {', '.join(sorted(p.recipe.allow))}]" if p.recipe.allow else ""
    return f"{p.recipe.model.family} {composition(p)} / {p.recipe.lane.name}{departs}{untried}"


def parts(p: Plan) -> Iterator[tuple[str, int, str]]:
    """(title, count, where) by kind, for people."""
    for kind in KINDS:
        if numbers := p.numbers(kind):
            yield p.site.blocks.of(kind).called(p.site), len(numbers), ", ".join(map(str, numbers))
