#!/bin/bash
# finds: gqa-ignored default-positions rope-flags-ignored rope-flags-ignored
# megatron: accepts
# 8 groups are asked for and 16 heads trained; RoPE's base is given and a learned table trained.
export CUDA_DEVICE_MAX_CONNECTIONS=1
options=" \
    --hybrid-layer-pattern M-M*-M-M*- \
    --hidden-size 1024 --ffn-hidden-size 4096 \
    --num-attention-heads 16 \
    --num-query-groups 8 \
    --rotary-base 500000 --rotary-percent 0.5 \
    --mamba-num-heads 32 \
    --squared-relu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \
    --attention-dropout 0.0 --hidden-dropout 0.0 \
    --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 4 --global-batch-size 32 --train-iters 100 \
    --lr 2.5e-4 --adam-beta2 0.95 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data"
torchrun --nproc_per_node 8 ../../pretrain_hybrid.py ${options}
