#!/bin/bash
# finds: unknown-variable
# megatron: unknown
# Two values come from nowhere, one of them by a misspelt name; the conditional branch cannot be told either.
LAYER=2
if [[ "$(hostname)" == login* ]]; then
    EXTRA_ARGS+=(--log-throughput)
fi
torchrun --nproc-per-node ${GPUS_PER_NODE} pretrain_gpt.py --num-layers ${LAYERS} --hidden-size 1024 --num-attention-heads 16 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 \
  --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size ${MBS} --global-batch-size 32 --train-iters 10 --lr 1e-4 --adam-beta2 0.95 --bf16 \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model ${TOKENIZER} --data-path ${DATA} --split 99,1,0
