#!/usr/bin/env bash
# Long proofs that the test tiers run in short.
# Each ends with one line of figures and fails when anything was lost.
#
#   scripts/soak.sh kills [N]      kill -9 at N random moments (default 1000): every run resumes, and its
#                                  losses are those of the run that was not killed, bit for bit
#   scripts/soak.sh faults         every operation of every save fails, tears,
#                                  fills the disk or loses the power
#   scripts/soak.sh fuzz [N] [T…]  N executions (default 2000000) of each reader's fuzz target (or of the
#                                  targets T…), one after the other, in 2 GiB and 10 s for an input at most; a
#                                  finding does not stop the rest
#   scripts/soak.sh flat [M]       trains M minutes (default 60) with evaluations and checkpoints; from a
#                                  tenth of the time on, resident memory stays within 1 %
#
# Uses the release build (cmake --preset release), for fuzz the build asan, and brings it up to date with J
# jobs (default 1). BUILD=DIR names another release build.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${BUILD:-build/release}
jobs=${J:-1}

require_count() { # COUNT NAME
  case "$1" in ''|0*|*[!0-9]*) echo "soak.sh: '$1' is not a number of $2" >&2; exit 2 ;; esac
}

case "${1:-}" in
  kills)
    count=${2:-1000}
    require_count "$count" kills
    cmake --build "$build" -j "$jobs" --target capstan test_cli_kills >/dev/null
    CAPSTAN_KILLS=$count "$build/test_cli_kills" --success=false
    ;;
  faults)
    cmake --build "$build" -j "$jobs" --target test_train_faults test_checkpoint >/dev/null
    "$build/test_checkpoint" && "$build/test_train_faults"
    ;;
  fuzz)
    build=build/asan
    count=${2:-2000000}
    require_count "$count" executions
    targets=("${@:3}")
    if [ ${#targets[@]} -eq 0 ]; then
      for source in tests/fuzz/fuzz_*.cpp; do targets+=("$(basename "$source" .cpp)"); done
    fi
    cmake --build "$build" -j "$jobs" --target "${targets[@]}" >/dev/null
    bad=0
    for target in "${targets[@]}"; do
      log=$build/soak-$target.txt
      status=0
      # Processor time: the machine may have other work.
      TIMEFORMAT='%U'
      { time FUZZ_RUNS=$count scripts/fuzz.sh "$target" 0 >"$log" 2>&1; } 2>"$log.seconds" || status=$?
      ran=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -n 1)
      found="no finding"
      [ "$status" -eq 0 ] || found="FOUND: see $log"
      awk -v target="$target" -v ran="${ran:-0}" -v found="$found" '
        END {
          printf "%s: %d executions in %.1f minutes of processor time (%d a second), %s\n",
            target, ran, $1 / 60, ran / ($1 + 0.001), found
        }
      ' "$log.seconds"
      [ "$status" -eq 0 ] || bad=$((bad + 1))
    done
    [ "$bad" -eq 0 ]
    ;;
  flat)
    minutes=${2:-60}
    require_count "$minutes" minutes
    cmake --build "$build" -j "$jobs" --target capstan >/dev/null
    folder=build/soak-flat
    rm -rf "$folder"
    mkdir -p "$folder"
    cat docs/*.md src/*/*.cpp >"$folder/text.txt"
    "$build/capstan" -q tokenizer train "$folder/text.txt" --vocab-size 4096 -o "$folder/tokenizer.json"
    "$build/capstan" -q data prepare "$folder/text.txt" -t "$folder/tokenizer.json" --append-eod \
      --documents blank-line -o "$folder/text"
    "$build/capstan" train quickstart --run-dir "$folder/run" dataset.data_path="$folder/text_text_document" \
      tokenizer.tokenizer_model="$folder/tokenizer.json" train.train_iters=1000000 \
      train.exit_duration_in_mins="$minutes" validation.eval_interval=100 checkpoint.save_interval=100 \
      checkpoint.async_save=true checkpoint.most_recent_k=2 \
      >"$folder/output.txt" 2>&1 &
    run=$!
    trap 'kill "$run" 2>/dev/null || true' EXIT
    begun=$SECONDS
    while resident=$(awk '/^VmRSS:/ {print $2}' "/proc/$run/status" 2>/dev/null) && [ -n "$resident" ]; do
      echo "$((SECONDS - begun)) $resident" >>"$folder/resident.txt"
      sleep 1
    done
    status=0
    wait "$run" || status=$?
    trap - EXIT
    if [ "$status" -ne 75 ]; then
      tail "$folder/output.txt" >&2
      echo "soak.sh: the run ended with $status instead of 75" >&2
      exit 1
    fi
    # The mean of each twentieth of the time: a save or an evaluation takes and gives back memory within one.
    # The last seconds belong to the end of the run.
    awk -v all=$((minutes * 60)) -v steps="$(grep -c '"loss"' "$folder/run/metrics.jsonl" || true)" '
      $1 >= all / 10 && $1 < all - 2 {
        part = int($1 * 20 / all); sum[part] += $2; count[part]++; n++
        if ($2 > peak) peak = $2
      }
      END {
        for (part in sum) {
          mean = sum[part] / count[part]
          if (!low || mean < low) low = mean
          if (mean > high) high = mean
        }
        if (!low) { print "soak.sh: no sample of memory"; exit 1 }
        spread = 100 * (high - low) / low
        printf "flat: %d samples of %.1f minutes, rows with a loss %d; " \
          "twentieths of the time: %.1f to %.1f MiB resident, %.2f %% apart; peak %.1f MiB\n",
          n, all / 60, steps, low / 1024, high / 1024, spread, peak / 1024
        exit spread > 1
      }' "$folder/resident.txt"
    ;;
  -h|--help) sed -n '2,17s/^# \{0,1\}//p' "$0" ;;
  *) echo "soak.sh: say what: kills [N], faults, fuzz [N] or flat [M] (try --help)" >&2; exit 2 ;;
esac
