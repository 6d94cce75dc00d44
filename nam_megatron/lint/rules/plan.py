"""A launch of our own trainer, and the plan that it names."""

from collections.abc import Iterator

from nam_megatron.errors import counted
from nam_megatron.lint.follow import holes
from nam_megatron.lint.model import Model
from nam_megatron.lint.rules.rule import FAIL, Rule
from nam_megatron.lint.values import Args


def _departs(a: Args, m: Model) -> Iterator[str]:
    launch, plan = a.launch, m.plan
    if plan is None or launch.kind == "plan":
        return
    from nam_megatron.train import difference, split  # Hydra, only for those who want it

    _, words = split(launch.words)
    if words != plan.argv and not any(map(holes, words)):
        yield f"--nam-plan\t{difference(words, plan.argv)}"
    if launch.gpus not in (None, plan.gpus):
        yield f"--nam-plan\t{counted(launch.gpus, 'GPU')}, and the plan is for {plan.gpus}"
    for env in plan.lowering.env:
        said = launch.env.get(env.name, env.value)
        if not env.allows(said) and not holes(said or ""):
            yield f"{env.name}\t{said or 'unset'}, and the plan needs it {env.value or 'unset'}"


RULES = (
    Rule("not-built", FAIL, "",
        lambda a, m: [f"{s.owner}\t{s.missing}" for s in m.plan.lowering.plan.not_built] if m.plan else [],
        "a part of the plan that is not built yet; parameters are counted with it, and our trainer refuses it",
        "leave it out of the recipe", "nam_megatron/train.py"),
    Rule("not-the-plan", FAIL, "", _departs, "our trainer refuses whatever its plan does not say",
        "translate the recipe again; run.sh stands beside the plan", "nam_megatron/train.py objections"),
)  # fmt: skip
