#!/usr/bin/env bash
# Every commit that README, docs or bench cite beside a figure must be an ancestor of this one: a reader can
# check it out and measure again, and a page with rates must cite one. A citation is a word of seven
# hexadecimal digits, at least one of them a letter.
#
#   scripts/figures.sh
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
if [ "$(git rev-parse --is-shallow-repository)" != false ]; then
  echo "figures: this clone is shallow; git fetch --unshallow" >&2
  exit 1
fi
bad=0 seen=0
while IFS=: read -r file line commit; do
  case "$commit" in *[a-f]*) ;; *) continue ;; esac
  seen=$((seen + 1))
  git merge-base --is-ancestor "$commit" HEAD 2>/dev/null && continue
  echo "$file:$line: no commit $commit in this history" >&2
  bad=1
done < <(git ls-files -z README.md CONTRIBUTING.md 'docs/*.md' 'bench/*.md' |
  xargs -0 grep -noHwE '[0-9a-f]{7}')
# A page with a rate says where it was measured.
while read -r file; do
  grep -qE '\b[0-9a-f]{7}\b' "$file" && continue
  echo "$file: rates without the commit at which they were measured" >&2
  bad=1
done < <(git ls-files -z README.md 'docs/*.md' |
  xargs -0 grep -lE '[0-9]K? ?(tok/s|tokens/s|[GT]FLOP/s|MB/s)')
[ "$seen" -gt 0 ] || { echo "figures: no citation found, which cannot be" >&2; exit 1; }
echo "figures: $seen commits are cited, all of this history"
exit $bad
