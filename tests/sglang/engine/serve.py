"""Start SGLang's own HTTP server on a CPU-only machine:

    python serve.py --model-path DIR --load-format dummy --device cpu ...

Every argument goes to SGLang unchanged.  This file only puts the stand-ins in
place (see stubs.py, cpu_kernels.py); spawned scheduler/detokenizer processes
re-import it as __mp_main__, so they get them too.
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import calm
import cpu_kernels
import nixl_dram
import reserve
import steps
import weights

cpu_kernels.install()
nixl_dram.install()
weights.install()
reserve.install()
steps.install()
if "--dp-size" in sys.argv:
    calm.install()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
