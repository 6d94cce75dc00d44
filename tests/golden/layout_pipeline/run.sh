#!/usr/bin/env bash
# nam56r_native_dp: NAM56R of GQA 13, MoE 22, Mamba-2 17, bf16
# identity: NAM56R GQA 13, MoE 22, Mamba-2 17, bf16 / native_dp (pipeline=4, virtual_pipeline=2)
# layers: 52 = A13 E22 M13 R4
# pattern: AEMEAEMEAEMR 4 times and its first 4: 52 layers
# parameters: 3,996,461,352 in all, 2,300,913,960 active for a token
# layout: 16 GPUs (h200_2x8), tensor 1, pipeline 4, virtual 2, context 1, data 4, expert 1, expert tensor 1, expert data 4
# batch: 4 per pass, 64 per step, 4096 tokens each
# initial weights: each pipeline stage draws its own; the same seed gives other weights in another layout
# departs from lane native_dp: pipeline=4, virtual_pipeline=2
# gives up Mamba-3 at M (13 layers): lane native_dp puts Mamba-2 there
# gives up M2RNN at R (4 layers): lane native_dp puts Mamba-2 there
# needs mamba-ssm, causal-conv1d and einops for Mamba-2
# assumed: feature.mtp.depths=0: the recipe's default is none; NAM56R as designed has 1
# assumed: model.init_std=0.02, norm_epsilon=1e-05: Megatron's default; the articles give none
# assumed: lane.name=native_dp: our name: the articles' nemo_native, run with tensor 1
# assumed: model.blocks.attention.output_gate=false, qkv_bias=false, rotary_percent=1.0, sinks=false: no article gives it
# assumed: model.blocks.attention.qk_norm=false: the published count of 3,996,461,352 is without; an article's runtime has it: `model.blocks.attention.qk_norm=true`
# assumed: model.blocks.moe.balancing=aux_loss, expert_bias_update_rate=0.001, pre_softmax=false, shared_expert_gate=false: no article gives it
# assumed: model.zero_centered_norms=false: no article gives it
# assumed: optim.eps=1e-08: no article gives it
# assumed: precision.grad_reduce=fp32: no article gives it
set -euo pipefail
export PYTORCH_ALLOC_CONF=expandable_segments:True
unset CUDA_DEVICE_MAX_CONNECTIONS
unset NVTE_NORM_FWD_USE_CUDNN
unset NVTE_NORM_BWD_USE_CUDNN
export NCCL_GRAPH_REGISTER=0
export TORCH_NCCL_HIGH_PRIORITY=1
export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=7200
export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1
export PYTHONIOENCODING=utf-8:backslashreplace
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
unset PYTORCH_CUDA_ALLOC_CONF
python -c 'import nam_megatron' 2>&- || { echo 'error: no nam_megatron here: activate the environment in which it is installed with what training needs' >&2; exit 2; }
exec python -m nam_megatron.torchrun --nproc-per-node 8 --nnodes 2 --node-rank "${NODE_RANK:?}" --master-addr "${MASTER_ADDR:?}" -m nam_megatron.train --nam-plan "$(dirname "$0")/plan.json" \
  --hybrid-layer-pattern '*EME*E|ME*EMM|*EME*E|ME*EMM|*EME*EM|E*EMM*E|ME*EME*|EMM*EME' \
  --hidden-size 3584 \
  --ffn-hidden-size 18944 \
  --num-attention-heads 56 \
  --seq-length 4096 \
  --max-position-embeddings 4096 \
  --vocab-size 65536 \
  --padded-vocab-size 65536 \
  --untie-embeddings-and-output-weights \
  --normalization RMSNorm \
  --norm-epsilon 1e-05 \
  --disable-bias-linear \
  --squared-relu \
  --no-bias-gelu-fusion \
  --hidden-dropout 0.0 \
  --attention-dropout 0.0 \
  --rotary-base 500000 \
  --init-method-std 0.02 \
  --tensor-model-parallel-size 1 \
  --pipeline-model-parallel-size 4 \
  --context-parallel-size 1 \
  --expert-model-parallel-size 1 \
  --expert-tensor-parallel-size 1 \
  --bf16 \
  --accumulate-allreduce-grads-in-fp32 \
  --cross-entropy-fusion-impl native \
  --no-gradient-accumulation-fusion \
  --optimizer adam \
  --lr 0.0003 \
  --min-lr 3e-05 \
  --lr-decay-style cosine \
  --lr-decay-iters 1000 \
  --lr-warmup-iters 10 \
  --lr-warmup-init 0.0 \
  --weight-decay 0.1 \
  --weight-decay-incr-style constant \
  --adam-beta1 0.9 \
  --adam-beta2 0.95 \
  --adam-eps 1e-08 \
  --clip-grad 1.0 \
  --micro-batch-size 4 \
  --global-batch-size 64 \
  --train-iters 1000 \
  --seed 1234 \
  --eval-iters 0 \
  --eval-interval 1000 \
  --log-interval 1 \
  --log-throughput \
  --exit-signal-handler \
  --distributed-timeout-minutes 5 \
  --manual-gc-interval 0 \
  --ckpt-format torch_dist \
  --mock-data \
  --tokenizer-type NullTokenizer \
  --num-workers 2 \
  --dataloader-type single \
  --no-create-attention-mask-in-dataloader \
  --transformer-impl transformer_engine \
  --attention-backend auto \
  --kv-channels 64 \
  --group-query-attention \
  --num-query-groups 8 \
  --softmax-type vanilla \
  --position-embedding-type rope \
  --rotary-percent 1.0 \
  --num-experts 16 \
  --moe-router-topk 4 \
  --moe-ffn-hidden-size 896 \
  --moe-shared-expert-intermediate-size 1024 \
  --moe-router-score-function sigmoid \
  --moe-router-enable-expert-bias \
  --moe-router-bias-update-rate 0.001 \
  --moe-router-dtype fp32 \
  --moe-router-load-balancing-type aux_loss \
  --moe-aux-loss-coeff 0.0001 \
  --moe-token-dispatcher-type alltoall \
  --moe-grouped-gemm \
  --mamba-num-heads 56 \
  --mamba-head-dim 64 \
  --mamba-state-dim 64 \
  --mamba-num-groups 8 \
  --cuda-graph-impl transformer_engine \
  --cuda-graph-modules attn mamba moe_router moe_preprocess \
  --cuda-graph-warmup-steps 3 \
  --te-rng-tracker \
  --use-distributed-optimizer \
  --overlap-grad-reduce \
  --overlap-param-gather
