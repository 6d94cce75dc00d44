#!/bin/bash
# finds: dsa-reuse-cut dsa-reuse-recompute dsa-reuse-mask pipeline-auto-split
# megatron: accepts
# Index reuse in groups of three sparse layers; the automatic cut after layer 26 parts the group that starts at 21.
PATTERN=+EMEDEMEDEMMDEME+EMEDEMMDEMEDEME+EMMDEMEDEMEDEMM+EME
exec torchrun --nproc-per-node 8 -m pretrain_hybrid --hybrid-layer-pattern $PATTERN --pipeline-model-parallel-size 2 \
  --dsa-indexer-topk-freq 16 --dsa-indexer-skip-topk-offset 5 --no-create-attention-mask-in-dataloader \
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
  --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 64 --v-head-dim 64 --qk-layernorm \
  --experimental-attention-variant dsa --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 64 --dsa-indexer-topk 256 \
  --dsa-indexer-loss-coeff 0.001 --no-dsa-indexer-rotate-activation --rope-type rope --no-rope-fusion --position-embedding-type rope \
  --hidden-size 3584 --num-attention-heads 56 --normalization RMSNorm --squared-relu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 \
  --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 896 --moe-router-score-function sigmoid --moe-aux-loss-coeff 1e-4 \
  --moe-token-dispatcher-type alltoall --moe-grouped-gemm --mamba-num-heads 56 --mamba-state-dim 64 \
  --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --train-iters 10 --lr 3e-4 --adam-beta2 0.95 --bf16 \
  --tokenizer-type NullTokenizer --vocab-size 65536 --mock-data
