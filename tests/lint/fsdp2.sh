#!/bin/bash
# finds: fsdp2 fsdp2 fsdp2 fsdp2 default-top-k
# megatron: refuses
# torch FSDP2 beside expert parallelism, the distributed optimizer, fused accumulation (a default) and tied embeddings (a default).
torchrun --nproc-per-node 8 pretrain_gpt.py --use-torch-fsdp2 --use-distributed-optimizer --expert-model-parallel-size 2 --num-experts 8 \
  --moe-router-score-function softmax --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm \
  --num-layers 16 --hidden-size 2048 --num-attention-heads 16 --position-embedding-type rope \
  --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 2048 --max-position-embeddings 2048 \
  --micro-batch-size 1 --global-batch-size 32 --train-iters 10 --lr 1e-4 --adam-beta2 0.95 --bf16 \
  --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
