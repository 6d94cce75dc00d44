"""What ranks that share a sequence hand to each other, and how they count its losses: both context.py on four real ranks."""

import copy
from types import SimpleNamespace

import pytest
import torch
from harness import Case, on_ranks
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler
from megatron.core.utils import get_batch_on_this_cp_rank

from nam_megatron.errors import Refused
from nam_megatron.mends import context as shared
from nam_megatron.mends import install, mtp_counts
from nam_megatron.runtime import context
from nam_megatron.runtime.cross_entropy import LARGEST

RANKS, TOKENS = 4, 16
COUNTS = (0, 3, 5, 2)  # tokens that count, by rank
# Of a whole sequence: [tokens, batch, columns], each number its own; a part of eight columns and one of four.
WHOLE, WIDTHS = torch.arange(TOKENS * 24.0).view(TOKENS, 2, 12), (8, 4)


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(Case("-", cp=RANKS), lambda rig: SimpleNamespace(**handed(), **counted(rig)))


def handed() -> dict:
    group = parallel_state.get_context_parallel_group()
    positions = get_batch_on_this_cp_rank({"positions": torch.arange(TOKENS)[None]}, False, group)["positions"][0]
    x = WHOLE[positions].requires_grad_()
    context.whole(x, group).mul(group.rank() + 1).square().sum().backward()
    of_whole, x.grad = x.grad, None
    spread = context.by_heads(x.split(WIDTHS, -1), group)
    back = context.by_tokens(spread, group)
    (back * back.detach() * (group.rank() + 1)).sum().backward()
    with pytest.raises(Refused, match="a layer takes no packed documents under context"):
        context.refuse_documents("a layer", group)
    return {
        "positions": positions, "chunks": context.own_chunks(group), "whole": context.whole(x.detach(), group), "of_whole": of_whole,
        "spread": spread.detach(), "back": back.detach(), "of_spread": x.grad, "share": context.share(torch.arange(8), group).tolist(),
    }  # fmt: skip


def counted(rig) -> dict:
    rank, group = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_group()
    config = copy.copy(rig.config)
    config.experimental_attention_variant = "dsa"
    mended = schedules.forward_step_calc_loss, multi_token_prediction.roll_tensor
    install.single("context")  # of a second model
    assert mended == (schedules.forward_step_calc_loss, multi_token_prediction.roll_tensor), "mended twice"

    def loss(found, config=config) -> float:
        output = torch.ones(COUNTS[rank])
        where = dict(vp_stage=None, collect_non_loss_data=False, num_microbatches=2, forward_data_store=[])
        value, _ = schedules.forward_step_calc_loss(
            rig.model, output, found, config, **where, cp_group_size=RANKS, is_last_stage=True
        )
        return value.item()

    def mine(output):
        return output.sum() * (rank + 1), torch.tensor(output.numel(), dtype=torch.int), {}

    summed = copy.copy(config)
    summed.calculate_per_token_loss = True
    mask = torch.ones(2, TOKENS // RANKS)
    moved, count = multi_token_prediction.roll_tensor(mask, cp_group=group)
    tokens, sum_of_tokens = multi_token_prediction.roll_tensor(mask.long(), cp_group=group)
    return {
        "loss": loss(mine), "sum": loss(mine, summed),
        "without_a_count": loss(lambda output: (torch.tensor(1.0), {})),
        "moved": moved.sum().item(), "count": count.item(), "tokens": tokens.sum().item(), "sum_of_tokens": sum_of_tokens.item(),
        "nothing": multi_token_prediction.roll_tensor(None, cp_group=group),
        "alone": multi_token_prediction.roll_tensor(mask)[1].item(), "scale": DSAIndexerLossAutoScaler.main_loss_backward_scale.item(),
    }  # fmt: skip


def test_every_rank_has_the_whole_in_order_and_the_sum_of_its_gradients(ranks):
    times = sum((rank + 1) ** 2 for rank in range(RANKS))
    for r in ranks:
        chunk = TOKENS // (2 * RANKS)
        assert r.positions.tolist() == [n * chunk + i for n in r.chunks for i in range(chunk)]
        assert torch.equal(r.whole, WHOLE)
        assert torch.equal(r.of_whole, 2 * times * WHOLE[r.positions])


def test_heads_are_shared_in_order_and_come_back_with_their_gradients(ranks):
    for rank, r in enumerate(ranks):
        mine = [part.chunk(RANKS, -1)[rank] for part in WHOLE.split(WIDTHS, -1)]
        assert torch.equal(r.spread, torch.cat(mine, -1))
        # The parts of each rank's heads lie beside each other.
        by_rank = torch.cat([p.unflatten(-1, (RANKS, -1)) for p in WHOLE.split(WIDTHS, -1)], -1).flatten(2)[r.positions]
        assert torch.equal(r.back, by_rank)
        assert torch.equal(r.of_spread, (rank + 1) * WHOLE[r.positions])
        assert r.share == [2 * rank, 2 * rank + 1]


def test_the_loss_is_the_mean_over_the_tokens_of_all_ranks(ranks):
    """Data-parallel averaging takes the mean over the ranks; Megatron divides by microbatches."""
    wanted = sum(n * (rank + 1) for rank, n in enumerate(COUNTS)) / sum(COUNTS) / 2
    assert sum(r.loss for r in ranks) / RANKS == pytest.approx(wanted)
    assert [r.sum for r in ranks] == [n * (rank + 1) for rank, n in enumerate(COUNTS)], (
        "of a model whose steps sum losses"
    )
    assert [r.without_a_count for r in ranks] == [RANKS / 2] * RANKS, "which Megatron scales itself"


def test_what_mtp_counts_is_a_ranks_share_of_all_tokens(ranks):
    """The last token of a sequence, which the first rank has, has no label."""
    held = TOKENS // RANKS * 2
    assert [r.moved for r in ranks] == [held - 2, held, held, held]
    assert [r.count for r in ranks] == [held - 0.5] * RANKS
    assert [r.sum_of_tokens for r in ranks] == [r.tokens for r in ranks]
    assert [r.alone for r in ranks] == [held - 2] * RANKS
    assert {r.nothing for r in ranks} == {(None, None)}


def test_a_share_of_few_tokens_is_less_than_one_and_never_none(monkeypatch):
    """Of 0, 1, 3 and 8 tokens on four ranks; of none the loss is zero, and is divided all the same."""
    for total, share in ((0, 0.25), (1, 0.25), (3, 0.75), (8, 2.0)):
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda count, group, total=total: count.fill_(total))
        assert shared._mean(torch.tensor(1), SimpleNamespace(size=lambda: 4)) == share


def test_the_indexers_loss_has_the_main_losss_scale(ranks):
    assert {r.scale for r in ranks} == {0.5}


def test_what_the_loss_has_left_counts_as_megatrons_look_at_all_logits():
    """Where positions of the mask are hit and missed, and others are hit."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 3, 4, generator=draw)
    labels, mask = torch.randint(4, (3, 16), generator=draw), torch.randint(2, (3, 16), generator=draw).float()
    stock = multi_token_prediction._compute_mtp_acceptance_counts
    wanted = stock(logits, labels, mask, SimpleNamespace(gather_output=True), None)
    assert mtp_counts._counts(lambda *_: "Megatron's", logits, labels, mask) == "Megatron's"
    setattr(logits, LARGEST, logits.argmax(-1).int())
    assert mtp_counts._counts(stock, logits, labels, mask) == wanted
