"""Ask Megatron itself what an argv means: its parser, its validation, its configs. Torch side, no GPU needed.

Importing Megatron costs seconds and its validation mutates `os.environ` and exits the process, so one warm process
imports it once and answers every question in a fork of itself.
"""

import contextlib
import dataclasses
import enum
import io
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from nam_megatron import installed, process
from nam_megatron.errors import Refused
from nam_megatron.packages import adding
from nam_megatron.targets import current

DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}  # as flags spell them
TE_VERSION = current().te_version  # of the training hosts; the CPU side has none installed


@dataclasses.dataclass(frozen=True)
class Answer:
    """What Megatron makes of an argv.

    error: why it refuses, or None. values: `config.field` -> plain value, for every config Megatron would train with.
    defaults: the same for the dataclass default of the field where it has one.
    """

    error: str | None
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]


class Oracle:
    """A warm Megatron in a process of its own. Use as a context manager. Raises Refused for another Megatron than the current target's."""

    def __enter__(self) -> "Oracle":
        installed.ask()
        # A Ctrl-C meanwhile comes when somebody knows the process that it has to end.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        server = subprocess.Popen(
            [sys.executable, *["-P"] * process.PROGRAM, "-W", "ignore", "-m", "nam_megatron.runtime.oracle"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a Ctrl-C is ours to pass on, also one that reaches nobody else
        )
        assert server.stdin is not None and server.stdout is not None, "started with pipes"
        self._server, self._questions, self._answers = server, server.stdin, server.stdout
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except KeyboardInterrupt as err:
            self.__exit__(type(err))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # it may be importing Megatron, or answering: nobody waits for that
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            self._questions.close()
        self._server.wait()
        self._answers.close()

    def ask(
        self,
        argv: Sequence[str],
        world_size: int,
        capability: tuple[int, int],
        env: Mapping[str, str | None],
        ours: Sequence[str] = (),
    ) -> Answer:
        """Parse, validate and build the configs of `argv` as rank 0 of `world_size` on such a device.

        ours: kinds and features that our trainer alone serves; what it says to Megatron's config for them is said here, too.
        """
        question = {"argv": list(argv), "world_size": world_size, "capability": list(capability), "env": dict(env)}
        question["ours"] = list(ours)
        with contextlib.suppress(BrokenPipeError):  # it is over, and has said why
            self._questions.write(json.dumps(question) + "\n")
            self._questions.flush()
        line = self._answers.readline()
        try:
            answer = json.loads(line)
        except ValueError:  # nothing, or what the one that was to answer had said before it was killed
            hint = "`python -m nam_megatron.runtime.oracle` shows why"
            raise Refused("Megatron cannot be asked: its process has ended", hint=hint) from None
        if "missing" in answer:
            raise ModuleNotFoundError(f"No module named {answer['missing']!r}", name=answer["missing"])
        if "broken" in answer:
            hint = f"it is of another version, or built for another torch; {adding('megatron')} installs the tried one"
            raise Refused(f"Megatron cannot be imported: {answer['broken']}", hint=hint)
        return Answer(**answer)


def _serve() -> None:
    """Answer questions, one JSON object a line, each in a fork."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Megatron prints stays out of the answers
    try:
        _warm()
    except Exception as err:
        name = err.name if isinstance(err, ModuleNotFoundError) else None
        out.write(json.dumps({"missing": name} if name else {"broken": f"{type(err).__name__}: {err}"}) + "\n")
        out.flush()
        return
    for line in sys.stdin:
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(read)
            with os.fdopen(write, "w") as pipe:
                json.dump(_answer(**json.loads(line)), pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            out.write(pipe.read() + "\n")
        os.waitpid(pid, 0)
        out.flush()


def _warm() -> None:
    from nam_megatron.runtime import uncompiled

    uncompiled.functions()
    import megatron.core.models.hybrid.hybrid_layer_allocation
    import megatron.core.transformer.experimental_attention_variant.dsa
    import megatron.training.argument_utils
    import megatron.training.arguments
    import megatron.training.training  # noqa: F401
    from megatron.training.argument_utils import ArgumentGroupFactory

    # Help texts are read from source code each time a parser is built: nine tenths of a question's time.
    ArgumentGroupFactory._get_field_docstrings = lambda *_: {}


def _answer(
    argv: list[str], world_size: int, capability: list[int], env: Mapping[str, str | None], ours: list[str]
) -> dict[str, Any]:
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages), contextlib.redirect_stdout(messages):
            values, defaults = _configs(argv, world_size, (capability[0], capability[1]), env, ours)
        return {"error": None, "values": values, "defaults": defaults}
    except SystemExit:
        said = [line for line in messages.getvalue().splitlines() if line.strip()]
        return {"error": said[-1] if said else "Megatron exits", "values": {}, "defaults": {}}
    except Exception as err:
        place = traceback.extract_tb(err.__traceback__)[-1]
        text = str(err).strip() or place.line or type(err).__name__
        return {"error": f"{type(err).__name__}: {text}", "values": {}, "defaults": {}}


def _configs(
    argv: list[str], world_size: int, capability: tuple[int, int], env: Mapping[str, str | None], ours: list[str]
):
    import types

    import megatron.core.utils as core_utils
    import torch
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        hybrid_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_args, validate_args
    from packaging.version import Version

    from nam_megatron.mends import install

    for name, value in {**env, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch.cuda.get_device_capability = lambda *_: capability
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=capability[0], minor=capability[1])
    core_utils._te_version = Version(TE_VERSION)
    for module, name in fusions():
        setattr(module, name, getattr(module, name) or object())
    sys.argv = ["train", *argv]
    args = validate_args(parse_args())
    hybrid = args.hybrid_layer_pattern is not None
    if "yarn" in ours:
        install.single("yarn")
    model = hybrid_config_from_args(args) if hybrid else gpt_config_from_args(args)
    container = pretrain_cfg_container_from_args(args, model)
    values, defaults = {}, {}
    configs = {f.name: getattr(container, f.name) for f in dataclasses.fields(container)}
    configs["transformer"] = container.model.transformer
    for name, config in configs.items():
        if not dataclasses.is_dataclass(config):
            continue
        for field in dataclasses.fields(config):
            if name == "model" and field.name == "transformer":
                continue
            values[f"{name}.{field.name}"] = _plain(getattr(config, field.name))
            if field.default is not dataclasses.MISSING:
                defaults[f"{name}.{field.name}"] = _plain(field.default)
            elif field.default_factory is not dataclasses.MISSING:
                defaults[f"{name}.{field.name}"] = _plain(field.default_factory())
    # Attributes that are no fields: GQA's YaRN.
    own = vars(container.model.transformer).items()
    values |= {f"transformer.{k}": _plain(v) for k, v in own if k.startswith("yarn_")}
    values |= {f"args.{k}": _plain(v) for k, v in vars(args).items()}
    values |= _layers(args) if hybrid else {}
    return values, defaults


def fusions() -> list[tuple[Any, str]]:
    """(module, name) of what Transformer Engine brings on a training host, and Megatron's configs ask for: None without it."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    names = ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute")
    return [(rope_utils, "fused_apply_rotary_pos_emb"), *((moe_utils, f"fused_{name}") for name in names)]


def _layers(args: Any) -> dict[str, Any]:
    """Where Megatron puts which layer: `layers.<number>` -> symbol, segment and the layer whose top-k it uses."""
    import torch
    from megatron.core.models.hybrid import hybrid_layer_allocation
    from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern, select_pipeline_segment
    from megatron.core.transformer.experimental_attention_variant import dsa

    hybrid_layer_allocation.log_on_each_pipeline_stage = lambda *_, **__: None  # wants process groups
    parsed = parse_hybrid_pattern(args.hybrid_layer_pattern)
    stages, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    found: dict[str, Any] = {"layers.mtp": [parsed.mtp_pattern or ""] * parsed.mtp_num_depths}
    torch.distributed.get_world_size = lambda *_: stages
    for vp in range(virtual or 1):
        for rank in range(stages):
            torch.distributed.get_rank = lambda *_, rank=rank: rank
            symbols, offset = select_pipeline_segment(
                parsed.main_pattern, object(), vp if virtual else None,
                args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers,
            )  # fmt: skip
            for number, symbol in enumerate(symbols, offset + 1):
                source = None
                if symbol == "D":
                    source = dsa.source_dsa_compute_layer(
                        number, args.dsa_indexer_skip_topk_offset, args.dsa_indexer_topk_freq
                    )
                found[f"layers.{number}"] = [symbol, vp * stages + rank, source]
    return found


def _plain(value: Any) -> Any:
    """As JSON: enums by name, functions and classes by qualified name, dtypes as flags spell them."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__module__ == "torch":
        return DTYPES.get(str(value), str(value))
    return f"<{type(value).__qualname__}>"


if __name__ == "__main__":
    _serve()
