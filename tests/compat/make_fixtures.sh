#!/usr/bin/env bash
# Makes the fixtures of tests/compat/compat.cpp with an earlier version of the program:
#
#   tests/compat/make_fixtures.sh CAPSTAN DIRECTORY
#
# The committed ones are of commit a759504, run with CAPSTAN_CPU=avx2: `checked`, `sharded`, `base`, `adapter`
# and `sweep` as the program left them, without the event files for TensorBoard, and under `expected` what the
# same program computed when it continued them.
set -euo pipefail
program=$(realpath "$1") target=$(realpath "$2")
home=/tmp/capstan-compat # part of the stored paths, the same on every machine
export CAPSTAN_CPU=avx2 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
rm -rf $home
mkdir -p $home/expected
cd $home
cp "$program" capstan
capstan=$home/capstan

tiny=(quickstart dataset=mock tokenizer=none model.num_layers=1 model.hidden_size=16 model.ffn_hidden_size=32
  model.num_attention_heads=4 model.num_query_groups=2 model.seq_length=16 model.vocab_size=64
  model.make_vocab_size_divisible_by=2 train.threads=1
  train.micro_batch_size=1 train.global_batch_size=2 validation.eval_interval=null logger.log_interval=1)

stopped() { # NAME WORD…: a run that stops after 4 of 8 steps; its rows when the program continues it
  local name=$1 code=0
  shift
  "$capstan" train "${tiny[@]}" "$@" train.train_iters=8 train.exit_interval=4 --run-dir "$name" || code=$?
  [ $code = 75 ]
  cp -r "$name" continued
  "$capstan" train "${tiny[@]}" "$@" train.train_iters=8 --run-dir continued --resume
  cp continued/metrics.jsonl "expected/$name.jsonl"
  rm -r continued
}
stopped checked train.device=guard
stopped sharded model.num_layers=2 dist.tp=2 --nproc 2

words=(tokenizer=byte model.vocab_size=257 model.make_vocab_size_divisible_by=1 train.train_iters=4
  checkpoint.save_optim=false)
"$capstan" train "${tiny[@]}" "${words[@]}" --run-dir base
"$capstan" train "${tiny[@]}" "${words[@]}" peft=lora peft.dim=2 checkpoint.pretrained_checkpoint=base \
  optimizer.lr=1e-2 --run-dir adapter
echo "The quick brown fox jumps over the lazy dog." >text.txt
"$capstan" eval adapter --text text.txt --json >expected/adapter.json

"$capstan" sweep plan "${tiny[@]}" train.train_iters=4 checkpoint.save_optim=false optimizer.lr=1e-3,1e-2 \
  --out sweep
first=$(ls sweep/trials | head -1)
"$capstan" sweep run sweep --trial "$first"
cp -r sweep continued
"$capstan" sweep run continued
"$capstan" sweep table continued --json >expected/sweep.json
rm -r continued sweep/trials/*/{run/checkpoints,checkpoints} # results are in metrics.jsonl

rm capstan
find . -name 'events.out.*' -o -name lock -o -name log.txt | xargs -r rm -f
rm -rf "$target"/{expected,checked,sharded,base,adapter,sweep,text.txt}
cp -r ./* "$target"
