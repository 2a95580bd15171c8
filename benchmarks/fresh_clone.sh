#!/usr/bin/env bash
# Seconds from `git clone` to a learning curve: clones this repository, installs it, trains the quick start.
# Needs: network for packages; an idle machine for a meaningful time. Goal: 8 minutes on 2 cores.
# Usage: bash benchmarks/fresh_clone.sh [FOLDER] [make variables such as ALGO=grpo …]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$(mktemp -d)}
[ $# -eq 0 ] || shift
unset PYTHONPATH VIRTUAL_ENV # the clone has its own environment
mkdir -p "$folder"
begin=$(date +%s)
git clone --quiet --depth 1 "file://$root" "$folder/verl"
cd "$folder/verl"
cloned=$(date +%s)
make setup "$@"
installed=$(date +%s)
make train "$@"
trained=$(date +%s)
curve=$(ls runs/quickstart/*.png | head -n 1)
echo "clone $((cloned - begin)) s, installation $((installed - cloned)) s, training $((trained - installed)) s," \
    "total $((trained - begin)) s; curve: $folder/verl/$curve"
