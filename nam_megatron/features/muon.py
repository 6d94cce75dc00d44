"""Muon for matrices (Keller Jordan, 2024), AdamW for the rest: Megatron's --optimizer muon."""

from collections.abc import Iterable, Iterator
from heapq import heapreplace
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from nam_megatron.features import Switch
from nam_megatron.words.setting import Package, Row, Setting
from nam_megatron.words.site import Site
from nam_megatron.words.sizes import MATRIX, UNMEASURED, Group, Held, Line, Sizes


class Muon(Switch):
    """Muon for matrices, AdamW for the rest; learning rate and weight decay are `optim`'s."""

    name = "muon"
    bound = True

    enabled: Annotated[bool, Row("takes every 2-D parameter but embeddings: router and indexer included")]
    momentum: Annotated[float, Field(ge=0, lt=1), Row("momentum", "muon_momentum")]
    nesterov: Annotated[bool, Row("Nesterov momentum", "muon_nesterov")]
    scale_mode: Annotated[
        Literal["spectral", "unit_rms_norm", "shape_scaling"], Row("scale of an update", "muon_scale_mode")
    ]
    extra_scale_factor: Annotated[PositiveFloat, Row("further scale of an update", "muon_extra_scale_factor")]
    ns_steps: Annotated[PositiveInt, Row("Newton-Schulz iterations", "muon_num_ns_steps")]
    tp_mode: Annotated[
        Literal["blockwise", "duplicated", "distributed"],
        Row("matrices that tensor ranks share; Megatron 0.20 changes the default", "muon_tp_mode"),
    ]
    split_qkv: Annotated[bool, Row("queries, keys and values are orthogonalised apart", "muon_split_qkv")]

    def settings(self, site: Site) -> Iterator[Setting]:
        why = "takes every 2-D parameter but embeddings: router and indexer included"
        yield Setting("optimizer", "muon", why, "enabled", fields=("optimizer.optimizer",))
        yield Setting("muon_coefficient_type", "quintic", "Newton-Schulz polynomial", beside="ns_steps")
        yield Setting("muon_fp32_matmul_prec", "medium", "precision of its products", beside="ns_steps")
        yield Setting("muon_scalar_optimizer", "adam", "for everything that is not a matrix")

    def unread(self, site: Site) -> Iterator[tuple[str, str]]:
        # megatron-core 0.19.2, optimizer/__init__.py: `linear_qkv.weight`; "TODO: support MLA"
        if "attention" not in site.kinds:
            yield "split_qkv", "no layer has queries, keys and values in one matrix"
        if site.tensor == site.expert_tensor == 1:
            yield "tp_mode", "no matrix is shared by tensor ranks"

    def packages(self) -> Iterator[Package]:
        yield Package("emerging-optimizers", "Muon")

    def state(self, z: Sizes, group: Group) -> Iterator[Line]:
        """Master weights and momentum of the matrices; whole matrices are dealt to ranks when the optimizer is distributed."""
        matrices = group.split("matrix")
        if not z.site.sharded:
            yield from group.line(z, MATRIX, "master weights", "4", "fp32, whole on each rank", matrices, since="init")
            yield from group.line(z, MATRIX, "momentum", "4", "fp32, whole on each rank", matrices, since="step")
        elif matrices:
            z = z.own(Wmax=_busiest(matrices, group.ranks))
            why = f"fp32; of the rank that got most of {len(matrices)} kinds of matrices, dealt largest first"
            # On several ranks the dealing has not been measured.
            more = {"bucket": MATRIX, "mark": UNMEASURED if group.ranks > 1 else ""}
            yield z.line(f"master weights, {group.name}", "4 Wmax", why, since="init", **more)
            yield z.line(f"momentum, {group.name}", "4 Wmax", why, since="step", **more)
        if matrices:
            rows, columns = max((x.param.shape for x in matrices), key=lambda shape: shape[0] * shape[-1])
            z = z.own(rows=rows, columns=columns)
            why = "of one matrix: four fp32 and two bf16 copies and four small squares"
            formula = "20 rows columns / t + 4 min(rows, columns) min(rows, columns)"
            yield z.line(f"Newton-Schulz, {group.name}", formula, why, bucket=MATRIX, since="stepping")


def _busiest(matrices: Iterable[Held], ranks: int) -> int:
    """Elements of the fullest rank when whole matrices are dealt out, the largest first, each to the emptiest rank."""
    loads = [0] * ranks
    for size in sorted((x.elements for x in matrices for _ in range(x.count)), reverse=True):
        heapreplace(loads, loads[0] + size)
    return max(loads)
