#!/usr/bin/env bash
# Installs the Debian packages that Capstan needs. Says what is missing, installs only that, and asks for sudo
# only when there is something to install and the user is not root.
#
#   scripts/install.sh                everything: build, quickstart, and the full test tier
#   scripts/install.sh build          compilers and libraries
#   scripts/install.sh quickstart     build, and the text of the quickstart
#   scripts/install.sh --list         prints the packages and installs nothing
set -euo pipefail

build=(
  g++ cmake ninja-build ccache pkg-config git
  libyaml-cpp-dev libboost-program-options-dev libspdlog-dev nlohmann-json3-dev libsimdjson-dev doctest-dev
  zlib1g-dev libzstd-dev libonig-dev libutf8proc-dev libxxhash-dev
  libhwy-dev libdnnl-dev
  libopenmpi-dev openmpi-bin
)
quickstart=(fortunes)                                     # the corpus: short English texts, separated by `%`
# Fuzz targets, readable sanitizer reports, style; what tests run: groff, strace;
# a linker that takes a tenth of the time.
full=(clang-16 libclang-rt-16-dev llvm-16 clang-format clang-tidy groff strace mold)

what=everything list=no
for argument in "$@"; do
  case "$argument" in
    build|quickstart|everything) what=$argument ;;
    --list) list=yes ;;
    -h|--help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "install.sh: unknown argument '$argument' (try --help)" >&2; exit 2 ;;
  esac
done

wanted=("${build[@]}")
[ "$what" = build ] || wanted+=("${quickstart[@]}")
[ "$what" != everything ] || wanted+=("${full[@]}")

if [ "$list" = yes ]; then
  printf '%s\n' "${wanted[@]}"
  exit 0
fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  echo "install.sh: this system has no apt. Install what these Debian packages hold, then build:" >&2
  printf '  %s\n' "${wanted[@]}" >&2
  exit 1
fi

missing=()
for package in "${wanted[@]}"; do
  state=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$state" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "install: all ${#wanted[@]} packages are there"
  exit 0
fi

echo "install: ${#missing[@]} of ${#wanted[@]} packages are missing: ${missing[*]}"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "install.sh: no sudo here; as root run: apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -qq --no-install-recommends "${missing[@]}"
echo "install: done"
