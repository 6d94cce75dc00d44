#!/bin/bash
# finds: default-balancing default-dispatcher default-expert-tensor moe-sequential default-top-k
# megatron: accepts
# Experts by their number alone: softmax scores, nothing that balances, all-gather, experts cut by the tensor size, one GEMM each.
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 \
  --num-experts 8 --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 \
  --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 32 --train-iters 10 --lr 1e-4 --bf16 \
  --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
