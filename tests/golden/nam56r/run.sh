#!/usr/bin/env bash
# nam56r: NAM56R of MLA 4, DSA 9, MoE 22, Mamba-3 13, M2RNN 4, MTP 1, bf16
# identity: NAM56R MLA 4, DSA 9, MoE 22, Mamba-3 13, M2RNN 4, MTP 1, bf16 / author_dp
# layers: 52 = A13 E22 M13 R4, MTP 1 x (MLA + MLP)
# pattern: AEMEAEMEAEMR 4 times and its first 4: 52 layers
# parameters: 4,694,828,352 in all, 2,999,280,960 active for a token
# layout: 8 GPUs (h200_8), tensor 1, pipeline 1, context 1, data 8, expert 1, expert tensor 1, expert data 8
# batch: 4 per pass, 64 per step, 4096 tokens each
# only nam_megatron trains DSA (layers 5, 9, 13, 21, 25, 29, 37, 41, 45): without an attention mask Megatron's shared top-k would live on across microbatches
# only nam_megatron trains Mamba-3 (layers 3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51): Megatron has no such layer and would build its Mamba-2 there
# only nam_megatron trains M2RNN (layers 12, 24, 36, 48): Megatron has no such layer and would build its Mamba-2 there
# assumed: model.init_std=0.02, norm_epsilon=1e-05: Megatron's default; the articles give none
# assumed: lane.name=author_dp: the articles' default is nemo_native, which gives up Mamba-3 and M2RNN
# assumed: model.blocks.moe.balancing=aux_loss, expert_bias_update_rate=0.001, pre_softmax=false, shared_expert_gate=false: no article gives it
# assumed: model.zero_centered_norms=false: no article gives it
# assumed: optim.eps=1e-08: no article gives it
# assumed: precision.grad_reduce=fp32: no article gives it
set -euo pipefail
export PYTORCH_ALLOC_CONF=expandable_segments:True
unset CUDA_DEVICE_MAX_CONNECTIONS
unset NVTE_NORM_FWD_USE_CUDNN
unset NVTE_NORM_BWD_USE_CUDNN
export TORCH_NCCL_HIGH_PRIORITY=1
export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=7200
export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1
export PYTHONIOENCODING=utf-8:backslashreplace
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
unset PYTORCH_CUDA_ALLOC_CONF
python -c 'import nam_megatron' 2>&- || { echo 'error: no nam_megatron here: activate the environment in which it is installed with what training needs' >&2; exit 2; }
exec python -m nam_megatron.torchrun --nproc-per-node 8 --standalone -m nam_megatron.train --nam-plan "$(dirname "$0")/plan.json" \
  --hybrid-layer-pattern +EMEDEMEDEMMDEME+EMEDEMMDEMEDEME+EMMDEMEDEMEDEMM+EME/+- \
  --hidden-size 3584 \
  --ffn-hidden-size 18944 \
  --num-attention-heads 56 \
  --seq-length 4096 \
  --max-position-embeddings 4096 \
  --vocab-size 65536 \
  --padded-vocab-size 65536 \
  --untie-embeddings-and-output-weights \
  --normalization RMSNorm \
  --norm-epsilon 1e-05 \
  --disable-bias-linear \
  --squared-relu \
  --no-bias-gelu-fusion \
  --hidden-dropout 0.0 \
  --attention-dropout 0.0 \
  --position-embedding-type rope \
  --rotary-base 500000 \
  --rotary-percent 1.0 \
  --softmax-type vanilla \
  --init-method-std 0.02 \
  --tensor-model-parallel-size 1 \
  --pipeline-model-parallel-size 1 \
  --context-parallel-size 1 \
  --expert-model-parallel-size 1 \
  --expert-tensor-parallel-size 1 \
  --bf16 \
  --accumulate-allreduce-grads-in-fp32 \
  --cross-entropy-fusion-impl native \
  --no-gradient-accumulation-fusion \
  --optimizer adam \
  --lr 0.0003 \
  --min-lr 3e-05 \
  --lr-decay-style cosine \
  --lr-decay-iters 1000 \
  --lr-warmup-iters 10 \
  --lr-warmup-init 0.0 \
  --weight-decay 0.1 \
  --weight-decay-incr-style constant \
  --adam-beta1 0.9 \
  --adam-beta2 0.95 \
  --adam-eps 1e-08 \
  --clip-grad 1.0 \
  --micro-batch-size 4 \
  --global-batch-size 64 \
  --train-iters 1000 \
  --seed 1234 \
  --eval-iters 0 \
  --eval-interval 1000 \
  --log-interval 1 \
  --log-throughput \
  --exit-signal-handler \
  --distributed-timeout-minutes 5 \
  --manual-gc-interval 0 \
  --ckpt-format torch_dist \
  --mock-data \
  --tokenizer-type NullTokenizer \
  --num-workers 2 \
  --dataloader-type single \
  --transformer-impl transformer_engine \
  --attention-backend auto \
  --multi-latent-attention \
  --q-lora-rank 64 \
  --kv-lora-rank 64 \
  --qk-head-dim 64 \
  --qk-pos-emb-head-dim 64 \
  --v-head-dim 64 \
  --rope-type rope \
  --rotary-scaling-factor 1.0 \
  --mscale 1.0 \
  --mscale-all-dim 0.0 \
  --qk-layernorm \
  --no-rope-fusion \
  --experimental-attention-variant dsa \
  --dsa-indexer-n-heads 32 \
  --dsa-indexer-head-dim 64 \
  --dsa-indexer-topk 256 \
  --dsa-indexer-loss-coeff 0.001 \
  --dsa-indexer-topk-freq 16 \
  --dsa-indexer-skip-topk-offset 5 \
  --no-dsa-indexer-rotate-activation \
  --dsa-kernel-backend none \
  --no-create-attention-mask-in-dataloader \
  --num-experts 16 \
  --moe-router-topk 4 \
  --moe-ffn-hidden-size 896 \
  --moe-shared-expert-intermediate-size 1024 \
  --moe-router-score-function sigmoid \
  --moe-router-enable-expert-bias \
  --moe-router-bias-update-rate 0.001 \
  --moe-router-dtype fp32 \
  --moe-router-load-balancing-type aux_loss \
  --moe-aux-loss-coeff 0.0001 \
  --moe-token-dispatcher-type alltoall \
  --moe-grouped-gemm \
  --mtp-loss-scaling-factor 0.1 \
  --cuda-graph-impl none \
  --cuda-graph-warmup-steps 3 \
  --use-distributed-optimizer \
  --overlap-grad-reduce \
  --overlap-param-gather \
  --nam-model dsa+mamba3+m2rnn:366b2b6c
