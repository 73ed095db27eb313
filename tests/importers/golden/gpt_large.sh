#!/usr/bin/env bash
# 48 layers of width 4096 over two nodes: tensor and pipeline parallel.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_DEBUG="WARN"   # quiet

CHECKPOINT_PATH=${1:-checkpoints/gpt-10b}
DATA_PATH="0.7 data/books_text_document 0.3 data/web_text_document"
TOKENIZER="--tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt"

DISTRIBUTED_ARGS=(
    --nproc_per_node 8
    --nnodes ${NNODES:-2}
    --rdzv_endpoint "$(hostname):29500"
)

MODEL_ARGS=(
    --num-layers 48            # depth
    --hidden-size 4096
    --num-attention-heads 32
    --seq-length 2048
    --max-position-embeddings 2048
)

TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 512
    --rampup-batch-size 16 16 5859375
    --train-samples 97656250
    --lr-decay-samples 84481300
    --lr-warmup-samples 162761
    --lr 1.0e-4
    --min-lr 1.0e-5
    --lr-decay-style cosine
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
    --initial-loss-scale 65536
    --split '949,50,1'
)

MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 2
	--pipeline-model-parallel-size 2
	--sequence-parallel
	--use-distributed-optimizer
	--recompute-activations
)

OUTPUT_ARGS="--log-interval 100 --save-interval 1000 --eval-interval 1000 --eval-iters 10"

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${OUTPUT_ARGS} ${TOKENIZER} \
    --data-path $DATA_PATH \
    --save $CHECKPOINT_PATH \
    --load $CHECKPOINT_PATH \
    --distributed-backend nccl \
    --tensorboard-dir `date +tb-%s` \
    --num-layrs 48 2>&1 | tee log.txt
