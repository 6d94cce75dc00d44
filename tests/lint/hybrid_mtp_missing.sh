#!/bin/bash
# finds: mtp-without-pattern hybrid-rope-scaling gpt-only spec-not-stock default-ffn
# megatron: accepts
# MTP asked for and not in the pattern; RoPE scaling that hybrids ignore; a spec that may or may not be importable.
torchrun --nproc-per-node 8 pretrain_hybrid.py --hybrid-layer-pattern '*-M-*-M-' --mtp-num-layers 1 --spec my_model.specs hybrid_stack \
  --use-rope-scaling --cpu-offloading-num-layers 2 --hidden-size 1024 --num-attention-heads 16 --position-embedding-type rope --normalization RMSNorm \
  --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --mamba-num-heads 32 --seq-length 1024 --max-position-embeddings 1024 \
  --micro-batch-size 4 --global-batch-size 32 --train-iters 10 --lr 1e-4 --adam-beta2 0.95 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 \
  --mock-data
