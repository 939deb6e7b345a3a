#!/usr/bin/env bash
# pack.sh OUT SITE.tar.xz R3ROUTER.whl [SGLANG_ROUTER.whl]
#
# Puts into OUT what the GPU machine has not: these scripts, the archive with SGLang 0.5.17 (README.md says how it is made), our wheel, and, in a folder of its own
# because both together are too large for one transfer, the peer's wheel without its debugging symbols.
set -euo pipefail
out=$1 site=$2 wheel=$3 peer=${4:-}
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out/src/benches" "$out/src/tests/sglang"
cp -r "$root/benches/gpu" "$out/src/benches/"
cp -r "$root/tests/sglang/engine" "$out/src/tests/sglang/"
find "$out/src" -name __pycache__ -type d -prune -exec rm -rf {} +
cp "$site" "$out/site.tar.xz"
cp "$wheel" "$out/"
if [ -n "$peer" ]; then
  stage=$(mktemp -d)
  unzip -q "$peer" -d "$stage"
  find "$stage" -name '*.so' -exec strip --strip-unneeded {} +
  mkdir -p "$out/peer"
  tar -C "$stage" -cf - . | xz -7 > "$out/peer/peer.tar.xz"
  rm -rf "$stage"
fi
du -sb "$out"/*
