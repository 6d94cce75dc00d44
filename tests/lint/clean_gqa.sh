#!/usr/bin/env bash
# finds:
# megatron: accepts
# Llama 3 8B as a GPT: a conditional, arguments that append themselves, a heredoc for Slurm.
SEQ=${SEQ:-8192}
DTYPE=bf16
ARGS="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
if [[ "$DTYPE" == "bf16" && "$SEQ" -gt 4096 ]]; then
    ARGS="$ARGS --bf16"
else
    ARGS="$ARGS --fp16"
fi
case "$DTYPE" in
    fp32) ARGS="" ;;
    bf16|fp16) ARGS="$ARGS --attention-backend auto" ;;
esac

sbatch <<EOF
#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
srun --mpi=pmix bash -c "
  cd /opt/megatron
  python -u pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 \
    --seq-length $SEQ --max-position-embeddings $SEQ --position-embedding-type rope --rotary-base 500000 \
    --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \
    --attention-dropout 0.0 --hidden-dropout 0.0 --micro-batch-size 1 --global-batch-size 128 \
    --train-iters 5000 --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 20 \
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    --tokenizer-type NullTokenizer --vocab-size 128256 --mock-data $ARGS"
EOF
