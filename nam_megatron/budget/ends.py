"""What stands before and after the layers: embedding, final norm, output layer, loss."""

from collections.abc import Iterator

from nam_megatron.sizes import ACTIVATIONS, LOSS, MTP, UNMEASURED, Line, Param, Sizes, Stage, Work


def params(z: Sizes, stage: Stage) -> Iterator[Param]:
    """Copies included: MTP and a tied output layer have the embedding again where it is not already."""
    m, table = z.model, (z.model.vocab_size, z.model.hidden_size)
    if stage.first or (stage.last and (z.plan.mtp or m.tied_embeddings)):
        yield Param("embedding.word_embeddings.weight", table, "tensor", "table")
    if stage.first and m.learned_positions:
        # No table to Megatron's optimizers: it alone marks those of words, so that Muon takes this one.
        shape = (m.learned_positions, m.hidden_size)
        yield Param("embedding.position_embeddings.weight", shape, "replicated", "router")
    if stage.last:
        yield from z.norm("decoder.final_norm.", m.hidden_size)
        if not m.tied_embeddings:
            yield Param("output_layer.weight", table, "tensor", "table")


def activations(z: Sizes, stage: Stage) -> Iterator[Line]:
    """Kept by one microbatch outside the layers."""
    if stage.last:
        why = "its input, its output for the output layer, statistics"
        yield z.line("final norm", "4 Ts h + 4 Ts", why, bucket=ACTIVATIONS, owner="ends")


def buffers(z: Sizes, stage: Stage) -> Iterator[Line]:
    """Made once, on first use."""
    blocks = z.model.blocks
    # Without attention Megatron makes the table all the same, of the width that it divides itself; not beside learned positions.
    plain = blocks.attention.turned if blocks.attention else z.model.hidden_size // z.model.num_attention_heads
    plain = 0 if z.model.learned_positions else plain
    if width := blocks.mla.qk_rope_head_dim if blocks.mla else plain:
        why = "fp32 angles of every position, whatever the layers"
        yield z.own(d=width).line("RoPE table", "4 S d", why, bucket=ACTIVATIONS, owner="ends")
        if yarn := z.plan.recipe.feature.yarn:
            # Of MLA's each layer has its own, and each indexer another.
            own = sum({"mla": 1, "dsa": 2 if layer.source is None else 1}.get(layer.kind, 0) for layer in stage.layers)
            own += z.plan.mtp_depths if stage.last and blocks.mla else 0
            why = "bf16 cos and sin, made with each module and never read by the plain rotation"
            sizes = z.own(d=width, n=own if blocks.mla else 1, L=yarn.original_length)
            yield sizes.line("YaRN tables", "4 n L d", why, bucket=ACTIVATIONS, owner="yarn", mark=UNMEASURED)
    if z.plan.index_reuse and blocks.dsa and blocks.dsa.kernels == "megatron":
        yield z.line(
            "attention mask",
            "b S S",
            "bool, from the data loader: it carries the shared top-k",
            bucket=ACTIVATIONS,
            owner="dsa",
        )


def loss(z: Sizes) -> Iterator[tuple[str, tuple[Line, ...]]]:
    """The moments of the output layer and the loss, with what each holds above all kept activations.

    MTP's losses run first in the forward pass and the main one first in the backward pass, so that all softmaxes are
    alive at once (megatron-core 0.19.2, models/hybrid/hybrid_model.py; tensor_parallel/cross_entropy.py).
    """
    of = {"bucket": LOSS, "owner": "loss"}
    logits = z.line("logits", "2 T V / t", "bf16, all positions", **of)
    added = z.plan.recipe.precision.fused_grad_accumulation  # where it lies: static's gradients that nobody reads
    formula, why = ("2 T h", "of its input") if added else ("2 T h + 2 V h / t", "of its input and of its weight")
    gradients = z.line("gradients of the output layer", formula, why, **of)
    if z.plan.recipe.precision.cross_entropy == "fused":
        why = "bf16, of every depth; each becomes its gradient in place"
        depths = (z.line("logits of MTP", "2 T V D / t", why, bucket=MTP, owner="mtp"),) if z["D"] else ()
        yield "output layer backward", (logits, *depths, gradients)
        return
    softmax = z.line(
        "softmax", "4 T V / t", "fp32, kept for the backward pass and turned into the gradient in place", **of
    )
    depths = (z.line("softmax", "4 T V D / t", "fp32, of every depth", bucket=MTP, owner="mtp"),) if z["D"] else ()
    clone: tuple[Line, ...] = ()
    if z.plan.recipe.precision.cross_entropy == "compiled":
        why = "the compiled gradient keeps the softmax and makes another fp32 tensor of its size"
        clone = (z.line("compiled gradient", "4 T V / t", why, **of),)
    yield "cross entropy backward", (logits, softmax, *depths, *clone)
    yield "output layer backward", (logits, *depths, gradients)


def flops(z: Sizes) -> Iterator[Work]:
    yield z.work("logits", "2 h V", "all positions")
