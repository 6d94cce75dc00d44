"""What stands before and after the layers: embedding, final norm, output layer, loss."""

from collections.abc import Iterator
from dataclasses import replace

from nam_megatron.words.sizes import ACTIVATIONS, LOSS, MTP, UNMEASURED, Line, Param, Sizes, Stage, Work


def params(z: Sizes, stage: Stage) -> Iterator[Param]:
    """Copies included: MTP and a tied output layer have the embedding again where it is not already."""
    site, table = z.site, (z.site.vocab_size, z.site.hidden_size)
    if stage.first or (stage.last and (site.mtp or site.tied_embeddings)):
        yield Param("embedding.word_embeddings.weight", table, "tensor", "table")
    if stage.first and site.learned_positions:
        # No table to Megatron's optimizers: it alone marks those of words, so that Muon takes this one.
        shape = (site.learned_positions, site.hidden_size)
        yield Param("embedding.position_embeddings.weight", shape, "replicated", "router")
    if stage.last:
        yield from z.norm("decoder.final_norm.", site.hidden_size)
        if not site.tied_embeddings:
            yield Param("output_layer.weight", table, "tensor", "table")


def activations(z: Sizes, stage: Stage) -> Iterator[Line]:
    """Kept by one microbatch outside the layers."""
    if stage.last:
        why = "its input, its output for the output layer, statistics"
        yield z.line("final norm", "4 Ts h + 4 Ts", why, bucket=ACTIVATIONS, owner="ends")


def buffers(z: Sizes, stage: Stage) -> Iterator[Line]:
    """Made once, on first use."""
    blocks = z.site.blocks
    # Without attention Megatron makes the table all the same, of the width that it divides itself; not beside learned positions.
    plain = blocks.attention.turned if blocks.attention else z.site.hidden_size // z.site.num_attention_heads
    plain = 0 if z.site.learned_positions else plain
    if width := blocks.mla.qk_rope_head_dim if blocks.mla else plain:
        why = "fp32 angles of every position, whatever the layers"
        yield z.own(d=width).line("RoPE table", "4 S d", why, bucket=ACTIVATIONS, owner="ends")
        if z.site.yarn_length:
            # Of MLA's each layer has its own, and each indexer another.
            own = sum(blocks.of(layer.kind).tables(layer) for layer in stage.layers)
            own += z.site.mtp_depths * sum(blocks.of(kind).tables(None) for kind in z.site.mtp) if stage.last else 0
            why = "bf16 cos and sin, made with each module and never read by the plain rotation"
            sizes = z.own(d=width, n=own if blocks.mla else 1, L=z.site.yarn_length)
            yield sizes.line("YaRN tables", "4 n L d", why, bucket=ACTIVATIONS, owner="yarn", mark=UNMEASURED)
    for block in blocks.all():
        yield from (replace(line, bucket=ACTIVATIONS, owner=block.kind) for line in block.buffers(z))


def loss(z: Sizes) -> Iterator[tuple[str, tuple[Line, ...]]]:
    """The moments of the output layer and the loss, with what each holds above all kept activations.

    MTP's losses run first in the forward pass and the main one first in the backward pass, so that all softmaxes are
    alive at once (megatron-core 0.19.2, models/hybrid/hybrid_model.py; tensor_parallel/cross_entropy.py).
    """
    of = {"bucket": LOSS, "owner": "loss"}
    logits = z.line("logits", "2 T V / t", "bf16, all positions", **of)
    added = z.site.fused_grad_accumulation  # where it lies: static's gradients that nobody reads
    formula, why = ("2 T h", "of its input") if added else ("2 T h + 2 V h / t", "of its input and of its weight")
    gradients = z.line("gradients of the output layer", formula, why, **of)
    if z.site.cross_entropy == "fused":
        why = "bf16, of every depth; each becomes its gradient in place"
        depths = (z.line("logits of MTP", "2 T V D / t", why, bucket=MTP, owner="mtp"),) if z["D"] else ()
        yield "output layer backward", (logits, *depths, gradients)
        return
    softmax = z.line(
        "softmax", "4 T V / t", "fp32, kept for the backward pass and turned into the gradient in place", **of
    )
    depths = (z.line("softmax", "4 T V D / t", "fp32, of every depth", bucket=MTP, owner="mtp"),) if z["D"] else ()
    clone: tuple[Line, ...] = ()
    if z.site.cross_entropy == "compiled":
        why = "the compiled gradient keeps the softmax and makes another fp32 tensor of its size"
        clone = (z.line("compiled gradient", "4 T V / t", why, **of),)
    yield "cross entropy backward", (logits, softmax, *depths, *clone)
    yield "output layer backward", (logits, *depths, gradients)


def flops(z: Sizes) -> Iterator[Work]:
    yield z.work("logits", "2 h V", "all positions")
