"""A mixture of experts' tensors: ours hold all experts in one, gate and up packed."""

from collections.abc import Iterator
from typing import Any

from nam_megatron.blocks.exported import Config, Piece, Tensor, View, gated, gates, linear, one, same
from nam_megatron.blocks.moe.block import Moe

INPUT_NORM = "pre_mlp_layernorm."


def keys(b: Moe) -> dict[str, Any]:
    groups, chosen = b.group_limit or (1, 1)
    named = (
        "experts", "top_k", "expert_hidden_size", "shared_expert_hidden_size", "shared_expert_gate",
        "score_function", "expert_bias", "pre_softmax", "router_dtype",
    )  # fmt: skip
    more = {"routed_scaling": b.routed_scaling or 1.0, "groups": groups, "chosen_groups": chosen}
    return {name: getattr(b, name) for name in named} | more | {"latent_size": b.latent_size or 0}


def tensors(c: Config) -> Iterator[Tensor]:
    b, h, u = c["moe"], c["hidden_size"], gates(c)
    count, width, shared, latent = (
        b[k] for k in ("experts", "expert_hidden_size", "shared_expert_hidden_size", "latent_size")
    )
    yield from linear("mixer.router", "mlp.router", count, h, c["linear_bias"])
    if b["expert_bias"]:
        yield one("mixer.router.expert_bias", "mlp.router.expert_bias", count, dtype="F32")
    if latent:
        yield from linear("mixer.to_latent", "mlp.fc1_latent_proj", latent, h, c["linear_bias"])
        yield from linear("mixer.from_latent", "mlp.fc2_latent_proj", h, latent, c["linear_bias"])
    yield one("mixer.experts.up", "mlp.experts.experts.linear_fc1.weight", count, u * width, latent or h)
    yield one("mixer.experts.down", "mlp.experts.experts.linear_fc2.weight", count, latent or h, width)
    if c["linear_bias"]:
        yield one("mixer.experts.up_bias", "mlp.experts.experts.linear_fc1.bias", count, u * width)
        yield one("mixer.experts.down_bias", "mlp.experts.experts.linear_fc2.bias", count, latent or h)
    if shared:
        yield one("mixer.shared.up.weight", "mlp.shared_experts.linear_fc1.weight", u * shared, h)
        yield one("mixer.shared.down.weight", "mlp.shared_experts.linear_fc2.weight", h, shared)
    if b["shared_expert_gate"]:
        yield one("mixer.shared_gate.weight", "mlp.shared_experts.gate_weight", 1, h)


def pieces(c: Config) -> Iterator[Piece]:
    for tensor in tensors(c):
        if tensor.name.startswith("mixer.experts."):
            if len(tensor.shape) == 3:
                yield from _of_each(c, tensor)
            yield _of_all(c, tensor)
        elif tensor.name == "mixer.shared.up.weight":
            yield from gated(c, tensor, "shared.")
        else:
            yield from same([tensor])


def _of_each(c: Config, tensor: Tensor) -> Iterator[Piece]:
    count, total, columns = tensor.shape
    last = tensor.name.rpartition(".")[2]
    slots = ("gate", "up") if last == "up" and gates(c) == 2 else (last,)
    size = total // len(slots)
    for expert in range(count):
        for at, slot in enumerate(slots):
            view = _rows(expert, at * size, size)
            yield Piece(f"experts.{slot}", tensor.name, (size, columns), view, expert=expert)


def _of_all(c: Config, tensor: Tensor) -> Piece:
    """All experts in one, turned, and row by row the gate's beside the other's, as gpt-oss has them."""
    count, total, *columns = tensor.shape
    parts = gates(c) if "up" in tensor.name else 1

    def here(x: Any) -> Any:
        y = x.view(count, parts, -1, *columns)
        return y.permute(0, 3, 2, 1) if columns else y.transpose(1, 2)

    shape = (count, *columns, total)
    return Piece(
        f"all.{tensor.name.rpartition('.')[2]}", tensor.name, shape, here, lambda y: y.unflatten(-1, (-1, parts))
    )


def _rows(expert: int, first: int, size: int) -> View:
    return lambda x: x[expert, first : first + size]
