"""The environment that every road to a training process carries: the plan's own, and what runs were validated with.

run.sh, `launch`, a batch script, pods, Megatron-Bridge's containers and a NeMo-Run experiment take it from here. A trainer refuses another
value of the plan's (Lowering.env) alone; the rest changes no result, and a plan that was stored before it grew stays readable.
"""

from nam_megatron.compile.lower import Lowering
from nam_megatron.words.setting import Env

OLD_ALLOC = "PYTORCH_CUDA_ALLOC_CONF"
VALIDATED = (
    Env("TORCH_NCCL_HIGH_PRIORITY", "1", "collectives overlap compute only if they are scheduled first"),
    Env("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "7200", "the first steps compile for minutes while other ranks wait"),
    Env("OMP_NUM_THREADS", "1", "what torchrun sets for several processes, and leaves out for one"),
    Env("PYTHONUNBUFFERED", "1", "the log has what was said before a crash"),
    Env("PYTHONIOENCODING", "utf-8:backslashreplace", "a locale of ASCII must not end a run at its first umlaut"),
    Env("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1", "its kernels are compiled once, not in every process"),
    Env(OLD_ALLOC, None, "the old name of PYTORCH_ALLOC_CONF; two of them are one too many"),
)


# What only libraries of a GPU read.
OF_GPUS = ("CUDA_", "FLASH_", "NCCL_", "PYTORCH_CUDA_", "QUACK_", "TORCH_NCCL_", "TRITON_")


def carried(lowering: Lowering, more: tuple[Env, ...] = VALIDATED) -> tuple[Env, ...]:
    """Every variable that something reads, each with its reason; the plan's come first and win over `more`."""
    known = {env.name for env in lowering.env}
    unread = OF_GPUS if lowering.plan.recipe.cluster.processor == "cpu" else ()
    return (*lowering.env, *(env for env in more if env.name not in known and not env.name.startswith(unread)))


def given(lowering: Lowering) -> dict[str, str]:
    """For tools that can only set: {name: value} of those that have one."""
    return {env.name: env.value for env in carried(lowering) if env.value is not None}
