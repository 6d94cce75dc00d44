#!/bin/bash
# finds: graphs-allocator graphs-modules graphs-modules default-top-k
# megatron: refuses
# TE graphs with expandable segments and NCCL left to register their memory; parts that cannot be captured.
export PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"
torchrun --nproc-per-node 8 pretrain_hybrid.py --cuda-graph-impl transformer_engine --cuda-graph-modules attn mamba moe_preprocess mlp \
  --hybrid-layer-pattern 'MEM*EM' --num-experts 8 --moe-router-score-function sigmoid --moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall \
  --moe-grouped-gemm --hidden-size 2048 --num-attention-heads 16 --mamba-num-heads 64 \
  --position-embedding-type rope --normalization RMSNorm --squared-relu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 \
  --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 4 --global-batch-size 64 --train-iters 10 --lr 3e-4 --adam-beta2 0.95 --bf16 \
  --tokenizer-type NullTokenizer --vocab-size 65536 --mock-data
