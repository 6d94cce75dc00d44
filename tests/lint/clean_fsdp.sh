#!/bin/bash
# finds:
# megatron: accepts
# Megatron-FSDP: no CUDA_DEVICE_MAX_CONNECTIONS, its own checkpoint format, adam.
unset CUDA_DEVICE_MAX_CONNECTIONS
USE_FSDP=${USE_FSDP:-1}
ARGS=(
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8
  --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000
  --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
  --attention-dropout 0.0 --hidden-dropout 0.0 --bf16
  --micro-batch-size 1 --global-batch-size 128 --train-samples 100000 --lr-decay-samples 90000 --lr-warmup-samples 1000
  --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95
  --tokenizer-type NullTokenizer --vocab-size 128256 --mock-data
)
if [ "${USE_FSDP}" = 1 ]; then
    ARGS=(
        "${ARGS[@]}"
        --use-megatron-fsdp
        --data-parallel-sharding-strategy optim_grads_params
        --no-gradient-accumulation-fusion
        --use-distributed-optimizer
        --ckpt-format fsdp_dtensor
    )
fi
torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}"
