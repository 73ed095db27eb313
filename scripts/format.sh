#!/usr/bin/env bash
# clang-format over the C++ sources that git knows, and the limit of 110 columns, which clang-format does not
# apply to comments; also of Python, CMake and the comments of scripts. Raw strings may be longer.
#
#   scripts/format.sh            formats them, and fails where a line stays too long
#   scripts/format.sh --check    names those that would change or have such a line, and fails if there are any
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
mapfile -t files < <(git ls-files '*.cpp' '*.hpp' | while read -r file; do [ ! -f "$file" ] || echo "$file"; done)
bad=()
if [ "${1:-}" = --check ]; then
  for file in "${files[@]}"; do clang-format "$file" | cmp -s - "$file" || bad+=("would change: $file"); done
else
  clang-format -i "${files[@]}"
fi
mapfile -t -O "${#bad[@]}" bad < <(perl -CSD -ne '
  $raw = 1 if /R"\w*\(/;
  print "above 110 columns: $ARGV:$.\n" if length > 111 && !$raw;
  $raw = 0 if /\)\w*"/;
  close ARGV if eof' "${files[@]}")
# Python and CMake: but for long texts, and for two tables of cases. Scripts of the shell: their comments.
mapfile -t others < <(git ls-files '*.py' '*.cmake' '*CMakeLists.txt' '*.sh' .ci/run |
  grep -vE 'make_(chat_fixtures|tokenizer_patterns)\.py$')
mapfile -t -O "${#bad[@]}" bad < <(perl -CSD -ne '
  my $counts = $ARGV =~ /\.sh$|run$/ ? /^\s*# \S/ && !/   / : !/"[^"]{60,}"/;
  print "above 110 columns: $ARGV:$.\n" if length > 111 && $counts;
  close ARGV if eof' "${others[@]}")
[ ${#bad[@]} -eq 0 ] && { echo "style: ${#files[@]} files are formatted"; exit 0; }
printf 'style: %s\n' "${bad[@]}"
exit 1
