"""What is told and what is refused where no preset goes, as text under review: tests/golden/said.txt.

Of every recipe of test_lower.py and of those below: what is said that its preset does not say, or why it is refused.
`pytest tests/test_said.py --rewrite-golden` writes it anew.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import chain, islice, zip_longest
from pathlib import Path

import yaml
from presets import changed, lowered, written
from test_lower import DELTA, DESIGN, NATIVE, NEIGHBOURS, REFUSALS

from nam_megatron import argv, report
from nam_megatron.budget import memory, search, serving, static, text
from nam_megatron.errors import Problem, Refused
from nam_megatron.lower import Lowering, translate
from nam_megatron.recipe import from_tree, keys_at, load, to_tree
from nam_megatron.sizes import Sizes

GOLDEN = Path(__file__).parent / "golden" / "said.txt"
FP8 = "nam56r_native_dp_fp8"
# What no case of test_lower.py says: a line each, of the preset above it.
MORE = {
    NATIVE: """
    model.linear_bias=true model.letters.E=mlp model.normalization=LayerNorm
    model.linear_bias=true model.blocks.moe.grouped_gemm=false model.blocks.moe.shared_expert_hidden_size=0
    model.activation=swiglu model.blocks.moe.grouped_gemm=false model.blocks.moe.capacity_factor=1.5 model.tied_embeddings=true
    model.activation=gelu model.zero_centered_norms=true model.normalization=LayerNorm
    model.letters.E=mlp model.activation=swiglu
    model.blocks.attention.window=512 model.blocks.attention.qkv_bias=true model.blocks.attention.output_gate=true
    model.blocks.attention.qk_norm=true model.blocks.attention.rotary_percent=0.5 model.blocks.attention.query_groups=56
    model.blocks.attention.rotary_percent=0.29
    model.blocks.attention.rotary_percent=0.01
    model.blocks.attention.position_embedding=none
    model.blocks.attention.position_embedding=none feature.mtp.depths=2 model.blocks.attention.output_gate=true
    model.blocks.mamba2.strided=true parallel.sequence=true parallel.tensor=2 parallel.expert=2 parallel.expert_tensor=2
    model.blocks.moe.score_function=softmax model.blocks.moe.expert_bias=false model.blocks.moe.pre_softmax=true
    model.blocks.moe.group_limit=[4,2] model.blocks.moe.routed_scaling=2.5 model.blocks.moe.z_loss_coeff=0.001
    model.blocks.moe.shared_expert_gate=true model.blocks.moe.permute_fusion=true model.blocks.moe.router_fusion=true
    model.blocks.moe.latent_size=512 model.blocks.moe.capacity_factor=1.5 model.blocks.moe.pad_to_capacity=true parallel.expert=2
    model.blocks.attention.window=512 model.blocks.attention.unwindowed_every=4
    model.blocks.moe.dispatcher=local model.blocks.moe.fused_weighted_squared_relu=true
    model.blocks.moe.dispatcher=local model.blocks.moe.fused_router_gradient=true
    model.blocks.mamba2.strided=true model.blocks.mamba2.strided_norm=true
    model.blocks.moe.dispatcher=allgather parallel.expert=4 model.blocks.moe.shared_overlap=true
    model.blocks.moe.balancing=none model.blocks.moe.aux_loss_coeff=0.0
    model.blocks.moe.shared_expert_hidden_size=0
    precision.cross_entropy=compiled
    precision.cross_entropy=fused feature.mtp.depths=1 precision.grad_reduce=bf16
    precision.deterministic=true precision.norm_kernels=cudnn precision.fused_grad_accumulation=true
    precision.deterministic=true precision.cross_entropy=compiled
    feature.megatron_fsdp.enabled=true feature.megatron_fsdp.strategy=optim
    feature.megatron_fsdp.enabled=true feature.megatron_fsdp.strategy=optim_grads parallel.tensor=2 parallel.sequence=true
    feature.megatron_fsdp.enabled=true parallel.expert=2
    feature.megatron_fsdp.enabled=true precision.fused_grad_accumulation=true schedule.async_save=true
    optim.name=muon feature.muon.enabled=true
    optim.name=muon feature.muon.enabled=true parallel.tensor=2 parallel.sequence=true feature.muon.tp_mode=distributed
    optim.name=muon feature.muon.enabled=true feature.distributed_optimizer.enabled=false \
    feature.distributed_optimizer.overlap_param_gather=false feature.distributed_optimizer.overlap_grad_reduce=false
    feature.distributed_optimizer.enabled=false feature.distributed_optimizer.overlap_param_gather=false \
    feature.distributed_optimizer.overlap_grad_reduce=false precision.grad_reduce=bf16
    feature.distributed_optimizer.reshardable=true
    feature.distributed_optimizer.enabled=false feature.distributed_optimizer.reshardable=true
    feature.ngram_hash.enabled=true feature.ngram_hash.buckets=1000 feature.ngram_hash.document_end=3 parallel.pipeline=2
    feature.mhc.streams=4 parallel.pipeline=2 feature.mtp.depths=1
    feature.tracking.tensorboard=/t feature.tracking.wandb_project=p feature.tracking.wandb_dir=/w feature.tracking.wandb_name=n \
    feature.tracking.wandb_entity=e
    feature.tracking.mlflow=/m feature.tracking.mlflow_experiment=x
    feature.tracking.mlflow_experiment=x
    feature.tracking.wandb_entity=e feature.tracking.tensorboard=/t
    data.name=indexed data.path=/d data.split='98,1,1' data.tokenizer=/t data.cache=/c schedule.eval_steps=2 feature.fim.enabled=true
    data.name=sft data.path=/d data.tokenizer=/t data.prompt=p data.answer=a schedule.pretrained=/p feature.mtp.depths=0
    schedule.pretrained=/p feature.lora.rank=8 feature.lora.targets=[linear_proj] model.blocks.moe.expert_bias_update_rate=0.0 \
    feature.mtp.depths=0 model.blocks.dsa.indexer_loss_coeff=0.0
    data.name=built data.path=/d schedule.eval_steps=2 data.workers=0
    data.name=built data.path=/d
    data.parts=[{weight: 1, path: /a}]
    data.name=blend data.parts=[{weight: 1, path: /a}] data.split='9,1,0' data.tokenizer=/t data.cache=/c
    data.name=built data.path=/d data.cache=/c
    data.name=blend data.parts=[{weight: 0.7, path: /a}, {weight: 2, path: /b}] data.split='9,1,0' data.tokenizer=/t
    schedule.save=/s schedule.save_interval=9 schedule.async_save=true schedule.load=/l schedule.stop_every=9 schedule.eval_steps=4
    schedule.async_save=true
    schedule.load=/l schedule.manual_gc_interval=100
    optim.decay=constant
    optim.decay=linear schedule.decay_steps=500
    optim.decay=WSD optim.wsd_steps=100 optim.wsd_shape=linear
    optim.decay=WSD
    optim.wsd_steps=100
    feature.recompute.granularity=selective feature.recompute.modules=[core_attn,moe,layernorm]
    feature.recompute.granularity=selective feature.recompute.modules=[moe_act,shared_experts]
    feature.recompute.granularity=selective feature.recompute.modules=[mlp] model.letters.E=mlp
    feature.recompute.granularity=full feature.recompute.method=block feature.recompute.layers=3 feature.mtp.depths=2 parallel.pipeline=2
    feature.recompute.granularity=full feature.recompute.method=uniform feature.recompute.layers=5
    feature.cuda_graphs.impl=local feature.cuda_graphs.modules=[attn,mamba,moe_router,moe_preprocess] feature.cuda_graphs.warmup_steps=0
    feature.cuda_graphs.impl=transformer_engine feature.cuda_graphs.modules=[mlp]
    feature.cuda_graphs.impl=transformer_engine feature.cuda_graphs.modules=[moe_router,moe_preprocess] \
    model.blocks.moe.capacity_factor=1.5
    feature.cuda_graphs.impl=transformer_engine feature.cuda_graphs.modules=[moe,attn] model.blocks.moe.capacity_factor=1.5 \
    feature.mtp.depths=1
    feature.cuda_graphs.impl=transformer_engine
    feature.mtp.depths=2
    feature.yarn.factor=4.0 feature.yarn.original_length=2048 feature.yarn.mscale=0.7
    feature.llama_rope.factor=8.0
    parallel.pipeline=4 parallel.virtual_pipeline=2
    parallel.virtual_pipeline=2
    parallel.pipeline=64
    parallel.context=2 parallel.pipeline=2
    model.pattern=AEME|AEME|AEMR|AE model.depth=14 parallel.pipeline=4
    model.pattern=AEME|AEME|AEMR|AE model.depth=14 parallel.pipeline=2
    model.pattern=AEME|AEME|AEMR|AE
    model.pattern=AEME||AE
    model.pattern=AEMEAEMR model.depth=6
    model.pattern=AEMEAEMR model.depth=8
    model.pattern=AEMR model.depth=6
    model.pattern=ADGX
    model.pattern=EM feature.mtp.depths=1
    model.pattern=EM
    model.pattern=EM feature.llama_rope.factor=8.0
    model.pattern=EM feature.yarn.factor=8.0
    model.pattern=M
    model.pattern=A model.letters.A=mla
    model.letters.E=attention
    model.letters.A=null
    model.letters.R=gdn model.pattern=AEM
    lane.blocks.R=gdn model.pattern=AEM
    lane.blocks.M=mamba3 lane.name=mine
    lane.blocks.M=null lane.blocks.R=null lane.name=mine
    lane.blocks.R=gdn lane.name=mine
    model.substitute=[{letter: A, ranks: [0, 13, 0], kind: moe}]
    model.substitute=[{letter: E, ranks: [0, 2], kind: mlp}]
    model.substitute=[{letter: A, ranks: [1], kind: mla}]
    model.blocks.mamba3.heads=4
    model.blocks.gdn.key_heads=4
    feature.mtp.loss_weight=0.2
    feature.muon.momentum=0.9
    model.rotary_base=1000 model.blocks.attention.position_embedding=none
    model.depth=52.5 parallel.tensor=true optim.lr=x schedule.seed=-1 model.substitute=3 model.normalization=RMSnorm data.path=--x
    preset.name=../x device.capability=[9,0,1] model.blocks.mla=3
    device.capability=[9] schedule.seed=99999999999999999999
    assumptions={mine: {key: model.hiden, value: 3, why: so}}
    cluster.nodes=2 cluster.gpus_per_node=4 parallel.tensor=4 parallel.sequence=true
    """,
    DESIGN: """
    model.substitute=[{letter: A, ranks: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], kind: dsa}] feature.mtp.depths=0
    model.blocks.mla.kernels=megatron model.blocks.dsa.kernels=megatron schedule.micro_batch_size=1 parallel.pipeline=2
    model.blocks.mla.kernels=megatron model.blocks.dsa.kernels=megatron feature.recompute.granularity=selective \
    feature.recompute.modules=[core_attn,mla_up_proj]
    model.blocks.mla.kernels=naive model.blocks.dsa.kernels=naive
    model.blocks.mla.kernels=naive model.blocks.dsa.kernels=naive feature.recompute.granularity=selective \
    feature.recompute.modules=[core_attn,mla_up_proj]
    model.blocks.dsa.kernels=megatron model.blocks.dsa.indexer_loss_coeff=0.0 model.blocks.dsa.full_every=1 \
    feature.distributed_optimizer.overlap_grad_reduce=false feature.distributed_optimizer.overlap_param_gather=false
    model.blocks.dsa.indexer_loss_coeff=0.0 model.blocks.dsa.full_every=1 feature.mtp.depths=0 \
    feature.distributed_optimizer.overlap_grad_reduce=false feature.distributed_optimizer.overlap_param_gather=false
    model.blocks.mla.latent_norm=false
    model.blocks.mla.v_head_dim=128 model.blocks.mla.qk_head_dim=128 model.substitute=[]
    model.blocks.mla.kv_lora_rank=512 model.blocks.mla.q_lora_rank=1536 model.substitute=[]
    model.substitute=[] model.blocks.mla.kernels=megatron model.blocks.mla.q_lora_rank=null model.blocks.mla.latent_norm=false
    model.substitute=[] feature.yarn.factor=4.0
    model.substitute=[] feature.yarn.factor=4.0 feature.yarn.beta_fast=40.0
    model.blocks.mamba3.recompute=in_proj
    model.blocks.mamba3.kernels=naive model.blocks.m2rnn.kernels=naive
    model.blocks.mamba3.mimo_rank=1 model.blocks.m2rnn.gradient_clip=0.5
    model.blocks.m2rnn.padded_projection=true
    model.blocks.m2rnn.padded_projection=true precision.fused_grad_accumulation=true parallel.tensor=2 parallel.sequence=true
    feature.recompute.granularity=selective feature.recompute.modules=[core_attn,mla_up_proj,mlp]
    feature.recompute.granularity=full feature.recompute.method=block feature.recompute.layers=7 parallel.pipeline=2
    feature.recompute.granularity=full feature.recompute.method=uniform feature.recompute.layers=1 model.blocks.dsa.kernels=naive
    feature.recompute.granularity=full feature.recompute.method=uniform feature.recompute.layers=1 model.blocks.dsa.kernels=megatron
    feature.recompute.granularity=full feature.recompute.method=uniform feature.recompute.layers=3 model.blocks.dsa.full_every=2
    feature.cuda_graphs.impl=local feature.cuda_graphs.modules=[attn]
    feature.cuda_graphs.impl=transformer_engine feature.cuda_graphs.modules=[attn]
    feature.cuda_graphs.impl=transformer_engine feature.cuda_graphs.modules=[attn] model.blocks.dsa.kernels=megatron
    parallel.pipeline=2 parallel.virtual_pipeline=2
    parallel.pipeline=26
    model.substitute=[{letter: A, ranks: [1, 2, 3, 4, 5, 7, 8], kind: dsa}]
    model.substitute=[{letter: A, ranks: [0, 1, 4, 5, 6], kind: dsa}]
    model.pattern=AEMEAEM|EAEMR model.depth=12 parallel.pipeline=2 model.substitute=[{letter: A, ranks: [1, 2], kind: dsa}]
    model.pattern=AEMEA|EMEAEMR model.depth=12 parallel.pipeline=2 model.substitute=[{letter: A, ranks: [1, 2], kind: dsa}]
    model.norm_epsilon=0.000001 model.attention_dropout=0.1
    parallel.tensor=2 parallel.sequence=true lane.name=nemo_native
    precision.cross_entropy=compiled feature.mtp.depths=2
    feature.muon.enabled=true optim.name=muon
    feature.ngram_hash.enabled=true feature.ngram_hash.buckets=1000 feature.mtp.depths=0
    """,
    DELTA: """
    feature.recompute.granularity=full feature.recompute.method=uniform feature.recompute.layers=2
    model.blocks.gdn.conv_width=2 model.linear_bias=true
    """,
    FP8: """
    feature.fp8.first_last_bf16=true feature.fp8.bf16_layers_at_start=2 feature.fp8.bf16_layers_at_end=3 feature.mtp.depths=1
    feature.fp8.first_last_bf16=true parallel.pipeline=2
    feature.fp8.bf16_layers_at_start=2
    feature.fp8.recipe=delayed feature.fp8.format=e4m3
    feature.fp8.param_gather=true
    feature.recompute.granularity=selective feature.recompute.modules=[layernorm]
    model.letters.E=mlp
    """,
}  # fmt: skip


def cases() -> Iterator[tuple[str, dict]]:
    yield from ((base, {}) for base in (NATIVE, DESIGN, DELTA, FP8))
    for base, stands, key, value in NEIGHBOURS:
        yield base, stands
        if value is not None:
            yield base, {k: v for k, v in stands.items() if k != key} | ({} if value is ... else {key: value})
    yield from ((base, changes) for base, changes, *_ in REFUSALS)
    for base, table in MORE.items():
        for line in table.strip().splitlines():
            yield (
                base,
                {key: yaml.safe_load(value) for key, value in re.findall(r"(\S+?)=(.+?)(?=\s+[\w.]+=|\s*$)", line)},
            )


def lines(lowering: Lowering) -> Iterator[str]:
    """All that is told of a plan, and all that Megatron must hold."""
    yield from report.plan_text(lowering).splitlines()
    plan = json.loads(argv.plan_json(lowering))
    yield from (
        f"plan.json {key}: {json.dumps(plan[key])}"
        for key in plan
        if key not in ("recipe", "settings", "argv", "layers")
    )
    yield from (f"layer {json.dumps(layer)}" for layer in plan["layers"])
    for s in lowering.settings:
        yield f"{s.owner} {s.name} = {s.value!r} @ {s.key} beside {s.place}, fields {s.fields}, executes {s.executes}: {s.why}"
    yield from (" ".join(line.split()) for line in text.golden(lowering).splitlines())
    yield from held(lowering)


def held(lowering: Lowering) -> Iterator[str]:
    """What a stage holds at moments that are not its worst, too: the tables above have those alone."""
    z = Sizes.of(lowering.plan)
    for stage in static.stages(lowering.plan):
        for line in static.lines(z, stage, static.groups(z, stage)):
            if line.since in ("build", "stepping"):
                yield f"{line.since}: {line.owner} {line.name} {line.bytes} = {line.formula}, {line.place} {line.mark}: {line.why}"
        for part in chain(*memory._Moving(z, stage, graphs=False).chunks):
            for event, lines in part.events:  # of layers of a kind those that differ
                what = re.sub(r" \d+", "", event)
                marks = "".join(dict.fromkeys(f" {line.mark}" for line in lines if line.mark))
                yield f"{what}: {sum(line.bytes for line in lines)} in {len(lines)} lines{marks}"


@cache
def told(base: str) -> frozenset[str]:
    return frozenset(lines(translate(changed(base, {}))))


OTHERS = {
    "sweep",
    "fit",
    "batch",
    "context",
    "feature",
    "assumptions.mine.key",
    "assumptions.a.key",
}  # a command's; a name's


def problems(found: Iterable[Problem]) -> Iterator[str]:
    """Each with its key and its hint; a key is one of a recipe or a word of a command, and a hint is neither."""
    for p in found:
        *parents, last = re.sub(r"\[\d+\]", "", p.key or "model.depth").split(".")
        assert p.key is None or last in keys_at(parents) or p.key in OTHERS, p
        assert p.hint is None or " " in p.hint or "=" in p.hint or "`" in p.hint, p
        yield f"refused: {p.message} @ {p.key}" + (f" ({p.place})" if p.place else "")
        yield f"    {p.hint}"


def said(base: str, changes: dict) -> Iterator[str]:
    yield " ".join(["==", base, *(f"{key}={value}" for key, value in changes.items())])
    try:
        now = lines(translate(changed(base, changes)))
    except Refused as refused:
        yield from problems(refused.problems)
    else:
        before = told(base) if changes else told(NATIVE) if base != NATIVE else ()
        yield from (line for line in dict.fromkeys(now) if line not in before)


# What is refused before or beside translating: what was asked -> what asks it.
def stored(preset: str, key: str, value: object = None) -> Callable[[], object]:
    """A stored recipe with another value at `key`; without it where there is none."""

    def ask() -> object:
        tree = to_tree(lowered(preset).plan.recipe)
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        if value is None:
            del node[last]
        else:
            node[last] = value
        return from_tree(tree)

    return ask


OFF = written(NATIVE)["feature"]["muon"]
ASKED: dict[str, Callable[[], object]] = {
    "stored without model.blocks.moe": stored(NATIVE, "model.blocks.moe"),
    "stored without model.blocks.mlp": stored(DESIGN, "model.blocks.mlp"),
    "stored without optim.min_lr": stored(NATIVE, "optim.min_lr"),
    "stored without model.depth": stored(NATIVE, "model.depth"),
    "stored with mamba3": stored(NATIVE, "model.blocks.mamba3", written(NATIVE)["model"]["blocks"]["mamba3"]),
    "stored with a feature that is off": stored(NATIVE, "feature.muon", {k: v for k, v in OFF.items() if k != "tp_mode"}),
    "stored with a key that nothing reads": stored(NATIVE, "optim.wsd_steps", 3),
    "stored with a wrong assumption": stored(NATIVE, "assumptions", {"a": {"key": "model.wide", "value": 1, "why": "b"}}),
    "stored with a key of no kind": stored(NATIVE, "model.blocks.moe.toes", 1),
    "stored with half of a kind": stored(NATIVE, "model.blocks.mla", {"kernels": "fused"}),
    "stored with no key": stored(NATIVE, "assumptions", {3: {"key": "model.depth", "value": 1, "why": "b"}}),
    **{f"loaded {' '.join(words)}": partial(load, NATIVE, words) for words in (
        ("feature=fp8",), ("lane.tensor=2",), ("lane.blocks.M=mamba3",), ("lane.sequence=true",), ("model.depth=${oc.env:HOME}",),
        ("model.depth=${nope}",), ("~model.depth",), ("model.blocks.mamba3.heads=4",), ("feature.muon.momentum=0.9",),
    )},
    **{f"sweep {text}": partial(search.values, text) for text in ("depth:1", "depth:1:x", "depth:3:2", "depth:1:9:0", "depth:1:20001:2")},
    **{f"search {name}": partial(search.resolve, lowered(NATIVE).plan.recipe, name, "fit") for name in ("heads", "hidden_sze", "no")},
    **{f"serving {batch} {context}": partial(serving.serve, lowered(NATIVE).plan, batch, context)
       for batch, context in ((0, 1), (1, 0), (1, 4097), (1, 4096))},
    "a plan that is no JSON": partial(argv.parse_plan, "{", "p"),
    "a plan that is a list": partial(argv.parse_plan, "[]", "p"),
    "a plan without a recipe": partial(argv.parse_plan, "{}", "p"),
    "a plan that cannot be": lambda: argv.parse_plan('{"recipe": {}}', "p"),
    "no plan": partial(argv.load_plan, "/nope/plan.json"),
}  # fmt: skip


def refusal(name: str, ask: Callable[[], object]) -> Iterator[str]:
    yield f"== {name}"
    try:
        yield f"stands: {type(ask()).__name__}"
    except Refused as refused:
        yield from problems(refused.problems)


def test_what_is_said_is_as_reviewed(rewrite_golden):
    """Case by case: the first that differs ends it."""
    seen = {" ".join([base, *map(str, changes.items())]): partial(said, base, changes) for base, changes in cases()}
    asked = [*seen.values(), *(partial(refusal, name, ask) for name, ask in ASKED.items())]
    if rewrite_golden:
        GOLDEN.write_text("".join(f"{line}\n" for case in asked for line in case()))
    reviewed = iter(GOLDEN.read_text().splitlines())
    for case in asked:
        now = list(case())
        differ = ((said, wanted) for said, wanted in zip_longest(now, islice(reviewed, len(now))) if said != wanted)
        assert next(differ, None) is None  # lists of hundreds of lines would take pytest minutes to compare
    assert list(reviewed) == []
