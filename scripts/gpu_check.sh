#!/usr/bin/env bash
# Builds the CUDA backend on a machine with an NVIDIA GPU, runs the tests on it, and takes its figures. Each
# stage ends within ten minutes: one that has more to do says so. When it is run again, `build` compiles what
# is left, and tests, sanitizers and recipes leave out what has passed with this build.
#
#   scripts/gpu_check.sh                all stages, one after another
#   scripts/gpu_check.sh STAGE…         these: build training recipes bench tests ranks memcheck racecheck
#                                       synccheck
#   --out DIR                           the results; default build/gpu-check
#   --archive FILE                      packs the results too (tar.gz, without checkpoints), after each stage
#   --seconds N                         all stages together, each at most its part of what is left (`weight`
#                                       below); a test and a run take at most a quarter
#   --jobs N                            tests at a time; default half of the processors, at most 4, which
#                                       share a GPU by time slices
#   --arch LIST                         CAPSTAN_CUDA_ARCHITECTURES of the build; default that of the preset
#   --cudnn DIR                         builds with cuDNN's attention and the cudnn-frontend in DIR
#
# build      the preset `cuda`: program, backend and the tests of the GPU
# training   quickstart beside the CPU, a resume to the bit, estimated beside measured memory
# recipes    tokens/s of an 8B model, of LoRA on it, and of a 0.5B model, on random tokens
# bench      `capstan bench`: peaks, kernels as fractions of them, a training step by operation; a trace
# tests      ctest -L cuda: kernels, operations, golden models, optimizers and trainer on the GPU
# ranks      on two GPUs, transfers over NCCL: their tests, and quickstart beside a run on one GPU
# memcheck, racecheck, synccheck    compute-sanitizer over the kernel tests, at small sizes
#
# A test that is skipped, a run without its losses and a figure that cannot be read fail their stage; a goal
# that is missed does not. A stage that this machine cannot run is neither passed nor failed. Only a build
# that fails ends the others. scripts/gpu_package.sh takes a build to a machine that cannot build.
#
# DIR/STAGE.txt holds what the runs of a stage have printed, DIR/summary.txt a line for each, DIR/figures.txt
# the figures that have a goal (name, value, goal, value / goal, met or missed), DIR/machine.txt GPU, driver,
# toolkit and commit, without which no figure is given. Exits with 77 where nothing could be run.
set -uo pipefail
script=$(realpath "$0")
cd "$(dirname "$script")/.." || exit 1

all=(build training recipes bench tests ranks memcheck racecheck synccheck)
# What a stage leaves over goes to those after it: tests are the last that need much.
declare -A weight=([build]=600 [training]=50 [recipes]=240 [bench]=130 [tests]=180 [ranks]=100 [memcheck]=20
  [racecheck]=10 [synccheck]=10)
out=build/gpu-check archive='' arch='' cudnn='' inside='' seconds='' packed='' stages=()
limit=570 part_limit=540 # seconds of a stage, and of a test or run in it, at most
at_a_time=$(($(nproc) / 2))
at_a_time=$((at_a_time < 1 ? 1 : at_a_time > 4 ? 4 : at_a_time))
while [ $# -gt 0 ]; do
  case "$1" in
    --out) out=$2; shift ;;
    --archive) archive=$(realpath "$2"); shift ;;
    --inside) inside=$2 limit=$3; shift 2 ;;
    --packed) packed=--packed all=(training recipes bench tests memcheck racecheck synccheck) ;;
    --seconds) seconds=$2 part_limit=$(($2 / 4)); shift ;;
    --jobs) at_a_time=$2; shift ;;
    --arch) arch=$2; shift ;;
    --cudnn) cudnn=$(realpath "$2"); shift ;;
    -h | --help) sed -n '2,33s/^# \{0,1\}//p' "$0"; exit 0 ;;
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
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 NO_COLOR=1

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
  echo "gpu_check.sh: not run: nvidia-smi shows no GPU" >&2
  exit 77
fi
[ -n "$inside" ] || {
  nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv
  "${CUDACXX:-/usr/local/cuda/bin/nvcc}" --version 2>/dev/null | tail -n 2
  ldd build/cuda/libcapstan_cuda.so 2>/dev/null | grep -E 'cublas|cudnn|nvrtc'
  echo "commit ${CAPSTAN_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
  date -u
} >"$out/machine.txt"

stage_build() {
  local with=OFF
  [ -z "$cudnn" ] || with=ON
  cmake --preset cuda ${arch:+"-DCAPSTAN_CUDA_ARCHITECTURES=$arch"} -DCAPSTAN_CUDNN=$with \
    ${cudnn:+"-DCAPSTAN_CUDNN_FRONTEND=$cudnn"} >/dev/null &&
    cmake --build --preset cuda -j "$(nproc)" --target capstan gpu_tests || return 1
  [ "$with" = OFF ] || {
    cmake --build --preset cuda -j "$(nproc)" --target test_cudnn_plans &&
      ctest --test-dir build/cuda -R '^cudnn_plans$' --output-on-failure --no-tests=error
  }
}

# The contents of program and backend, and which test programs were linked when.
build_id() {
  { cat "$program" build/cuda/libcapstan_cuda.so; stat -c '%n %s %Y' build/cuda/test_*; } | cksum | tr ' ' -
}

# Runs a part of a stage, unless it has passed before with this build: a stage that did not finish goes on
# where it was.
once() { # NAME COMMAND…
  local name=$1
  shift
  local passed="$out/passed/$build/$name"
  [ ! -e "$passed" ] || { echo "== $name: passed before"; return 0; }
  echo "== $name"
  "$@" && mkdir -p "$out/passed/$build" && touch "$passed"
}

# Starts a part of a stage beside others; all_parts waits for them, and fails where one has failed. The tests
# compute their references on the processor: several at a time use a GPU better.
running=0 parts_failed=0
part() { # NAME COMMAND…
  [ "$running" -lt "$at_a_time" ] || finish_part
  once "$@" &
  running=$((running + 1))
}
finish_part() {
  wait -n || parts_failed=1
  running=$((running - 1))
}
all_parts() {
  while [ "$running" -gt 0 ]; do finish_part; done
  return "$parts_failed"
}
# Prints what a part has written, in one piece.
print_log() { flock "$out/lock" cat "$1"; }

# Runs a test, which must not be skipped.
run_test() { # NAME
  local log="$out/test.$1.txt" status=0
  ctest --test-dir build/cuda -R "^$1\$" -V --no-tests=error \
    --stop-time "$(date -d "+$part_limit seconds" +%T)" >"$log" 2>&1 || status=$?
  if [ "$status" -eq 0 ] && ! grep -q '^100% tests passed' "$log"; then status=1; fi
  # CTest counts a skipped test as passed.
  if grep -qE '\*\*\*Skipped|\(Skipped\)' "$log"; then
    echo "$1 was skipped: $(sed -nE 's/^([0-9]+: )?not run: //p' "$log" | tail -n 1)" >>"$log"
    status=1
  fi
  print_log "$log"
  return "$status"
}
run_tests() { # [ctest arguments that choose them]
  local test tests
  mapfile -t tests < <(ctest --test-dir build/cuda -L '^cuda$' "$@" -N | sed -nE 's/^ *Test +#[0-9]+: //p')
  [ ${#tests[@]} -gt 0 ] || { echo "no tests with the label cuda: ctest $*"; return 1; }
  for test in "${tests[@]}"; do part "test.$test" run_test "$test"; done
  all_parts
}
# scripts/gpu_package.sh writes which tests an archive lacks.
stage_tests() {
  local left_out
  left_out=$(cat build/cuda/left_out.txt 2>/dev/null)
  [ -z "$left_out" ] || echo "not in the archive: $left_out"
  run_tests -LE '^several_gpus$' ${packed:+-E "_ranks[0-9]+_gpu\$${left_out:+|$left_out}"}
}

# Family by family: the sources of the tests in kernels/CMakeLists.txt, without workspace.cpp, whose cases
# repeat the kernels of the others.
sanitize() { # TOOL
  local family families sanitizer
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  [ -x "$sanitizer" ] || { echo "no compute-sanitizer in PATH or /usr/local/cuda/bin"; return 1; }
  mapfile -t families < <(sed -n '/^set(CUDA_KERNEL_TESTS/,/)/p' kernels/CMakeLists.txt |
    grep -oE '[a-z0-9_]+\.cpp' | sed 's/\.cpp$//' | grep -vx workspace)
  [ ${#families[@]} -gt 0 ] || { echo "no CUDA_KERNEL_TESTS in kernels/CMakeLists.txt"; return 1; }
  for family in "${families[@]}"; do part "$1.$family" sanitize_family "$1" "$family"; done
  all_parts
}
# The cases of a source under the tool: some have run, and the tool has reported, and found nothing.
sanitize_family() { # TOOL FAMILY
  local log="$out/$1.$2.txt" status=0
  CAPSTAN_TEST_SMALL=1 CUDA_LAUNCH_BLOCKING=1 timeout --foreground -k 5 "$part_limit" \
    "$sanitizer" --tool "$1" --error-exitcode 9 build/cuda/test_cuda_kernels --source-file="*/$2.cpp" \
    >"$log" 2>&1 || status=$?
  if ! grep -qE 'test cases: +[1-9]' "$log"; then
    echo "$1: no case of $2.cpp has run" >>"$log"
    status=1
  fi
  if ! grep -qE 'SUMMARY: 0 (errors|hazards)' "$log"; then
    echo "$1: no report without errors" >>"$log"
    status=1
  fi
  print_log "$log"
  return "$status"
}
stage_memcheck() { sanitize memcheck; }
stage_racecheck() { sanitize racecheck; }
stage_synccheck() { sanitize synccheck; }

# The values of a key in the rows of a run's steps, one to a line, and in its row of an event.
step_values() { # RUN KEY
  sed -nE "/\"event\":/d; s/.*\"$2\": ?([-+.0-9eE]+)[,}].*/\1/p" "$1/metrics.jsonl"
}
event_value() { # RUN EVENT KEY
  sed -nE "/\"event\": ?\"$2\"/s/.*\"$3\": ?([-+.0-9eE]+)[,}].*/\1/p" "$1/metrics.jsonl" | tail -n 1
}

short_quickstart=(quickstart dataset=mock tokenizer=none model.vocab_size=8192 logger.log_interval=1
  train.train_iters=40 validation.eval_interval=null)
steps=40

# Compares the losses of two runs, one for each step; fails where a loss is missing.
compare_losses() { # RUN RUN LARGEST-RELATIVE-DIFFERENCE
  paste <(step_values "$1" loss) <(step_values "$2" loss) | awk -F'\t' -v most="$3" -v steps="$steps" '
    $1 == "" || $2 == "" { next }
    { ++rows; d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > worst) worst = d }
    END {
      printf "%d losses of %d; largest relative difference: %g, at most %g\n", rows, steps, worst, most
      exit rows == steps && worst + 0 <= most + 0 ? 0 : 1
    }'
}

# Compares estimated with measured memory of a run, both as reserved from the device: within 2 %.
compare_memory() { # RUN
  local measured estimated
  measured=$(event_value "$1" estimate memory_bytes)
  estimated=$(event_value "$1" estimate memory_estimated_bytes)
  awk -v name="$(basename "$1")" -v measured="$measured" -v estimated="$estimated" 'BEGIN {
    if (measured + 0 <= 0 || estimated + 0 <= 0) {
      print name ": no row with measured and estimated memory"
      exit 1
    }
    d = estimated / measured - 1
    printf "%s: %.0f bytes reserved, %.0f estimated: ", name, measured, estimated
    printf "%+.2f %%, at most 2 %%\n", 100 * d
    exit d <= 0.02 && d >= -0.02 ? 0 : 1
  }'
}

stage_training() {
  local runs="$out/runs/training" status=0
  rm -rf "$runs"
  "$program" train "${short_quickstart[@]}" train.device=cpu --run-dir "$runs/cpu" || status=1
  "$program" train "${short_quickstart[@]}" train.device=cuda --run-dir "$runs/gpu" || status=1
  "$program" train "${short_quickstart[@]}" train.device=cuda --run-dir "$runs/resumed" train.exit_interval=20
  "$program" train "${short_quickstart[@]}" train.device=cuda --run-dir "$runs/resumed" --resume || status=1
  echo "losses of the CPU, of the GPU, of the GPU with a resume:"
  paste <(step_values "$runs/cpu" loss) <(step_values "$runs/gpu" loss) <(step_values "$runs/resumed" loss)
  echo "the GPU beside the GPU with a resume:"
  compare_losses "$runs/gpu" "$runs/resumed" 0 || status=1
  echo "the GPU beside the CPU:"
  compare_losses "$runs/cpu" "$runs/gpu" 1e-3 || status=1
  compare_memory "$runs/gpu" || status=1
  return "$status"
}

# GPUs that a process sees.
gpus() {
  local listed
  listed=$(nvidia-smi -L | grep -c '^GPU ')
  [ -z "${CUDA_VISIBLE_DEVICES+set}" ] ||
    listed=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true)
  echo "$listed"
}
stage_ranks() {
  local runs="$out/runs/ranks" status=0 seen
  seen=$(gpus)
  if [ "$seen" -lt 2 ]; then
    [ "$seen" -eq 1 ] && echo "not run: one GPU" || echo "not run: no GPU is visible"
    return 77
  fi
  at_a_time=1 # both GPUs
  run_tests -L '^several_gpus$' || status=1
  rm -rf "$runs"
  "$program" train "${short_quickstart[@]}" train.device=cuda --run-dir "$runs/one" || status=1
  "$program" train "${short_quickstart[@]}" train.device=cuda --nproc 2 --run-dir "$runs/two" |
    tee "$out/ranks.log" || status=1
  grep 'transfers between GPUs by NCCL' "$out/ranks.log" ||
    { echo "the run of two ranks did not transfer by NCCL"; status=1; }
  echo "two GPUs beside one:"
  compare_losses "$runs/one" "$runs/two" 1e-3 || status=1
  compare_memory "$runs/two" || status=1
  return "$status"
}

# Writes a figure beside its goal, in place of that of an earlier run; fails where the figure is no number.
# The goals are those of one H100 or H200.
figure() { # NAME VALUE GOAL
  local line
  if ! line=$(awk -v name="$1" -v value="$2" -v goal="$3" 'BEGIN {
      if (value !~ /^[0-9.]+([eE][-+]?[0-9]+)?$/ || value + 0 <= 0) exit 1
      met = value + 0 >= goal + 0 ? "met" : "missed"
      printf "%s\t%.6g\t%.6g\t%.3f\t%s\n", name, value, goal, value / goal, met
    }'); then
    echo "the figure could not be read: $1"
    return 1
  fi
  touch "$out/figures.txt"
  awk -F'\t' -v name="$1" '$1 != name' "$out/figures.txt" >"$out/figures.new"
  echo "$line" >>"$out/figures.new"
  mv "$out/figures.new" "$out/figures.txt"
  echo "$line"
}

# Kernels of a report of `capstan bench --json`: name, rate, unit, fraction of the peak that bounds it.
kernels_of() { # FILE
  sed -nE 's/^ *"(name|rate|unit|fraction_of_peak)": "?([^"]*[^",])"?,?$/\1\t\2/p' "$1" | awk -F'\t' '
    { of[$1] = $2 }
    $1 == "fraction_of_peak" { print of["name"] "\t" of["rate"] "\t" of["unit"] "\t" $2; split("", of) }'
}
# Memory-bound kernels at the sizes of an 8B model: 85 % of the copy bandwidth. Left out are two whose arrays
# fit into the cache of a GPU. Attention at 8192 tokens, causal, heads of 128: 320 TFLOP/s forward, 300
# backward, and in a build with cuDNN's 600 and 500.
kernel_figures() { # FILE
  local name rate unit fraction goal found=0 attention=0 status=0 forward=320 backward=300
  if grep -q '^CAPSTAN_CUDNN:BOOL=ON$' build/cuda/CMakeCache.txt 2>/dev/null; then
    forward=600 backward=500
  fi
  ! grep -B 1 '"error":' "$1" || status=1
  while IFS=$'\t' read -r name rate unit fraction; do
    case "$name" in
      'llama3-8b attention forward') goal=$forward ;;
      'llama3-8b attention backward') goal=$backward ;;
      # Short: bound by the latency of their launches.
      'llama3-8b attention decode'* | 'llama3-8b experts: plan' | 'llama3-8b experts: regroup' | \
        'llama3-8b experts: count dropped' | 'llama3-8b experts: router '*) continue ;;
      'llama3-8b '* | *'(16 Mi'*) goal='' ;;
      *) continue ;;
    esac
    if [ -n "$goal" ]; then
      attention=$((attention + 1))
      figure "$name, TFLOP/s" "$(awk -v rate="$rate" 'BEGIN { print rate / 1000 }')" "$goal" || status=1
    elif [ "$unit" = GB/s ]; then
      found=$((found + 1))
      figure "$name, fraction of copy bandwidth" "$fraction" 0.85 || status=1
    fi
  done < <(kernels_of "$1")
  [ "$attention" -eq 2 ] || { echo "no figures of attention in $1"; status=1; }
  [ "$found" -gt 0 ] || { echo "no figures of memory-bound kernels in $1"; status=1; }
  return "$status"
}
# The speed with CUDA graphs of a step, and of tokens, of the smallest model, whose kernels are short.
graph_figures() { # FILE
  local with without status=0 run="$out/runs/generation" graphs
  speed() { awk -v with="$1" -v without="$2" 'BEGIN { print (with > 0 ? without / with : "null") }'; }
  with=$(sed -nE '/"cuda_graphs"/,/}/s/^ *"seconds": ([^,]*),?$/\1/p' "$1")
  without=$(sed -nE '/"cuda_graphs"/,/}/s/^ *"seconds_without": ([^,]*),?$/\1/p' "$1")
  figure "quickstart with CUDA graphs, speed of that without" "$(speed "$with" "$without")" 1 || status=1
  rm -rf "$run"
  "$program" train "${short_quickstart[@]}" train.device=cuda --run-dir "$run" >"$out/generation.txt" ||
    status=1
  for graphs in none local; do
    "$program" generate "$run" --json --ignore-eod --max-tokens 200 train.device=cuda \
      tokenizer.tokenizer_type=huggingface tokenizer.tokenizer_model=tests/cli/text/tokenizer.json \
      model.cuda_graph_impl="$graphs" >"$out/generation-$graphs.json" || status=1
  done
  seconds() { tr ',{}' '\n' <"$out/generation-$1.json" | sed -nE 's/^ *"seconds": *([0-9.e-]+) *$/\1/p'; }
  figure "tokens of quickstart with CUDA graphs, speed of those without" \
    "$(speed "$(seconds local)" "$(seconds none)")" 1 || status=1
  return "$status"
}
stage_bench() {
  local status=0
  local step=(-r gpt2-124m train.device=cuda mixed_precision=bf16_mixed train.micro_batch_size=16)
  rm -f "$out"/bench*.json
  "$program" bench step --json "${step[@]}" >"$out/bench-step.json" || status=1
  "$program" bench step --json -r quickstart train.device=cuda model.cuda_graph_impl=local \
    >"$out/graphs.json" || status=1
  echo "figure, value, goal, value / goal:"
  graph_figures "$out/graphs.json" || status=1
  # First the kernels that have a goal, which take the most time: one that is ended leaves its rows.
  timeout --foreground -k 2 $((limit > SECONDS + 9 ? limit - SECONDS - 8 : 1)) \
    "$program" bench llama3-8b '(16 Mi' --json "${step[@]}" >"$out/bench.json" ||
    { echo "bench llama3-8b '(16 Mi': exit code $?"; status=1; }
  kernel_figures "$out/bench.json" || status=1
  "$program" trace gpt2-124m train.device=cuda mixed_precision=bf16_mixed -o "$out/trace.json" || status=1
  "$program" bench gpt2-124m quickstart --json "${step[@]}" >"$out/bench-small.json" || status=1
  return "$status"
}

# The first steps of a run on one GPU; prints the last lines of its log. A run saves a checkpoint at its end,
# for which an 8B model takes minutes, and 64 GB or more of a disk: it is killed once it has its steps.
short_run() { # NAME RECIPE [OVERRIDES]
  local name=$1 wanted=8 begun=$SECONDS most=$((part_limit < 180 ? part_limit : 180))
  local process status=0 ended=0 part=$(((limit - SECONDS - 5) / runs_left))
  most=$((part < most ? part : most))
  shift
  echo "capstan train $*"
  rm -rf "${runs:?}/$name"
  mkdir -p "$runs"
  "$program" train "$@" train.device=cuda dataset=mock tokenizer=none train.train_iters=1000 \
    logger.log_interval=4 validation.eval_interval=null checkpoint.save_interval=null \
    --run-dir "$runs/$name" >"$runs/$name.log" 2>&1 &
  process=$!
  has_steps() { [ "$(step_values "$runs/$name" step 2>/dev/null | tail -n 1)" -ge "$wanted" ] 2>/dev/null; }
  while ! has_steps && kill -0 "$process" 2>/dev/null && [ $((SECONDS - begun)) -lt "$most" ]; do
    sleep 0.2
  done
  kill -KILL "$process" 2>/dev/null
  wait "$process" 2>/dev/null || ended=$?
  has_steps || { echo "$name: fewer than $wanted steps in $((SECONDS - begun)) s"; status=1; }
  [ "$ended" -eq 0 ] || [ "$ended" -eq 137 ] || status=$ended
  tail -n 12 "$runs/$name.log"
  return "$status"
}
run_recipe() { # NAME RECIPE [OVERRIDES]
  once "$1" short_run "$@" || status=1
  runs_left=$((runs_left - 1))
}
# tokens/s of the last steps of a run.
tokens_per_second() { step_values "$runs/$1" tokens_per_second | tail -n 1; }
throughput() { # GOAL NAME RECIPE [OVERRIDES]
  local goal=$1
  shift
  run_recipe "$@"
  figure "$1, tokens/s" "$(tokens_per_second "$1" 2>/dev/null)" "$goal" || status=1
  compare_memory "$runs/$1" || status=1
}
one_gpu=(dist.world_size=1 dist.tp=1 dist.cp=1 dist.pp=1 ddp=no_shard)
# 14 bytes per parameter of state: 16-bit moments.
small_moments=(optimizer.use_precision_aware_optimizer=true optimizer.exp_avg_dtype=bf16
  optimizer.exp_avg_sq_dtype=bf16)
stage_recipes() {
  local status=0 full=(llama3.1-8b "${one_gpu[@]}" "${small_moments[@]}" model.seq_length=4096
    train.micro_batch_size=1 train.global_batch_size=8 model.recompute_granularity=null)
  # Of this build: a part that has passed before has left its run here.
  local runs="$out/runs/recipes-$build" runs_left=4
  # The shortest one first: each may take an equal part of the time that is left.
  throughput 145000 full-0.5b qwen2.5-0.5b "${one_gpu[@]}" model.seq_length=1024 \
    train.micro_batch_size=16 train.global_batch_size=64
  throughput 12500 full-8b "${full[@]}"
  run_recipe full-8b-fp8 "${full[@]}" mixed_precision=bf16_with_fp8_current_scaling_mixed
  compare_memory "$runs/full-8b-fp8" || status=1
  figure "full-8b-fp8, tokens/s of full-8b" \
    "$(awk -v fp8="$(tokens_per_second full-8b-fp8)" -v bf16="$(tokens_per_second full-8b)" \
      'BEGIN { if (bf16 + 0 > 0) print fp8 / bf16 }')" 1.15 || status=1
  throughput 13000 lora-8b lora model=llama3-8b peft.random_base=true \
    checkpoint.pretrained_checkpoint=null "${one_gpu[@]}" model.seq_length=4096 train.micro_batch_size=1 \
    train.global_batch_size=8
  return "$status"
}

# Packs the results. The machine that lends a GPU may return files up to a size only.
pack() {
  [ -n "$archive" ] || return 0
  tar -czf "$archive.new" --exclude=checkpoints -C "$out" . && mv "$archive.new" "$archive"
  local most=$((16 << 20)) bytes
  bytes=$(stat -c %s "$archive") || return 0
  [ "$bytes" -gt "$most" ] || return 0
  echo "gpu_check.sh: warning: $archive is above 16 MiB ($((bytes >> 20)) MiB), with these files:" >&2
  find "$out" -name checkpoints -prune -o -type f -printf '%s %P\n' | sort -rn | head -n 5 >&2
}

if [ -n "$inside" ]; then
  [ "$inside" = build ] || build=$(build_id)
  "stage_$inside"
  exit
fi
failed=0 passed=0 left=0 process=''
trap pack EXIT
trap 'kill "$process" 2>/dev/null; exit 143' TERM INT
for stage in "${stages[@]}"; do left=$((left + weight[$stage])); done
for stage in "${stages[@]}"; do
  begun=$SECONDS
  if [ -n "$seconds" ]; then
    limit=$(((seconds - SECONDS) * weight[$stage] / left))
    limit=$((limit < 1 ? 1 : limit > 570 ? 570 : limit))
  fi
  left=$((left - weight[$stage]))
  echo "== $stage (at most $limit s), into $out/$stage.txt"
  # The script itself again, in a process group that the limit ends as a whole; a signal is handled at once.
  timeout -k 5 "$limit" "$script" --inside "$stage" "$limit" --out "$out" --jobs "$at_a_time" $packed \
    ${seconds:+--seconds "$seconds"} ${arch:+--arch "$arch"} ${cudnn:+--cudnn "$cudnn"} \
    >>"$out/$stage.txt" 2>&1 &
  process=$!
  wait "$process"
  status=$?
  case $status in
    0) line="passed" passed=1 ;;
    77) line=$(tail -n 1 "$out/$stage.txt") ;;
    124 | 137) line="not finished: run \`scripts/gpu_check.sh $stage\` again" failed=1 ;;
    *) line="failed" failed=1; tail -n 30 "$out/$stage.txt" ;;
  esac
  printf '%-10s %4d s  %s\n' "$stage" $((SECONDS - begun)) "$line" | tee -a "$out/summary.txt"
  [ "$stage" != build ] || [ "$status" -eq 0 ] || exit 1
  pack
done
[ "$failed" -eq 1 ] || [ "$passed" -eq 1 ] || exit 77
exit $failed
