#!/usr/bin/env bash
# Long proofs that the test tiers run in short. Each ends with one line of figures and fails when anything was lost.
#
#   scripts/soak.sh kills [N]      kill -9 at N random moments (default 1000): every run resumes, and its losses are those of
#                                  the run that nobody killed, bit for bit
#   scripts/soak.sh faults         every operation of every save fails, tears, fills the disk or loses the power
#
# Uses the release build (cmake --preset release); BUILD=DIR names another.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${BUILD:-build/release}

case "${1:-}" in
  kills)
    count=${2:-1000}
    case "$count" in ''|*[!0-9]*) echo "soak.sh: '$count' is not a number of kills" >&2; exit 2 ;; esac
    cmake --build "$build" --target capstan test_cli_kills >/dev/null
    CAPSTAN_KILLS=$count "$build/test_cli_kills" --success=false
    ;;
  faults)
    cmake --build "$build" --target test_train_faults test_checkpoint >/dev/null
    "$build/test_checkpoint" && "$build/test_train_faults"
    ;;
  -h|--help) sed -n '2,10s/^# \{0,1\}//p' "$0" ;;
  *) echo "soak.sh: say what: kills [N] or faults (try --help)" >&2; exit 2 ;;
esac
