#!/usr/bin/env bash
# A program with the CUDA backend where the process sees no GPU: train.device=auto trains on the CPU and says
# why in one line, and train.device=cuda is refused by name.
#
#   without_gpu.sh PROGRAM SCRATCH
set -euo pipefail
program=$1 scratch=$2
rm -rf "$scratch"
mkdir -p "$scratch"
export CUDA_VISIBLE_DEVICES='' NO_COLOR=1
recipe=(quickstart dataset=mock tokenizer=none model.vocab_size=512 model.num_layers=1 model.hidden_size=64
  model.seq_length=32 train.train_iters=2 logger.log_interval=1 validation.eval_interval=null)
# A driver that is not there, or one that shows no GPU.
reason='(no NVIDIA driver is installed|the NVIDIA driver (shows no GPU|supports CUDA))'

failed=0
check() { # WHAT STATUS PATTERN LINES TRAIN-DEVICE
  local what=$1 expected=$2 pattern=$3 lines=$4 status=0 found
  "$program" train "${recipe[@]}" "train.device=$5" --run-dir "$scratch/$5" >"$scratch/$5.txt" 2>&1 ||
    status=$?
  found=$(grep -cE "$pattern" "$scratch/$5.txt" || true)
  if [ "$status" -ne "$expected" ] || [ "$found" -ne "$lines" ]; then
    echo "FAILED: $what: status $status, not $expected, or not $lines lines with '$pattern' in:"
    cat "$scratch/$5.txt"
    failed=1
  fi
}
check "auto" 0 "^train\.device=auto: on the CPU, because $reason" 1 auto
grep -qE '^step 2/2 \| loss [0-9]' "$scratch/auto.txt" ||
  { echo "FAILED: auto: no loss of step 2"; failed=1; }
check "cuda" 1 "^error: train\.device: cuda: $reason" 1 cuda
check "cpu" 0 "train\.device=auto" 0 cpu
exit "$failed"
