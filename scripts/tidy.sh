#!/usr/bin/env bash
# clang-tidy, with the checks of .clang-tidy, over C++ sources.
# Configures build/tidy, whose compile commands name each source by itself and no precompiled header.
#
#   scripts/tidy.sh              every source that git knows below src/ and kernels/
#   scripts/tidy.sh FILE…        these
#   scripts/tidy.sh --since REV  what has changed since that revision; for a changed header a source that
#                                includes it, that of its name first
#
# Without FILE… it leaves out kernels/cuda/cudnn_attention.cpp, which includes cudnn-frontend.
set -euo pipefail
cd "$(dirname "$0")/.."
without_cudnn() { grep -vxF kernels/cuda/cudnn_attention.cpp; }
case "${1:-}" in
  -h|--help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
  --since)
    changed() { git diff --name-only --diff-filter=d "$since" -- "$@"; }
    since=$2
    mapfile -t files < <({
      changed 'src/*.cpp' 'kernels/*.cpp'
      changed 'src/*.hpp' 'kernels/*.hpp' 'include/*.hpp' | while read -r header; do
        named=${header#src/}
        if [ -f "${header%.hpp}.cpp" ]; then
          echo "${header%.hpp}.cpp"
        else
          # None may include it, and `head` may end first.
          git grep -lF "#include \"${named#include/}\"" -- 'src/*.cpp' 'kernels/*.cpp' | head -n 1 || true
        fi
      done
    } | without_cudnn | sort -u) ;;
  '') mapfile -t files < <(git ls-files 'src/*.cpp' 'kernels/*.cpp' | without_cudnn) ;;
  *) files=("$@") ;;
esac
[ ${#files[@]} -gt 0 ] || { echo "tidy: nothing to look at"; exit 0; }
cmake --preset release -B build/tidy -DCAPSTAN_UNITY=OFF -DCAPSTAN_PRECOMPILE=OFF >/dev/null
# The compile commands are g++'s: clang does not know all of its warning options.
printf '%s\n' "${files[@]}" |
  xargs -P "${CAPSTAN_JOBS:-$(nproc)}" -n 1 clang-tidy -p build/tidy --quiet \
    --extra-arg=-Wno-unknown-warning-option 2> >(grep -v ' warnings generated' >&2)
echo "tidy: ${#files[@]} files are clean"
