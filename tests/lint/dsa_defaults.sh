#!/bin/bash
# finds: dsa-rope-fusion dsa-bias dsa-rotate dsa-untrained-indexer default-bias default-ffn
# megatron: refuses
# DeepSeek sparse attention with Megatron's defaults.
MLA="--multi-latent-attention --q-lora-rank 192 --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --qk-layernorm"
DSA="--dsa-indexer-n-heads 16 --dsa-indexer-head-dim 64 --dsa-indexer-topk 512"
torchrun --nproc-per-node 8 pretrain_hybrid.py --hybrid-layer-pattern D-D-D-D- $MLA $DSA \
  --rope-type rope --position-embedding-type rope --hidden-size 1024 --num-attention-heads 16 --normalization RMSNorm --swiglu \
  --hidden-dropout 0 --attention-dropout 0 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 8 \
  --train-iters 10 --lr 1e-4 --adam-beta2 0.95 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
