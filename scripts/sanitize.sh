#!/bin/sh
# Builds the core's stand-alone fuzz driver with sanitizers and runs it on every instruction set of this machine.
#   scripts/sanitize.sh [rounds] [seed]
# Environment: BUILD_DIR (default build/sanitize), SANITIZERS (default "address,undefined thread").
set -eu
unset LD_PRELOAD  # a process that has had vLLM in it preloads libraries, and ASan's runtime must come first

root=$(cd "$(dirname "$0")/.." && pwd)
rounds=${1:-300}
seed=${2:-1}
build=${BUILD_DIR:-$root/build/sanitize}

mkdir -p "$build"
for sanitizer in ${SANITIZERS:-address,undefined thread}; do
    dir=$build/$(echo "$sanitizer" | tr ',' '-')
    cmake -S "$root" -B "$dir" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKVOFFLOAD_BUILD_MODULE=OFF \
        -DKVOFFLOAD_BUILD_FUZZ=ON -DKVOFFLOAD_SANITIZE="$sanitizer" >"$dir.log" 2>&1 || { cat "$dir.log"; exit 1; }
    cmake --build "$dir" --parallel 2 >>"$dir.log" 2>&1 || { cat "$dir.log"; exit 1; }
    echo "== $sanitizer"
    "$dir/ops_fuzz" "$rounds" "$seed" 2
done
