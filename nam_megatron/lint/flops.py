"""The operations of a launch's token, counted of the nearest recipe of ours."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nam_megatron.errors import Problem, Refused
from nam_megatron.lint import Report
from nam_megatron.lint.values import NotKnown

if TYPE_CHECKING:
    from nam_megatron.budget.cost import Cost


@dataclass(frozen=True)
class Counted:
    """What a token costs, a step where its batch is known, and what of the launch the recipe does not have."""

    cost: "Cost"
    step_tokens: int | None
    lost: tuple[str, ...]

    @property
    def step(self) -> float | None:
        return self.cost.model * self.step_tokens if self.step_tokens else None

    def text(self) -> str:
        from nam_megatron.budget.text import cost_text

        step = (
            f"a step of {self.step_tokens:,} tokens: {self.step / 1e15:.3f} PFLOP\n"
            if self.step and self.step_tokens
            else ""
        )
        lost = "".join(f"not counted, since no recipe has it: {line}\n" for line in self.lost)
        return cost_text(self.cost) + step + lost

    def data(self) -> dict[str, object]:
        by = {owner: flops for owner, flops in self.cost.by_owner().items()}
        return {"token": self.cost.model, "hardware": self.cost.hardware, "megatron": self.cost.megatron, "forward": by, "step": self.step,
                "not_counted": list(self.lost)}  # fmt: skip


def of(report: Report) -> Counted:
    """Raises Refused: there is no recipe near, or the text does not say what operations depend on."""
    from nam_megatron.budget.cost import cost  # Hydra, only for those who want it
    from nam_megatron.compile.plan import plan
    from nam_megatron.lint import recipe

    made = recipe.make(report, Path("launch.yaml"))
    if unsaid := [key for key in made.unsaid if key.startswith("model.")]:
        hint = f"`nam budget {report.name} {' '.join(f'{key}=VALUE' for key in unsaid)}` counts with yours"
        raise Refused(
            Problem(
                f"the text does not say `{key}`, or says what no recipe has: no operations are counted",
                key="flops",
                hint=hint,
            )
            for key in unsaid
        )
    a, m = report.args, report.model
    try:
        batch = a.global_batch_size or m.need("micro_batch_size") * m.dp
        tokens = batch * m.sequence
    except NotKnown:
        tokens = None
    lost = [line for line in made.lost if line.startswith("--") and any(word in line for word in CHANGES)]
    return Counted(cost(plan(made.recipe)), tokens, tuple(lost))


# Parts of flags on which operations depend.
CHANGES = (
    "window", "layers", "hidden", "heads", "expert", "mtp", "latent", "lora", "dim", "topk", "vocab", "recompute", "swiglu", "pattern",
)  # fmt: skip
