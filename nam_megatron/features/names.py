"""The closed list of features. A new one is a file and a line here."""

from collections.abc import Iterator

from nam_megatron.features import Feature
from nam_megatron.features.cuda_graphs import CudaGraphs
from nam_megatron.features.distributed_optimizer import DistributedOptimizer
from nam_megatron.features.fim import Fim
from nam_megatron.features.fp8 import Fp8
from nam_megatron.features.llama_rope import LlamaRope
from nam_megatron.features.lora import Lora
from nam_megatron.features.megatron_fsdp import MegatronFsdp
from nam_megatron.features.mhc import Mhc
from nam_megatron.features.mtp import Mtp
from nam_megatron.features.muon import Muon
from nam_megatron.features.ngram_hash import NgramHash
from nam_megatron.features.recompute import Recompute
from nam_megatron.features.tracking import Tracking
from nam_megatron.features.yarn import Yarn
from nam_megatron.words.setting import Config, section


class Features(Config):
    """`feature`: those that are on."""

    mtp: Mtp | None = None
    recompute: Recompute | None = None
    cuda_graphs: CudaGraphs | None = None
    fp8: Fp8 | None = None
    muon: Muon | None = None
    distributed_optimizer: DistributedOptimizer
    megatron_fsdp: MegatronFsdp | None = None
    fim: Fim | None = None
    yarn: Yarn | None = None
    llama_rope: LlamaRope | None = None
    mhc: Mhc | None = None
    ngram_hash: NgramHash | None = None
    lora: Lora | None = None
    tracking: Tracking | None = None

    def all(self) -> Iterator[Feature]:
        """Those that are on, in the order above."""
        return (feature for name in FEATURES if (feature := getattr(self, name)) is not None)


def _features() -> dict[str, type[Feature]]:
    """The classes of the fields above, by name."""
    found = {}
    for name, field in Features.model_fields.items():
        feature = section(field.annotation)
        assert feature is not None and issubclass(feature, Feature), name
        found[name] = feature
    return found


FEATURES: dict[str, type[Feature]] = _features()
