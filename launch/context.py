"""What a verb works on: the lowered recipe, the command's words, and the world it was started in."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from launch.finding import unknown
from launch.record import receipt, source
from launch.record.redact import Redactor
from launch.run import slurm
from launch.run.overlay import child, overlay
from nam_megatron.compile.lower import Lowering
from nam_megatron.errors import raise_if
from nam_megatron.launcher import BESIDE
from nam_megatron.recipe import Cluster
from nam_megatron.words.setting import Env

# Where receipts and caches go and git looks; of an installed package, where the command runs.
CHECKOUT = Path.cwd() if BESIDE.is_dir() else Path(__file__).parent.parent


@dataclass(frozen=True)
class Context:
    """words: of conf/launch.yaml, checked. overrides: the command line. environ: this process's. checkout: where git looks."""

    lowering: Lowering
    words: Mapping[str, Any]
    overrides: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)
    checkout: Path = CHECKOUT
    made: list[Path] = field(default_factory=list)  # folders of its runs

    def __post_init__(self) -> None:
        raise_if(unknown(self.cluster.waivers))

    @property
    def cluster(self) -> Cluster:
        return self.lowering.plan.recipe.cluster

    @property
    def receipts(self) -> Path:
        return self.checkout / self.cluster.storage.receipts  # an absolute path stays one

    @property
    def scratch(self) -> Path:
        return self.checkout / self.cluster.storage.scratch

    @property
    def durable(self) -> Path:
        return self.checkout / self.cluster.storage.durable

    @cached_property
    def envs(self) -> tuple[Env, ...]:
        """The environment overlay, each variable with its reason."""
        return overlay(self.lowering, self.scratch)

    @cached_property
    def child_environ(self) -> dict[str, str]:
        """The whole environment of the training processes."""
        return child(self.environ, self.envs)

    @cached_property
    def source(self) -> source.Source:
        return source.read(self.checkout, self.receipts, self.words["revision"])

    @cached_property
    def redactor(self) -> Redactor:
        places = {
            "<checkout>": (self.checkout,),
            "<receipts>": (self.receipts,),
            "<scratch>": (self.scratch,),
            "<durable>": (self.durable,),
            "<python>": (Path(sys.prefix), Path(sys.base_prefix)),
            "<packages>": tuple(Path(p) for p in sys.path if p),
            "<home>": (Path(self.environ["HOME"]),) if self.environ.get("HOME") else (),
        }
        kept = receipt.kept_of(self.receipts)
        return Redactor(self.environ, places, slurm.hosts(self.environ), kept["salt"] if kept else "")
