#!/bin/bash
# finds:
# megatron: accepts
# A small Nemotron-like hybrid: Mamba-2, a few GQA layers, experts; tensor parallel 2 with sequence parallelism.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1

NODES=${SLURM_NNODES:-1}
GPUS_PER_NODE=8
TP=2
EP=4

MODEL_ARGS=(
    --hybrid-layer-pattern "MEM*EMEM*EME"   # 12 layers
    --hidden-size 2688
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 2
    --kv-channels 128
    --position-embedding-type none
    --mamba-num-heads 64
    --mamba-head-dim 64
    --mamba-state-dim 128
    --mamba-num-groups 8
    --squared-relu
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --init-method-std 0.0173
)
MOE_ARGS="
    --num-experts 128 --moe-router-topk 6
    --moe-ffn-hidden-size 1856 --moe-shared-expert-intermediate-size 3712
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32
    --moe-router-topk-scaling-factor 2.5
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm
"
MODEL_ARGS+=(--seq-length 8192 --max-position-embeddings 8192)

torchrun --nproc-per-node $GPUS_PER_NODE --nnodes "$NODES" pretrain_hybrid.py \
    "${MODEL_ARGS[@]}" ${MOE_ARGS} \
    --tensor-model-parallel-size ${TP} --sequence-parallel --expert-model-parallel-size ${EP} --expert-tensor-parallel-size 1 \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --micro-batch-size 1 --global-batch-size $((NODES * GPUS_PER_NODE * 8)) --train-iters 1000 \
    --lr 1e-3 --min-lr 1e-5 --lr-decay-style WSD --lr-wsd-decay-iters 100 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    --bf16 --tokenizer-type NullTokenizer --vocab-size 131072 --mock-data 2>&1 | tee train.log
