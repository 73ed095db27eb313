#!/usr/bin/env bash
# A training step (fp32, 2048 tokens) of three models at four sequence lengths, as a table: tokens a second,
# and the fraction of the GEMM throughput that the machine reached at the same moments. Attention grows with
# the length, everything else does not.
#
#   bench/scaling.sh [CAPSTAN]
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
capstan=${1:-build/release/capstan}
printf '| model | sequence | tokens/s | % of GEMM throughput | attention |\n|---|---|---|---|---|\n'
for recipe in quickstart bench/recipes/llama-26m.yaml gpt2-124m; do
  for length in 128 256 512 1024; do
    batch=$((2048 / length))
    "$capstan" bench step --json -r "$recipe" mixed_precision=fp32 model.seq_length=$length \
      train.micro_batch_size=$batch train.global_batch_size=$batch |
      python3 -c '
import json, sys
step = json.load(sys.stdin)["step"]
attention = sum(o["seconds"] for o in step["operations"] if o["name"] in ("attention", "rope"))
print("| {} | {} x {} | {:.0f} | {:.1f} % | {:.1f} % of the step |".format(
    step["recipe"], sys.argv[1], sys.argv[2], step["tokens_per_second"],
    100 * step["fraction_of_concurrent"], 100 * attention / step["seconds"]))' $batch $length
  done
done
