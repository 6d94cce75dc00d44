#!/bin/bash
# finds: fp8-mamba-width fp8-delayed-edges fp8-gather
# megatron: refuses
# 56 Mamba heads under FP8, delayed scaling by default beside bf16 edge layers, FP8 weights without a sharded optimizer.
torchrun --nproc-per-node 8 pretrain_hybrid.py --hybrid-layer-pattern 'M-M*-M-' --fp8-format hybrid --first-last-layers-bf16 --fp8-param-gather \
  --mamba-num-heads 56 --mamba-state-dim 64 --hidden-size 3584 --num-attention-heads 56 --group-query-attention --num-query-groups 8 \
  --position-embedding-type rope --normalization RMSNorm --squared-relu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 \
  --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 4 --global-batch-size 64 --train-iters 10 --lr 3e-4 --adam-beta2 0.95 --bf16 \
  --tokenizer-type NullTokenizer --vocab-size 65536 --mock-data
