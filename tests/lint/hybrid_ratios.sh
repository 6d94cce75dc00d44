#!/bin/bash
# finds: removed-flag
# megatron: refuses
# Before patterns there were ratios. Without them there are no layers, which lint says once they are gone.
torchrun --nproc_per_node 8 pretrain_hybrid.py --num-layers 48 --hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5 \
  --hidden-size 1024 --num-attention-heads 16 --position-embedding-type none --normalization RMSNorm --squared-relu --disable-bias-linear \
  --attention-dropout 0 --hidden-dropout 0 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 32 \
  --train-iters 10 --lr 1e-4 --adam-beta2 0.95 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
