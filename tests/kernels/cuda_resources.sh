#!/usr/bin/env bash
# scripts/cuda.sh resources, and the launcher that writes what it reads, with a compiler that only prints.
#
#   cuda_resources.sh SOURCES SCRATCH
set -euo pipefail
sources=$1 scratch=$2
rm -rf "$scratch"
objects=$scratch/build/cuda-90a/kernels/cuda/CMakeFiles/capstan_cuda_kernels.dir
mkdir -p "$scratch/scripts" "$scratch/kernels/cuda" "$objects"
cp "$sources/scripts/cuda.sh" "$scratch/scripts"
cd "$scratch"
touch kernels/cuda/one.cu
# Prints a warning, and the report of a kernel for two architectures, with a function that it calls.
cat >nvcc <<'NVCC'
#!/usr/bin/env bash
if [ "$1" = --version ]; then echo "Cuda compilation tools, release ${RELEASE:-13.0}, V0"; exit; fi
echo 'one.cu(3): warning #177-D: declared but never referenced' >&2
for architecture in sm_80 sm_90a; do
  cat >&2 <<REPORT
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7capstan7kernels4cuda1kIfEEvPT_' for '$architecture'
ptxas info    : Function properties for called
    8 bytes stack frame, ${SPILLS:-0} bytes spill stores, 4 bytes spill loads
ptxas info    : Function properties for _ZN7capstan7kernels4cuda1kIfEEvPT_
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used ${REGISTERS:-40} registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compile time = 3.125 ms
REPORT
done
exit "${STATUS:-0}"
NVCC
chmod +x nvcc
export CUDACXX=$PWD/nvcc

failed=0
check() { # WHAT STATUS TEXT COMMAND…
  local what=$1 expected=$2 text=$3 output status=0
  shift 3
  output=$("$@" 2>&1) || status=$?
  if [ "$status" -ne "$expected" ] || [[ "$output" != *"$text"* ]]; then
    echo "FAILED: $what: status $status, not $expected, or no '$text' in: $output"
    failed=1
  fi
}
compile() { "$sources/cmake/ptxas_report.sh" "$CUDACXX" -c kernels/cuda/one.cu -o "$objects/one.cu.o"; }
resources() { scripts/cuda.sh resources "$@"; }

check "an object that is missing" 1 "kernels/cuda/one.cu was not compiled" resources
check "messages of the compiler" 0 "one.cu(3): warning" compile
[[ "$(compile 2>&1)" != *ptxas* ]] || { echo "FAILED: the report is printed"; failed=1; }
STATUS=3 check "status of the compiler" 3 "" compile
check "list" 0 "resources.txt" resources --write
check "line of the list" 0 "  40    24      4    1024  k<float>" cat kernels/cuda/resources.txt
check "the same" 0 "1 kernels compared, 0 with less" resources
REGISTERS=39 compile 2>/dev/null
check "fewer registers" 0 "1 with less" resources
REGISTERS=41 compile 2>/dev/null
check "more registers" 1 "41 registers, where the list has 40: k<float>" resources
RELEASE=12.9 check "more registers by another compiler" 0 "not compared" resources
SPILLS=8 compile 2>/dev/null
check "spills" 1 "12 bytes of spills, where the list has 4" resources
RELEASE=12.9 check "spills by another compiler" 1 "12 bytes of spills" resources
compile 2>/dev/null
sed -i 's/k<float>/k<double>/' kernels/cuda/resources.txt
check "a kernel that is not in the list" 1 "not in the list: k<float>" resources
check "a kernel that is in the list only" 1 "in the list, and not compiled: k<double>" resources
: >"$objects/one.cu.o.resources"
check "no kernel" 1 "no kernel for sm_90a" resources
CUDACXX=$PWD/none check "no toolkit" 77 "no nvcc" resources
exit "$failed"
