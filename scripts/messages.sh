#!/usr/bin/env bash
# Fails if a text of the library names a command-line flag of Capstan. The command line adds flags to the library's help
# (help_with_flags in src/cli/report.cpp). Flags of other programs may be named.
set -euo pipefail
cd "$(dirname "$0")/.."
mapfile -t files < <(git ls-files src include kernels | grep -E '\.(cpp|hpp)$' | grep -vE '^src/(cli|importers)/|^src/sweep/slurm\.cpp$')
found=$(perl -ne '
  print "$ARGV:$.: $_" if /"[^"]*[ `(]--[a-z]/ &&
    !/llama-gguf-split --merge|--local-dir|--mail-type=|form --name|capstan recipe new/;
  close ARGV if eof' "${files[@]}")
[ -z "$found" ] || { printf 'messages: a flag is named outside src/cli:\n%s\n' "$found"; exit 1; }
echo "messages: the library names no flag"
