"""mamba-ssm's scan on a transposed view of the packed projection: what it is on a copy, and the gradient lies as the view does."""

import pytest
import torch

pytestmark = pytest.mark.gpu

SEQUENCE, BATCH, HEADS, WIDTH, STATE, GROUPS = 1024, 3, 56, 64, 64, 8
INNER, PACKED = HEADS * WIDTH, 2 * GROUPS * STATE


def run(strided: bool) -> tuple[bool, dict[str, torch.Tensor]]:
    """Whether the gradient of the scan's input lies sequence first; the output and every gradient. Types are Megatron's."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

    torch.manual_seed(0)
    half, lies = dict(device="cuda", dtype=torch.bfloat16), []
    packed = torch.randn(SEQUENCE, BATCH, 2 * INNER + PACKED + HEADS, **half)
    weights = dict(conv=torch.randn(INNER + PACKED, 4, **half) / 2, bias=torch.randn(INNER + PACKED, **half))
    weights |= dict(dt_bias=torch.randn(HEADS, device="cuda"), A=-torch.rand(HEADS, device="cuda") - 0.5)
    weights |= dict(packed=packed, D=torch.randn(HEADS, **half))
    conv, bias, dt_bias, A, packed, D = (w.requires_grad_() for w in weights.values())
    view = packed.transpose(0, 1) if strided else packed.transpose(0, 1).contiguous()
    view.register_hook(lambda gradient: lies.append(gradient.transpose(0, 1).is_contiguous()))
    y = mamba_split_conv1d_scan_combined(
        view, conv, bias, dt_bias, A, D=D, chunk_size=128, activation="silu", headdim=WIDTH, ngroups=GROUPS,
        norm_before_gate=False,
    )  # fmt: skip
    y.backward(torch.randn(SEQUENCE, BATCH, INNER, **half).transpose(0, 1))
    return lies == [True], {"y": y.detach()} | {name: w.grad for name, w in weights.items()}


def test_the_scan_reads_strides():
    (ours, found), (copied, expected) = run(strided=True), run(strided=False)
    assert ours and not copied
    far = {name: ((found[name] - t).float().norm() / t.float().norm()).item() for name, t in expected.items()}
    assert not {name: error for name, error in far.items() if not error < 5e-3}
