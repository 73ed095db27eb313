#!/usr/bin/env bash
# From nothing to a language model that has learned English from fortune cookies, in a few minutes on two
# cores: installs what is missing, builds, learns a tokenizer, prepares the data, trains the recipe
# `quickstart`, evaluates and prints text.
#
#   scripts/quickstart.sh            begins, or continues what an earlier call left unfinished
#   scripts/quickstart.sh --fresh    begins anew; an earlier run is kept under another name
#   … --run-dir DIR                  the run's directory, instead of runs/quickstart
#   … a.b=c                          overrides for the recipe, for instance train.train_iters=400
set -euo pipefail
cd "$(dirname "$0")/.."

fresh=no overrides=() run=runs/quickstart
while [ $# -gt 0 ]; do
  case "$1" in
    --fresh) fresh=yes ;;
    --run-dir) run=${2:?a directory is missing}; shift ;;
    -h|--help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *=*) overrides+=("$1") ;;
    *) echo "quickstart.sh: unknown argument '$1' (try --help)" >&2; exit 2 ;;
  esac
  shift
done
data=build/quickstart
say() { printf '\n== %s\n' "$*"; }

say "install"
scripts/install.sh quickstart

say "build (the first time takes some minutes)"
mkdir -p build
cmake --preset release >build/configure.log 2>&1 || { cat build/configure.log >&2; exit 1; }
cmake --build --preset release --target capstan
capstan=build/release/capstan

say "corpus: texts of Debian's fortune cookies"
# Plain English; the files with drawings, code, other languages and rude jokes stay out.
cookies=(art computers cookie definitions education food fortunes goedel humorists kids law linux literature
  love magic medicine miscellaneous news people pets platitudes politics riddles science songs-poems sports
  startrek tao wisdom work)
mkdir -p "$data"
for name in "${cookies[@]}"; do
  file=/usr/share/games/fortunes/$name
  [ -r "$file" ] || { echo "quickstart.sh: $file is missing (package fortunes)" >&2; exit 1; }
  cat "$file"
  echo "%"
done | tr -d '\010\015' | awk -v train="$data/train.txt" -v heldout="$data/heldout.txt" '
  # Documents end at a line of one `%`. Every fortieth is held out;
  # in that file the end-of-document token stands between them.
  function flush() {
    if (text ~ /[^ \t\n]/) {
      if (++count % 40 == 0) { printf "%s<|endoftext|>", text >heldout; ++held }
      else { printf "%s%%\n", text >train }
    }
    text = ""
  }
  $0 == "%" { flush(); next }
  { text = text $0 "\n" }
  END { flush(); printf "%d documents to train on, %d held out\n", count - held, held }'

say "tokenizer and dataset"
if [ -f "$data/tokenizer.json" ] && [ -f "$data/fortunes_text_document.idx" ] &&
  cmp -s "$data/train.txt" "$data/prepared.txt"; then
  echo "$data/tokenizer.json and $data/fortunes_text_document are there already"
else
  "$capstan" tokenizer train "$data/train.txt" --separator % --vocab-size 4096 --overwrite \
    --output "$data/tokenizer.json"
  "$capstan" data prepare "$data/train.txt" --separator % --tokenizer "$data/tokenizer.json" --append-eod \
    --overwrite --output "$data/fortunes"
  cp "$data/train.txt" "$data/prepared.txt"  # what they were made from
fi

say "train"
if [ "$fresh" = yes ] && [ -e "$run" ]; then
  number=1
  while [ -e "$run.$number" ]; do number=$((number + 1)); done
  mv "$run" "$run.$number"
  echo "the earlier run is now $run.$number"
fi
state=none
if [ -e "$run" ]; then
  state=$("$capstan" runs show "$run" --json |
    sed -nE 's/.*"state":[[:space:]]*"([a-z]+)".*/\1/p' | head -n 1)
fi
case "$state" in
  none) "$capstan" train quickstart "${overrides[@]}" --run-dir "$run" ;;
  finished)
    if [ ${#overrides[@]} -gt 0 ]; then
      "$capstan" train quickstart "${overrides[@]}" --run-dir "$run" --resume
    else
      echo "$run is finished already; scripts/quickstart.sh --fresh trains once more"
    fi ;;
  *) echo "$run is $state: it is continued"
     "$capstan" train quickstart "${overrides[@]}" --run-dir "$run" --resume ;;
esac

say "evaluate on the held-out texts"
"$capstan" eval "$run" --text "$data/heldout.txt"

say "what it writes"
for prompt in "The best way to" "A man who" "Love is"; do
  "$capstan" generate "$run" --prompt "$prompt" --max-tokens 48 --temperature 0.7 --top-p 0.95 --seed 1
  echo "--"
done

say "next"
cat <<EOF
Train on, for twice as long:
  $capstan train quickstart --run-dir $run --resume train.train_iters=1600 scheduler.lr_decay_iters=1600
Look at the run:     $capstan runs show $run        (curves: tensorboard --logdir $run)
Write with it:       $capstan generate $run --prompt "Once upon a time"
Your own recipe:     $capstan recipe new my.yaml
EOF
