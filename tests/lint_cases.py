"""One launch for every rule of lint: a clean one, and what must change in it for the rule to speak."""


def words(flags: dict) -> list[str]:
    """Flags as a launch has them; one of None is left out."""
    return [
        w
        for flag, value in flags.items()
        if value is not None
        for w in ([flag] if value is True else [flag, *value.split()])
    ]


GPT = dict.fromkeys(("--bf16", "--swiglu", "--disable-bias-linear", "--mock-data"), True) | {
    "--num-layers": "8", "--hidden-size": "1024", "--ffn-hidden-size": "4096", "--num-attention-heads": "16", "--seq-length": "1024",
    "--max-position-embeddings": "1024", "--micro-batch-size": "4", "--global-batch-size": "64", "--train-iters": "10", "--lr": "1e-4",
    "--adam-beta2": "0.95", "--normalization": "RMSNorm", "--position-embedding-type": "rope", "--hidden-dropout": "0",
    "--attention-dropout": "0", "--tokenizer-type": "NullTokenizer", "--vocab-size": "32000",
}  # fmt: skip
SCALE = "--moe-router-topk-scaling-factor"
RUN = GPT | {"--mock-data": None, "--train-iters": "2000"}
HYBRID = {k: v for k, v in GPT.items() if k != "--num-layers"} | {
    "--hybrid-layer-pattern": "M-M*-M",
    "--mamba-num-heads": "32",
}
EXPERTS = {
    "--num-experts": "8", "--moe-router-topk": "2", "--moe-ffn-hidden-size": "1024", "--moe-router-score-function": "sigmoid",
    "--moe-aux-loss-coeff": "1e-3", "--moe-token-dispatcher-type": "alltoall", "--moe-grouped-gemm": True,
}  # fmt: skip
MOE = GPT | EXPERTS
LATENT = {
    "--multi-latent-attention": True, "--q-lora-rank": "64", "--kv-lora-rank": "64", "--qk-head-dim": "64", "--qk-pos-emb-head-dim": "64",
    "--v-head-dim": "64", "--qk-layernorm": True, "--rope-type": "rope", "--no-rope-fusion": True,
}  # fmt: skip
MLA = GPT | LATENT
SPARSE = {
    "--dsa-indexer-n-heads": "16", "--dsa-indexer-head-dim": "64", "--dsa-indexer-topk": "256", "--dsa-indexer-loss-coeff": "0.001",
    "--no-dsa-indexer-rotate-activation": True,
}  # fmt: skip
DSA = {k: v for k, v in HYBRID.items()} | LATENT | SPARSE | {"--hybrid-layer-pattern": "DMDM+-"}
CAPTURED = {"--cuda-graph-impl": "transformer_engine", "--cuda-graph-modules": "attn"}
LINEAR = {
    "--experimental-attention-variant": "gated_delta_net", "--linear-attention-freq": "4", "--linear-conv-kernel-dim": "4",
    "--linear-key-head-dim": "64", "--linear-value-head-dim": "64", "--linear-num-key-heads": "4", "--linear-num-value-heads": "4",
}  # fmt: skip
FSDP = GPT | {"--use-megatron-fsdp": True, "--use-distributed-optimizer": True, "--ckpt-format": "fsdp_dtensor"}
SHARDED = {"--data-parallel-sharding-strategy": "optim_grads_params"}
TP2 = {"--tensor-model-parallel-size": "2", "--sequence-parallel": True}
ONE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

EP8 = {"--expert-model-parallel-size": "8"}
OVERLAP = {"--overlap-moe-expert-parallel-comm": True}
FULL = {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1"}
AHEAD = HYBRID | FULL | {"--hybrid-layer-pattern": "M-M*-M/*-"}

# rule -> (a clean launch, what changes in it, the environment). A value of None takes the flag away.
CASES = {
    "activations": (GPT, {"--squared-relu": True}),
    "attention-without-positions": (HYBRID, LATENT),
    "inference-layers": (GPT, {"--transformer-impl": "inference_optimized", "--normalization": "LayerNorm"}),
    "rmsnorm-fusion": (GPT | {"--normalization": "LayerNorm"}, {"--fused-residual-rmsnorm": True}),
    "no-position-embedding": (GPT | {"--position-embedding-type": "learned_absolute"}, {"--no-position-embedding": True}),
    "batch": (GPT, {"--global-batch-size": "36"}),
    "checkpoint-format": (GPT, {"--ckpt-format": "fsdp_dtensor"}),
    "companion": (GPT, {"--tp-comm-overlap": True}),
    "companion-later": (GPT | {"--calculate-per-token-loss": True}, {"--ddp-average-in-collective": True}),
    "idle-flag": (GPT, {"--lr-wsd-decay-iters": "3"}),
    "context-attention": (DSA, {"--context-parallel-size": "2", "--cp-comm-type": "allgather"}, ONE),
    "connections-fsdp": (FSDP, {}, ONE),
    "connections-leftover": (GPT | {"--overlap-grad-reduce": True}, {}, ONE),
    "connections-not-one": (GPT, TP2, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
    "cpu-offloading": (GPT, {"--cpu-offloading-num-layers": "2", "--recompute-activations": True}),
    "data-sources": (GPT, {"--data-path": "a", "--split": "1,0,0"}),
    "default-activation": (GPT, {"--swiglu": None}),
    "default-balancing": (MOE, {"--moe-aux-loss-coeff": None}),
    "default-beta2": (RUN, {"--adam-beta2": None}),
    "default-bias": (GPT, {"--disable-bias-linear": None}),
    "default-expert-scale": (MOE | {"--moe-router-group-topk": "2", "--moe-router-num-groups": "4", SCALE: "2.5"}, {SCALE: None}),
    "default-dispatcher": (MOE | TP2, {"--moe-token-dispatcher-type": None}, ONE),
    "default-dropout": (RUN, {"--hidden-dropout": None}),
    "default-expert-tensor": (MOE, TP2, ONE),
    "default-kv-lora-rank": (MLA, {"--kv-lora-rank": None}),
    "default-latent-norm": (MLA, {"--qk-layernorm": None}),
    "default-normalization": (GPT, {"--normalization": None}),
    "default-ffn": (GPT, {"--ffn-hidden-size": None}),
    "default-top-k": (MOE, {"--moe-router-topk": None}),
    "default-yarn-scale": (MLA, {"--rope-type": "yarn", "--rotary-scaling-factor": "40"}),
    "default-positions": (GPT, {"--position-embedding-type": None}),
    "default-rope-type": (MLA, {"--rope-type": None}),
    "default-router-scores": (MOE | {"--moe-shared-expert-intermediate-size": "1024"}, {"--moe-router-score-function": None}),
    "deterministic": (GPT, {"--deterministic-mode": True, "--cross-entropy-loss-fusion": True}),
    "dsa-bias": (DSA, {"--disable-bias-linear": None}),
    "dsa-context": (DSA, {"--context-parallel-size": "2"}, ONE),
    "dsa-context-loss": (DSA, {"--context-parallel-size": "2", "--cp-comm-type": "all_gather", "--dsa-indexer-loss-coeff": "0.01"}, ONE),
    "dsa-fsdp-recompute": (DSA, {"--use-megatron-fsdp": True, "--use-distributed-optimizer": True, "--ckpt-format": "fsdp_dtensor",
                                 "--data-parallel-sharding-strategy": "optim_grads_params", "--recompute-granularity": "selective",
                                 "--recompute-modules": "mla_up_proj"}),
    "dsa-flags-ignored": (MLA, {"--dsa-indexer-topk": "64"}),
    "dsa-kernel-declines": (DSA, {"--dsa-kernel-backend": "cudnn"}),
    "dsa-latent-norm": (DSA, {"--q-lora-rank": None}),
    "dsa-reuse-cut": (DSA, {"--dsa-indexer-topk-freq": "4", "--dsa-indexer-skip-topk-offset": "1",
                            "--pipeline-model-parallel-size": "2", "--hybrid-layer-pattern": "DM|DM+-"}),
    "dsa-reuse-mask": (DSA, {"--dsa-indexer-topk-freq": "4", "--dsa-indexer-skip-topk-offset": "1",
                             "--no-create-attention-mask-in-dataloader": True}),
    "dsa-reuse-recompute": (DSA, {"--dsa-indexer-topk-freq": "4", "--dsa-indexer-skip-topk-offset": "1", "--recompute-granularity": "full",
                                  "--recompute-method": "uniform", "--recompute-num-layers": "2"}),
    "dsa-reuse-source": (DSA, {"--dsa-indexer-topk-freq": "4", "--hybrid-layer-pattern": "MDMD+-"}),
    "dsa-rope-fusion": (DSA, {"--no-rope-fusion": None}),
    "dsa-rotate": (DSA, {"--no-dsa-indexer-rotate-activation": None}),
    "graphs-recomputed-attention": (GPT | CAPTURED, {"--recompute-granularity": "selective", "--recompute-modules": "core_attn"}),
    "graphs-recomputed-dropout": (
        GPT | CAPTURED | {"--cuda-graph-modules": "mlp", "--hidden-dropout": "0.1"},
        {"--recompute-granularity": "selective", "--recompute-modules": "mlp"}),
    "sinks-without-kernel": (GPT, {"--softmax-type": "off-by-one", "--attention-backend": "flash"}),
    "sinks-uncounted": (GPT | TP2, {"--softmax-type": "learnable"}, ONE),
    "gdn-sequence": (GPT | LINEAR, {"--tensor-model-parallel-size": "2"}, ONE),
    "mla-sequence": (MLA | {"--transformer-impl": "local"}, {"--tensor-model-parallel-size": "2"}, ONE),
    "yarn-share": (GPT | {"--position-embedding-type": "yarn"}, {"--rotary-percent": "0.5"}),
    "window-mtp": (GPT | {"--window-size": "128,0", "--window-attn-skip-freq": "2"}, {"--mtp-num-layers": "1"}),
    "moe-groups-uneven": (MOE | {"--moe-router-num-groups": "4"}, {"--moe-router-group-topk": "3"}),
    "dsa-sequence": (DSA, {"--tensor-model-parallel-size": "2"}, ONE),
    "dsa-stage-without-indexer": (DSA, {"--hybrid-layer-pattern": "DMDM|M+-M", "--pipeline-model-parallel-size": "2"}),
    "dsa-untrained-indexer": (DSA, {"--dsa-indexer-loss-coeff": None}),
    "dsa-untrained-overlap": (DSA | {"--overlap-grad-reduce": True}, {"--dsa-indexer-loss-coeff": "0.0"}),
    "dsa-without-mla": (GPT, SPARSE | {"--experimental-attention-variant": "dsa", "--no-rope-fusion": True}),
    "experts-not-in-pattern": (HYBRID, EXPERTS),
    "fp32": (GPT, {"--bf16": None}),
    "fp8-and-fp4": (GPT, {"--fp8-format": "hybrid", "--fp4-format": "e2m1"}),
    "fp8-delayed-edges": (GPT, {"--fp8-format": "hybrid", "--first-last-layers-bf16": True}),
    "fp8-delayed-recompute": (GPT, {"--fp8-format": "hybrid", "--recompute-granularity": "selective", "--recompute-modules": "layernorm"}),
    "fp8-edges": (GPT, {"--fp8-format": "hybrid", "--fp8-recipe": "tensorwise", "--first-last-layers-bf16": True,
                        "--num-layers-at-end-in-bf16": "9"}),
    "fp8-flags-ignored": (GPT, {"--fp8-recipe": "tensorwise"}),
    "fp8-gather": (GPT, {"--fp8-format": "hybrid", "--fp8-param-gather": True}),
    "fp8-gather-without-fp8": (GPT, {"--fp8-param-gather": True, "--use-distributed-optimizer": True}),
    "fp8-mamba-width": (HYBRID, {"--fp8-format": "hybrid", "--mamba-num-heads": "24"}),
    "fsdp-checkpoints": (FSDP, {"--ckpt-format": "torch_dist"}),
    "fsdp-optimizer": (GPT, {"--use-torch-fsdp2": True, "--no-gradient-accumulation-fusion": True, "--optimizer": "lion",
                             "--untie-embeddings-and-output-weights": True}),
    "fsdp-tensor": (FSDP, TP2),
    "fsdp2": (GPT, {"--use-torch-fsdp2": True, "--no-gradient-accumulation-fusion": True}),
    "fused-cross-entropy-te": (GPT, {"--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": "te"}),
    "gpt-only": (HYBRID, {"--cpu-offloading-num-layers": "2"}),
    "gqa-ignored": (GPT, {"--num-query-groups": "4"}),
    "gqa-one-group": (GPT, {"--group-query-attention": True}),
    "graphs-allocator": (GPT, {"--cuda-graph-impl": "transformer_engine", "--cuda-graph-modules": "attn"},
                         {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "flex-ignored": (MOE, {"--moe-flex-dispatcher-backend": "hybridep"}),
    "graphs-ignored": (GPT, {"--cuda-graph-modules": "attn"}),
    "graphs-modules": (MOE, {"--cuda-graph-impl": "transformer_engine", "--cuda-graph-modules": "moe_preprocess"}),
    "graphs-twice": (GPT, {"--cuda-graph-impl": "local", "--external-cuda-graph": True}),
    "hybrid-positions": (HYBRID, {"--position-embedding-type": "relative"}),
    "hybrid-rope-scaling": (HYBRID, {"--use-rope-scaling": True}),
    "ignored-flag": (GPT, {"--apply-residual-connection-post-layernorm": True}),
    "indivisible": (GPT, TP2 | {"--num-attention-heads": "15", "--kv-channels": "64"}, ONE),
    "iterations-and-samples": (GPT, {"--lr-warmup-samples": "100"}),
    "layer-frequency": (MOE, {"--moe-layer-freq": "([0]*3+[1]*6)"}),
    "learning-rates": (GPT, {"--min-lr": "1e-3"}),
    "missing-flag": (GPT, {"--micro-batch-size": None}),
    "mixed-attention": (MLA, {"--num-layers": None, "--hybrid-layer-pattern": "*-+-"}),
    "not-the-card": (GPT | {"--save": "runs/mini-7b", "--save-interval": "5"}, {"--save": "runs/llama2_7b", "--hidden-size": "4096",
                     "--num-attention-heads": "32", "--ffn-hidden-size": "11000", "--untie-embeddings-and-output-weights": True}),
    "rope-columns": (GPT, {"--rotary-percent": "1.5"}),
    "width-alignment": (GPT, {"--ffn-hidden-size": "4097"}),
    "rampup-ignored": (GPT, {"--rampup-batch-size": "16 16 1000"}),
    "batch-schedule-steps": (GPT, {"--global-batch-size": None, "--step-batch-size-schedule": "0:16,1M:32"}),
    "mla-flags-ignored": (GPT, {"--kv-lora-rank": "64"}),
    "mla-no-latent-norm": (MLA, {"--qk-layernorm": None, "--wandb-project": "deepseek-v3"}),
    "mla-query-norm": (MLA, {"--q-lora-rank": None}),
    "mla-refuses": (MLA, {"--group-query-attention": True, "--num-query-groups": "4"}),
    "mla-rope-fusion": (MLA, {"--no-rope-fusion": None}),
    "mla-rope-type": (GPT, {"--rope-type": "yarn"}),
    "yarn-flags-ignored": (MLA, {"--rope-type": "yarn", "--rotary-scaling-factor": "32", "--yarn-beta-fast": "1"}),
    "rope-scaling-factor": (GPT, {"--use-rope-scaling": True, "--rope-scaling-factor": "32"}),
    "rope-scaling-of-yarn": (GPT, {"--use-rope-scaling": True, "--rotary-scaling-factor": "32.0"}),
    "rope-share-odd": (GPT, {"--rotary-percent": "0.3"}),
    "mla-yarn-fusion-heads": (MLA, {"--no-rope-fusion": None, "--rope-type": "yarn", "--num-attention-heads": "24",
                                    "--hidden-size": "1536"}),
    "fsdp-pipeline": (FSDP, {"--pipeline-model-parallel-size": "2"}),
    "checkpoint-shifted": (GPT | {"--use-distributed-optimizer": True, "--overlap-grad-reduce": True},
                           {"--dist-ckpt-optim-fully-reshardable": True, "--save": "out", "--save-interval": "9"}),
    "fsdp-lone-experts": (FSDP | EXPERTS | SHARDED, {"--expert-model-parallel-size": "8"}),
    "fsdp-indexer": (DSA | {k: v for k, v in (FSDP | SHARDED).items() if k not in GPT}, TP2 | {"--no-gradient-accumulation-fusion": True}),
    "moe-balancing-lists": (MOE, {"--moe-router-load-balancing-type": "aux_loss global_aux_loss"}),
    "moe-bias": (MOE, TP2 | {"--disable-bias-linear": None, "--expert-tensor-parallel-size": "2"}, ONE),
    "moe-expert-bias": (MOE, {"--moe-router-enable-expert-bias": True, "--moe-router-score-function": "softmax"}),
    "moe-expert-parallel": (GPT, {"--expert-model-parallel-size": "2"}),
    "moe-flags-ignored": (GPT, {"--moe-router-topk": "4"}),
    "moe-forced-balancing": (MOE | {"--mock-data": None, "--data-path": "a"}, {"--moe-router-force-load-balancing": True}),
    "moe-groups": (MOE, {"--moe-router-group-topk": "2"}),
    "moe-layer-freq-ignored": (HYBRID, {"--hybrid-layer-pattern": "MEM*", "--moe-layer-freq": "2"} | EXPERTS),
    "moe-no-balancing": (MOE, {"--moe-aux-loss-coeff": None, "--moe-router-load-balancing-type": "aux_loss"}),
    "moe-stage-without-experts": (HYBRID, {"--hybrid-layer-pattern": "MEM*|M-M", "--pipeline-model-parallel-size": "2"} | EXPERTS),
    "moe-padding": (MOE, {"--moe-pad-expert-input-to-capacity": True}),
    "moe-sequence": (MOE, {"--tensor-model-parallel-size": "2", "--expert-tensor-parallel-size": "1"}, ONE),
    "moe-sequential": (MOE, {"--moe-grouped-gemm": None}),
    "moe-shared-overlap": (MOE, {"--moe-shared-expert-intermediate-size": "512", "--moe-shared-expert-overlap": True,
                                 "--moe-token-dispatcher-type": "allgather"}),
    "moe-top-1": (MOE, {"--moe-router-topk": "1", "--moe-router-score-function": "softmax"}),
    "moe-top-k": (MOE, {"--moe-router-topk": "9"}),
    "moe-width-without-experts": (GPT, {"--moe-ffn-hidden-size": "64"}),
    "mtp-depths": (HYBRID, {"--hybrid-layer-pattern": "M-*-/*-", "--mtp-num-layers": "2"}),
    "mtp-positions": (HYBRID, {"--hybrid-layer-pattern": "M-*-/*-", "--position-embedding-type": "learned_absolute"}),
    "mtp-unequal": (HYBRID, {"--hybrid-layer-pattern": "M-*-/*-/**"}),
    "mtp-without-pattern": (HYBRID, {"--mtp-num-layers": "1"}),
    "moe-grouped-bias": (MOE, {"--disable-bias-linear": None}),
    "dropout-range": (GPT, {"--hidden-dropout": "1.5"}),
    "yarn-sequence": (GPT | {"--position-embedding-type": "yarn", "--rotary-scaling-factor": "4"},
                      {"--yarn-original-max-position-embeddings": "128"}),
    "not-positive": (GPT, {"--context-parallel-size": "0"}),
    "num-layers-ignored": (HYBRID, {"--num-layers": "8"}),
    "overlap-param-gather": (GPT, {"--overlap-param-gather": True}),
    "pattern-symbol": (HYBRID, {"--hybrid-layer-pattern": "AEM"}),
    "pattern-without-experts": (HYBRID, {"--hybrid-layer-pattern": "MEM*"}),
    "pipeline-auto-split": (HYBRID, {"--pipeline-model-parallel-size": "2"}),
    "pipeline-flags": (HYBRID, {"--pipeline-model-parallel-size": "2", "--hybrid-layer-pattern": "M-|*-",
                                "--decoder-first-pipeline-num-layers": "1"}),
    "pipeline-split": (HYBRID, {"--hybrid-layer-pattern": "M-|*-"}),
    "mtp-loss-weight": (HYBRID | {"--hybrid-layer-pattern": "M-*-/*-"}, {"--mtp-loss-scaling-factor": "10"}),
    "padded-vocab-short": (GPT, {"--padded-vocab-size": "31936"}),
    "window-size": (GPT, {"--window-size": "128"}),
    "positions-short": (GPT, {"--max-position-embeddings": "512"}),
    "recompute": (GPT, {"--recompute-granularity": "full", "--recompute-method": "uniform"}),
    "recompute-mtp": (AHEAD, {"--recompute-num-layers": "2"}),
    "recompute-mtp-block": (AHEAD, {"--recompute-method": "block"}),
    "recompute-ignored": (GPT, {"--recompute-modules": "mlp"}),
    "rope-flags-ignored": (GPT, {"--position-embedding-type": "none", "--rotary-base": "500000"}),
    "rope-scales-softmax": (MLA, {"--rotary-scaling-factor": "40", "--mscale-all-dim": "1.0"}),
    "save-interval": (GPT, {"--save": "out"}),
    "sequence-parallel-off": (GPT, {"--sequence-parallel": True}),
    "spec-not-stock": (HYBRID, {"--spec": "no.such module"}),
    "spec-words": (HYBRID, {"--spec": "local"}),
    "squared-relu-fusion": (GPT, {"--swiglu": None, "--squared-relu": True, "--disable-bias-linear": None}),
    "two-patterns": (HYBRID, {"--hybrid-override-pattern": "M-M*-M"}),
    "two-precisions": (GPT, {"--fp16": True}),
    "conflict": (GPT, {"--use-distributed-optimizer": True, "--use-precision-aware-optimizer": True, "--optimizer": "sgd"}),
    "documents-not-apart": (GPT, {"--reset-attention-mask": True}),
    "fsdp-hybridep": (FSDP | EXPERTS | SHARDED | {"--expert-model-parallel-size": "2"},
                      {"--moe-token-dispatcher-type": "flex", "--moe-flex-dispatcher-backend": "hybridep"}),
    "graphs-experts": (MOE | EP8, {"--cuda-graph-impl": "transformer_engine", "--cuda-graph-modules": "moe_router"}),
    "graphs-overlap": (MOE | EP8 | OVERLAP, {"--cuda-graph-impl": "transformer_engine", "--cuda-graph-modules": "attn"}),
    "moe-mtp-metrics": (HYBRID | EXPERTS | {"--hybrid-layer-pattern": "*E*E/E*"}, {"--hybrid-layer-pattern": "*E*E/*E"}),
    "moe-probs-on-input": (MOE, {"--moe-apply-probs-on-input": True}),
    "offload-resume": (RUN | {"--use-distributed-optimizer": True, "--use-precision-aware-optimizer": True,
                              "--optimizer-cpu-offload": True}, {"--load": "there"}),
    "resume-learning-rate": (GPT | {"--load": "there"}, {"--override-opt_param-scheduler": True}),
    "schedule": (GPT, {"--lr-decay-style": "WSD"}),
    "schedule-apart": (GPT | {"--train-iters": "100000"}, {"--lr-decay-iters": "10000"}),
    "restart-anew": (RUN | {"--save": "there", "--save-interval": "3", "--load": "there"}, {"--finetune": True}),
    "restart-strict": (GPT | {"--save": "there", "--save-interval": "3", "--load": "there"}, {"--dist-ckpt-strictness": "raise_all"}),
    "moe-no-capacity": (MOE, {"--moe-expert-capacity-factor": "0"}),
    "default-expert-ffn": (MOE | {"--num-experts": "64", "--moe-layer-freq": "2"}, {"--moe-ffn-hidden-size": None}),
    "wsd-too-long": (GPT, {"--lr-decay-style": "WSD", "--lr-wsd-decay-iters": "100000"}),
    "wrong-chip": (GPT | {"--fp8-format": "e4m3", "--wandb-exp-name": "h100-run"}, {"--fp8-recipe": "mxfp8"}),
    "unlikely-value": (GPT, {"--init-method-std": "0.2"}),
    "world-size": (GPT, {"--pipeline-model-parallel-size": "3", "--num-layers": "9"}),
}  # fmt: skip
# Of a conflict: its argument and what stands beside it -> a launch that has the one, and what brings the other.
OVERLAPPED = MOE | EP8 | OVERLAP
DELAYED = {"--overlap-dispatch-backward-with-experts-wgrad": True}
TWO_STAGES = GPT | {"--pipeline-model-parallel-size": "2"}
VIRTUAL = TWO_STAGES | {"--num-layers-per-virtual-pipeline-stage": "2"}
RANKED = TWO_STAGES | {"--num-virtual-stages-per-pipeline-rank": "2"}
CONFLICTING = {
    **{(name, "--no-overlap-p2p-communication on two pipeline stages"): (base, {"--no-overlap-p2p-communication": True})
       for name, base in (("num_layers_per_virtual_pipeline_stage", VIRTUAL), ("num_virtual_stages_per_pipeline_rank", RANKED))},
    ("pipeline_model_parallel_layout", "a --pipeline-model-parallel-size that does not divide its stages"): (
        TWO_STAGES | {"--pipeline-model-parallel-layout": "Et*4|t*4L"}, {"--pipeline-model-parallel-layout": "Et*4|(tt|)*1,t*2L"}),
    ("moe_enable_deepep", "--moe-flex-dispatcher-backend hybridep"): (
        MOE | {"--moe-token-dispatcher-type": "flex", "--moe-enable-deepep": True}, {"--moe-flex-dispatcher-backend": "hybridep"}),
    ("overlap_moe_expert_parallel_comm", "--recompute-granularity full"): (OVERLAPPED, {"--recompute-granularity": "full"}),
    ("overlap_moe_expert_parallel_comm", "--recompute-method"): (OVERLAPPED, {"--recompute-method": "block"}),
    ("overlap_moe_expert_parallel_comm", "--recompute-num-layers"): (OVERLAPPED, {"--recompute-num-layers": "2"}),
    ("overlap_moe_expert_parallel_comm", "--recompute-modules moe"): (
        OVERLAPPED, {"--recompute-granularity": "selective", "--recompute-modules": "moe"}),
    ("overlap_moe_expert_parallel_comm", "--moe-shared-expert-overlap"): (
        OVERLAPPED | {"--moe-shared-expert-intermediate-size": "512"}, {"--moe-shared-expert-overlap": True}),
    ("overlap_moe_expert_parallel_comm", "--moe-token-dispatcher-type allgather, the default"): (
        OVERLAPPED, {"--moe-token-dispatcher-type": None}),
    ("overlap_moe_expert_parallel_comm", "more than one MTP depth"): (OVERLAPPED | {"--mtp-num-layers": "1"}, {"--mtp-num-layers": "2"}),
    ("overlap_moe_expert_parallel_comm", "fp32"): (OVERLAPPED, {"--bf16": None}),
    ("overlap_moe_expert_parallel_comm", "graphs of `moe` or `mlp`"): (
        OVERLAPPED | {"--cuda-graph-impl": "transformer_engine", "--cuda-graph-modules": "attn", "--moe-layer-freq": "2"},
        {"--cuda-graph-modules": "mlp"}),
    ("overlap_dispatch_backward_with_experts_wgrad", "--overlap-moe-expert-parallel-comm"): (MOE | EP8 | DELAYED, OVERLAP),
    ("overlap_dispatch_backward_with_experts_wgrad", "--delay-wgrad-compute"): (
        MOE | EP8 | DELAYED, {"--delay-wgrad-compute": True}),
    ("use_precision_aware_optimizer", "an optimizer other than adam"): (
        GPT | {"--use-distributed-optimizer": True, "--use-precision-aware-optimizer": True}, {"--optimizer": "sgd"}),
    ("finetune", "--override-ckpt-iteration"): (GPT | {"--finetune": True}, {"--override-ckpt-iteration": "2"}),
    ("moe_router_padding_for_quantization", "--moe-token-dispatcher-type allgather, the default"): (
        MOE | {"--fp8-format": "e4m3", "--moe-router-padding-for-quantization": True}, {"--moe-token-dispatcher-type": None}),
    **{(name, "--use-megatron-fsdp"): (
        FSDP | EXPERTS | {"--use-transformer-engine-op-fuser": True} | ({"--disable-bias-linear": None} if "bias" in name else {}),
        {f"--{name.replace('_', '-')}": True}) for name in ("moe_single_grouped_weight", "moe_single_grouped_bias")},
    ("hybrid_context_parallel", "--use-megatron-fsdp"): (
        GPT | {"--use-distributed-optimizer": True, "--hybrid-context-parallel": True, "--calculate-per-token-loss": True},
        {"--use-megatron-fsdp": True, "--ckpt-format": "fsdp_dtensor"}),
    ("fp4", "--fp4-recipe custom without --fp4-quantizer-factory"): (GPT | {"--fp4-format": "e2m1"}, {"--fp4-recipe": "custom"}),
    ("fp8", "--fp8-recipe custom without --fp8-quantizer-factory"): (GPT | {"--fp8-format": "e4m3"}, {"--fp8-recipe": "custom"}),
    ("init_model_with_meta_device", "--use-megatron-fsdp that shards nothing"): (
        FSDP | SHARDED | {"--init-model-with-meta-device": True}, {"--data-parallel-sharding-strategy": "no_shard"}),
    ("check_weight_hash_across_dp_replicas_interval", "--data-parallel-sharding-strategy optim_grads_params"): (
        FSDP | {"--check-weight-hash-across-dp-replicas-interval": "5", "--data-parallel-sharding-strategy": "optim"}, SHARDED),
    ("moe_expert_capacity_factor", "--moe-router-load-balancing-type sinkhorn"): (
        MOE | {"--moe-expert-capacity-factor": "1.0"}, {"--moe-router-load-balancing-type": "sinkhorn"}),
    ("moe_deepep_num_sms", "another --moe-hybridep-num-sms"): (MOE | {"--moe-deepep-num-sms": "8"}, {"--moe-hybridep-num-sms": "16"}),
    ("qk_clip", "--qk-clip-alpha that is not between 0 and 1"): (GPT | {"--qk-clip": True}, {"--qk-clip-alpha": "2"}),
    ("save_retain_interval", "a --save-interval that does not divide it"): (
        GPT | {"--save": "out", "--save-interval": "3", "--save-retain-interval": "6"}, {"--save-retain-interval": "7"}),
    ("step_batch_size_schedule", "--global-batch-size"): (
        {k: v for k, v in GPT.items() if k not in ("--global-batch-size", "--train-iters")}
        | {"--step-batch-size-schedule": "0:64", "--train-samples": "640"}, {"--global-batch-size": "64"}),
    ("flash_decode", "--no-rope-freq"): (GPT | {"--flash-decode": True}, {"--no-rope-freq": "2"}),
    ("fake_process_group", "--moe-token-dispatcher-type flex"): (
        MOE | EP8 | {"--fake-process-group": True}, {"--moe-token-dispatcher-type": "flex"}),
    ("encoder_num_layers", "--num-layers"): (
        {k: v for k, v in GPT.items() if k != "--num-layers"} | {"--encoder-num-layers": "8"}, {"--num-layers": "8"}),
    ("inference_fuse_tp_communication", "a hybrid pattern"): (
        HYBRID | {"--transformer-impl": "inference_optimized"}, {"--inference-fuse-tp-communication": True}),
    ("override_opt_param_scheduler", "--use-checkpoint-opt_param-scheduler"): (
        GPT | {"--override-opt_param-scheduler": True}, {"--use-checkpoint-opt_param-scheduler": True}),
}  # fmt: skip
# What Megatron notices only when it builds the model or runs it (read in its source), or that needs a CUDA device to be seen.
LATER = {
    "context-attention", "dsa-latent-norm", "dsa-reuse-cut", "dsa-reuse-source", "dsa-rotate", "dsa-sequence", "dsa-stage-without-indexer",
    "dsa-untrained-overlap", "dsa-without-mla", "fp8-mamba-width", "fsdp-pipeline", "layer-frequency", "moe-sequence",
    "companion-later", "dropout-range", "moe-grouped-bias", "moe-mtp-metrics", "moe-probs-on-input", "moe-stage-without-experts",
    "moe-top-k", "pattern-without-experts", "recompute-mtp", "restart-strict",
    "padded-vocab-short", "rope-columns", "schedule", "window-size", "wrong-chip", "sinks-without-kernel",
}  # fmt: skip
NEEDS_CUDA = {"dsa-kernel-declines"}
CONFLICTS_LATER = {("override_opt_param_scheduler", "--use-checkpoint-opt_param-scheduler")}
