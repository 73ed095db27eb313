#!/usr/bin/env bash
# Runs one libFuzzer target of the fuzz build over its committed corpus and beyond.
#
#   scripts/fuzz.sh TARGET [SECONDS]      TARGET: fuzz_yaml, …; SECONDS: default 20
#
# What is found new is kept below build/fuzz/corpus, a crashing input below build/fuzz/crashes; an input that found a mistake
# belongs into tests/fuzz/corpus/NAME (of fuzz_NAME), with a test.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:?TARGET is missing} seconds=${2:-20}
program=build/fuzz/$target
[ -x "$program" ] || { echo "fuzz.sh: no $program; cmake --preset fuzz && cmake --build --preset fuzz" >&2; exit 2; }

corpus=build/fuzz/corpus/$target
mkdir -p "$corpus" build/fuzz/crashes
seeds=tests/fuzz/corpus/${target#fuzz_}
extra=()
[ -d "$seeds" ] && extra+=("$seeds")
[ -f "tests/fuzz/${target#fuzz_}.dict" ] && extra+=("-dict=tests/fuzz/${target#fuzz_}.dict")
export ASAN_OPTIONS="detect_leaks=1:allocator_may_return_null=1"
exec "$program" -max_total_time="$seconds" -max_len=65536 -rss_limit_mb=2048 -malloc_limit_mb=1024 -timeout=10 \
  -print_final_stats=0 -artifact_prefix="build/fuzz/crashes/$target-" "$corpus" "${extra[@]}"
