#!/usr/bin/env bash
# cmake/CudaArchitectures.cmake: what it compiles for, with a compiler and an nvidia-smi that only print.
#
#   cuda_architectures.sh CMAKE SOURCES SCRATCH
set -euo pipefail
cmake=$1 sources=$2 scratch=$3
rm -rf "$scratch"
mkdir -p "$scratch"
cd "$scratch"
printf '#!/bin/sh\nprintf "%%s\\n" $OFFERED\n' >nvcc
printf '#!/bin/sh\n[ -n "$GPUS" ] || exit 9\nprintf "%%s\\n" $GPUS\n' >nvidia-smi
chmod +x nvcc nvidia-smi
cat >print.cmake <<'CMAKE'
include(${SOURCES}/cmake/CudaArchitectures.cmake)
message("${CMAKE_CUDA_ARCHITECTURES}")
CMAKE

failed=0
check() { # WANTED GPUS [SETTING]
  local found
  found=$(GPUS=$2 "$cmake" -DSOURCES="$sources" -DCMAKE_CUDA_COMPILER="$PWD/nvcc" \
    -DNVIDIA_SMI="$PWD/nvidia-smi" ${3:+-DCAPSTAN_CUDA_ARCHITECTURES="$3"} -P print.cmake 2>&1)
  [ "$found" = "$1" ] || { echo "FAILED: GPUs '$2', setting '${3:-}': $found, not $1"; failed=1; }
}
every='80-virtual;120-virtual;80-real;89-real;90a-real;100a-real;103a-real;120a-real'
export OFFERED='sm_75 sm_80 sm_86 sm_87 sm_88 sm_89 sm_90 sm_100 sm_110 sm_103 sm_120 sm_121'
check "$every" ''
check '80-virtual;90a-real' '9.0 9.0'
check '80-virtual;86-real' 8.6
check '80-virtual;120a-real;103a-real' '12.0 10.3'
check '80-virtual;121a-real' 12.1
check "$every" 7.0                 # a GPU that is too old
check "$every" 20.0                # one that the toolkit does not know
check "$every" 9.0 all
check '90a-real;80-virtual' 8.0 '90a-real;80-virtual'
OFFERED='sm_50 sm_80 sm_86 sm_89 sm_90'
check '80-virtual;90-virtual;80-real;89-real;90a-real' ''
check '80-virtual;90-virtual;80-real;89-real;90a-real' 10.0
exit "$failed"
