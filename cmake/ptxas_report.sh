#!/bin/sh
# Compiler launcher of the CUDA kernels: runs a compilation by nvcc, writes what ptxas reports of each kernel
# (registers, stack, spills, shared memory) to OBJECT.resources, and prints the other messages. ccache repeats
# the report of an object that it has stored. scripts/cuda.sh reads these files.
object='' previous=''
for argument in "$@"; do
  [ "$previous" != -o ] || object=$argument
  previous=$argument
done
messages=$object.messages
"$@" 2>"$messages"
status=$?
report='^ptxas info +: (Compiling entry function|Function properties for|Used [0-9]+ registers|'
report="$report"'Compile time|[0-9]+ bytes gmem)|^ +[0-9]+ bytes stack frame'
grep -E "$report" "$messages" >"$object.resources"
grep -E -v "$report" "$messages" >&2
rm -f "$messages"
exit "$status"
