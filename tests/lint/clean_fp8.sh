#!/bin/bash
# finds:
# megatron: accepts
# FP8 with CUDA graphs in a hybrid: 64 Mamba heads fit, NCCL registers no graph memory.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NCCL_GRAPH_REGISTER=0
unset CUDA_DEVICE_MAX_CONNECTIONS
FLAGS=(--hybrid-layer-pattern 'M-M*-M-M*-' --hidden-size 4096 --ffn-hidden-size 16384 --num-attention-heads 32)
FLAGS=("${FLAGS[@]}" --group-query-attention --num-query-groups 8 --kv-channels 128)
FLAGS+=(
  --mamba-num-heads 64 --mamba-state-dim 64 --position-embedding-type none
  --squared-relu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
  --hidden-dropout 0 --attention-dropout 0
  --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 --bf16
  --cuda-graph-impl transformer_engine --cuda-graph-modules attn mamba mlp --te-rng-tracker
  --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 4 --global-batch-size 64 --train-iters 200
  --lr 3e-4 --adam-beta2 0.95 --tokenizer-type NullTokenizer --vocab-size 65536 --mock-data
)
exec python3 -m torch.distributed.run --nproc-per-node=8 -- pretrain_mamba.py "${FLAGS[@]}"
