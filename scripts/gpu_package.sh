#!/usr/bin/env bash
# Takes a build to a machine with a GPU that cannot build: one without the packages of scripts/install.sh, or
# that is lent for minutes. The archive has the program, the backend, the tests of a GPU that need one
# process, the files that they read, and the libraries that the program needs, but for those of C++ and of
# NVIDIA.
#
#   scripts/gpu_package.sh make FILE [--arch LIST] [-j N]
#                                       builds the preset `cuda` and packs it; needs the toolkit, and no GPU.
#                                       LIST: CAPSTAN_CUDA_ARCHITECTURES, default 90a-real (H100, H200)
#   scripts/gpu_package.sh run FILE RESULTS [arguments of scripts/gpu_check.sh]
#                                       unpacks to the paths of the build, which the tests have compiled in,
#                                       runs scripts/gpu_check.sh there with all stages but `build` and
#                                       `ranks`, or those given, and packs its results (tar.gz). Needs
#                                       python3, ctest, and libcublasLt of the toolkit's version in /usr or
#                                       /opt
#
# On 15 minutes of an H200, with the archive carried to the machine:
#   scripts/gpu_package.sh run FILE RESULTS --seconds 540
set -euo pipefail
shopt -s inherit_errexit
script=$(realpath "$0")

usage() { sed -n '2,19s/^# \{0,1\}//p' "$script"; }

# Directories of the libraries that are looked for where NVIDIA's installer, Debian and pip put them.
library_directories() { # NAME…
  local name found
  for name in "$@"; do
    found=$(find -L /usr/local /usr/lib /opt -name "$name" -print -quit 2>/dev/null || true)
    [ -z "$found" ] || dirname "$found"
  done | sort -u
}

make_package() { # FILE [options]
  local file arch=90a-real jobs directory tests copy program library
  file=$(realpath "$1") jobs=$(nproc)
  shift
  while [ $# -gt 0 ]; do
    case "$1" in
      --arch) arch=$2 ;;
      -j) jobs=$2 ;;
      *) echo "gpu_package.sh: unknown argument '$1' (try --help)" >&2; exit 2 ;;
    esac
    shift 2
  done
  cd "$(dirname "$script")/.."
  directory=$PWD
  cmake --preset cuda "-DCAPSTAN_CUDA_ARCHITECTURES=$arch" >/dev/null
  # Tests of several ranks are started by MPI, which the other machine may lack. Names: cmake/Module.cmake.
  mapfile -t tests < <(ctest --test-dir build/cuda -L '^cuda$' -E '_ranks[0-9]+_gpu$|several_gpus' -N \
    2>/dev/null | sed -nE 's/^ *Test +#[0-9]+: (.*)$/test_\1/p' |
    sed -E 's/_gpu$//; s/^(test_cuda_kernels)_.*/\1/' | sort -u)
  [ ${#tests[@]} -gt 0 ] || { echo "gpu_package.sh: no tests with the label cuda" >&2; exit 1; }
  cmake --build --preset cuda -j "$jobs" --target capstan capstan_cuda "${tests[@]}"

  copy=$(mktemp -d)
  trap "rm -rf '$copy'" EXIT
  echo "$directory" >"$copy/DIRECTORY"
  git rev-parse --short HEAD >"$copy/COMMIT"
  mkdir -p "$copy/tree/build/cuda/libraries"
  # What tests read. Their sources are not among it, but for those that gpu_check.sh reads.
  git ls-files -z scripts tests recipes configs kernels/CMakeLists.txt |
    grep -zvE '\.(cpp|hpp)$|^tests/fuzz/' |
    tar -c --null -T - | tar -x -C "$copy/tree"
  (cd build/cuda && find . -name CTestTestfile.cmake -o -name CMakeCache.txt -o -path ./CMakeFiles -prune) |
    grep -v '^./CMakeFiles' | tar -c -C build/cuda -T - | tar -x -C "$copy/tree/build/cuda"
  for program in capstan libcapstan_cuda.so "${tests[@]}"; do
    strip -o "$copy/tree/build/cuda/$program" "build/cuda/$program"
  done
  ldd build/cuda/capstan | awk '$3 ~ "^/" { print $3 }' |
    grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv|libutil|libstdc\+\+|libgcc_s)\.so' |
    while read -r library; do cp -L "$library" "$copy/tree/build/cuda/libraries/"; done
  # One dictionary for all: the tests have most of their code in common.
  tar -c -C "$copy" DIRECTORY COMMIT tree | xz --lzma2=preset=6,dict=128MiB >"$file"
  echo "gpu_package.sh: $file: $(($(stat -c %s "$file") >> 20)) MiB, ${#tests[@]} tests, for $arch"
}

run_package() { # FILE RESULTS [arguments of gpu_check.sh]
  local file results unpacked directory out status=0
  file=$(realpath "$1") results=$(realpath "$2")
  shift 2
  unpacked=$(mktemp -d)
  python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$file" "$unpacked"
  directory=$(cat "$unpacked/DIRECTORY")
  mkdir -p "$directory"
  cp -rT "$unpacked/tree" "$directory"
  CAPSTAN_COMMIT=$(cat "$unpacked/COMMIT")
  export CAPSTAN_COMMIT
  rm -rf "$unpacked"
  out=$(mktemp -d)
  cd "$directory"
  LD_LIBRARY_PATH=$directory/build/cuda/libraries:$(library_directories libcublasLt.so.13 libcublasLt.so.12 |
    paste -sd:)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export LD_LIBRARY_PATH
  scripts/gpu_check.sh --packed --out "$out" "$@" || status=$?
  rm -rf "$out"/runs/*/*/checkpoints
  tar -czf "$results" -C "$out" .
  return "$status"
}

case "${1:-}" in
  make) [ $# -ge 2 ] || { usage >&2; exit 2; }; make_package "${@:2}" ;;
  run) [ $# -ge 3 ] || { usage >&2; exit 2; }; run_package "${@:2}" ;;
  -h | --help) usage ;;
  *) usage >&2; exit 2 ;;
esac
