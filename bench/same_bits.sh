#!/usr/bin/env bash
# Whether two builds of Capstan train to the same bits: losses and gradient norms of six steps of a small
# Llama, on one rank and on layouts of two and four, and of the recipes of the layout matrix
# (tests/train/layouts) that need no files.
#
#   bench/same_bits.sh OLD [NEW]     two programs `capstan`; NEW: default build/release/capstan
#
# Prints one line for each layout, "not in OLD" where OLD cannot train it; exit 1 where a value differs.
set -euo pipefail
case "${1:---help}" in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
old=$(realpath "$1")
cd "$(dirname "$0")/.."
new=$(realpath "${2:-build/release/capstan}")
layouts=$PWD/tests/train/layouts
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

small=(quickstart dataset=mock tokenizer=none model.num_layers=4 model.hidden_size=64
  model.ffn_hidden_size=160 model.num_attention_heads=4 model.num_query_groups=2 model.seq_length=64
  model.vocab_size=512 train.micro_batch_size=1 train.global_batch_size=8)
steps=(train.train_iters=6 train.threads=1 logger.log_interval=1 validation.eval_interval=null)

values() { # DIRECTORY: step, loss and norm of each row
  python3 - "$1" <<'PYTHON'
import json, sys
for row in map(json.loads, open(sys.argv[1] + "/metrics.jsonl")):
    if "event" not in row:
        print(row["step"], row["loss"], row["grad_norm"])
PYTHON
}

number=0 different=0
while IFS='|' read -r ranks words; do
  read -ra overrides <<<"$words"
  recipe=("${small[@]}")
  case $words in @*)
    recipe=("$layouts/${overrides[0]#@}.yaml")
    overrides=("${overrides[@]:1}") ;;
  esac
  number=$((number + 1))
  failed=''
  for build in old new; do
    "${!build}" train "${recipe[@]}" "${steps[@]}" --nproc "$ranks" --run-dir "$build$number" \
      "${overrides[@]}" >"$build$number.log" 2>&1 </dev/null || failed+="$build "
  done
  if [[ "$failed" = *new* ]]; then
    cat "new$number.log"
    exit 1
  elif [ -n "$failed" ]; then
    result='not in OLD'
  elif [ "$(values "old$number")" = "$(values "new$number")" ]; then
    result='same bits'
  else
    result='DIFFERENT'
    different=1
  fi
  printf '%s  %s rank(s) %s\n' "$result" "$ranks" "$words"
done <<'LAYOUTS'
1|
1|model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1
1|model.hidden_dropout=0.1 model.attention_dropout=0.1
2|dist.tp=2
2|dist.tp=2 dist.sp=true
2|dist.pp=2
2|dist.pp=2 dist.vpp=2
2|dist.cp=2
2|dist.cp=2 dist.cp_comm_type=a2a
2|dist.cp=2 dist.cp_comm_type=all_gather
2|ddp.sharding=optim
2|ddp.sharding=optim_grads ddp.overlap_grad_reduce=true
2|ddp.sharding=optim_grads_params ddp.overlap_grad_reduce=true ddp.overlap_param_gather=true
4|dist.tp=2 dist.pp=2
4|dist.tp=2 dist.sp=true ddp.sharding=optim_grads_params
4|dist.cp=2 dist.pp=2
4|ddp.num_distributed_optimizer_instances=2 ddp.sharding=optim ddp.outer_dp_sharding_strategy=optim
4|dist.pp=4 dist.pipeline_schedule=gpipe
1|@llama
2|@llama dist.tp=2
2|@llama dist.tp=2 dist.sp=true
1|@gpt
2|@gpt dist.pp=2
1|@gemma
2|@gemma dist.tp=2 dist.sp=true
1|@olmo
2|@olmo dist.cp=2 dist.cp_comm_type=a2a
1|@lion ~optimizer.adam_eps
1|@sgd ~optimizer.adam_eps
1|@muon
2|@muon dist.tp=2 optimizer.muon_tp_mode=distributed
4|@muon ddp.num_distributed_optimizer_instances=2 ddp.sharding=optim ddp.outer_dp_sharding_strategy=optim
1|@moments
2|@moments ddp.sharding=optim
1|@moments_fp8
1|@lora ~checkpoint.pretrained_checkpoint peft.random_base=true
2|@qlora ~checkpoint.pretrained_checkpoint peft.random_base=true dist.tp=2
LAYOUTS
exit $different
