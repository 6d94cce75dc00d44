"""The sparse gradient of the table of n-grams, as Megatron's DDP adds it: bf16 rows to a buffer in fp32, on a GPU."""

import pytest
import torch

from nam_megatron.runtime.ngram_embedding import _Looked

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_are_added_to_the_buffer_without_a_gradient_of_the_table(deterministic):
    rows, width, asked = 2_000_000, 16, (4, 4096, 4)
    table = torch.randn(rows * width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    buffer, ids = torch.zeros(rows * width, device="cuda"), torch.randint(0, 50_000, asked, device="cuda")
    grad = torch.randn(*asked, width, dtype=torch.bfloat16, device="cuda")
    torch.use_deterministic_algorithms(deterministic)
    try:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _Looked.apply(table, ids, width).backward(grad)
        buffer.add_(table.grad.data)
        peak = torch.cuda.max_memory_allocated() - before
    finally:
        torch.use_deterministic_algorithms(False)
    wanted = torch.zeros(rows, width, dtype=torch.float64, device="cuda")
    wanted.index_add_(0, ids.flatten(), grad.double().flatten(0, -2))
    torch.testing.assert_close(buffer.view(-1, width).double(), wanted, rtol=1e-5, atol=1e-5)
    if not deterministic:  # then rows are sorted first
        assert peak < 4 * 14 * grad.numel() < 2 * table.numel()
