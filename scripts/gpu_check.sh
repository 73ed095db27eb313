#!/usr/bin/env bash
# Builds the CUDA backend on a machine with an NVIDIA GPU, runs the tests on it, and takes its figures. Each
# stage ends within ten minutes: one that has more to do says so. When it is run again, `build` compiles what
# is left, and tests, sanitizers and recipes leave out what has passed with this build.
#
#   scripts/gpu_check.sh                all stages, one after another
#   scripts/gpu_check.sh STAGE…         these: build tests memcheck racecheck synccheck training bench recipes
#   --out DIR                           the results; default build/gpu-check
#   --arch LIST                         CAPSTAN_CUDA_ARCHITECTURES of the build; default that of the preset
#
# build      the preset `cuda`: program, backend and the tests of the GPU
# tests      ctest -L cuda: kernels, operations, golden models, optimizers and trainer on the GPU
# memcheck, racecheck, synccheck    compute-sanitizer over the kernel tests, at small sizes
# training   quickstart beside the CPU, a resume to the bit, estimated beside measured memory
# bench      `capstan bench`: peaks, kernels as fractions of them, a training step by operation; a trace
# recipes    tokens/s of an 8B model, of LoRA on it, and of a 0.5B model, on random tokens
#
# DIR/STAGE.txt holds what the runs of a stage have printed, DIR/summary.txt a line for each, DIR/machine.txt
# GPU, driver, toolkit and commit, without which no figure is given.
set -uo pipefail
script=$(realpath "$0")
cd "$(dirname "$script")/.." || exit 1

all=(build tests memcheck racecheck synccheck training bench recipes)
out=build/gpu-check arch='' inside='' stages=()
while [ $# -gt 0 ]; do
  case "$1" in
    --out) out=$2; shift ;;
    --inside) inside=$2; shift ;;
    --arch) arch=$2; shift ;;
    -h | --help) sed -n '2,19s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *)
      [[ " ${all[*]} " == *" $1 "* ]] || { echo "gpu_check.sh: unknown stage '$1' (try --help)" >&2; exit 2; }
      stages+=("$1") ;;
  esac
  shift
done
[ ${#stages[@]} -gt 0 ] || stages=("${all[@]}")
mkdir -p "$out"
out=$(cd "$out" && pwd)
program=build/cuda/capstan
limit=570 # seconds of a stage
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 NO_COLOR=1

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
  echo "gpu_check.sh: not run: nvidia-smi shows no GPU" >&2
  exit 77
fi
[ -n "$inside" ] || {
  nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv
  "${CUDACXX:-/usr/local/cuda/bin/nvcc}" --version 2>/dev/null | tail -n 2
  echo "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
  date -u
} >"$out/machine.txt"

stage_build() {
  cmake --preset cuda ${arch:+"-DCAPSTAN_CUDA_ARCHITECTURES=$arch"} >/dev/null &&
    cmake --build --preset cuda -j "$(nproc)" --target capstan gpu_tests
}

# Runs a part of a stage, unless it has passed before with this build: a stage that did not finish goes on
# where it was.
once() { # NAME COMMAND…
  local name=$1
  shift
  : "${build:=$(cat "$program" build/cuda/libcapstan_cuda.so | cksum | tr ' ' -)}"
  local passed="$out/passed/$build/$name"
  [ ! -e "$passed" ] || { echo "== $name: passed before"; return 0; }
  echo "== $name"
  "$@" && mkdir -p "$out/passed/$build" && touch "$passed"
}

stage_tests() {
  local test tests status=0
  mapfile -t tests < <(ctest --test-dir build/cuda -L cuda -N | sed -nE 's/^ *Test +#[0-9]+: //p')
  [ ${#tests[@]} -gt 0 ] || { echo "no tests with the label cuda"; return 1; }
  for test in "${tests[@]}"; do
    once "test.$test" ctest --test-dir build/cuda -R "^$test\$" --output-on-failure --no-tests=error ||
      status=1
  done
  return "$status"
}

# Family by family: the sources of the tests in kernels/CMakeLists.txt, without workspace.cpp, whose cases
# repeat the kernels of the others.
sanitize() { # TOOL
  local family families status=0 sanitizer
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  [ -x "$sanitizer" ] || { echo "no compute-sanitizer in PATH or /usr/local/cuda/bin"; return 1; }
  mapfile -t families < <(sed -n '/^set(CUDA_KERNEL_TESTS/,/)/p' kernels/CMakeLists.txt |
    grep -oE '[a-z0-9_]+\.cpp' | sed 's/\.cpp$//' | grep -vx workspace)
  [ ${#families[@]} -gt 0 ] || { echo "no CUDA_KERNEL_TESTS in kernels/CMakeLists.txt"; return 1; }
  for family in "${families[@]}"; do
    once "$1.$family" env CAPSTAN_TEST_SMALL=1 CUDA_LAUNCH_BLOCKING=1 "$sanitizer" --tool "$1" \
      --error-exitcode 9 build/cuda/test_cuda_kernels --source-file="*/$family.cpp" || status=1
  done
  return "$status"
}
stage_memcheck() { sanitize memcheck; }
stage_racecheck() { sanitize racecheck; }
stage_synccheck() { sanitize synccheck; }

# Losses of a run, one to a line.
losses() { sed -nE 's/.*"loss": ?([^,}]+).*/\1/p' "$1/metrics.jsonl"; }
stage_training() {
  local runs="$out/runs" status=0
  local recipe=(quickstart dataset=mock tokenizer=none model.vocab_size=8192 logger.log_interval=1
    train.train_iters=40 validation.eval_interval=null)
  rm -rf "$runs"
  "$program" train "${recipe[@]}" train.device=cpu --run-dir "$runs/cpu" || status=1
  "$program" train "${recipe[@]}" train.device=cuda --run-dir "$runs/gpu" || status=1
  "$program" train "${recipe[@]}" train.device=cuda --run-dir "$runs/resumed" train.exit_interval=20
  "$program" train "${recipe[@]}" train.device=cuda --run-dir "$runs/resumed" --resume || status=1
  echo "losses of the CPU, of the GPU, of the GPU with a resume:"
  paste <(losses "$runs/cpu") <(losses "$runs/gpu") <(losses "$runs/resumed")
  cmp <(losses "$runs/gpu") <(losses "$runs/resumed") || status=1
  paste <(losses "$runs/cpu") <(losses "$runs/gpu") |
    awk '{ d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > worst) worst = d }
         END { print "largest relative difference: " worst; exit worst < 1e-3 ? 0 : 1 }' || status=1
  return "$status"
}

stage_bench() {
  "$program" bench -r gpt2-124m train.device=cuda mixed_precision=bf16_mixed train.micro_batch_size=16 &&
    "$program" bench --json -r gpt2-124m train.device=cuda mixed_precision=bf16_mixed \
      train.micro_batch_size=16 >"$out/bench.json" &&
    "$program" trace gpt2-124m train.device=cuda mixed_precision=bf16_mixed -o "$out/trace.json"
}

# A short run on one GPU; prints the last lines of its log, with tokens/s and memory.
short_run() { # NAME RECIPE [OVERRIDES]
  local name=$1
  shift
  echo "capstan train $*"
  rm -rf "$out/runs/$name"
  timeout 180 "$program" train "$@" train.device=cuda dataset=mock tokenizer=none train.train_iters=12 \
    logger.log_interval=4 validation.eval_interval=null checkpoint.save_interval=null \
    --run-dir "$out/runs/$name" 2>&1 | tail -n 12
}
throughput() { once "$1" short_run "$@" || status=1; }
one_gpu=(dist.world_size=1 dist.tp=1 dist.cp=1 dist.pp=1 ddp=no_shard)
# 14 bytes per parameter of state: 16-bit moments.
small_moments=(optimizer.use_precision_aware_optimizer=true optimizer.exp_avg_dtype=bf16
  optimizer.exp_avg_sq_dtype=bf16)
stage_recipes() {
  local status=0 full=(llama3.1-8b "${one_gpu[@]}" "${small_moments[@]}" model.seq_length=4096
    train.micro_batch_size=1 train.global_batch_size=8 model.recompute_granularity=null)
  throughput full-8b "${full[@]}"
  throughput full-8b-fp8 "${full[@]}" mixed_precision=bf16_with_fp8_current_scaling_mixed
  throughput lora-8b lora model=llama3-8b peft.random_base=true checkpoint.pretrained_checkpoint=null \
    "${one_gpu[@]}" model.seq_length=4096 train.micro_batch_size=1 train.global_batch_size=8
  throughput full-0.5b qwen2.5-0.5b "${one_gpu[@]}" model.seq_length=1024 train.micro_batch_size=16 \
    train.global_batch_size=64
  return "$status"
}

if [ -n "$inside" ]; then
  "stage_$inside"
  exit
fi
failed=0
for stage in "${stages[@]}"; do
  begun=$SECONDS
  echo "== $stage (at most $((limit / 60)) minutes), into $out/$stage.txt"
  # The script itself again, in a process group that the limit ends as a whole.
  timeout "$limit" "$script" --inside "$stage" --out "$out" ${arch:+--arch "$arch"} >>"$out/$stage.txt" 2>&1
  status=$?
  case $status in
    0) line="passed" ;;
    124) line="not finished: run \`scripts/gpu_check.sh $stage\` again" failed=1 ;;
    *) line="failed" failed=1; tail -n 30 "$out/$stage.txt" ;;
  esac
  printf '%-10s %4d s  %s\n' "$stage" $((SECONDS - begun)) "$line" | tee -a "$out/summary.txt"
  [ "$stage" != build ] || [ "$status" -eq 0 ] || exit 1
done
exit $failed
