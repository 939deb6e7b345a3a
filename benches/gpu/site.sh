#!/usr/bin/env bash
# site.sh OUT_DIR: site.tar.xz, one archive (about 55 MiB) with SGLang 0.5.17 and what it needs beside
# Python 3.12, torch 2.11.0+cu130, triton 3.6.0, nvcc 13.0 on an sm_90 GPU.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd); out=$1; site=$out/site
mkdir -p "$out"; rm -rf "$site"
"${PY312:-python3.12}" -m pip install -q --no-deps --no-compile --only-binary=:all: \
  --target "$site" -r "$here/requirements.txt"     # a Python 3.12 on x86-64
cd "$site"
# Hopper needs sm90/common_ops alone: FA3 (1.1 GB), FlashMLA, infllm and sm100 go.
rm -rf sgl_kernel/sm100; find sgl_kernel -maxdepth 1 -name '*_ops*.so' ! -name 'spatial_ops*' -delete
# NIXL: the UCX plugin alone, no expert-parallel kernels, no cloud-storage libraries.
rm -rf nixl_ep nixl_ep_cu13 nixl_cu13-*.data nixl_cu13.scripts nixl_cu13.libs/nixl
find .nixl_cu13.mesonpy.libs/plugins -type f ! -name 'libplugin_UCX.so' -delete
rm -f nixl_cu13.libs/lib{aws,azure,gusli,xml2,curl,s2n}* nixl_cu13.libs/ucx/libucx_perftest*
rm -rf sglang/multimodal_gen sglang/test/manual pycountry/locales bin tools build_backend.py build_utils.py
rm -f xgrammar/lib/libxgrammar.a
for d in cutlass cccl; do for s in test python examples tools ci benchmarks docs; do rm -rf "flashinfer/data/$d/$s"; done; done
for d in xgrammar zstandard tokenizers llguidance openai_harmony pydantic_core tvm_ffi orjson rpds watchfiles zmq msgspec; do
  find "$d" -name '*.so*' -type f -exec strip --strip-unneeded {} +
done
find . -name __pycache__ -type d -prune -exec rm -rf {} +
tar -cf - . | xz -9 -T2 > ../site.tar.xz
ls -l ../site.tar.xz
