#!/usr/bin/env bash
# Compiles the CUDA backend, and compares the resources of its kernels with a list. Needs NVIDIA's toolkit,
# and no GPU. Exits with 77 where there is no toolkit.
#
#   scripts/cuda.sh build              for one architecture, sm_90a, with warnings as errors: build/cuda-90a.
#                                      Compiles and starts the tests of kernels and operations on a GPU, too;
#                                      scripts/gpu_check.sh has all. Runs the tests of this build that need no
#                                      GPU: conversions of numbers, the backend and the program without one.
#                                      Where there is cudnn-frontend (scripts/install.sh cuda), compiles what
#                                      calls cuDNN, too, and builds cuDNN's plans
#   scripts/cuda.sh resources          compares the kernels of `build` with kernels/cuda/resources.txt. Fails
#                                      where one needs more registers, stack or shared memory, or spills more,
#                                      than the list says, and where a kernel is only here or only there
#   scripts/cuda.sh resources --write  writes the list
#   scripts/cuda.sh all                for every architecture that the toolkit offers, and PTX of the newest,
#                                      with warnings as errors: build/cuda-all. Lists the kernels that spill.
#                                      Runs the kernel tests on the simulated GPU at the sizes of a real one,
#                                      and a sample of each launch of a step of every recipe
#
# The resources are those that ptxas reports while it compiles (cmake/ptxas_report.sh).
#
# CAPSTAN_JOBS: compilations at a time. CAPSTAN_LINE_TABLES: ON (default) or OFF, as the build whose objects
# ccache is to share.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."
list=kernels/cuda/resources.txt

nvcc=${CUDACXX:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}

require_toolkit() {
  if [ ! -x "$nvcc" ]; then
    echo "cuda.sh: no nvcc in PATH or /usr/local/cuda/bin (try scripts/install.sh cuda)" >&2
    exit 77
  fi
  toolkit=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
}

configure() { # DIRECTORY ARCHITECTURES [CMake arguments]
  cmake --preset cuda -B "build/$1" -DCAPSTAN_WERROR=ON "-DCAPSTAN_CUDA_ARCHITECTURES=$2" \
    "-DCAPSTAN_LINE_TABLES=${CAPSTAN_LINE_TABLES:-ON}" "${@:3}" >/dev/null
}
compile() { # DIRECTORY TARGETS…
  # All sources are compiled, so that all warnings are printed.
  cmake --build "build/$1" -j "${CAPSTAN_JOBS:-$(nproc)}" --target "${@:2}" -- -k 0
}
build() { # DIRECTORY ARCHITECTURES TARGETS…
  configure "$1" "$2"
  compile "$1" "${@:3}"
  echo "cuda.sh: build/$1/libcapstan_cuda.so for $2, without warnings, by CUDA $toolkit"
}

# The two sources that call cuDNN, in a build directory of their own: the others are those of `build`.
build_cudnn() { # ARCHITECTURES
  if [ ! -e build/cudnn-frontend/include/cudnn_frontend.h ]; then
    echo "cuda.sh: not run: attention by cuDNN: no build/cudnn-frontend (try scripts/install.sh cuda)"
    return 0
  fi
  configure cuda-cudnn "$1" -DCAPSTAN_CUDNN=ON "-DCAPSTAN_CUDNN_FRONTEND=$PWD/build/cudnn-frontend"
  compile cuda-cudnn capstan_cuda_cudnn test_cudnn_plans \
    kernels/cuda/CMakeFiles/capstan_cuda_kernels.dir/attention_by_cudnn.cu.o
  ctest --test-dir build/cuda-cudnn -R '^cudnn_plans$' --output-on-failure --no-tests=error
}

# Prints the architectures of the toolkit.
offered_architectures() {
  local offered architecture
  offered=$("$nvcc" --list-gpu-code)
  for architecture in 80 89 90a 100a 103a 120a; do
    if grep -qx "sm_${architecture%a}" <<<"$offered"; then echo "$architecture"; fi
  done
}

# One line for each kernel: registers of a thread, bytes of stack, of spills (stores and loads) and of shared
# memory, name. A kernel that several sources instantiate stands there once, with the most of each. Names of
# unnamed namespaces, which depend on the path, and parameters are left out.
resources_of() { # DIRECTORY ARCHITECTURE
  local objects=build/$1/kernels/cuda/CMakeFiles/capstan_cuda_kernels.dir source reports=()
  for source in kernels/cuda/*.cu; do
    reports+=("$objects/$(basename "$source").o.resources")
    if [ ! -f "${reports[-1]}" ]; then
      echo "cuda.sh: no ${reports[-1]}: $source was not compiled (try scripts/cuda.sh build)" >&2
      return 1
    fi
  done
  # Stack and spills of a function that is not inlined are reported with the kernel that calls it.
  awk -v architecture="sm_$2" '
    function print_kernel() {
      if (name != "") printf "%d\t%d\t%d\t%d\t%s\n", registers, stack, spills, shared, name
      name = ""
    }
    /Compiling entry function/ {
      print_kernel()
      split($0, quoted, "\047")
      if (quoted[4] == architecture) { name = quoted[2]; registers = stack = spills = shared = 0 }
    }
    /bytes stack frame/ { stack += $1; spills += $5 + $9 }
    /Used [0-9]+ registers/ {
      for (i = 2; i <= NF; ++i) {
        if ($i ~ /^registers/) registers = $(i - 1)
        if ($i ~ /^smem/) shared = $(i - 2)
      }
    }
    END { print_kernel() }' "${reports[@]}" |
    c++filt |
    sed -E 's/_GLOBAL__N__[0-9a-z_]+:://g; s/\(anonymous namespace\):://g; s/\tvoid /\t/
            s/capstan::(kernels::)?(cuda::)?//g' |
    LC_ALL=C awk -F'\t' '
      function most(field, value) { if (value > of[name, field]) of[name, field] = value + 0 }
      {
        name = $5
        depth = 0
        # The parameters begin at the first parenthesis outside of the arguments of the template.
        for (i = 1; i <= length(name); ++i) {
          c = substr(name, i, 1)
          if (c == "<") ++depth
          if (c == ">") --depth
          if (c == "(" && depth == 0) { name = substr(name, 1, i - 1); break }
        }
        names[name] = 1
        for (field = 1; field <= 4; ++field) most(field, $field)
      }
      END {
        for (name in names)
          printf "%4d %5d %6d %7d  %s\n", of[name, 1], of[name, 2], of[name, 3], of[name, 4], name
      }' | LC_ALL=C sort -k5
}

# As resources_of; a build without any kernel is an error.
kernels_of() { # DIRECTORY ARCHITECTURE
  local kernels
  kernels=$(resources_of "$@")
  if [ -z "$kernels" ]; then
    echo "cuda.sh: ptxas has reported no kernel for sm_$2 in build/$1" >&2
    return 1
  fi
  echo "$kernels"
}

write_list() {
  local kernels
  kernels=$(kernels_of cuda-90a 90a)
  {
    echo "# Kernels of the CUDA backend for sm_90a: registers of a thread; bytes of stack, of spills"
    echo "# (stores and loads) and of shared memory (without that of the launch); name."
    echo "# Compiled by CUDA $toolkit. Written by scripts/cuda.sh resources --write."
    echo "$kernels"
  } >"$list"
  echo "cuda.sh: $list"
}

compare() {
  local kernels listed
  kernels=$(kernels_of cuda-90a 90a)
  listed=$(sed -n 's/.*Compiled by CUDA \([0-9.]*[0-9]\).*/\1/p' "$list")
  # Another compiler allocates other registers; it may not spill more.
  if [ "$listed" != "$toolkit" ]; then
    echo "cuda.sh: the list is of CUDA $listed: registers, stack and shared memory are not compared"
  fi
  LC_ALL=C awk -v same="$([ "$listed" = "$toolkit" ] && echo 1 || echo 0)" '
    function name_of(line) { sub(/^ *[0-9]+ +[0-9]+ +[0-9]+ +[0-9]+ +/, "", line); return line }
    BEGIN { split("registers|bytes of stack|bytes of spills|bytes of shared memory", what, "|") }
    /^#/ || /^$/ { next }
    NR == FNR {
      name = name_of($0)
      in_list[name] = 1
      for (i = 1; i <= 4; ++i) most[name, i] = $i
      next
    }
    {
      ++count
      name = name_of($0)
      seen[name] = 1
      if (!(name in in_list)) { print "not in the list: " name; bad = 1; next }
      fewer = 0
      for (i = 1; i <= 4; ++i) {
        if (!same && i != 3) continue
        if ($i + 0 > most[name, i] + 0) {
          print $i " " what[i] ", where the list has " most[name, i] ": " name
          bad = 1
        }
        if ($i + 0 < most[name, i] + 0) fewer = 1
      }
      lower += fewer
    }
    END {
      for (name in in_list) if (!(name in seen)) { print "in the list, and not compiled: " name; bad = 1 }
      print "cuda.sh: " count " kernels compared, " (lower + 0) " with less than the list says"
      exit bad
    }' "$list" - <<<"$kernels" || {
    echo "cuda.sh: if this is as it should be: scripts/cuda.sh resources --write" >&2
    return 1
  }
}

report_spills() { # DIRECTORY ARCHITECTURES…
  local directory=$1 architecture kernels
  shift
  for architecture in "$@"; do
    kernels=$(kernels_of "$directory" "$architecture")
    awk -v architecture="$architecture" '
      $3 > 0 { spilling[++n] = "  " $0 }
      { if ($1 > most) most = $1 }
      END {
        print "sm_" architecture ": " NR " kernels, " most " registers at most, " n + 0 " spill"
        for (i = 1; i <= n; ++i) print spilling[i]
      }' <<<"$kernels"
  done
}

case "${1:-}${2:+ $2}" in
  build)
    require_toolkit
    build cuda-90a 90a-real capstan_cuda capstan test_cuda_conversions test_cuda_graph_runtime \
      test_cuda_kernels test_ops test_tensor
    # Where there is no GPU, the tests of one say so.
    for test in cuda_conversions cuda_graph_runtime tensor cli_without_gpu cuda_kernels_gemm ops_gpu; do
      ctest --test-dir build/cuda-90a -R "^$test\$" --output-on-failure --no-tests=error
    done
    build_cudnn 90a-real ;;
  resources) require_toolkit; compare ;;
  'resources --write') require_toolkit; write_list ;;
  all)
    require_toolkit
    mapfile -t offered < <(offered_architectures)
    newest=${offered[-1]}
    build cuda-all "$(printf '%s-real;' "${offered[@]}")${newest%a}-virtual" capstan_cuda
    report_spills cuda-all "${offered[@]}"
    cmake --preset release >/dev/null
    cmake --build --preset release -j "${CAPSTAN_JOBS:-$(nproc)}" --target test_simulated \
      test_train_real_sizes
    CAPSTAN_TEST_FULL=1 build/release/test_simulated
    CAPSTAN_TEST_FULL=1 build/release/test_train_real_sizes ;;
  -h | --help) sed -n '2,24s/^# \{0,1\}//p' "$0" ;;
  *) echo "usage: scripts/cuda.sh build|all|resources [--write] (try --help)" >&2; exit 2 ;;
esac
