"""A real Mooncake store on loopback, in the environment of `make mooncake`: master, a sink in front of it, a reader as newer miles has one.

The reader is a process of its own that holds the store's memory. It reads a reference as miles does - flat dict, one row a field, int32 -
and removes the object, and it knows nothing of r3router.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(os.environ.get("MOONCAKE_HOME", Path(__file__).parents[2] / ".venv-mooncake"))
PYTHON = ROOT / "bin" / "python"
PACKAGE = "mooncake-transfer-engine-non-cuda"
READER = """
import hashlib, json, sys
import numpy as np
from mooncake.store import MooncakeDistributedStore
from mooncake.structured_object_store import MooncakeBundleTransfer, import_ref
store = MooncakeDistributedStore()
failed = store.setup({"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "global_segment_size": 64 << 20,
    "local_buffer_size": 64 << 20, "protocol": "tcp", "rdma_devices": "", "master_server_addr": sys.argv[1]})
assert not failed, failed
transfer = MooncakeBundleTransfer(store, key_prefix="miles-object-store")
print("ready", flush=True)
for line in sys.stdin:
    handle = import_ref(json.loads(line))
    try:
        value = transfer.get(handle, type="dict")
        array = np.array(value["routed_experts"][0], dtype=np.int32)
        seen = {"fields": sorted(value), "rows": len(value["routed_experts"]), "shape": list(array.shape),
            "sha256": hashlib.sha256(array.tobytes()).hexdigest()}
        MooncakeBundleTransfer.release_result(value)
        transfer.cleanup_dataproto(handle)
    except Exception as error:
        seen = {"error": repr(error)}
    print("seen " + json.dumps(seen), flush=True)
"""


def environment() -> dict[str, str]:
    """With Debian's libraries for the package, this clone's Python, and no proxy."""
    found = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    libraries = [ROOT / "debian" / part / "x86_64-linux-gnu" for part in ("usr/lib", "lib")]
    found["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    found["PYTHONPATH"] = str(Path(__file__).parents[2] / "python")
    return found


def missing() -> str | None:
    """Why the package cannot run here; `None` when it can."""
    if not PYTHON.exists():
        return f"the package {PACKAGE} is not here (make mooncake)"
    code = "import mooncake.store, mooncake.structured_object_store"
    done = subprocess.run([str(PYTHON), "-c", code], env=environment(), capture_output=True, text=True, timeout=120)
    return None if done.returncode == 0 else f"the package {PACKAGE} cannot run here: {done.stderr.strip().splitlines()[-1]}"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@dataclass
class Mooncake:
    """A store that runs."""

    sink: str
    """Address of the sink."""
    log: Path
    reader: subprocess.Popen[str]

    def read(self, handle: Any) -> dict[str, Any]:
        """What the reader finds under a handle, which it removes."""
        assert self.reader.stdin is not None and self.reader.stdout is not None
        self.reader.stdin.write(json.dumps(handle) + "\n")
        self.reader.stdin.flush()
        while not (line := self.reader.stdout.readline()).startswith("seen "):
            assert line, self.log.read_text()[-2000:]
        seen: dict[str, Any] = json.loads(line.removeprefix("seen "))
        return seen


def expected(rows: NDArray[np.int32]) -> dict[str, Any]:
    """What `read` finds of these rows."""
    digest = hashlib.sha256(np.ascontiguousarray(rows, np.int32).tobytes()).hexdigest()
    return {"fields": ["routed_experts"], "rows": 1, "shape": list(rows.shape), "sha256": digest}


@contextlib.contextmanager
def running(folder: Path, router: str, sink: int) -> Iterator[Mooncake]:
    """Master, reader and, on port `sink`, a sink for this router; stopped at the end."""
    port = free_port()
    master = next(ROOT.glob("lib/python3*/site-packages/mooncake/mooncake_master"))
    log = folder / "mooncake.log"
    env = environment()
    with contextlib.ExitStack() as stack, log.open("ab") as out:

        def start(command: list[str], **more: Any) -> subprocess.Popen[Any]:
            process = subprocess.Popen(command, env=env, **{"stdout": out, "stderr": out, **more})
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        start([str(master), "--port", str(port), "--rpc_address", "127.0.0.1", "--metrics_port", str(free_port())])
        wait(lambda: socket.create_connection(("127.0.0.1", port), 1).close(), log)
        command = [str(PYTHON), "-c", READER, f"127.0.0.1:{port}"]
        reader = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert reader.stdout is not None
        while not (line := reader.stdout.readline()).startswith("ready"):
            assert line, log.read_text()[-2000:]
        more = ["--master", f"127.0.0.1:{port}", "--router", router, "--buffer-mb", "64", "--port", str(sink)]
        start([str(PYTHON), "-m", "r3router", "sink", *more])
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        wait(lambda: opener.open(f"http://127.0.0.1:{sink}/health", timeout=1).close(), log)
        yield Mooncake(f"http://127.0.0.1:{sink}", log, reader)


def wait(look: Any, log: Path) -> None:
    """Until `look` raises no more."""
    for _ in range(600):
        with contextlib.suppress(OSError):
            return look()
        time.sleep(0.05)
    raise AssertionError(log.read_text()[-2000:])
