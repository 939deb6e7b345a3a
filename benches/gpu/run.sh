#!/usr/bin/env bash
# run.sh PACK [WORDS OF incident.py...]     on the GPU machine; PACK is what pack.sh made, or what is left of it in a later call
#
# Everything is unpacked once, outside of PACK, so that later calls on the same machine need not carry the archives again. Results go to $OUT.
set -uo pipefail
pack=$1; shift
home=$HOME/bench-gpu-site
mkdir -p "$home"
unpack() { python3 -c "import sys,tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter='fully_trusted')" "$1" "$home"; }
if [ ! -d "$home/sglang" ]; then
  unpack "$pack/site.tar.xz"
  python3 -m zipfile -e "$pack"/r3router-*.whl "$home"
fi
if [ -e "$pack/peer/peer.tar.xz" ] && [ ! -d "$home/sglang_router" ]; then unpack "$pack/peer/peer.tar.xz"; fi
rm -rf "$home/src"; cp -r "$pack/src" "$home/src"
export PYTHONPATH=$home HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export UCX_TLS=${UCX_TLS:-cuda_copy,cuda_ipc,sm,tcp,self} TVM_FFI_CACHE_DIR=$HOME/bench-gpu-tvmffi
# Programs below here that multicast over NVLink can disturb the host's other GPUs.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
echo "unpacked after ${SECONDS} s; $(nproc) cores; $(df -h /dev/shm | tail -1)"
nvidia-smi --query-gpu=index,name,driver_version,memory.used,memory.total --format=csv,noheader 2>/dev/null
exec python3 "$home/src/benches/gpu/incident.py" "$@"
