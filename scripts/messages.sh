#!/usr/bin/env bash
# Fails if a text of the library names a command-line flag of Capstan, or if words for which the command line
# puts a flag (with_flags in src/cli/report.cpp) are in no text of the library. Flags of other programs may be
# named, and outside src/config and src/train a flag alone is an argument, not a text.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
# The option tables and the options that commands share: {"name", 'n', "ARGUMENT", … or {"name", 0, …
flags=$(git ls-files 'src/cli/*.cpp' 'src/cli/*.hpp' |
  xargs perl -0ne 'print "$1\n" while /\{"([a-z-]+)",\s*(?:0|\x27.\x27),/g' | sort -u | paste -sd'|')
# Their short forms, which texts give in backquotes.
letters=$(git ls-files 'src/cli/*.cpp' 'src/cli/*.hpp' |
  xargs perl -0ne 'print "$1\n" while /\{"[a-z-]+",\s*\x27([A-Za-z])\x27,/g' | sort -u | tr -d '\n')
case "|$flags|" in
  *'|adapter|'*'|resume|'*) [ -n "$letters" ] ;;
  *) echo "messages.sh: found no option tables in src/cli" >&2; exit 2 ;;
esac
mapfile -t files < <(git ls-files src include kernels | grep -E '\.(cpp|hpp)$' |
  grep -vE '^src/cli/|^src/sweep/slurm\.cpp$')
found=$(FLAGS=$flags LETTERS=$letters perl -ne '
  while (/"((?:[^"\\]|\\.)*)"/g) {
    my $literal = $1;
    next if $literal =~ /^--[\w-]+(?:=\S*)?\s*$/ && $ARGV !~ m{^src/(?:config|train)/};
    print("$ARGV:$.: $_"), last
      if $literal =~ /(?<![\w-])--(?:$ENV{FLAGS})(?![\w-])|`-[$ENV{LETTERS}](?![\w-])/;
  }
  close ARGV if eof' "${files[@]}")
[ -z "$found" ] || { printf 'messages: a flag is named outside src/cli:\n%s\n' "$found"; exit 1; }

# The left column of the table in with_flags: {"words", "words with a flag"}.
mapfile -t words < <(perl -0ne '
  /with_flags\(std::string text\) \{.*?\n  \};/s or exit;
  my $table = $&;
  print "$1\n" while $table =~ /\{"((?:[^"\\]|\\.)*)",\s*"/g' src/cli/report.cpp)
[ "${#words[@]}" -gt 10 ] || { echo "messages.sh: found no table in with_flags" >&2; exit 2; }
# Adjacent literals are one text.
texts=$(perl -0pe 's/"\s*\n\s*"//g' "${files[@]}")
for phrase in "${words[@]}"; do
  case "$texts" in
    *"$phrase"*) ;;
    *) echo "messages: with_flags replaces \`$phrase\`, which no text of the library has"; exit 1 ;;
  esac
done
echo "messages: the library names no flag"
