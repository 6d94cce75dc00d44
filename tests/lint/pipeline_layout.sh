#!/bin/bash
# finds: pipeline-split pipeline-flags world-size sequence-parallel-off
# megatron: refuses
# Three segments on two ranks, a GPT flag for virtual stages beside a pattern, and six GPUs that 2 x 2 does not divide.
torchrun --nproc-per-node 6 pretrain_hybrid.py --pipeline-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel \
  --hybrid-layer-pattern 'M-M*|-M-M|*-M-' --num-virtual-stages-per-pipeline-rank 2 --hidden-size 2048 --num-attention-heads 16 --mamba-num-heads 64 \
  --position-embedding-type rope --normalization RMSNorm --squared-relu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 \
  --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 4 --global-batch-size 64 --train-iters 10 --lr 3e-4 --adam-beta2 0.95 --bf16 \
  --tokenizer-type NullTokenizer --vocab-size 65536 --mock-data
