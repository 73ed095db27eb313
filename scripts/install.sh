#!/usr/bin/env bash
# Installs the Debian packages that Capstan needs. Says what is missing, installs only that, and asks for sudo
# only when there is something to install and the user is not root.
#
#   scripts/install.sh                everything: build, quickstart, and the full test tier
#   scripts/install.sh build          compilers and libraries
#   scripts/install.sh quickstart     build, and the text of the quickstart
#   scripts/install.sh cuda           build, and a check of NVIDIA's toolkit, which Debian 12 does not have
#   scripts/install.sh --list         prints the packages and installs nothing
#
# Where that toolkit has cuDNN, everything and cuda also fetch the headers of cudnn-frontend from PyPI, into
# build/cudnn-frontend.
set -euo pipefail
cd "$(dirname "$0")/.."

build=(
  g++ cmake ninja-build ccache pkg-config git
  libyaml-cpp-dev libboost-program-options-dev libboost-context-dev libspdlog-dev nlohmann-json3-dev
  libsimdjson-dev doctest-dev
  zlib1g-dev libzstd-dev libonig-dev libutf8proc-dev libxxhash-dev
  libhwy-dev libdnnl-dev
  libopenmpi-dev openmpi-bin
)
quickstart=(fortunes)                                     # the corpus: short English texts, separated by `%`
# Fuzz targets, readable sanitizer reports, style; what tests run: groff, strace;
# a linker that takes a tenth of the time.
full=(clang-16 libclang-rt-16-dev llvm-16 clang-format clang-tidy groff strace mold)

what=everything list=no
for argument in "$@"; do
  case "$argument" in
    build|quickstart|cuda|everything) what=$argument ;;
    --list) list=yes ;;
    -h|--help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "install.sh: unknown argument '$argument' (try --help)" >&2; exit 2 ;;
  esac
done

wanted=("${build[@]}")
case "$what" in build | cuda) ;; *) wanted+=("${quickstart[@]}") ;; esac
[ "$what" != everything ] || wanted+=("${full[@]}")

nvcc=${CUDACXX:-$(command -v nvcc || true)}
[ -n "$nvcc" ] || nvcc=/usr/local/cuda/bin/nvcc
root=$(dirname "$(dirname "$(readlink -m "$nvcc")")")
# Prints where the toolkit or the system has a header.
has_header() { # FILE
  local place
  for place in "$root"/include "$root"/targets/*/include /usr/include /usr/include/*-linux-gnu; do
    [ ! -e "$place/$1" ] || { echo "$place/$1"; return 0; }
  done
  return 1
}

# Checks what the CUDA backend is built with; fails where the compiler or the runtime is missing. NCCL is for
# several GPUs: its header for the build, its library (libnccl2) where ranks train.
check_cuda() {
  [ "$what" = cuda ] || return 0
  local version major minor missing=no
  if [ ! -x "$nvcc" ]; then
    echo "install.sh: no nvcc in PATH or /usr/local/cuda/bin. Add NVIDIA's repository for this system" >&2
    echo "  (https://developer.nvidia.com/cuda-downloads), then install:" >&2
    echo "  cuda-nvcc-13-0 cuda-cudart-dev-13-0 libcublas-dev-13-0 cuda-nvtx-13-0 libnccl2 libnccl-dev" >&2
    echo "  and, for scripts/gpu_check.sh, cuda-sanitizer-13-0" >&2
    return 1
  fi
  version=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p')
  major=${version%.*} minor=${version#*.}
  if [ "$major" -lt 12 ] || { [ "$major" -eq 12 ] && [ "$minor" -lt 4 ]; }; then
    echo "install.sh: $nvcc is of CUDA $version; the backend needs 12.4 or newer" >&2
    return 1
  fi
  echo "install: nvcc of CUDA $version: $nvcc"
  for part in "runtime cuda_runtime_api.h cuda-cudart-dev yes" "cuBLAS cublasLt.h libcublas-dev yes" \
    "NVTX nvtx3/nvToolsExt.h cuda-nvtx yes" "NCCL nccl.h libnccl-dev ranks"; do
    read -r name header package needed <<<"$part"
    if place=$(has_header "$header"); then
      echo "install: $name: $place"
    elif [ "$needed" = yes ]; then
      echo "install.sh: no $header beside $nvcc; NVIDIA's package is $package-${major}-$minor" >&2
      missing=yes
    else
      echo "install: no $header ($name): ranks would transfer through host memory; the package is $package"
    fi
  done
  [ "$missing" = no ]
}

# Debian has no package of cudnn-frontend. The version is that with which the sources were compiled.
fetch_cudnn_frontend() {
  local to=build/cudnn-frontend fetched
  case "$what" in everything | cuda) ;; *) return 0 ;; esac
  if [ ! -x "$nvcc" ] || ! has_header cudnn.h >/dev/null || [ -e "$to/include/cudnn_frontend.h" ]; then
    return 0
  fi
  fetched=$(mktemp -d)
  if python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --dest "$fetched" nvidia-cudnn-frontend==1.32.0 >&2; then
    python3 -m zipfile -e "$fetched"/*.whl "$fetched/wheel"
    mkdir -p "$to"
    cp -r "$fetched/wheel/include" "$to"
    echo "install: cudnn-frontend: $to"
  else
    echo "install: pip did not fetch cudnn-frontend: attention by cuDNN cannot be compiled" >&2
  fi
  rm -rf "$fetched"
}

if [ "$list" = yes ]; then
  printf '%s\n' "${wanted[@]}"
  exit 0
fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  echo "install.sh: this system has no apt. Install what these Debian packages hold, then build:" >&2
  printf '  %s\n' "${wanted[@]}" >&2
  exit 1
fi

missing=()
for package in "${wanted[@]}"; do
  state=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$state" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "install: all ${#wanted[@]} packages are there"
  check_cuda
  fetch_cudnn_frontend
  exit
fi

echo "install: ${#missing[@]} of ${#wanted[@]} packages are missing: ${missing[*]}"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "install.sh: no sudo here; as root run: apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -qq --no-install-recommends "${missing[@]}"
echo "install: done"
check_cuda
fetch_cudnn_frontend
