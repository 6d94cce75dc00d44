"""What others may look at while it trains: TensorBoard and Weights & Biases by Megatron's own writers, MLflow by ours."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from nam_megatron.errors import Problem
from nam_megatron.features import Feature
from nam_megatron.setting import Name, Row, Setting

if TYPE_CHECKING:
    from nam_megatron.plan import Plan


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

    def settings(self, plan: "Plan") -> Iterator[Setting]:
        if self.tensorboard:
            yield Setting("tensorboard_log_interval", 1, "every step", executes=self.executes)
            yield Setting(
                "log_memory_to_tensorboard", True, "torch's counters, beside our peaks", executes=self.executes
            )

    def check(self, plan: "Plan") -> Iterator[Problem]:
        at = "feature.tracking."
        if self.wandb_project:
            if not self.tensorboard:
                # megatron-core 0.19.2, training_log: everything it gives to W&B stands under `if writer`, TensorBoard's.
                message = "Megatron writes to Weights & Biases only beside TensorBoard"
                yield Problem(message, at + "tensorboard", "name a folder for its events")
            for name in ("wandb_name", "wandb_dir"):
                if not getattr(self, name):
                    yield Problem(f"Weights & Biases without `{name}`", at + name, "give it")
        elif self.wandb_name or self.wandb_dir or self.wandb_entity:
            message = "keys of Weights & Biases without `wandb_project`"
            yield Problem(message, at + "wandb_project", "name it, or null the others")
        if bool(self.mlflow) != bool(self.mlflow_experiment):
            missing = "mlflow_experiment" if self.mlflow else "mlflow"
            yield Problem("`mlflow` and `mlflow_experiment` go together", at + missing, "give both or neither")
