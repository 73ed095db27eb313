#!/usr/bin/env bash
# Fails if a text of the library names a command-line flag of Capstan, or if an action of src/base/actions.cpp
# is proposed by no text of the library, or a text has a marker of no action. Flags of other programs may be
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

# The names of the actions, {"resume", "resume it"}; a text proposes one as "{resume}".
mapfile -t actions < <(perl -0ne '
  /kPlainWords\[\] = \{.*?\n\};/s or exit;
  my $table = $&;
  print "$1\n" while $table =~ /\{"([a-z0-9_]+)",\s*"/g' src/base/actions.cpp)
[ "${#actions[@]}" -gt 10 ] || { echo "messages.sh: found no table in src/base/actions.cpp" >&2; exit 2; }
texts=$(cat "${files[@]}")
for action in "${actions[@]}"; do
  case "$texts" in
    *"{$action}"*) ;;
    *) echo "messages: no text of the library proposes the action {$action}"; exit 1 ;;
  esac
done
unknown=$(ACTIONS=$(IFS='|'; echo "${actions[*]}") perl -ne '
  while (/"((?:[^"\\]|\\.)*)"/g) {
    my $literal = $1;
    while ($literal =~ /(?<!\$)\{([a-z0-9_]+)\}/g) {
      print "$ARGV:$.: {$1}\n" unless "|$ENV{ACTIONS}|" =~ /\|\Q$1\E\|/;
    }
  }
  close ARGV if eof' "${files[@]}")
[ -z "$unknown" ] || { printf 'messages: markers of no action:\n%s\n' "$unknown"; exit 1; }
echo "messages: the library names no flag"
