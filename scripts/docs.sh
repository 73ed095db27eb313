#!/usr/bin/env bash
# Writes what is generated from the program's tables: docs/reference/, docs/coming-from.md and schemas/. A
# test compares them byte for byte.
#
#   scripts/docs.sh [CAPSTAN]     the program to ask; default build/release/capstan
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
capstan=${1:-build/release/capstan}
if [ ! -x "$capstan" ]; then
  echo "docs.sh: no program \`$capstan\`; build it first: cmake --build --preset release" >&2
  exit 2
fi
rm -rf docs/reference
"$capstan" schema --docs docs/reference
"$capstan" recipe import --keys >docs/coming-from.md
"$capstan" schema --write schemas
