#!/usr/bin/env bash
# Fails if a text of the library names a command-line flag of Capstan. The command line adds flags to the
# library's texts (with_flags in src/cli/report.cpp). Flags of other programs may be named,
# and a flag alone is an argument, not a text.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
# The option tables: {"name", 'n', "ARGUMENT", … or {"name", 0, …
flags=$(git ls-files 'src/cli/*.cpp' |
  xargs perl -0ne 'print "$1\n" while /\{"([a-z-]+)",\s*(?:0|\x27.\x27),/g' | sort -u | paste -sd'|')
case "|$flags|" in
  *'|resume|'*) ;;
  *) echo "messages.sh: found no option tables in src/cli" >&2; exit 2 ;;
esac
mapfile -t files < <(git ls-files src include kernels | grep -E '\.(cpp|hpp)$' |
  grep -vE '^src/cli/|^src/sweep/slurm\.cpp$')
found=$(FLAGS=$flags perl -ne '
  my $text = /capstan recipe new/ ? "" : $_;
  while ($text =~ /"((?:[^"\\]|\\.)*)"/g) {
    my $literal = $1;
    next if $literal =~ /^--[\w-]+(?:=\S*)?\s*$/;
    print("$ARGV:$.: $_"), last if $literal =~ /(?<![\w-])--(?:$ENV{FLAGS})(?![\w-])/;
  }
  close ARGV if eof' "${files[@]}")
[ -z "$found" ] || { printf 'messages: a flag is named outside src/cli:\n%s\n' "$found"; exit 1; }
echo "messages: the library names no flag"
