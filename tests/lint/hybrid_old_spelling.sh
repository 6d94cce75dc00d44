#!/bin/bash
# finds: num-layers-ignored default-normalization default-activation default-bias
# megatron: accepts
PATTERN="M-M*-"
torchrun --nproc_per_node 8 pretrain_mamba.py --hybrid-override-pattern "$PATTERN" --num-layers 24 --use-mcore-models \
  --hidden-size 1024 --num-attention-heads 16 --group-query-attention --num-query-groups 4 --use-rotary-position-embeddings \
  --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 32 --train-iters 10 --lr 1e-4 \
  --adam-beta2 0.95 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data --mamba-num-heads 32
