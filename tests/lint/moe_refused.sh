#!/bin/bash
# finds: moe-expert-bias moe-bias moe-grouped-bias default-bias moe-sequence moe-top-k moe-shared-overlap indivisible
# megatron: refuses
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 \
  --num-experts 6 --moe-router-topk 8 --moe-router-score-function softmax --moe-router-enable-expert-bias --moe-aux-loss-coeff 1e-3 \
  --moe-shared-expert-intermediate-size 1024 --moe-shared-expert-overlap --moe-token-dispatcher-type allgather --moe-grouped-gemm \
  --tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --hidden-dropout 0 --attention-dropout 0 \
  --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 32 --train-iters 10 --lr 1e-4 --adam-beta2 0.95 --bf16 \
  --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
