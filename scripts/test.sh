#!/usr/bin/env bash
# Builds Capstan and runs its tests. Ends with one line "N passed, N failed".
#
#   scripts/test.sh           fast: release build with warnings as errors, all tests but those labeled `full`
#                             or `slow`; within fifteen minutes on two cores without a compiler cache
#   scripts/test.sh --full    also the form of the sources, all tests, clang-tidy of what changed,
#                             installation, the quickstart, the tests of a GPU where there is one, the CUDA
#                             backend for one architecture where there is a toolkit, one build with address
#                             and undefined-behavior sanitizers, the tests labeled `threaded` under the thread
#                             sanitizer, and each fuzz target for a while; the time of each stage at the end
#   -j N                      compile and test jobs; default: the cores
#   --no-install              take the installed packages as they are
#
# CAPSTAN_FUZZ_SECONDS       how long each fuzz target runs (default 10)
# CAPSTAN_TIDY_SINCE         clang-tidy looks at what has changed since that revision (default: since `main`;
#                            on `main`, the last commit)
# CI                         where it is set, a missing tool or right is a failure, not a line that says what
#                            was not run
set -euo pipefail
cd "$(dirname "$0")/.."

full=no install=yes jobs=$(nproc)
while [ $# -gt 0 ]; do
  case "$1" in
    --full) full=yes ;;
    --no-install) install=no ;;
    -j) jobs=$2; shift ;;
    -h|--help) sed -n '2,21s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "test.sh: unknown argument '$1' (try --help)" >&2; exit 2 ;;
  esac
  shift
done

# All builds of the full tier are alike, so that one finds in ccache what another has compiled, and without
# line tables, which take time.
export CAPSTAN_LINE_TABLES=ON
if [ "$full" = yes ]; then CAPSTAN_LINE_TABLES=OFF; fi

logs=build/test-logs
mkdir -p "$logs"
begun=$SECONDS
passed=0 failed=0
failures=()
not_run=()  # what this machine cannot run, which is neither passed nor failed

# Ends the stage before, and begins the next.
stage_name='' stage_begun=0 stage_times=()
minutes() { printf '%dm %02ds' $(($1 / 60)) $(($1 % 60)); }
stage() {
  [ -z "$stage_name" ] ||
    stage_times+=("$(printf '%8s  %s' "$(minutes $((SECONDS - stage_begun)))" "$stage_name")")
  stage_name=$1 stage_begun=$SECONDS
  printf '\n== %s  (%s)\n' "$1" "$(minutes $((SECONDS - begun)))"
}

# Whether a tool is there. A missing one fails under CI and is reported elsewhere.
require_tool() {
  command -v "$1" >/dev/null && return
  if [[ "${CI:-0}" =~ ^(|0|false)$ ]]; then not_run+=("no $1"); else result "tool $1 is missing" 1; fi
  return 1
}

# A step whose failure ends everything: nothing after it would mean anything.
must() { "$@" || { echo "test.sh: failed: $*" >&2; exit 1; }; }

configure() { # PRESET [CMake arguments]
  must cmake --preset "$@" -DCAPSTAN_WERROR=ON "-DCAPSTAN_LINE_TABLES=$CAPSTAN_LINE_TABLES" \
    >"$logs/configure-$1.txt"
}
build() { # PRESET [--target TARGET…]
  local preset=$1
  shift
  must cmake --build --preset "$preset" -j "$jobs" "$@"
}

# Runs ctest and adds its counts to the totals; a failing test does not stop the rest.
tests() { # PRESET [ctest arguments]
  local preset=$1 log="$logs/ctest-$1.txt" total=0 bad=0 errors
  shift
  ctest --test-dir "build/$preset" -j "$jobs" --output-on-failure --no-tests=error "$@" 2>&1 |
    tee "$log" || true
  # "98% tests passed, 2 tests failed out of 120"
  read -r bad total < <(sed -nE 's/^.*, ([0-9]+) tests? failed out of ([0-9]+).*$/\1 \2/p' "$log" |
    tail -n 1) || true
  if [ "${total:-0}" -eq 0 ]; then
    bad=1 total=1
    failures+=("$preset: ctest did not report")
  fi
  local skipped
  skipped=$(grep -c '\*\*\*Skipped' "$log" || true)
  passed=$((passed + total - bad - skipped))
  failed=$((failed + bad))
  while read -r name; do
    case "$name" in
      *_gpu | cuda_kernels_*) not_run+=("$preset: $name: this machine has no NVIDIA GPU") ;;
      *_several_gpus*) not_run+=("$preset: $name: this machine has fewer than two NVIDIA GPUs") ;;
      *) not_run+=("$preset: $name: this machine lacks the instructions") ;;
    esac
  done < <(sed -nE 's/^.*Test +#[0-9]+: ([^ ]+) \.*\*\*\*Skipped.*$/\1/p' "$log")
  while read -r name; do
    errors=$(first_errors "$log" "$name")
    failures+=("$preset: $name${errors:+$'\n'$errors}")
  done < <(sed -nE '/\(Skipped\)$/d; s/^[[:space:]]+[0-9]+ - ([^ ]+) \(.*$/\1/p' "$log")
}

# The first errors that a failed test printed, without what passed tests have logged.
first_errors() { # LOG NAME
  awk -v name="$2" '
    /^ *[0-9]+\/[0-9]+ Test +#|^ +Start +[0-9]+:/ { within = index($0, " " name " ") && /\*\*\*/; next }
    / MESSAGE: | WARNING: / { error = 0 }
    /ERROR|FATAL|SUMMARY|terminate|runtime error:/ { error = 1; wanted = 1 }
    within && (wanted || error && /  values: |  logged: /) && ++lines <= 12 { print "        " $0 }
    { wanted = 0 }
  ' "$1"
}

result() { # NAME STATUS
  if [ "$2" -eq 0 ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    failures+=("$1")
  fi
}

if [ "$install" = yes ]; then
  stage install
  if [ "$full" = yes ]; then must scripts/install.sh everything; else must scripts/install.sh quickstart; fi
fi

if [ "$full" = yes ]; then
  stage style
  if require_tool clang-format; then
    status=0
    scripts/format.sh --check || status=$?
    result style "$status"
  fi
  status=0
  scripts/messages.sh || status=$?
  result messages "$status"
  for tool in groff strace mpirun ccache; do require_tool "$tool" || true; done
  status=0
  scripts/figures.sh || status=$?
  result figures "$status"
fi

stage "build: release"
configure release
build release
stage "tests: release"
# train_every_layout includes what train_layouts runs.
if [ "$full" = yes ]; then tests release -E '^train_layouts'; else tests release -LE "full|slow"; fi

if [ "$full" = yes ]; then
  stage "clang-tidy of what changed"
  if require_tool clang-tidy; then
    if since=${CAPSTAN_TIDY_SINCE:-$(git merge-base HEAD main 2>/dev/null)} &&
      [ "$since" = "$(git rev-parse HEAD)" ]; then
      since=HEAD~1
    fi
    status=0
    CAPSTAN_JOBS=$jobs scripts/tidy.sh --since "${since:-HEAD~1}" >"$logs/tidy.txt" 2>&1 || status=$?
    tail -n 20 "$logs/tidy.txt"
    result "clang-tidy (see $logs/tidy.txt)" "$status"
  fi

  stage installation
  status=0
  rm -rf build/test-install
  { cmake --install build/release --prefix build/test-install && build/test-install/bin/capstan version &&
    build/test-install/bin/capstan check quickstart dataset=mock tokenizer=none &&
    test -s build/test-install/share/man/man1/capstan-train.1 &&
    test -s build/test-install/share/bash-completion/completions/capstan
  } >"$logs/install.txt" 2>&1 || status=$?
  [ "$status" -eq 0 ] || tail -n 20 "$logs/install.txt"
  result "cmake --install (see $logs/install.txt)" "$status"

  stage quickstart
  status=0
  rm -rf build/test-quickstart
  scripts/quickstart.sh --run-dir build/test-quickstart train.train_iters=60 \
    >"$logs/quickstart.txt" 2>&1 || status=$?
  [ "$status" -eq 0 ] || tail -n 20 "$logs/quickstart.txt"
  result "quickstart (see $logs/quickstart.txt)" "$status"

  stage "tests on a GPU"
  if nvidia-smi -L >/dev/null 2>&1; then
    status=0
    scripts/gpu_check.sh build tests ranks | tee "$logs/gpu.txt" || status=$?
    result "scripts/gpu_check.sh build tests ranks (see build/gpu-check)" "$status"
    while read -r line; do not_run+=("cuda: $line"); done < <(
      sed -nE 's/^([a-z]+) +[0-9]+ s  not run: (.*)$/\1: \2/p' "$logs/gpu.txt")
  else
    not_run+=("cuda: ctest -L cuda: this machine has no NVIDIA GPU")
  fi

  # Debian has no toolkit that compiles the kernels, and scripts/install.sh installs none: the stage is of
  # machines that have one. Every other architecture: scripts/cuda.sh all.
  stage "cuda: build for one architecture, resources of the kernels"
  status=0
  { CAPSTAN_JOBS=$jobs scripts/cuda.sh build && scripts/cuda.sh resources; } >"$logs/cuda.txt" 2>&1 ||
    status=$?
  if [ "$status" -eq 77 ]; then
    not_run+=("cuda: no CUDA toolkit compiles the kernels here (docs/gpu.md)")
  else
    tail -n "$([ "$status" -eq 0 ] && echo 3 || echo 40)" "$logs/cuda.txt"
    while read -r line; do not_run+=("cuda: $line"); done < <(
      sed -n 's/^cuda\.sh: not run: //p' "$logs/cuda.txt")
    result "scripts/cuda.sh build, resources (see $logs/cuda.txt)" "$status"
  fi

  # Leaks: Open MPI and the loader keep some memory until the end; scripts/lsan.supp names them. Threads: Open
  # MPI and libgomp synchronize in ways that the sanitizer cannot see; scripts/tsan.supp names them.
  export ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1"
  ASAN_OPTIONS+=":allocator_may_return_null=1"
  export LSAN_OPTIONS="suppressions=$PWD/scripts/lsan.supp:print_suppressions=0"
  export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1"
  export TSAN_OPTIONS="suppressions=$PWD/scripts/tsan.supp:halt_on_error=1:second_deadlock_stack=1"
  TSAN_OPTIONS+=":allocator_may_return_null=1"

  stage "build: asan"
  configure asan
  build asan
  stage "tests: asan"
  tests asan -LE "slow|ranks"
  # The memory that Open MPI does not free belongs to modules that are unloaded by then: no suppression can
  # name it.
  ASAN_OPTIONS="${ASAN_OPTIONS/detect_leaks=1/detect_leaks=0}" tests asan -L ranks -LE slow

  stage "build: tsan"
  configure tsan
  must cmake --build --preset tsan -j "$jobs" --target threaded_tests
  stage "tests: tsan"
  tests tsan -L threaded -LE slow

  stage "fuzz: ${CAPSTAN_FUZZ_SECONDS:-10} s a target"
  # As many targets at a time as there are jobs; a target's report is in its log.
  running=()
  for target in build/asan/fuzz_*; do
    [ -f "$target" ] && [ -x "$target" ] || continue
    name=$(basename "$target")
    scripts/fuzz.sh "$name" "${CAPSTAN_FUZZ_SECONDS:-10}" >"$logs/$name.txt" 2>&1 &
    running+=("$name $!")
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do sleep 0.2; done
  done
  [ ${#running[@]} -gt 0 ] || result "fuzz: no targets in build/asan" 1
  for entry in "${running[@]}"; do
    read -r name pid <<<"$entry"
    status=0
    wait "$pid" || status=$?
    result "fuzz: $name (see $logs/$name.txt)" "$status"
    [ "$status" -eq 0 ] && echo "  $name: $(grep -E '^Done ' "$logs/$name.txt" | tail -n 1)" ||
      tail -n 40 "$logs/$name.txt"
  done
fi

stage "end"
for name in "${not_run[@]}"; do echo "NOT RUN $name"; done
for name in "${stage_times[@]}"; do echo "$name"; done
for name in "${failures[@]}"; do echo "FAILED  $name"; done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
