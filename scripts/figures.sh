#!/usr/bin/env bash
# Every commit that README, docs or bench cite beside a figure must be an ancestor of this one: a reader can
# check it out and measure again, and rates must have one near them, with processor and command. A citation is
# a word of 7 to 40 hexadecimal digits, at least one of them a letter unless `commit` stands before it.
#
#   scripts/figures.sh
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
if [ "$(git rev-parse --is-shallow-repository)" != false ]; then
  echo "figures: this clone is shallow; git fetch --unshallow" >&2
  exit 1
fi
# Hashes on the pages that are no commits: trials of a sweep, a tokenizer.
others='^(3f9c1a7e|5d1f20aa|4dfe5442)$'
bad=0 seen=0
while IFS=: read -r file line commit; do
  [[ "$commit" == *ommit\ * || "$commit" == *[a-f]* ]] || continue
  commit=${commit##* }
  [[ ! "$commit" =~ $others ]] || continue
  seen=$((seen + 1))
  git merge-base --is-ancestor "$commit" HEAD 2>/dev/null && continue
  echo "$file:$line: no commit $commit in this history" >&2
  bad=1
done < <(git ls-files -z README.md CONTRIBUTING.md 'docs/*.md' 'bench/*.md' |
  xargs -0 grep -noHwE '([Cc]ommit )?[0-9a-f]{7,40}')
# A rate, or a ratio to PyTorch, is within 80 lines of a commit beside which (4 lines) a processor is named,
# and near which (30 lines) a command stands.
while read -r file; do
  awk -v file="$file" -v others="$others" '
    { text[NR] = $0 }
    /[0-9]K? ?(tok\/s|tokens\/s|[GT]FLOP\/s|[KMG]B\/s)|\/ PyTorch|[0-9] ?(x|×|times) PyTorch/ { rate[NR] = 1 }
    function near(pattern, line, distance,    i) {
      for (i = line - distance; i <= line + distance; ++i) if (i in text && text[i] ~ pattern) return 1
      return 0
    }
    function cites(line,    words, count, i) {
      count = split(text[line], words, /[^0-9a-z]+/)
      for (i = 1; i <= count; ++i)
        if (length(words[i]) >= 7 && length(words[i]) <= 40 && words[i] ~ /^[0-9a-f]+$/ &&
            words[i] ~ /[a-f]/ && words[i] !~ others) return 1
      return 0
    }
    END {
      for (line = 1; line <= NR; ++line)
        if (cites(line) && near("EPYC|Xeon|Ryzen|Intel|AMD|Arm|GPU|H100|H200|A100", line, 4) &&
            near("capstan [a-z]|scripts/|bench/|build/release/", line, 30)) measured[line] = 1
      for (line = 1; line <= NR; ++line) {
        if (!(line in rate)) continue
        found = 0
        for (i in measured) if (i - line <= 80 && line - i <= 80) found = 1
        if (found) continue
        printf "%s:%d: a rate without commit, processor and command near it\n", file, line
        bad = 1
      }
      exit bad
    }' "$file" >&2 || bad=1
done < <(git ls-files README.md 'docs/*.md')
[ "$seen" -gt 0 ] || { echo "figures: no citation found, which cannot be" >&2; exit 1; }
[ "$bad" -eq 0 ] || exit 1
echo "figures: $seen commits are cited, all of this history"
