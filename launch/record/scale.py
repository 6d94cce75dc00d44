"""`launch scale RUN`: how long its step would take on other numbers of GPUs, each with a whole model (data parallelism).

gpus=1,2,4,8: on which numbers; up to eight are one host's, more are whole hosts of eight. batch=N: one global batch on all of them, in
the place of the run's number of microbatches on each GPU. network=GB/s: what one GPU sends to another host, beyond eight; a link of
400 Gbit/s for each GPU carries at most 50.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from launch.record.receipt import named, read
from launch.record.receipts import RECEIPTS
from launch.words import whole
from nam_megatron.budget import text
from nam_megatron.budget.static import parameters
from nam_megatron.compile.lower import translate
from nam_megatron.compile.plan import Plan
from nam_megatron.errors import OK, Problem, Refused, counted, raise_if
from nam_megatron.recipe import Recipe, at, from_tree

HOST = 8  # GPUs
MOST = 10**6
SAID = """\
messages go at {:g} GB/s within a host of {}{}. `ms a step` counts them in full: kernels that hide them run slower for it.
docs/launch.md says how far this was off where it was measured."""
# Bytes that a step of Adam moves for a parameter, with fp32 gradients, master weights and moments: the norm reads the gradient, clipping
# reads and writes it, the update reads it and reads and writes the other three, and casts.
ADAM = 4 + 8 + 4 + 3 * 8 + 6
# Of a microbatch, what its backward and its forward pass take: gradients travel behind the one, weights behind the other.
BACKWARD, FORWARD = 2 / 3, 1 / 3


@dataclass(frozen=True)
class Scale:
    """What a step is made of beside its microbatches: bytes of the optimizer and of the messages; rates in bytes a second.

    A message to n ranks moves (n - 1) / n of its bytes over each rank's slowest link, as a ring does.
    """

    gradients: float
    weights: float
    optimizer: float  # bytes that all ranks together move
    sharded: bool  # the optimizer's state is shared by the ranks
    copies: float
    link: float
    network: float
    overlapped: tuple[bool, bool]  # gradients, weights

    @classmethod
    def of(cls, plan: Plan, network: float) -> "Scale":
        recipe = plan.recipe
        shared, count = recipe.feature.distributed_optimizer, parameters(plan)[0]
        wide = 4 if recipe.precision.grad_reduce == "fp32" else 2
        # Reduced and scattered, and gathered as weights; or reduced to all, which is both.
        gradients, weights = (wide, 2) if shared.enabled else (2 * wide, 0)
        return cls(
            gradients=gradients * count,
            weights=weights * count,
            optimizer=ADAM * count,
            sharded=shared.enabled,
            copies=recipe.device.copy_gbs * 1e9,
            link=recipe.device.allreduce_floor_gbs * 1e9,
            network=network * 1e9,
            overlapped=(shared.overlap_grad_reduce, shared.overlap_param_gather),
        )

    def messages(self, gpus: int) -> tuple[float, float]:
        """Seconds of gradients and of weights, nothing beside them."""
        link = self.link if gpus <= HOST else min(self.link, self.network)
        return (gpus - 1) / gpus * self.gradients / link, (gpus - 1) / gpus * self.weights / link

    def rest(self, gpus: int, hide: bool, microbatch: float) -> float:
        """Seconds of a step beside its microbatches. hide: what can travel behind a microbatch costs nothing."""
        seconds = self.optimizer / self.copies / (gpus if self.sharded else 1)
        for sent, share, overlapped in zip(self.messages(gpus), (BACKWARD, FORWARD), self.overlapped, strict=True):
            seconds += max(0.0, sent - share * microbatch) if hide and overlapped else sent
        return seconds

    def microbatch(self, seconds: float, gpus: int, count: int, hide: bool) -> float:
        """Seconds of one of `count` microbatches of a measured step."""
        found = seconds / count
        for _ in range(20):  # what hides messages depends on it
            found = max(0.0, seconds - self.rest(gpus, hide, found)) / count
        return found


class Step(NamedTuple):
    """Of one number of GPUs: samples of its global batch; milliseconds with the messages counted in full, all hidden, and of them alone."""

    gpus: int
    samples: int
    ms: float
    hidden_ms: float
    messages_ms: float


def command(words: Sequence[str], options: Mapping[str, str]) -> int:
    if len(words) != 1:
        raise Refused("`scale` takes one run", hint="python -m launch scale receipts/RUN gpus=1,2,4,8")
    gpus = [whole("gpus", word, MOST) for word in options.get("gpus", "1,2,4,8").split(",")]
    batch = whole("batch", options["batch"], MOST) if "batch" in options else None
    network = _rate(options["network"]) if "network" in options else None
    run = read(named(words[0], RECEIPTS))
    (ms, ours), steps = measured(run), forecast(run, gpus, batch, network)
    rows: list[tuple[str, ...]] = [
        ("GPUs", "global batch", "ms a step", "tokens/s a GPU", "tokens/s", "messages, ms", "all hidden, ms")
    ]
    for step in steps:
        rate = step.samples * run["recipe"]["model"]["seq_length"] / step.ms * 1e3
        figures = (step.samples, step.ms, rate / step.gpus, rate, step.messages_ms, step.hidden_ms)
        rows.append((f"{step.gpus}", *(f"{x:,.0f}" for x in figures)))
    print(f"{run['run']}: {ms:,.0f} ms a step on {counted(ours, 'GPU')}")
    print(text.grid(rows, right=range(len(rows[0]))), end="")
    at_rate = f" and {network:g} GB/s between hosts" if network and max(gpus) > HOST else ""
    print(SAID.format(run["recipe"]["device"]["allreduce_floor_gbs"], HOST, at_rate))
    return OK


def forecast(run: Mapping, gpus: Sequence[int], batch: int | None = None, network: float | None = None) -> list[Step]:
    """A step on each of these numbers of GPUs.

    batch: samples of the global batch; None: as many on each GPU as in the run. network: GB/s.
    Raises Refused: no measured step, a layout that is not data parallelism alone, samples that do not divide.
    """
    ms, ours = measured(run)
    recipe = _recipe(run)
    micro = recipe.schedule.micro_batch_size
    raise_if([*_only_data(recipe), *_of_hosts((*gpus, ours), network), *_even(micro, gpus, batch)])
    if not (each := recipe.schedule.global_batch_size // (micro * ours)):
        raise Refused(f"`{run['run']}` has less than a microbatch on each of {ours} GPUs", hint="take another run")
    scale = Scale.of(translate(recipe).plan, network or 0.0)
    took = {hide: scale.microbatch(ms / 1e3, ours, each, hide) for hide in (False, True)}
    steps = []
    for n in gpus:
        count = batch // (micro * n) if batch else each
        whole, hidden = (count * took[hide] + scale.rest(n, hide, took[hide]) for hide in (False, True))
        steps.append(Step(n, count * micro * n, 1e3 * whole, 1e3 * hidden, 1e3 * sum(scale.messages(n))))
    return steps


def measured(run: Mapping) -> tuple[float, int]:
    """(milliseconds of the median step, GPUs) of a run that ended as it should. Raises Refused."""
    ms, gpus = at(run, "outcome.figures.window.median_ms"), at(run, "job.world")
    hint = "take a run that `launch receipts end=completed` lists, of a few steps more"
    if at(run, "outcome.end") != "completed" or not (isinstance(ms, int | float) and ms > 0 and gpus):
        raise Refused(f"`{run['run']}` has no measured step: it is not completed, or too short", hint=hint)
    if at(run, "recipe.cluster.processor") == "cpu":
        raise Refused(f"`{run['run']}` ran on a CPU", hint="take a run on GPUs")
    return ms, gpus


def _recipe(run: Mapping) -> Recipe:
    try:
        tree = run["recipe"]  # without its sentences
        return from_tree({"assumptions": {}, **tree, "preset": {"about": "a run", **tree["preset"]}})
    except (Refused, KeyError, TypeError):
        hint = "take a run of this version, or one not much older"
        raise Refused(f"the recipe of `{run['run']}` is no recipe any more", hint=hint) from None


def _only_data(recipe: Recipe):
    why = "docs/log.md has what other layouts were measured to take on two and four GPUs"
    for key in ("tensor", "pipeline", "context", "expert"):
        if (size := getattr(recipe.parallel, key)) > 1:
            yield Problem(f"only data parallelism is forecast, not {size} ranks", key=f"parallel.{key}", hint=why)
    for name in ("megatron_fsdp", "muon", "lora"):
        if (feature := getattr(recipe.feature, name)) and feature.on:
            yield Problem("only Adam over all weights under DDP is forecast", key=f"feature.{name}", hint=why)


def _of_hosts(gpus: Sequence[int], network: float | None):
    for n in gpus:
        if n > HOST and n % HOST:
            yield Problem(f"{n} GPUs are no whole hosts of {HOST}", key="gpus", hint=f"take a multiple of {HOST}")
    if max(gpus) > HOST and network is None:
        hint = (
            "give it in GB/s: `network=50` is at most what 400 Gbit/s for each GPU carry; nothing here has measured one"
        )
        yield Problem("how fast is a GPU's link to other hosts?", key="network", hint=hint)


def _even(micro: int, gpus: Sequence[int], batch: int | None):
    for n in gpus:
        if batch and batch % (micro * n):
            hint = f"take a multiple of {micro * n}, or leave {n} GPUs out"
            yield Problem(f"{batch} samples are no whole microbatches of {micro} on {n} GPUs", key="batch", hint=hint)


def _rate(word: str) -> float:
    try:
        rate = float(word)
    except ValueError:
        rate = 0.0
    if not 0.001 <= rate <= MOST:
        raise Refused(f"`{word}` is no rate in GB/s", key="network", hint="network=50")
    return rate
