#!/usr/bin/env bash
# Takes a build to a machine with a GPU that cannot build: one without the packages of scripts/install.sh, or
# that is lent for minutes. The archive has the program, the backend, the tests of a GPU that need one
# process, the files that they read, and the libraries that these programs need, but for those of C++ and of
# NVIDIA.
#
#   scripts/gpu_package.sh make FILE [--arch LIST] [-j N] [--leave-out N]
#                                       builds the preset `cuda` and packs it; needs the toolkit, and no GPU.
#                                       LIST: CAPSTAN_CUDA_ARCHITECTURES, default 90a-real (H100, H200).
#                                       --leave-out: the N largest test programs, for a smaller archive; the
#                                       kernels' own stays
#   scripts/gpu_package.sh run FILE RESULTS [--seconds N] [arguments of scripts/gpu_check.sh]
#                                       unpacks to the paths of the build, which the tests have compiled in,
#                                       runs scripts/gpu_check.sh there with all stages but `build` and
#                                       `ranks`, or those given, and packs its results (tar.gz) after each of
#                                       them and when it is terminated. N: unpacking and packing included,
#                                       default 540. Needs python3, ctest, and libcublasLt of the toolkit's
#                                       version. Where it is run again, it leaves out what has passed: its
#                                       results lie in build/gpu-check of the build's path; on another
#                                       machine, `--out DIR` with the unpacked results
#
# On an H200 that is lent for ten minutes a command, with the archive carried to the machine:
#   scripts/gpu_package.sh run FILE RESULTS
set -euo pipefail
shopt -s inherit_errexit
script=$(realpath "$0")

usage() { sed -n '2,24s/^# \{0,1\}//p' "$script"; }

# The libraries that a program needs: name, and the path of one that is found.
libraries_of() { # PROGRAM
  { ldd "$1" 2>/dev/null || true; } |
    sed -nE 's/^\s*(\S+) => (\/\S+).*/\1 \2/p; s/^\s*(\S+) => not found.*/\1/p'
}
# Directories of the libraries of the backend that the system does not find by itself: where NVIDIA's
# installer, Debian and pip put them, and if they are not there, anywhere, which takes long.
library_directories() {
  local name path found site
  site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  while read -r name path; do
    [ -z "$path" ] || continue
    found=$(find -L /usr/local/cuda*/{lib64,targets/*/lib} /usr/lib/*-linux-gnu "$site"/nvidia/*/lib \
      -maxdepth 1 -name "$name" -print -quit 2>/dev/null || true)
    [ -n "$found" ] ||
      found=$(find -L /usr/local /usr/lib /opt -name "$name" -print -quit 2>/dev/null || true)
    [ -n "$found" ] || { echo "gpu_package.sh: warning: no $name" >&2; continue; }
    dirname "$found"
  done < <(libraries_of build/cuda/libcapstan_cuda.so) | sort -u
}

# A machine that is lent may take the archive and the files of the repository up to a size only.
check_size() { # FILE
  local most=$((64 << 20)) archive tree
  archive=$(stat -c %s "$1")
  # du fails where a file of the repository was removed.
  tree=$(git ls-files -z --cached --others --exclude-standard |
    { du --files0-from=- -bc 2>/dev/null || true; } | tail -n 1 | cut -f 1)
  echo "gpu_package.sh: $1: $(mib "$archive") MiB, with the files of the repository" \
    "$(mib $((archive + tree))) MiB"
  [ $((archive + tree)) -gt "$most" ] || return 0
  echo "gpu_package.sh: warning: above 64 MiB, which some machines do not take: --leave-out N." \
    "The largest test programs (MiB, not compressed):" >&2
  (cd "$copy/tree/build/cuda" && stat -c '%s %n' test_*) | sort -rn | awk 'NR <= 8' |
    while read -r bytes name; do echo "  $(mib "$bytes") $name" >&2; done
}
mib() { awk -v bytes="$1" 'BEGIN { printf "%.1f", bytes / 1048576 }'; }

make_package() { # FILE [options]
  local file arch=90a-real jobs leave_out=0 directory tests copy program library
  file=$(realpath "$1") jobs=$(nproc)
  shift
  while [ $# -gt 0 ]; do
    case "$1" in
      --arch) arch=$2 ;;
      -j) jobs=$2 ;;
      --leave-out) leave_out=$2 ;;
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
  # Names of the tests that are missing, as a regular expression of ctest -E.
  (cd "$copy/tree/build/cuda" && find test_* ! -name test_cuda_kernels -printf '%s %p\n') | sort -rn |
    awk -v most="$leave_out" 'NR <= most' | while read -r _ program; do
      rm "$copy/tree/build/cuda/$program"
      echo "^${program#test_}(_gpu)?\$"
    done | paste -sd'|' >"$copy/tree/build/cuda/left_out.txt"
  for program in capstan libcapstan_cuda.so "${tests[@]}"; do libraries_of "build/cuda/$program"; done |
    awk '$2 { print $2 }' | sort -u |
    grep -vE '/lib(c|m|dl|rt|pthread|resolv|util|stdc\+\+|gcc_s)\.so|/lib(cu(da|blas|dnn)|nv|nccl)[^/]*\.so' |
    while read -r library; do cp -L "$library" "$copy/tree/build/cuda/libraries/"; done
  # One dictionary for all: the tests have most of their code in common.
  tar -c -C "$copy" DIRECTORY COMMIT tree | xz --lzma2=preset=6,dict=128MiB >"$file"
  echo "gpu_package.sh: $((${#tests[@]} - leave_out)) test programs, for $arch"
  check_size "$file"
}

run_package() { # FILE RESULTS [arguments of gpu_check.sh]
  local file results unpacked directory libraries seconds=540 arguments=()
  file=$(realpath "$1") results=$(realpath "$2")
  shift 2
  while [ $# -gt 0 ]; do
    case "$1" in
      --seconds) seconds=$2; shift ;;
      --out) arguments+=(--out "$(realpath "$2")"); shift ;;
      *) arguments+=("$1") ;;
    esac
    shift
  done
  unpacked=$(mktemp -d)
  python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$file" "$unpacked"
  directory=$(cat "$unpacked/DIRECTORY")
  mkdir -p "$directory"
  # Times of the files too: by them gpu_check.sh knows the tests that have passed.
  cp -aT "$unpacked/tree" "$directory"
  CAPSTAN_COMMIT=$(cat "$unpacked/COMMIT")
  export CAPSTAN_COMMIT
  rm -rf "$unpacked"
  cd "$directory"
  export LD_LIBRARY_PATH=$directory/build/cuda/libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  libraries=$(library_directories | paste -sd:)
  LD_LIBRARY_PATH+=${libraries:+:$libraries}
  # Ten seconds for the end of the last stage, and to pack.
  exec scripts/gpu_check.sh --packed --archive "$results" "${arguments[@]}" \
    --seconds $((seconds - SECONDS - 10))
}

case "${1:-}" in
  make) [ $# -ge 2 ] || { usage >&2; exit 2; }; make_package "${@:2}" ;;
  run) [ $# -ge 3 ] || { usage >&2; exit 2; }; run_package "${@:2}" ;;
  -h | --help) usage ;;
  *) usage >&2; exit 2 ;;
esac
