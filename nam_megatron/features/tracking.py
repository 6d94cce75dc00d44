"""What others may look at while it trains: TensorBoard and Weights & Biases by Megatron's own writers, MLflow by ours."""

from collections.abc import Iterator
from typing import Annotated

from nam_megatron.features import Feature
from nam_megatron.words.setting import OURS, Name, Package, Row, Setting
from nam_megatron.words.site import Site


class Tracking(Feature):
    """Figures for others to look at while it trains: each null, or where it goes."""

    name = "tracking"
    switch = "tensorboard"  # or one of the two others that `on` names
    executes = "what is written down"

    tensorboard: Annotated[Name | None, Row("folder of TensorBoard's events, by the last rank", "tensorboard_dir")]
    wandb_project: Annotated[Name | None, Row("project of Weights & Biases; wants `tensorboard` too", "wandb_project")]
    wandb_name: Annotated[Name | None, Row("the run's name there", "wandb_exp_name")]
    wandb_dir: Annotated[Name | None, Row("its files on this host", "wandb_save_dir")]
    wandb_entity: Annotated[Name | None, Row("team or person", "wandb_entity")]
    mlflow: Annotated[Name | None, Row("where MLflow keeps its runs: a folder or an address")]
    mlflow_experiment: Annotated[Name | None, Row("the experiment there")]

    @property
    def on(self) -> bool:
        return any((self.tensorboard, self.wandb_project, self.mlflow))

    def settings(self, site: Site) -> Iterator[Setting]:
        if self.tensorboard:
            yield Setting("tensorboard_log_interval", 1, "every step", executes=self.executes)
            if site.gpu:  # without one torch has no counters, and Megatron breaks where it looks for them
                why = "torch's counters, beside our peaks"
                yield Setting("log_memory_to_tensorboard", True, why, executes=self.executes)

    def packages(self) -> Iterator[Package]:
        if self.tensorboard:
            yield Package("tensorboard", "`feature.tracking.tensorboard`")
        if self.wandb_project:
            yield Package("wandb", "`feature.tracking.wandb_project`")
        if self.mlflow:
            yield Package("mlflow", "`feature.tracking.mlflow`, which stock Megatron does not write to", OURS)
