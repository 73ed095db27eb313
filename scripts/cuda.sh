#!/usr/bin/env bash
# Builds the CUDA backend, and holds the resources of its kernels to a list. Needs NVIDIA's toolkit, no GPU.
#
#   scripts/cuda.sh build              for sm_90a, without warnings: build/cuda
#   scripts/cuda.sh all                for every architecture that the toolkit offers, with PTX of the newest:
#                                      build/cuda-all
#   scripts/cuda.sh resources          compares registers, stack and shared memory of the kernels of the
#                                      backend in build/cuda with kernels/cuda/resources.txt. Fails where a
#                                      kernel needs more stack, which is what spills, or is not in the list
#   scripts/cuda.sh resources --write  writes the list
#
# CAPSTAN_JOBS: compilations at a time. CUOBJDUMP: NVIDIA's program of this name, where it is not in PATH or
# beside nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."
list=kernels/cuda/resources.txt

nvcc=${CUDACXX:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
if [ ! -x "$nvcc" ]; then
  echo "cuda.sh: no nvcc in PATH or /usr/local/cuda/bin (try scripts/install.sh cuda)" >&2
  exit 1
fi

# DIRECTORY ARCHITECTURES
build() {
  cmake --preset cuda -B "build/$1" -DCAPSTAN_WERROR=ON "-DCAPSTAN_CUDA_ARCHITECTURES=$2" >/dev/null
  cmake --build "build/$1" -j "${CAPSTAN_JOBS:-$(nproc)}" --target capstan_cuda
  echo "cuda.sh: build/$1/libcapstan_cuda.so for $2"
}

# Those of the toolkit, as CMake's list; the last one, the newest, also as PTX.
offered_architectures() {
  local offered architecture result=()
  offered=$("$nvcc" --list-gpu-code)
  for architecture in 80 89 90a 100a 103 120; do
    if grep -qx "sm_${architecture%a}" <<<"$offered"; then result+=("$architecture-real"); fi
  done
  local newest=${result[-1]%-real}
  local IFS=';'
  echo "${result[*]};${newest%a}-virtual"
}

# One line for each kernel: registers, bytes of stack and of shared memory, name. Names of unnamed namespaces,
# which depend on the path, and parameters are left out.
resources_of() { # LIBRARY
  local cuobjdump=${CUOBJDUMP:-$(command -v cuobjdump || echo "$(dirname "$nvcc")/cuobjdump")}
  [ -x "$cuobjdump" ] || { echo "cuda.sh: no cuobjdump; NVIDIA's package is cuda-cuobjdump" >&2; return 1; }
  "$cuobjdump" --dump-resource-usage -arch sm_90a "$1" |
    sed -n 's/^ *Function \(.*\):$/\1/p; s/^ *\(REG:.*\)$/\1/p' | paste - - | c++filt |
    sed -E 's/_GLOBAL__N__[0-9a-z_]+:://g; s/\(anonymous namespace\):://g; s/^void //' |
    sed -E 's/capstan::(kernels::)?(cuda::)?//g' |
    awk -F'\t' '{
      name = $1
      depth = 0
      # The parameters begin at the first parenthesis outside of the arguments of the template.
      for (i = 1; i <= length(name); ++i) {
        c = substr(name, i, 1)
        if (c == "<") ++depth
        if (c == ">") --depth
        if (c == "(" && depth == 0) { name = substr(name, 1, i - 1); break }
      }
      split("", of)
      n = split($2, parts, " ")
      for (i = 1; i <= n; ++i) { split(parts[i], pair, ":"); of[pair[1]] = pair[2] }
      printf "%4d %5d %6d  %s\n", of["REG"], of["STACK"], of["SHARED"], name
    }' | LC_ALL=C sort -u -k4 -k1,3
}

# A kernel that several sources instantiate stands there once for each set of resources.
compare() {
  resources_of build/cuda/libcapstan_cuda.so | LC_ALL=C awk -v list="$list" '
    function name_of(line) { sub(/^ *[0-9]+ +[0-9]+ +[0-9]+ +/, "", line); return line }
    BEGIN {
      while ((getline line < list) > 0) {
        if (line ~ /^#/) continue
        split(line, field, " ")
        name = name_of(line)
        known[line] = 1
        if (!(name in stack) || field[2] > stack[name]) stack[name] = field[2]
      }
    }
    {
      name = name_of($0)
      seen[name] = 1
      if (!(name in stack)) { print "not in the list: " $0; bad = 1 }
      else if ($2 > stack[name]) { print "more stack than " stack[name] " bytes: " $0; bad = 1 }
      else if (!($0 in known)) { print "changed: " $0; ++changed }
    }
    END {
      for (name in stack) if (!(name in seen)) { print "in the list, not in the library: " name; bad = 1 }
      print "cuda.sh: " NR " kernels, " (changed + 0) " with other registers or shared memory"
      exit bad
    }' || { echo "cuda.sh: if this is as it should be: scripts/cuda.sh resources --write" >&2; return 1; }
}

case "${1:-}${2:+ $2}" in
  build) build cuda '80-virtual;90a-real' ;;
  all) build cuda-all "$(offered_architectures)" ;;
  resources) compare ;;
  'resources --write')
    resources=$(resources_of build/cuda/libcapstan_cuda.so)
    toolkit=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    {
      echo "# Kernels of the CUDA backend for sm_90a: registers of a thread, bytes of stack,"
      echo "# bytes of shared memory"
      echo "# (with the 1024 that the GPU takes, without those of the launch), name."
      echo "# Compiled by CUDA $toolkit."
      echo "# Written by scripts/cuda.sh resources --write."
      echo "$resources"
    } >"$list"
    echo "cuda.sh: $list" ;;
  -h | --help) sed -n '2,14s/^# \{0,1\}//p' "$0" ;;
  *) echo "usage: scripts/cuda.sh build|all|resources [--write] (try --help)" >&2; exit 2 ;;
esac
