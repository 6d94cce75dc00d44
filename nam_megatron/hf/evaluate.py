"""lm-evaluation-harness on an export or straight on a checkpoint (torch side).

The harness has no entry point for models: importing this file registers ours as `nam`, for
`lm_eval.simple_evaluate("nam", {"path": "runs/ckpt"}, ...)`. An export opens by the harness's own `hf` route too.
"""

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from transformers import PreTrainedTokenizerFast

from nam_megatron.data import tokenizer as tokenizers
from nam_megatron.errors import Refused, raise_if
from nam_megatron.hf import export
from nam_megatron.hf.opened import absent, another_tokenizer, of_text, open_model, tokenizer_of

KEPT = ("results", "groups", "n-shot", "n-samples", "versions", "higher_is_better", "configs")


@register_model("nam")
class NamLM(HFLM):
    """The harness's own Hugging Face model around ours; no code of the folder runs. Probabilities are in fp32: in bf16, the
    harness's default for a bf16 model, a log-likelihood of 60 is rounded to quarters, and answers tie.

    path: an export or a checkpoint. tokenizer: its folder; None: the export's, or that of the dataset that the run read.

    Raises:
        Refused: a model that is damaged, or no tokenizer that fits it.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: str | Path | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: str | None = None,
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        kernels: str = "torch",
    ):
        path = Path(path)
        tokens = tokenizer_of(path) if tokenizer is None else Path(tokenizer)
        raise_if(another_tokenizer(path, tokens))
        self.identity = of_text(path)
        model = open_model(path, dtype, device or "cpu", kernels)
        export.fits(tokens, model.config.vocab_size)
        super().__init__(
            model,
            tokenizer=_as_trained(tokens),
            add_bos_token=False,
            softmax_dtype=torch.float32,
            batch_size=batch_size or 1,
        )

    truncated = 0  # requests of whose beginning the model saw nothing: the harness cuts what is too long, and goes on

    def _loglikelihood_tokens(self, requests: list[Any], *words: Any, **named: Any) -> Any:
        self.truncated += sum(len(asked) + len(answer) > self.max_length + 1 for _, asked, answer in requests)
        return super()._loglikelihood_tokens(requests, *words, **named)

    def tok_batch_encode(
        self, strings: list[str], *words: Any, left_truncate_len: int | None = None, **named: Any
    ) -> Any:
        ids, mask = super().tok_batch_encode(strings, *words, **named)
        most = left_truncate_len or ids.size(1)
        self.truncated += int((mask.sum(-1) > most).sum())
        return ids[:, -most:], mask[:, -most:]

    def get_model_info(self) -> dict[str, Any]:
        """In the place of the harness's, which asks the Hugging Face hub for the model's name."""
        return {**self.identity, "model_dtype": str(self.model.dtype)}


def evaluate(
    path: Path,
    tasks: list[str],
    tokens: Path | None,
    shots: int | None,
    limit: int | None,
    batch: int,
    dtype: torch.dtype,
    device: str,
    kernels: str = "torch",
) -> dict[str, Any]:
    """What the harness finds, and what it looked at.

    tasks: the harness's names of tasks or groups, or YAML files. tokens: the tokenizer's folder, None: the model's own. shots: examples
    before a question, None: as the task has it. limit: of the questions of each task.

    Raises:
        Refused: a task that cannot be loaded; a model that is damaged, or no tokenizer that fits it.
    """
    begin = time.monotonic()
    if not path.exists():
        raise Refused(f"there is no `{path}`")
    raise_if(absent(device, kernels))
    # The harness reads its thousands of tasks to know their names: 10 s that files do not need.
    manager = TaskManager(include_defaults=any(not Path(task).is_file() for task in tasks))
    loaded = _loaded(manager, tasks)  # before the weights, which may take minutes
    manager.load = lambda _: loaded
    model = NamLM(path, tokens, dtype, device, batch, kernels=kernels)
    found = simple_evaluate(
        model,
        tasks=tasks,
        num_fewshot=shots,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=1000,
    )
    return {
        **model.identity,
        "dtype": str(dtype).removeprefix("torch."),
        "kernels": kernels,
        "lm_eval": version("lm_eval"),
        "limit": limit,
        "truncated": model.truncated,
        "seconds": round(time.monotonic() - begin, 2),
        **{key: found[key] for key in KEPT if key in found},
    }


def _as_trained(tokens: Path) -> PreTrainedTokenizerFast:
    """Without the beginning that a tokenizer of others may name and put before a text: the data has ends alone."""
    made = tokenizers.load(tokens)
    ends = {f"{name}_token": made.id_to_token(number) for name, number in tokenizers.named(tokens, made).items()}
    return PreTrainedTokenizerFast(tokenizer_object=made, **ends)


def table(made: dict[str, Any]) -> str:
    """The harness's, for a person."""
    return "\n".join(make_table(made, which) for which in ("results", "groups") if made.get(which))


def _loaded(manager: Any, tasks: list[str]) -> Any:
    try:
        return manager.load(tasks)
    except Exception as err:  # a wrong name, YAML, or dataset, or no network
        said = f"{type(err).__name__}: {str(err)[:300]}"
        raise Refused(f"`{','.join(tasks)}` cannot be loaded: {said}", hint="`lm_eval ls tasks` lists names") from None
