#!/bin/bash
# finds: fused-cross-entropy-te squared-relu-fusion default-bias recompute recompute
# megatron: refuses
torchrun --nproc-per-node 8 pretrain_hybrid.py --hybrid-layer-pattern 'M-M*-' --cross-entropy-loss-fusion --cross-entropy-fusion-impl te \
  --attention-backend flash --squared-relu --recompute-granularity full --hidden-size 1024 --num-attention-heads 16 --mamba-num-heads 32 \
  --position-embedding-type none --normalization RMSNorm --hidden-dropout 0 --attention-dropout 0 \
  --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 32 --train-iters 10 --lr 1e-4 --adam-beta2 0.95 --bf16 \
  --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
