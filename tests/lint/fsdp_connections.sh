#!/bin/bash
# finds: connections-fsdp fsdp-checkpoints fsdp-tensor default-ffn
# megatron: refuses
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc-per-node 8 pretrain_gpt.py --use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params \
  --tensor-model-parallel-size 2 --sequence-parallel --num-layers 16 --hidden-size 2048 --num-attention-heads 16 --position-embedding-type rope \
  --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 2048 --max-position-embeddings 2048 \
  --micro-batch-size 1 --global-batch-size 32 --train-iters 10 --lr 1e-4 --adam-beta2 0.95 --bf16 --no-gradient-accumulation-fusion \
  --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
