#!/usr/bin/env bash
# clang-format over the C++ sources that git knows, and the limit of 110 columns for these, whose comments
# clang-format leaves as they are, and for scripts, build files, pages (JavaScript, CSS, HTML), Markdown and
# the YAML of recipes and presets.
#
#   scripts/format.sh            formats the C++ sources, and fails where a line of any file stays too long
#   scripts/format.sh --check    names files that would change and lines that are too long, and fails if there
#                                are any
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
# Files that git knows and that are there.
known() { # PATHSPEC…
  git ls-files "$@" | while read -r file; do [ ! -f "$file" ] || echo "$file"; done
}
mapfile -t files < <(known '*.cpp' '*.hpp' '*.cu')
# Exception: shell files in folders named `golden` are expected outputs, and inputs as users write them.
mapfile -t scripts < <(known '*.py' '*.sh' .ci/run '*.cmake' '*CMakeLists.txt' '*.js' '*.css' '*.html' \
  'configs/*.yaml' 'recipes/*.yaml' 'examples/*.yaml' 'bench/*.yaml' \
  'tests/train/*.yaml' '*requirements.txt' ':!*/golden/*')
mapfile -t pages < <(known '*.md' ':!tests/*')
# clang-format over the C++ sources, some files at a time on each core.
formatted() { # ARGUMENT
  printf '%s\0' "${files[@]}" | xargs -0 -n 40 -P "$(nproc)" clang-format "$1"
}
bad=()
if [ "${1:-}" = --check ]; then
  report=$(formatted --dry-run 2>&1) || { echo "$report" >&2; exit 1; }
  mapfile -t bad < <(sed -nE 's/^([^:]+):[0-9]+:[0-9]+: .*clang-format-violations.*/would change: \1/p' \
    <<<"$report" | sort -u)
else
  formatted -i
fi
# Exceptions: raw strings (R"( of C++, r""" of Python) are texts and data, and code blocks and tables of
# Markdown cannot be broken.
mapfile -t -O "${#bad[@]}" bad < <(perl -CSD -ne '
  chomp;
  my $python = $ARGV =~ /\.py$/;
  my $page = $ARGV =~ /\.md$/;
  $fenced = !$fenced if $page && /^ *```/;
  # Text of nested lists is indented as code is.
  $list = /^([-*]|\d+\.) / if $page && /^\S/;
  next if $page && ($fenced || /^\|/ || (/^    / && !$list));
  $raw = 1 if $page ? 0 : $python ? /\br"""/ : /R"\w*\(/;
  print "above 110 columns: $ARGV:$.\n" if length > 110 && !$raw;
  $raw = 0 if $python ? /^"""/ : /\)\w*"/;
} continue {
  $raw = $fenced = $list = 0, close ARGV if eof' "${files[@]}" "${scripts[@]}" "${pages[@]}")
if [ ${#bad[@]} -eq 0 ]; then
  echo "style: ${#files[@]} files are formatted, $((${#scripts[@]} + ${#pages[@]})) more end at column 110"
  exit 0
fi
printf 'style: %s\n' "${bad[@]}"
exit 1
