#!/usr/bin/env bash
# Runs the commands of the documentation as they are written there: README.md, docs/, bench/,
# examples/, the help and the
# manual page of each command. Each page has a scratch directory of its own, in which its commands run in
# their order; the files that they name are prepared (small ones). `capstan` is a wrapper there that appends
# overrides to make training short. A command that cannot run here (a cluster, many minutes) is in the list
# `instead` below, with the reason and what is run in its place: an installation goes into a scratch prefix,
# and `ctest` must list a test. Of a script, a benchmark, a build, a test program and a download it is checked
# that what the line names exists: `named` below; these lines are listed at the end. A line in a block of
# commands that is none that this script knows is a failure.
#
# Printed output below a command that takes little time (`compared` below) must be what the command prints:
# each line of the page has to occur there, with numbers, units and hashes replaced by one sign and blanks by
# one blank; `…` stands for anything.
#
#   scripts/check_docs.sh [PROGRAM] [PAGE…]      PROGRAM: default build/release/capstan; PAGE: docs/data.md,
#                                                "capstan train"
#
# It also checks that each page of docs/ says its kind in its first sentence, and that links between pages
# lead to a file. Ends with one line "N commands, N failed".
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
case "${1-}" in -h|--help) sed -n '2,19s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
program=$(realpath "${1:-$repository/build/release/capstan}")
[ $# -eq 0 ] || shift
only=("$@")
build=$(dirname "$program")
scratch=$(mktemp -d "${TMPDIR:-/tmp}/capstan-docs.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
export NO_COLOR=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PAGER=cat
export HOME=$scratch/home PATH=$scratch/bin:$PATH
mkdir -p "$HOME"/{.zfunc,.config/fish/completions,.local/share/bash-completion/completions}
mkdir -p "$scratch/bin" "$scratch/pages"
count=0 failed=0
declare -A measured=()
: >"$scratch/seen"
: >"$scratch/named"

# ---- what is run in place of a command that cannot run here; empty: the command itself ---------------------

instead() { # COMMAND
  case "$1" in
    # Installs packages, builds, runs for minutes or needs the peers of scripts/peers.sh. Installing the
    # library, and the program that uses it, is what tests/api/install.cmake runs.
    "cmake --install build/release"*)
      local prefix=" --prefix $scratch/prefix"
      [[ "$1" != *" --prefix "* ]] || prefix=
      if [ ! -f "$build/cmake_install.cmake" ] ||
        [[ "$1" == *" library "* && ! -f "$build/library/libcapstan.a" ]]; then
        printf 'named %q\n' "$1"
      else
        echo "${1/build\/release/$build}$prefix"
      fi ;;
    # Tests of the preset `cuda`.
    "ctest -L cuda") grep -q 'LABELS cuda' "$repository/cmake/Module.cmake" && echo true ;;
    "ctest "*)
      if [ -f "$build/CTestTestfile.cmake" ]; then
        printf 'listed %q\n' "$1"
      else
        echo "this program is not in a build directory: nothing is checked of $1" >>"$scratch/skipped"
        echo true
      fi ;;
    scripts/*|bench/*|*" scripts/"*|cmake*|*build/release/*|*/tmp/embed/embed*|"time "*|"pip "*|"hf "*)
      printf 'named %q\n' "$1" ;;
    # Debian's fortune cookies may be missing here; other texts stand for them.
    *"/usr/share/games/fortunes/"*) echo "${1//\/usr\/share\/games\/fortunes/$files/fortunes}" ;;
    # Without a GPU it is refused.
    "capstan check "*) ;;
    "capstan "*train.device=cuda*) echo "$1 || [ \$? = 1 ]" ;;
    # An image that the reader makes.
    "docker run "*" IMAGE "*) echo "${1#* IMAGE }" ;;
    # Measures for minutes.
    "capstan bench") echo "$1 --seconds 0.01" ;;
    "capstan bench step"*)
      echo "capstan bench step -r quickstart dataset=mock tokenizer=none --seconds 0.01" ;;
    "capstan bench "*) echo "$1 --seconds 0.01" ;;
    # Trials have other names here, and runs are shorter.
    *5d1f20aa*|*3f9c1a7e*)
      echo "trial=\$(ls sweeps/lr/trials | head -n 1); $(sed -E 's/5d1f20aa|3f9c1a7e/$trial/' <<<"$1")" ;;
    # What a branch decides is missing, which exit code 1 says.
    "capstan recipe import pretrain.sh -o "*) echo "$1 || [ \$? = 1 ]" ;;
    *"capstan diff "*) echo "${1//step-00000100/step-00000002} || [ \$? = 1 ]" ;;  # 1: they differ
    # The wrapper would scale it down.
    "! capstan train llama3-70b "*) echo "! $program ${1#! capstan }" ;;
    # Several hosts: ranks of this one.
    "mpirun --hostfile "*)
      sed -E 's#--hostfile [^ ]+#--oversubscribe#; s/-n [0-9]+/-n 2/; s#/shared/##' <<<"$1" ;;
    "srun "*) sed -E 's#^srun [^c]*#mpirun --oversubscribe -n 2 #; s#/shared/##' <<<"$1" ;;
    # Sends jobs to a cluster.
    *" --submit"*) echo "${1/ --submit/}" ;;
  esac
}

# ---- what a command that is not run names ------------------------------------------------------------------

# Whether the script, preset, target, folder and option exist that COMMAND names; what does not is printed.
named() { # COMMAND
  local part good=0
  while read -r part; do
    set -f; set -- $part; set +f
    while [[ "${1-}" == [A-Z]*=* ]]; do  # FUZZ_TIMEOUT=300 scripts/soak.sh
      grep -qr "${1%%=*}" "$repository"/{scripts,bench,tests,src} ||
        { echo "nothing reads ${1%%=*}"; good=1; }
      shift
    done
    [ "${1-}" != time ] || shift
    case "${1-}" in
      pip) grep -q "^$3\>" "$repository/scripts/peers-requirements.txt" ||
        grep -q "package $3\>" "$repository"/docs/*.md ||
        { echo "neither scripts/peers-requirements.txt nor a page names the package $3"; good=1; } ;;
      hf) [ "$2 $4 $5" = "download --local-dir ${3##*/}" ] ||
        { echo "the program says: hf download ORG/NAME --local-dir NAME"; good=1; } ;;
      *.sh|*.py) named_script "$@" || good=1 ;;
      cmake) shift && named_build "$@" || good=1 ;;
      mpirun) named_program "$4" || good=1 ;;  # mpirun -n 2 PROGRAM
      /tmp/embed/*) named_program "$1" || good=1 ;;
      build/*)
        named_program "$1" || good=1
        if [[ "$part" =~ -tc=\"([^\"]*)\" ]]; then
          grep -qrF "TEST_CASE(\"${BASH_REMATCH[1]}\"" "$repository/tests" ||
            { echo "no test case \"${BASH_REMATCH[1]}\""; good=1; }
        fi ;;
      *) echo "not known: $part"; good=1 ;;
    esac
  done < <(sed 's/ && /\n/g' <<<"$1")
  return $good
}

named_script() { # FILE WORD…
  local file=$repository/$1 help word
  shift
  if [[ "$file" == */scripts/peers/* ]]; then  # a part of scripts/peers.sh, whose environment it needs
    [ -f "$file" ] || echo "no file $file"
    [ -f "$file" ]
    return
  fi
  [ -x "$file" ] || { echo "$file is no program"; return 1; }
  if [[ "$file" == *.py ]]; then
    if ! command -v python3 >/dev/null; then
      echo "python3 is missing: nothing is checked of ${file#"$repository/"}" | tee -a "$scratch/skipped"
      [[ "${CI:-0}" =~ ^(|0|false)$ ]]
      return
    fi
    help=$(python3 "$file" "$@" --help) || { echo "$help"; return 1; }
  else
    grep -q -e '--help' "$file" || { echo "${file##*/} has no --help"; return 1; }
    help=$("$file" --help) || return 1
  fi
  for word; do
    [[ "$word" != *[.=/]* && ! "$word" =~ ^[0-9]+$ ]] || continue  # a.b=c, a file, a number
    case "${file##*/} $word" in
      *.sh\ -*|*.py\ *) grep -qE -- "(^|[^a-z-])$word([^a-z-]|\$)" <<<"$help" ;;
      peers.sh*) [ -f "$repository/scripts/peers/check_$word.py" ] ;;
      layouts.sh*) [ -f "$repository/recipes/$word.yaml" ] ;;
      *) grep -qE -- "${file##*/} $word([^a-z-]|\$)" <<<"$help" ;;
    esac || { echo "${file##*/} --help does not know $word"; return 1; }
  done
}

named_program() { # FILE
  local name=${1##*/} lists
  lists=$(cat $(git -C "$repository" ls-files --full-name '*CMakeLists.txt' '*.cmake' |
    sed "s|^|$repository/|"))
  local targets="(add_(executable|library|custom_target)|capstan_(bench|fuzz)[a-z_]*)\($name([ )]|\$)"
  local tests="capstan_[a-z_]*test\(${name#test_}([ )]|\$)"
  grep -qE "$targets|$tests" <<<"$lists" || { echo "no target $name"; return 1; }
}

named_build() { # WORD…, behind `cmake`
  local kind=configure
  while [ $# -gt 0 ]; do
    case "$1" in
      --build) kind=build
        [[ "$2" == -* ]] || shift ;;
      --preset)
        cmake "--list-presets=$kind" -S "$repository" | grep -q "^ *\"$2\"" ||
          { echo "no $kind preset $2"; return 1; }
        shift ;;
      --target) named_program "$2" || return 1
        shift ;;
      --install|-B|--prefix) shift ;;
      --component) grep -qr "COMPONENT $2" "$repository/cmake" || { echo "no component $2"; return 1; }
        shift ;;
      -S) [ -f "$repository/$2/CMakeLists.txt" ] || { echo "no CMakeLists.txt in $2"; return 1; }
        shift ;;
      -DCAPSTAN_*)
        local option=${1#-D}
        grep -qE "(option|set)\(${option%%=*} .*" "$repository/CMakeLists.txt" "$repository"/cmake/*.cmake ||
          { echo "no option ${option%%=*}"; return 1; } ;;
      -DCMAKE_*|-j|-j[0-9]*) ;;
      *) echo "not known to this check: $1"; return 1 ;;
    esac
    shift
  done
}

# Whether `ctest` with these words lists at least one test.
listed() { # COMMAND
  local words=${1#ctest}
  words=${words/--test-dir build\/release/}
  ctest --test-dir "$build" -N $words | grep -qE '^Total Tests: [1-9]' || { echo "no test"; return 1; }
}
export repository scratch build
export -f named named_script named_program named_build listed

# ---- printed output ----------------------------------------------------------------------------------------

# Whether the output of COMMAND is compared with the page's.
compared() { # COMMAND
  case "$1" in
    "capstan check "*|"capstan show "*|"capstan explain "*|"capstan recipe "*|"capstan diff "*) true ;;
    "capstan data prepare "*|"capstan tokenizer train "*|"! capstan check "*) true ;;
    *) false ;;
  esac
}

# Numbers with their units and hashes become one sign, blanks one blank. The numbers of `capstan show --step`
# are masked too: they are the same at every call on one machine, but the workspace, and with it the total,
# depends on the kernels for its processor and on its number of threads.
masked() {
  sed -E 's/\b[0-9a-f]*[0-9][0-9a-f]{6,}\b/#/g; s/[0-9]([0-9.,]| [0-9]{3})*/#/g
    s/# ?([KMGT]i?B?|ms|s|B)\b/#/g; s/# [KMGT]B\//# B\//g; s/[[:space:]]+/ /g; s/^ //; s/ $//'
}

# Prints the lines of the page that the program does not print.
not_printed() { # LOG, the page's lines on standard input
  local line
  masked <"$1" >"$scratch/printed"
  masked | while read -r line; do
    [[ -n "$line" && "$line" != "…" ]] || continue
    while IFS= read -r part; do
      part=$(sed -E 's/^ +| +$//g' <<<"$part")
      grep -qF -- "$part" "$scratch/printed" || { echo "not printed now: $line"; break; }
    done < <(sed 's/…/\n/g' <<<"$line")
  done
}

# ---- the program, made short -------------------------------------------------------------------------------

cat >"$scratch/bin/capstan" <<EOF
#!/usr/bin/env bash
words=" \$* "
sizes="model.hidden_size=48 model.ffn_hidden_size=96 model.seq_length=64 train.threads=1"
steps="train.train_iters=2 validation.eval_iters=1"
case "\$words" in
  *" --resume "*|*" --resume=auto "*) steps="train.train_iters=4 validation.eval_iters=1" ;;
esac
case "\$words" in *" --shrink "*|*" -h "*|*" --help "*|*" --trial "*|*/trials/*) sizes= steps= ;; esac
case "\$words" in *" model=hf:"*|*" winch.yaml "*) sizes="train.threads=1 model.seq_length=64" ;; esac
case "\${1-} \${2-}" in
  "train llama"*|"train qwen"*|"train gpt2"*|"train latent"*|"train sft"|"train lora"|"train qlora"|\
  "train dora")
    [[ "\$words" == *" model=hf:"* ]] || { sizes=--shrink; steps=; } ;;&
  train\ *) exec "$program" "\$@" \$sizes \$steps ;;
  "tokenizer train") exec "$program" "\$@" --overwrite ;;
  trace\ *) exec "$program" "\$@" \$sizes ;;
  "sweep plan") [[ "\$3" == *.yaml ]] || exec "$program" "\$@" \$sizes \$steps ;;
esac
exec "$program" "\$@"
EOF
chmod +x "$scratch/bin/capstan"

# ---- files that commands name, made once and copied to the page that first names them ----------------------

files=$scratch/files
make_files() {
  mkdir -p "$files/build/quickstart" "$files/data" && cd "$files"
  cat "$repository"/docs/*.md "$repository"/docs/reference/*.md >corpus.txt
  head -c 20000 corpus.txt >heldout.txt
  head -n 20 corpus.txt | tee lines.txt quotes.txt >/dev/null
  printf '%s\n' '{"text": "Many hands haul one load."}' '{"text": "The rope turns round the drum."}' >a.jsonl
  cp a.jsonl b.jsonl
  for _ in $(seq 200); do cat a.jsonl; done >corpus.jsonl
  gzip -k corpus.jsonl
  mkdir books && cp a.jsonl b.jsonl books
  for _ in $(seq 40); do
    echo '{"messages": [{"role": "user", "content": "Who is it?"},' \
      '{"role": "assistant", "content": "It is I."}]}'
  done >chats.jsonl
  cp chats.jsonl data/chats.jsonl
  cp -r "$repository/tests/formats/families/smollm2" SmolLM2-135M
  cp -r SmolLM2-135M SmolLM2-135M-Instruct
  sed -i 's/"max_position_embeddings": [0-9]*/"max_position_embeddings": 512/' \
    SmolLM2-135M-Instruct/config.json
  mkdir fortunes
  for name in literature people science work humorists definitions songs-poems wisdom; do
    sed 's/^$/%/' heldout.txt >fortunes/$name
  done
  mkdir texts && cp corpus.txt texts/pages.txt && cp heldout.txt texts/others.txt
  cp "$repository/tests/formats/gguf/smollm2.gguf" model.gguf
  cp "$repository/tests/importers/golden/gpt_small.sh" pretrain_gpt.sh
  sed 's/--num-layers 12/--num-layers $LAYERS/' pretrain_gpt.sh >pretrain.sh
  sed -i '2i case $SIZE in large) LAYERS=48 ;; *) LAYERS=24 ;; esac' pretrain.sh
  cp "$repository/tests/importers/golden/ds_zero2.json" ds_config.json
  cp "$repository/tests/importers/golden/run_config.yaml" run_config.yaml
  cp "$repository/examples/first.yaml" first.yaml
  printf 'extends: quickstart\nname: my\noptimizer:\n  lr: 1e-3\n' >my.yaml
  printf '%s\n' 'extends: smollm2-135m-sft' 'model: hf:SmolLM2-135M' \
    'checkpoint.pretrained_checkpoint: hf:SmolLM2-135M' 'dataset.train_files: chats.jsonl' >chats.yaml
  printf 'partition: cpu\ntime: 1h\ncpus_per_rank: 2\n' >cluster.yaml
  printf 'schema: capstan-sweep/1\nname: lr\nbase: quickstart\naxes:\n  optimizer.lr: [1e-3, 2e-3]\n' >lr.yaml
  capstan tokenizer train corpus.txt --vocab-size 4096 --output tokenizer.json
  cp tokenizer.json t.json
  capstan data prepare corpus.txt --tokenizer tokenizer.json --append-eod --output data/corpus
  capstan data prepare corpus.txt --tokenizer tokenizer.json --append-eod --output build/quickstart/fortunes
  cp tokenizer.json build/quickstart/
  cp heldout.txt corpus.txt build/quickstart/
  capstan tokenizer encode lines.txt --tokenizer tokenizer.json >ids.jsonl
  capstan train quickstart --run-dir runs/quickstart
  capstan train quickstart optimizer.lr=1e-3 --run-dir runs/a
  capstan train quickstart optimizer.lr=3e-3 --run-dir runs/b
  capstan train quickstart --run-dir runs/base
  capstan train my.yaml
  cp -r runs experiments
  capstan train quickstart-lora --run-dir runs/quickstart-lora
  local tune=(model=hf:SmolLM2-135M checkpoint.pretrained_checkpoint=hf:SmolLM2-135M
    dataset.train_files=chats.jsonl)
  capstan train smollm2-135m-sft "${tune[@]}" --run-dir runs/tuned
  capstan train smollm2-135m-lora "${tune[@]}" peft.dim=4 --run-dir runs/tuned-lora
  capstan train smollm2-135m-lora "${tune[@]}"
  capstan convert runs/tuned-lora peft:my-lora
  cp -r my-lora adapter
}
prepared=(tokenizer.json corpus.txt corpus.jsonl.gz corpus.jsonl books t.json a.jsonl b.jsonl chats.jsonl
  quotes.txt lines.txt ids.jsonl heldout.txt my.yaml first.yaml chats.yaml experiments runs/my lr.yaml
  cluster.yaml pretrain_gpt.sh pretrain.sh ds_config.json run_config.yaml model.gguf SmolLM2-135M
  SmolLM2-135M-Instruct texts
  my-lora adapter data/corpus_text_document data build/quickstart runs/quickstart-lora runs/quickstart
  runs/base runs/tuned-lora runs/tuned runs/smollm2-135m-lora runs/a runs/b)

# Copies what COMMAND reads and the page does not have yet. What it writes is not prepared.
prepare() { # COMMAND
  local command=$1 name named source
  local written='--output|--out|-o|--run-dir|--write|recipe new|recipe cp [^ ]+|>'
  command=$(sed -E "s/($written) *[^ ]+//g" <<<"$command")
  [[ "$command" != "capstan convert"* && "$command" != "capstan merge"* ]] ||
    command=$(sed -E 's/(convert|merge) ([^ ]+) [^ ]+/\1 \2/g' <<<"$command")
  command=${command/#capstan data /capstan }  # the command is no directory
  [[ "$command" != *quickstart* && "$command" != *.yaml* && "$command" != *sweep* ]] ||
    command+=" build/quickstart"
  case "$command" in
    *-lora*) command+=" runs/quickstart" ;;&
    *"my.yaml --resume"*) command+=" runs/my" ;;&
    "capstan train my.yaml "*--resume*) command+=" runs/a" ;;&
    *"capstan runs "*) command+=" runs/quickstart runs/a runs/b" ;;&
    *chats.yaml*) command+=" chats.jsonl SmolLM2-135M" ;;
  esac
  [[ "$command" != *\*.txt* ]] || command+=" lines.txt"
  command=${command//$'\n'/ }
  for name in "${prepared[@]}"; do  # 40 names for each of 500 commands: without a process for each
    named="(^|[ =:\"'\`/[])${name//./\\.}([] ,\"'\`_/]|\$)"
    [[ "$command" =~ $named ]] || continue
    for source in "$files/$name"{,.bin,.idx}; do
      [ -e "$source" ] && [ ! -e "${source#"$files/"}" ] || continue
      mkdir -p "$(dirname "${source#"$files/"}")"
      cp -r "$source" "${source#"$files/"}"
    done
  done
  # A sweep knows where its data are: it is planned in place.
  [[ "$command" != *sweeps/lr* || "$command" == *"sweep plan"* || -e sweeps/lr ]] ||
    capstan sweep plan quickstart optimizer.lr=1e-3,2e-3 --out sweeps/lr >/dev/null 2>&1
}

# ---- commands from texts -----------------------------------------------------------------------------------

# Lines "LINE<tab>COMMAND<tab>OUTPUT" of a page: indented and fenced blocks, and `capstan …` inside of the
# text where it is complete. OUTPUT, with \002 for its line ends, is what the page shows below the command:
# behind `$ COMMAND`, or in the block that follows at once. A line that is no command in a block of commands
# is "LINE<tab>unknown: TEXT".
commands_of_page() { # FILE
  awk '
    function emit(line, text) {
      if (held != "") print held "\t" output
      held = line "\t" text
      output = ""
    }
    function is_command(text) {
      if (text ~ /^capstan [0-9]/) return 0  # the first line of a log
      if (text ~ /^((! )?capstan |scripts\/|bench\/|cmake |ctest |build\/release\/)/) return 1
      if (text ~ /^(source |mpirun |srun )/) return 1
      if (text ~ /^(time |pip |hf |mkdir |tail |sed |for .*; do|\[ |\/tmp\/embed\/)/) return 1
      return text ~ /^(two( |\(|$)|[A-Z_]+=[^ ]+ (capstan|scripts))/
    }
    function is_override(text) {
      return text ~ /^(checkpoint|train|dataset|resilience|optimizer|model|dist|ddp|scheduler)(\.[a-z_]+)?=/
    }
    function flush(  i, j, shell, commands, text, words) {
      for (i = 1; i <= n; ++i) if (block[i] ~ /^\$ /) shell = 1
      for (i = 1; i <= n; ++i) if (is_command(block[i])) ++commands
      if (n > 0 && !shell && !commands && follows)
        for (i = 1; i <= n; ++i) output = output block[i] "\002"
      for (i = 1; i <= n; ++i) {
        text = block[i]
        if (shell && text !~ /^\$ /) {
          output = output text "\002"
          continue
        }
        # A command whose output on the page has an error has to fail.
        if (text ~ /^\$ /) for (j = i + 1; j <= n && block[j] !~ /^\$ /; ++j)
          if (block[j] ~ /^error/) { text = "$ ! " substr(text, 3); break }
        sub(/^\$ /, "", text)
        if (is_command(text)) emit(at[i], text)
        else if (is_override(text)) {
          # Overrides: those of a block belong together,
          # but for the choices of where data and weights come from.
          sub(/  +.*/, "", text)
          if (text ~ /^(dataset|checkpoint\.(load|pretrained))/)
            emit(at[i], "capstan check quickstart " text)
          else emit(at[i], "capstan check quickstart" (words = words " " text))
        } else if ((shell || commands) && text !~ /^(#|          )/)  # no comment, no further explanation
          emit(at[i], "unknown: " text)
      }
      if (n > 0) follows = shell || commands
      n = 0
    }
    # A file that the page writes: `cat >FILE <<'\''END'\''` up to the line END, as one command.
    writing {
      line = $0
      sub(/^    /, "", line)
      file = file "\001" line
      if (line == "END") { writing = 0; emit(begin, file) }
      next
    }
    /^    cat >[^ ]+ <<'\''END'\''$/ {
      flush()
      file = $0
      sub(/^    /, "", file)
      begin = NR
      writing = 1
      next
    }
    /^```/ { fenced = !fenced; next }
    {
      if (fenced || $0 ~ /^    /) {
        line = $0
        if (!fenced) sub(/^    /, "", line)
        if (loop) block[n] = block[n] "\001" line
        else if (open) { sub(/^ +/, "", line); block[n] = block[n] " " line }
        else { block[++n] = line; at[n] = NR }
        loop = (loop || line ~ /^for .*; do$/) && line != "done"
        open = block[n] ~ /\\$/
        sub(/ *\\$/, "", block[n])
        next
      }
      flush()
      if ($0 != "") follows = 0
      rest = $0
      span_begin = "`((time|[A-Z_]+=[^ `]+) )?(capstan |scripts/|bench/|cmake |ctest |build/release/)"
      while (match(rest, span_begin "[^`]+`")) {
        span = substr(rest, RSTART + 1, RLENGTH - 2)
        rest = substr(rest, RSTART + RLENGTH)
        if (span !~ /…|\|/ && span !~ /(^| |=|:)[A-Z]+( |$)/) emit(NR, span)
      }
    }
    END { flush(); emit(0, "") }' "$1"
}

# Without the comment behind it, outside of quotes: a line can be pasted into a shell as it is.
without_explanation() {
  sed -E "s/^((( *)([^ #'\"]|'[^']*'|\"[^\"]*\")|[^ '\"]#)*) +#.*\$/\1/"
}

commands_of_manual() { # FILE
  sed -nE '/^\.nf/,/^\.fi/{ s/\\-/-/g; s/\\e/\\/g; s/^\\&//; s/^(capstan .*)$/\1/p }' "$1" | sed 's/^/0\t/'
}

# ---- running -----------------------------------------------------------------------------------------------

problem() { # TEXT
  failed=$((failed + 1))
  printf 'FAILED  %s\n' "$1"
}

run_page() { # NAME FILE LIST fresh|shared
  local name=$1 line command output stead directory log differs
  [ ${#only[@]} -eq 0 ] || [[ " ${only[*]} " == *" $name "* ]] || return 0
  directory=$scratch/pages/${name//[^a-z0-9]/-}
  : >"$scratch/functions"
  mkdir -p "$directory"
  while IFS=$'\t' read -r line command output; do
    if [[ "$command" == "unknown: "* ]]; then
      problem "$name:$line: not known to this check: ${command#unknown: }"
      continue
    fi
    if [[ "$command" == *$'\001'* ]]; then
      command=${command//$'\001'/$'\n'}
    else
      command=$(without_explanation <<<"$command")
    fi
    if [[ "$command" =~ ^[a-z]+\(\) ]]; then
      echo "$command" >>"$scratch/functions"
      continue
    fi
    [ "$4" = shared ] || { rm -rf "$directory" && mkdir -p "$directory"; }
    cd "$directory"
    [[ "$command" == "cat >"* ]] || prepare "$command" </dev/null
    stead=$(instead "$command")
    [[ "$stead" != "named "* ]] || echo "$name:$line: $command" >>"$scratch/named"
    # A command's name in the text stands for its page of help.
    if [ "$3" = text ] && "$program" help ${command#capstan } >/dev/null 2>&1; then stead=true; fi
    count=$((count + 1))
    echo "$name" >>"$scratch/seen"
    log=$scratch/log
    # Measurements leave nothing behind that a page needs twice: each is made once, which saves a third of
    # the time.
    [ -z "${measured[${stead:-$command}]-}" ] || continue
    if ! timeout 300 bash -c "set -e; source '$scratch/functions'; ${stead:-$command}" \
      </dev/null >"$log" 2>&1; then
      failed=$((failed + 1))
      printf 'FAILED  %s:%s: %s%s\n' "$name" "$line" "$command" "${stead:+   (run: $stead)}"
      tail -n 12 "$log" | sed 's/^/        /'
    elif [[ "$command" == "capstan bench"* ]]; then
      measured[${stead:-$command}]=yes
    elif [ -n "$output" ] && compared "$command"; then
      differs=$(tr '\002' '\n' <<<"$output" | not_printed "$log")
      [ -z "$differs" ] || problem "$name:$line: $command prints other lines
$(sed 's/^/        /' <<<"$differs")"
    fi
  done
}
# The headings of the index under which a page is listed.
kinds_in_index() { # PAGE
  awk -v link="($1)" '/^\*\*/ { split($0, parts, "[*]+"); kind = parts[2] } index($0, link) { print kind }' \
    "$repository/docs/README.md"
}
for page in README.md CONTRIBUTING.md $(cd "$repository" && ls docs/*.md); do
  name=${page#docs/}
  if [[ "$page" == docs/* && "$name" != README.md ]]; then
    kind=$(sed -nE '3s/^(Tutorial|How-to guide|Reference|Explanation),.*/\1/p' "$repository/$page")
    [ -n "$kind" ] || problem "$page: the first sentence does not say the kind of the page"
    [[ "$(kinds_in_index "$name")" =~ ^"$kind"s?$ ]] ||
      problem "$page: says that it is a ${kind,,}; docs/README.md lists it under '$(kinds_in_index "$name")'"
  fi
  while read -r link; do
    [ -e "$repository/$(dirname "$page")/$link" ] || problem "$page: no file for the link $link"
  done < <(grep -v '^    ' "$repository/$page" | grep -oE '\]\([^)#:]+' | cut -c3-)  # no lines of code
done

make_files >"$scratch/make" 2>&1 || {
  echo "check_docs.sh: the files could not be prepared:" >&2
  tail -n 20 "$scratch/make" >&2
  exit 1
}
for page in "$repository"/README.md "$repository"/CONTRIBUTING.md "$repository"/docs/*.md \
  "$repository"/docs/reference/*.md "$repository"/bench/*.md "$repository"/examples/*.md; do
  run_page "${page#"$repository/"}" "$page" text shared < <(commands_of_page "$page")
done
# The two examples of the program's help, in an empty directory; then each command's:
# its manual page has what --help shows.
mkdir -p "$scratch/bare" "$scratch/man"
run_page "capstan --help" - help fresh < <("$program" --help | sed -nE 's/^  (capstan .*)$/1\t\1/p')
"$program" help --man "$scratch/man" -q
for page in "$scratch"/man/man1/*.1; do
  name=$(basename "$page" .1)
  run_page "${name//-/ }" "$page" help fresh < <(commands_of_manual "$page")
done
for page in "${only[@]}"; do
  grep -qxF -- "$page" "$scratch/seen" ||
    { echo "check_docs.sh: no commands found in '$page'" >&2; failed=$((failed + 1)); }
done
if [ ${#only[@]} -eq 0 ] && [ "$count" -lt 200 ]; then
  echo "check_docs.sh: only $count commands found, which cannot be: they are no longer recognized" >&2
  failed=$((failed + 1))
fi
if [ -s "$scratch/named" ]; then
  echo "not run; what they name exists:"
  sed 's/^/    /' "$scratch/named"
fi
[ ! -s "$scratch/skipped" ] || sort -u "$scratch/skipped"
echo "$count commands, $failed failed"
[ "$failed" -eq 0 ]
