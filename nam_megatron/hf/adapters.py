"""Low-rank adapters put into the weights that they were trained on (torch side): W + alpha / rank B A, in fp32, rounded once.

A checkpoint of adapters has no other weights; they are those of the plan's `schedule.pretrained`. An adapter that finds no weight is
refused by name, so that none is lost.
"""

import contextlib
from pathlib import Path

import torch

from nam_megatron.blocks.exported import Tensor
from nam_megatron.compile.plan import Plan
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.hf.distributed import DTYPES, Checkpoint
from nam_megatron.judge import resume
from nam_megatron.runtime import checksums

IN, OUT = ".adapter.linear_in.weight", ".adapter.linear_out.weight"


def based(step: Path, pretrained: Path) -> Path:
    """The step in `pretrained` that adapters were trained on, whatever was saved there since. Raises Refused."""
    told = resume.step_and_sums(resume.began(step.parent).get("schedule.pretrained"))
    if told is None:
        place = step.parent / resume.SIGNED / resume.BEGAN
        message = f"`{place}` does not say which weights these adapters were trained on"
        raise Refused(message, hint="it lies in the folder of the run that trained them")
    name, sums = told
    base = pretrained / name
    with contextlib.suppress(OSError):
        if checksums.whole(base) == sums:
            return base
    message = f"`{base}` is not the step that these adapters were trained on, or no more"
    hint = f"put back the one whose `{checksums.NAME}` has the hash {sums}"
    raise Refused(message, key="schedule.pretrained", hint=hint)


class Merged(Checkpoint):
    """The tensors of a pretrained step with a run's adapters in them.

    Raises:
        Refused: no pretrained checkpoint, a damaged one, or an adapter that belongs to none of `tensors`.
    """

    def __init__(self, step: Path, plan: Plan, tensors: list[Tensor]):
        lora, pretrained = plan.recipe.feature.lora, plan.recipe.schedule.pretrained
        assert lora is not None
        if pretrained is None:
            raise Refused("the plan does not say whose weights these adapters stand on", key="schedule.pretrained")
        base = based(step, Path(pretrained))
        raise_if(Problem(f"checkpoint `{base}` is damaged: {what}") for what in checksums.damage(base))
        raise_if(Problem(f"checkpoint `{base}` {why}") for why in resume.foreign(base))
        super().__init__(base)
        self.step = step  # whose export it is
        self.adapters, self.scale, self.rank = Checkpoint(step), lora.alpha / lora.rank, lora.rank
        keys = {key for key in self.adapters.tensors if ".adapter." in key}
        strangers = sorted(keys - {key for tensor in tensors for key in self._of(tensor)})
        if strangers or not keys:
            what = (
                f"`{strangers[0]}` of `{step}` stands on no weight here" if strangers else f"`{step}` has no adapters"
            )
            raise Refused(f"{what}: nothing is merged", key="feature.lora.targets")

    def _of(self, tensor: Tensor) -> set[str]:
        """The adapter's keys that may belong to a tensor: of a packed one there is one, or one for each part."""
        modules = {key.partition(".weight")[0]: key.partition(".weight")[2] for key, _ in tensor.parts}
        found = {f"{module}{what}" for module in modules for what in (IN, OUT)}
        return found | {f"{key.partition('.weight')[0]}{OUT}{key.partition('.weight')[2]}" for key, _ in tensor.parts}

    def joined(self, tensor: Tensor) -> torch.Tensor:
        """A tensor of the export, its adapter in it. Raises Refused."""
        whole = super().joined(tensor)
        if (pair := self.pair(tensor)) is None:
            return whole
        into, out = (part.float() for part in pair)
        return (whole.float() + self.scale * (out @ into)).to(DTYPES[tensor.dtype])

    def pair(self, tensor: Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What a tensor's adapter holds: from the input to the rank, and from there to the output. All experts of a tensor share one."""
        module = tensor.parts[0][0].partition(".weight")[0]
        if f"{module}{IN}" not in self.adapters.tensors:
            return None
        return self._read(f"{module}{IN}", (self.rank, tensor.shape[-1])), self._out(module, tensor)

    def _out(self, module: str, tensor: Tensor) -> torch.Tensor:
        if f"{module}{OUT}" in self.adapters.tensors:
            return self._read(f"{module}{OUT}", (tensor.shape[-2], self.rank))
        parts = ((f"{module}{OUT}{key.partition('.weight')[2]}", (shape[0], self.rank)) for key, shape in tensor.parts)
        return torch.cat([self._read(*part) for part in parts])

    def _read(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        of = self.adapters.tensors.get(key)
        return self.adapters.read(key, shape, of.properties.dtype if of else torch.bfloat16)
