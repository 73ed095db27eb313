#!/usr/bin/env bash
# A table of the ways to recompute: peak memory of a step, measured and estimated, and the step's time
# relative to a step that recomputes nothing. Times are measured in matrix products that the machine did at
# the same moments, so that other programs affect both sides alike.
#
#   bench/recompute.sh [RECIPE a.b=c …]        CAPSTAN=build/release/capstan
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
capstan=${CAPSTAN:-build/release/capstan}
[ $# -gt 0 ] || set -- bench/recipes/llama-26m.yaml mixed_precision=fp32 train.micro_batch_size=4 \
  train.global_batch_size=4
recipe=$1
shift
g=model.recompute_granularity m=model.recompute_modules
how=model.recompute_method layers=model.recompute_num_layers
measure() {  # NAME [a.b=c …]
  local name=$1
  shift
  "$capstan" bench step --json -r "$recipe" "${given[@]}" "$@" | python3 -c '
import json, sys
step = json.load(sys.stdin)["step"]
print(json.dumps([sys.argv[1], step["memory"], step["memory_estimated"],
                  step["seconds"] * (step["concurrent_gflops"] or 1)]))' "$name"
}
given=("$@")
{
  measure none
  measure 'selective, `core_attn`' $g=selective "$m=[core_attn]"
  measure 'selective, `mlp`' $g=selective "$m=[mlp]"
  measure 'selective, `core_attn` and `mlp`' $g=selective "$m=[core_attn, mlp]"
  measure 'full, `uniform`, 1 layer' $g=full $how=uniform $layers=1
  measure 'full, `uniform`, 2 layers' $g=full $how=uniform $layers=2
  measure 'full, `block`, 2 layers' $g=full $how=block $layers=2
  measure 'full, `block`, 4 layers' $g=full $how=block $layers=4
} | python3 -c '
import json, sys
print("| recomputed | activations at the peak | workspace | peak of the step | estimated | time |")
print("|---|---|---|---|---|---|")
first = None
for line in sys.stdin:
    name, memory, estimated, work = json.loads(line)
    first = first or work
    mib = lambda account, key: "{:.1f} MiB".format(account[key] / 2**20)
    print("| {} | {} | {} | {} | {} | {:.2f} |".format(
        name, mib(memory, "activations"), mib(memory, "workspace"), mib(memory, "peak"),
        mib(estimated, "peak"), work / first))'
