"""The closed list of features. A new one is a file and a line here."""

from collections.abc import Iterator

from nam_megatron.features import Feature
from nam_megatron.features.cuda_graphs import CudaGraphs
from nam_megatron.features.distributed_optimizer import DistributedOptimizer
from nam_megatron.features.fim import Fim
from nam_megatron.features.fp8 import Fp8
from nam_megatron.features.fsdp2 import Fsdp2
from nam_megatron.features.linear_ce import LinearCe
from nam_megatron.features.megatron_fsdp import MegatronFsdp
from nam_megatron.features.mhc import Mhc
from nam_megatron.features.mtp import Mtp
from nam_megatron.features.muon import Muon
from nam_megatron.features.ngram_hash import NgramHash
from nam_megatron.features.recompute import Recompute
from nam_megatron.setting import Config


class Features(Config):
    """`feature`: every feature, on or off."""

    mtp: Mtp
    recompute: Recompute
    cuda_graphs: CudaGraphs
    fp8: Fp8
    muon: Muon
    distributed_optimizer: DistributedOptimizer
    megatron_fsdp: MegatronFsdp
    fsdp2: Fsdp2
    fim: Fim
    mhc: Mhc
    ngram_hash: NgramHash
    linear_ce: LinearCe

    def all(self) -> Iterator[Feature]:
        return (getattr(self, name) for name in type(self).model_fields)
