#!/usr/bin/env bash
# clang-format over the C++ sources that git knows.
#
#   scripts/format.sh            rewrites them
#   scripts/format.sh --check    names those that would change, and fails if there are any
set -euo pipefail
cd "$(dirname "$0")/.."
mapfile -t files < <(git ls-files '*.cpp' '*.hpp')
if [ "${1:-}" = --check ]; then
  bad=()
  for file in "${files[@]}"; do
    [ -f "$file" ] || continue
    clang-format "$file" | cmp -s - "$file" || bad+=("$file")
  done
  [ ${#bad[@]} -eq 0 ] && { echo "style: ${#files[@]} files are formatted"; exit 0; }
  printf 'style: would change: %s\n' "${bad[@]}"
  exit 1
fi
clang-format -i "${files[@]}"
