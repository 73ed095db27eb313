#!/usr/bin/env bash
# scripts/gpu_check.sh with programs that only print: each stage passes once, and fails where a test is
# skipped, a run lacks its losses, memory is not as estimated, a figure cannot be read or a tool finds an
# error. Then the same from an archive of scripts/gpu_package.sh.
#
#   gpu_check.sh SOURCES SCRATCH
set -euo pipefail
sources=$1 scratch=$2
rm -rf "$scratch"
mkdir -p "$scratch"/{scripts,kernels,build/cuda,bin,tests/cli/text}
cp "$sources"/scripts/gpu_{check,package}.sh "$scratch/scripts"
cp "$sources/kernels/CMakeLists.txt" "$scratch/kernels"
cp "$sources/tests/cli/text/tokenizer.json" "$scratch/tests/cli/text"
cd "$scratch"
touch build/cuda/libcapstan_cuda.so

program() { cat >"$1"; chmod +x "$1"; }
program bin/nvidia-smi <<'NVIDIA'
#!/usr/bin/env bash
for ((gpu = 0; gpu < ${FAKE_GPUS:-1}; ++gpu)); do echo "GPU $gpu: a stand-in (UUID: GPU-0)"; done
NVIDIA
# As the tests of a GPU: 77 where they cannot run.
program build/cuda/test_one <<'TEST'
#!/usr/bin/env bash
echo "not run: no NVIDIA driver is installed"
sleep "${FAKE_SLEEP:-0}"
exit "${FAKE_TEST:-0}"
TEST
program build/cuda/test_cuda_kernels <<'TEST'
#!/usr/bin/env bash
echo "[doctest] test cases: ${FAKE_CASES:-3} | ${FAKE_CASES:-3} passed | 0 failed | 90 skipped"
TEST
program bin/compute-sanitizer <<'SANITIZER'
#!/usr/bin/env bash
[[ "$*" == *"--error-exitcode 9 build/cuda/test_cuda_kernels --source-file="* ]] || exit 2
build/cuda/test_cuda_kernels
[ "$2" = racecheck ] && hazards='RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)'
echo "========= ${FAKE_SUMMARY-${hazards:-ERROR SUMMARY: 0 errors}}"
SANITIZER
for number in 1 2; do
  echo "add_test(one_gpu$number $PWD/build/cuda/test_one)"
  [ "$number" = 2 ] && labels='cuda;several_gpus' || labels=cuda
  echo "set_tests_properties(one_gpu$number PROPERTIES LABELS \"$labels\" SKIP_RETURN_CODE 77)"
done >build/cuda/CTestTestfile.cmake
# capstan train, bench and trace. FAKE_…: what to do wrong.
program build/cuda/capstan <<'CAPSTAN'
#!/usr/bin/env bash
echo "capstan $*" >>commands.txt
command=$1 device=cpu name=none run='' ranks=1 first=1 last=40 interval=1
if [ "$command" = generate ]; then
  [[ " $* " =~ ' tokenizer.tokenizer_model='([^ ]+)' ' && -e "${BASH_REMATCH[1]}" ]] ||
    { echo "the checkpoint has no tokenizer, since its run trained on mock data" >&2; exit 1; }
  [[ "$*" == *cuda_graph_impl=local* ]] && echo "{\"tokens\":200,\"seconds\":${FAKE_TOKENS-0.5}}" ||
    echo '{"tokens":200,"seconds":0.4}'
  exit 0
fi
if [ "$command" = bench ]; then
  [[ "$*" == *--json* ]] || exit 0
  if [[ "$*" == *cuda_graph_impl* ]]; then
    cat <<JSON
{
  "step": {
    "seconds": 0.5,
    "cuda_graphs": {
      "seconds": ${FAKE_GRAPHS-0.02},
      "seconds_without": 0.03,
      "graphs": 12,
      "nodes": 144
    },
    "steps": 3
  }
}
JSON
    exit 0
  fi
  [[ "$*" == *"bench llama3-8b (16 Mi --json"* ]] || exit 0
  cat <<JSON
{
  "kernels": [
    {
      "name": "gpt2-124m norm forward",
      "rate": 68.83,
      "unit": "GB/s",
      "fraction_of_peak": 1.39
    },
    {
      "name": "llama3-8b attention forward",
      "rate": ${FAKE_ATTENTION-330000.5},
      "unit": "GFLOP/s",
      "fraction_of_peak": 0.45
    },
    {
      "name": "llama3-8b ${FAKE_BACKWARD:-attention backward}",
      "rate": 299999,
      "unit": "GFLOP/s",
      "fraction_of_peak": 0.40
    },
    {
      "name": "llama3-8b quantize to fp8, and its transpose",
      "rate": 3200.5,
      "unit": "GB/s",
      "fraction_of_peak": 0.8501
JSON
  # Ended, or with a kernel that fails.
  [ -z "${FAKE_ENDED:-}" ] || exec sleep 100
  [ -z "${FAKE_ERROR:-}" ] || printf '    },\n    {\n      "name": "norm",\n      "error": "a fault"\n    }\n'
  [ -z "${FAKE_ERROR:-}" ] || exit 1
  cat <<JSON
    },
    {
      "name": "llama3-8b mlp up forward",
      "rate": 600000,
      "unit": "GFLOP/s",
      "fraction_of_peak": 0.9
    }
  ]
}
JSON
  exit
fi
[ "$command" = train ] || exit 0
while [ $# -gt 0 ]; do
  case "$1" in
    train.device=*) device=${1#*=} ;;
    --run-dir) run=$2 name=$(basename "$2") ;;
    --nproc) ranks=$2 ;;
    --resume) first=21 ;;
    train.exit_interval=*) last=${1#*=} ;;
    train.train_iters=*) last=${1#*=} ;;
    logger.log_interval=*) interval=${1#*=} ;;
  esac
  shift
done
[ "$ranks" = 1 ] || echo "${FAKE_TRANSPORT-transfers between GPUs by NCCL 2.28.9}"
mkdir -p "$run"
for ((step = first; step <= last; ++step)); do
  [ "$device.$step" = "${FAKE_MISSING:-}" ] && continue
  [ "$name.$step" = "${FAKE_FAILING:-}.8" ] && exit 1
  # A run that goes on until somebody ends it.
  [ "$last.$step" = 1000.13 ] && exec sleep 100
  loss=9.0$step speed=150000
  [ "$name" = "${FAKE_OTHER_LOSS:-}" ] && [ "$step" = 30 ] && loss=9.1
  [ "$name" = "${FAKE_NO_SPEED:-}" ] && speed=null
  [ "$name" = full-8b ] && speed=12000
  ((step % interval == 0 || step == 1)) &&
    echo "{\"step\": $step, \"loss\": $loss, \"step_loss\": 1, \"tokens_per_second\": $speed, \"x\": 1}"
  if [ "$step" = 3 ] && [ -z "${FAKE_NO_MEMORY:-}" ]; then
    echo "{\"step\": 3, \"event\": \"estimate\", \"memory_bytes\": 1000000," \
      "\"memory_estimated_bytes\": ${FAKE_ESTIMATED:-1019999}, \"step_seconds\": 1}"
  fi
done >>"$run/metrics.jsonl"
CAPSTAN

failed=0
fail() { echo "FAILED: $*"; failed=1; }
check() { # WHAT STATUS TEXT STAGE [arguments]; a clean directory of results
  local what=$1 expected=$2 text=$3 output status=0
  shift 3
  rm -rf results commands.txt
  output=$(PATH="$PWD/bin:$PATH" scripts/gpu_check.sh --out results "$@" 2>&1) || status=$?
  output+=$(cat "results/$1.txt" results/figures.txt 2>/dev/null || true)
  if [ "$status" -ne "$expected" ] || [[ "$output" != *"$text"* ]]; then
    fail "$what: status $status, not $expected, or no '$text' in: $(tail -c 3000 <<<"$output")"
  fi
}
stored() { find results/passed -type f | wc -l; }

check "tests" 0 "100% tests passed" tests
[ "$(stored)" -eq 1 ] || fail "a test that has passed is not stored"
FAKE_TEST=77 check "a skipped test" 1 "one_gpu1 was skipped: no NVIDIA driver is installed" tests
[ ! -e results/passed ] || fail "a skipped test is stored as passed"
FAKE_TEST=1 check "a failing test" 1 "0% tests passed" tests
FAKE_SLEEP=20 check "a test that takes longer than it may" 1 "***Timeout" tests --seconds 8
mv build/cuda/CTestTestfile.cmake tests.cmake
check "no tests" 1 "no tests with the label cuda" tests
mv tests.cmake build/cuda/CTestTestfile.cmake

FAKE_CASES=0 check "several at a time" 1 "memcheck: no case of gemm.cpp has run" memcheck --jobs 4
for tool in memcheck racecheck synccheck; do
  check "$tool" 0 "SUMMARY: 0" "$tool"
  [ -e "results/passed/$(ls results/passed)/$tool.quantize_launches" ] ||
    fail "$tool has not run quantize_launches.cpp"
  FAKE_CASES=0 check "$tool without cases" 1 "$tool: no case of quantize_launches.cpp has run" "$tool"
  FAKE_SUMMARY='ERROR SUMMARY: 1 error' check "an error of $tool" 1 "no report without errors" "$tool"
  FAKE_SUMMARY='' check "no report of $tool" 1 "no report without errors" "$tool"
done

check "training" 0 "40 losses of 40; largest relative difference: 0, at most 0" training
FAKE_OTHER_LOSS=gpu check "a loss other than the CPU's" 1 "difference: 0.0" training
FAKE_OTHER_LOSS=resumed check "a loss other than that of the resumed run" 1 "at most 0" training
FAKE_MISSING=cuda.12 check "a missing loss" 1 "39 losses of 40" training
FAKE_FAILING=gpu check "a run that fails" 1 "" training
FAKE_NO_MEMORY=1 check "no row of memory" 1 "gpu: no row with measured and estimated memory" training
FAKE_ESTIMATED=1020001 check "memory above 2 %" 1 "gpu: 1000000 bytes reserved, 1020001 estimated" training
FAKE_ESTIMATED=979999 check "memory below 2 %" 1 "-2.00 %" training

FAKE_GPUS=1 check "one GPU" 77 "not run: one GPU" ranks
[ ! -e commands.txt ] || fail "ranks on one GPU have run"
FAKE_GPUS=1 check "one GPU, and another stage" 0 " s  not run: one GPU" tests ranks
FAKE_GPUS=4 CUDA_VISIBLE_DEVICES=2 check "one GPU that is visible" 77 "not run: one GPU" ranks
FAKE_GPUS=2 check "ranks" 0 "40 losses of 40" ranks
grep -q -- '--nproc 2' commands.txt || fail "no run of two ranks"
FAKE_GPUS=2 FAKE_TEST=77 check "a skipped test of ranks" 1 "one_gpu2 was skipped" ranks
FAKE_GPUS=2 FAKE_OTHER_LOSS=two check "another loss of two ranks" 1 "difference: 0.0" ranks
FAKE_GPUS=2 FAKE_TRANSPORT='through host memory' check "ranks without NCCL" 1 "did not transfer by NCCL" ranks

check "bench" 0 $'llama3-8b attention forward, TFLOP/s\t330\t320\t1.031\tmet' bench
check "a goal that is missed" 0 $'llama3-8b attention backward, TFLOP/s\t299.999\t300\t1.000\tmissed' bench
check "a fraction" 0 $'its transpose, fraction of copy bandwidth\t0.8501\t0.85\t1.000\tmet' bench
check "CUDA graphs" 0 $'with CUDA graphs, speed of that without\t1.5\t1\t1.500\tmet' bench
check "tokens with CUDA graphs" 0 $'with CUDA graphs, speed of those without\t0.8\t1\t0.800\tmissed' bench
[ "$(wc -l <results/figures.txt)" -eq 5 ] || fail "other figures than five"
FAKE_TOKENS= check "no time of tokens" 1 "could not be read: tokens of quickstart with CUDA graphs" bench
FAKE_GRAPHS=null check "CUDA graphs without a figure" 1 "could not be read: quickstart with CUDA graphs" bench
echo 'CAPSTAN_CUDNN:BOOL=ON' >build/cuda/CMakeCache.txt
check "attention of cuDNN" 0 $'llama3-8b attention forward, TFLOP/s\t330\t600\t0.550\tmissed' bench
grep -q $'attention backward, TFLOP/s\t299.999\t500\t' results/figures.txt ||
  fail "another goal of cuDNN's backward pass: $(cat results/figures.txt)"
echo 'CAPSTAN_CUDNN:BOOL=OFF' >build/cuda/CMakeCache.txt
check "own attention" 0 $'llama3-8b attention forward, TFLOP/s\t330\t320\t1.031\tmet' bench
FAKE_ATTENTION=null check "a figure that cannot be read" 1 "could not be read: llama3-8b attention" bench
FAKE_BACKWARD=other check "a figure that is missing" 1 "no figures of attention" bench
FAKE_ERROR=1 check "a kernel that fails" 1 '"error": "a fault"' bench
[ "$(wc -l <results/figures.txt)" -eq 5 ] || fail "figures beside a failing kernel are lost"
FAKE_ENDED=1 check "kernels for which the time is too short" 1 "exit code 124" bench --seconds 12
[ "$(wc -l <results/figures.txt)" -eq 5 ] || fail "figures of measured kernels are lost"

# Each stage takes its part of the time: neither the tests nor the figures take that of the others.
FAKE_SLEEP=100 check "tests without an end" 1 " s  passed" tests bench --seconds 14
[ "$(wc -l <results/figures.txt)" -eq 5 ] || fail "tests took the time of the figures"
FAKE_ENDED=1 check "figures without an end" 1 " s  passed" bench tests --seconds 14

begun=$SECONDS
check "recipes" 0 $'lora-8b, tokens/s\t150000\t13000\t11.538\tmet' recipes
[ $((SECONDS - begun)) -lt 90 ] || fail "a run that has its steps goes on"
check "a recipe below its goal" 0 $'full-8b, tokens/s\t12000\t12500\t0.960\tmissed' recipes
check "fp8" 0 $'full-8b-fp8, tokens/s of full-8b\t12.5\t1.15\t10.870\tmet' recipes
FAKE_NO_SPEED=full-0.5b check "no tokens/s" 1 "could not be read: full-0.5b, tokens/s" recipes
FAKE_FAILING=lora-8b check "a recipe that fails" 1 "" recipes
FAKE_ESTIMATED=1 check "memory of a recipe" 1 "lora-8b: 1000000 bytes reserved, 1 estimated" recipes

# A second run leaves out what has passed, and reads its figures again.
check "recipes" 0 "" recipes
rm results/figures.txt commands.txt
PATH="$PWD/bin:$PATH" scripts/gpu_check.sh --out results recipes >/dev/null
[ ! -e commands.txt ] || fail "recipes that have passed run again"
[ "$(wc -l <results/figures.txt)" -eq 4 ] || fail "figures of an earlier run are lost"

# A call that is terminated leaves the results of the stages before, without checkpoints of any depth.
rm -rf results
mkdir -p results/runs/one/checkpoints results/runs/one/two/checkpoints
touch results/runs/one/{,two/}checkpoints/weights
head -c 17M /dev/urandom >results/large.bin
FAKE_SLEEP=100 PATH="$PWD/bin:$PATH" scripts/gpu_check.sh --out results --archive killed.tar.gz \
  training tests >killed.txt 2>&1 &
process=$!
until grep -q '== tests' killed.txt; do sleep 0.1; done
kill "$process"
wait "$process" || true
tar -xzOf killed.tar.gz ./summary.txt | grep -q '^training .* passed$' ||
  fail "a call that was terminated leaves no results"
! tar -tzf killed.tar.gz | grep checkpoints || fail "checkpoints are among the results"
grep -A 1 'warning: .*killed.tar.gz is above 16 MiB' killed.txt | grep -q large.bin ||
  fail "no warning of large results: $(cat killed.txt)"

# A test that was linked again runs again.
again() { PATH="$PWD/bin:$PATH" scripts/gpu_check.sh --out results tests >/dev/null; }
check "tests" 0 "" tests
again
grep -q 'test.one_gpu1: passed before' results/tests.txt || fail "a test runs twice"
touch -d '1 hour' build/cuda/test_one
again
[ "$(grep -c '100% tests passed' results/tests.txt)" -eq 2 ] ||
  fail "a test that was linked again does not run again"

# An archive: the paths of its build do not exist where it runs, the tests that it has no MPI for are left
# out, and the largest one that is no test of the kernels, if that is wanted.
echo "add_test(one_ranks2_gpu /nonexistent)
add_test(large_gpu $PWD/build/cuda/test_large)
set_tests_properties(one_ranks2_gpu large_gpu PROPERTIES LABELS cuda)" >>build/cuda/CTestTestfile.cmake
sed -i "s/one_gpu1/one_gpu/; s/one_gpu2/two_several_gpus/" build/cuda/CTestTestfile.cmake
head -c 100000 /dev/zero >build/cuda/test_large
for tool in cmake strip; do printf '#!/bin/sh\n[ "$1" != -o ] || cp "$3" "$2"\n' | program "bin/$tool"; done
program bin/git <<'GIT'
#!/usr/bin/env bash
[ "$1" = ls-files ] && find scripts kernels tests -type f -print0 || echo abc1234
GIT
# Only a test needs libtwo, and the backend a library of NVIDIA, which is at its usual place in Python's.
mkdir -p site/nvidia/cublas/lib
touch libone.so.1 libtwo.so.2 site/nvidia/cublas/lib/libcublasLt.so.99
program bin/python3 <<PYTHON
#!/usr/bin/env bash
[[ "\$2" == *sysconfig* ]] && echo "$PWD/site" || exec $(command -v python3) "\$@"
PYTHON
program bin/ldd <<LDD
#!/usr/bin/env bash
printf '\tlibc.so.6 => /lib/libc.so.6 (0x0)\n\tlibone.so.1 => $PWD/libone.so.1 (0x0)\n'
[[ "\$1" != *test_one ]] || printf '\tlibtwo.so.2 => $PWD/libtwo.so.2 (0x0)\n'
[[ "\$1" != *cuda.so ]] || printf '\tlibcublasLt.so.99 => not found\n'
LDD
PATH="$PWD/bin:$PATH" scripts/gpu_package.sh make package.tar.xz --leave-out 1 >package.txt 2>&1 ||
  fail "an archive: $(cat package.txt)"
grep -q 'gpu_package.sh: 1 test programs' package.txt &&
  grep -qE 'MiB, with the files of the repository [0-9.]+ MiB' package.txt ||
  fail "no sizes of an archive: $(cat package.txt)"
rm -rf packed
mkdir packed
tar -xJf package.tar.xz -C packed
[ "$(ls packed/tree/build/cuda/libraries | paste -sd,)" = libone.so.1,libtwo.so.2 ] ||
  fail "libraries of an archive: $(ls packed/tree/build/cuda/libraries)"
[ ! -e packed/tree/build/cuda/test_large ] || fail "the largest test is packed"

echo "$scratch/unpacked" >packed/DIRECTORY
sed -i "s|$PWD/build|$scratch/unpacked/build|" packed/tree/build/cuda/CTestTestfile.cmake
program packed/tree/build/cuda/test_one <<'TEST'
#!/usr/bin/env bash
echo "$LD_LIBRARY_PATH"
TEST
tar -cJf package.tar.xz -C packed DIRECTORY COMMIT tree
run_packed() {
  PATH="$PWD/bin:$PATH" scripts/gpu_package.sh run package.tar.xz results.tar.gz "$@" tests training \
    >package.txt 2>&1 || fail "a run of an archive: $(cat package.txt)"
}
run_packed
tar -xzOf results.tar.gz ./machine.txt | grep -q 'commit abc1234' ||
  fail "the results of an archive have no commit"
[ "$(tar -xzOf results.tar.gz ./summary.txt | grep -c ' passed$')" -eq 2 ] ||
  fail "the results of an archive have no two stages"
tar -xzOf results.tar.gz ./tests.txt |
  grep -q "$scratch/unpacked/build/cuda/libraries:.*$PWD/site/nvidia/cublas/lib" ||
  fail "the libraries of an archive are not found: $(tar -xzOf results.tar.gz ./tests.txt)"
# Once more from its results, as on another machine.
rm -rf unpacked earlier
mkdir earlier
tar -xzf results.tar.gz -C earlier
run_packed --out earlier
tar -xzOf results.tar.gz ./tests.txt | grep -q 'test.one_gpu: passed before' ||
  fail "a second run of an archive does not know what has passed"

rm bin/nvidia-smi
printf '#!/bin/sh\nexit 9\n' | program bin/nvidia-smi
check "no GPU" 77 "nvidia-smi shows no GPU" tests
exit "$failed"
