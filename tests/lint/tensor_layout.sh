#!/bin/bash
# finds: connections-not-one indivisible indivisible batch save-interval overlap-param-gather
# megatron: refuses
# Tensor parallel 4 with the wrong number of connections, heads and groups that 4 does not divide, a batch that does not come out even.
export CUDA_DEVICE_MAX_CONNECTIONS=8
GPUS=8; TP=4
torchrun --nproc-per-node $GPUS pretrain_hybrid.py --tensor-model-parallel-size $TP --sequence-parallel \
  --hybrid-layer-pattern 'M-M*-M-' --mamba-num-heads 30 --mamba-num-groups 2 --hidden-size 2048 --num-attention-heads 16 \
  --position-embedding-type rope --normalization RMSNorm --squared-relu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 \
  --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 4 --global-batch-size 60 --train-iters 10 --lr 3e-4 --adam-beta2 0.95 --bf16 \
  --overlap-param-gather --save ./out --tokenizer-type NullTokenizer --vocab-size 65536 --mock-data
