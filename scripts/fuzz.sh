#!/usr/bin/env bash
# Runs one libFuzzer target of the asan build over its committed corpus and beyond.
#
#   scripts/fuzz.sh TARGET [SECONDS]      TARGET: fuzz_recipe, …; SECONDS: default 20, 0 for no end
#
# FUZZ_RUNS=N ends after N executions. Inputs are up to 64 KiB long, with FUZZ_RUNS up to 4 KiB: the same time
# goes into more of them, and what only long inputs reach (limits of size and depth) has tests of its own.
# FUZZ_TIMEOUT=S: seconds for one input (default 10), by the clock; where other work stops the process now and
# then it has to be more than those breaks. What is found new is kept below build/asan/fuzz/corpus, a crashing
# input below build/asan/fuzz/crashes; an input that found a mistake belongs into tests/fuzz/corpus/NAME (of
# fuzz_NAME), with a test.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
target=${1:?TARGET is missing} seconds=${2:-20}
program=build/asan/$target
if [ ! -x "$program" ]; then
  echo "fuzz.sh: no $program; cmake --preset asan && cmake --build --preset asan --target fuzz_all" >&2
  exit 2
fi

corpus=build/asan/fuzz/corpus/$target
mkdir -p "$corpus" build/asan/fuzz/crashes
seeds=tests/fuzz/corpus/${target#fuzz_}
extra=()
[ -d "$seeds" ] && extra+=("$seeds")
[ -f "tests/fuzz/${target#fuzz_}.dict" ] && extra+=("-dict=tests/fuzz/${target#fuzz_}.dict")
limits=(-max_total_time="$seconds" -max_len=65536)
[ -n "${FUZZ_RUNS:-}" ] &&
  limits=(-max_total_time="$seconds" -runs="$FUZZ_RUNS" -max_len=4096 -print_final_stats=1)
# Short stacks of allocations: a report has the stack of the fault itself,
# and recording long ones takes 7 % of the time.
export ASAN_OPTIONS="detect_leaks=1:allocator_may_return_null=1:malloc_context_size=4:quarantine_size_mb=64"
# Without entropic scheduling, which spent two thirds of the time of the recipe targets on counting how rare
# their many features are.
exec "$program" "${limits[@]}" -entropic=0 -rss_limit_mb=2048 -malloc_limit_mb=1024 \
  -timeout="${FUZZ_TIMEOUT:-10}" -artifact_prefix="build/asan/fuzz/crashes/$target-" "$corpus" "${extra[@]}"
