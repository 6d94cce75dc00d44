#!/bin/bash
# finds: stray-word bad-value missing-value unknown-flag
# megatron: refuses
# "--fp8-format hybrid" in one pair of quotes stays one word; a pattern that starts with a dash reads as a flag.
ARGS=("--fp8-format hybrid" "--swiglu")
torchrun --nproc-per-node 8 pretrain_hybrid.py "${ARGS[@]}" --swiglu="yes" --hybrid-layer-pattern -M-M*-M \
  --hidden-size 1024 --num-attention-heads 16 --mamba-num-heads 32 \
  --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 \
  --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 32 --train-iters 10 --lr 1e-4 --adam-beta2 0.95 --bf16 \
  --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
