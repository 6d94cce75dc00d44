#!/bin/bash
# finds: gpt-script-with-pattern num-layers-ignored default-ffn
# megatron: accepts
# pretrain_gpt.py takes the pattern's length and nothing else of it.
srun -n 8 python pretrain_gpt.py --hybrid-layer-pattern M-M*-M- --num-layers 12 --hidden-size 1024 --num-attention-heads 16 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 \
  --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 32 --train-iters 10 --lr 1e-4 --adam-beta2 0.95 \
  --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
