#!/usr/bin/env bash
# The table of docs/parallelism.md: layouts of one recipe on N ranks,
# the largest rank's memory and what it sends in a step.
#
#   bench/layouts.sh [RECIPE] [RANKS] [OVERRIDES…]     default: gpt2-124m 8
#
# Each row is `capstan show RECIPE … --ranks N --step`: a step on the `meta` device.
# CAPSTAN=PROGRAM names another one.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
capstan=${CAPSTAN:-build/release/capstan}
recipe=${1:-gpt2-124m} ranks=${2:-8}
common=("${@:3}")
shard=ddp.sharding

printf '| layout of %s on %s ranks | largest rank | it sends in a step |\n|---|---|---|\n' "$recipe" "$ranks"
while IFS='|' read -r name overrides; do
  read -ra words <<<"$overrides"
  line=$("$capstan" show "$recipe" "${words[@]}" "${common[@]}" --ranks "$ranks" --step --color never -q \
    2>/dev/null | tail -n 1) || line=
  case "$line" in
    largest:*) line=${line#largest: rank *: } ;;
    *) line="refused, refused" ;;
  esac
  printf '| %s<br>`%s` | %s | %s |\n' "$name" "$overrides" "${line%%,*}" "${line#*, sends }"
done <<TABLE
data parallel|$shard=no_shard
ZeRO 1|$shard=optim
ZeRO 2|$shard=optim_grads
ZeRO 3|$shard=optim_grads_params
tensor|dist.tp=2 $shard=no_shard
tensor and sequence|dist.tp=2 dist.sp=true $shard=no_shard
pipeline|dist.pp=2 $shard=no_shard
interleaved pipeline|dist.pp=2 dist.vpp=2 $shard=no_shard
context, ring|dist.cp=2 $shard=no_shard
context, all-to-all|dist.cp=2 dist.cp_comm_type=a2a $shard=no_shard
tensor, sequence, pipeline, ZeRO 1|dist.tp=2 dist.sp=true dist.pp=2 $shard=optim
tensor, sequence, context, ZeRO 3|dist.tp=2 dist.sp=true dist.cp=2 $shard=optim_grads_params
TABLE
