"""Rows read by NIXL over UCX from an agent of another process. Runs where the engines' environment is, which brings nixl."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from . import environment

SCRIPT = """
import asyncio, socket, subprocess, sys, tempfile, time, urllib.request
from pathlib import Path
import aiohttp, numpy as np
from r3router.r3 import FormatError, Reference, RowsGone
from r3router.r3.nixl import NixlReader
from r3router.r3.store import StoreDir, new_header

def put(store, rows, start):
    w = store.reserve(new_header(len(rows), 48, 8, "uint8", start=start, expires_s=60, rid="r", weight_version=""))
    w.write([rows])
    return w.path

async def main():
    parent = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="nixl-test-"))
    store = StoreDir(parent / "r3router-x", 256 << 20)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    agent = subprocess.Popen([sys.executable, "-m", "r3router", "agent", "--host", "127.0.0.1", "--port", str(port),
        "--directory", str(store.path), "--parent", str(parent), "--nixl"])
    try:
        for _ in range(1200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health"); break
            except OSError:
                assert agent.poll() is None
                time.sleep(0.1)
        rows = np.random.default_rng(1).integers(0, 256, (20000, 48, 8), np.uint8)
        async with aiohttp.ClientSession() as http:
            reader = NixlReader(http)
            for turn in range(3):
                paths = [put(store, rows[:15000], 0), put(store, rows[14000:], 14000)]
                segments = [
                    {"uri": f"r3://127.0.0.1:{port}/{path.stem}", "offset": offset, "pos": pos, "rows": count}
                    | {"dtype": "uint8", "path": "/x"}
                    for path, offset, pos, count in ((paths[0], 256, 0, 15000), (paths[1], 256 + 1000 * 384, 15000, 5000))
                ]
                ref = Reference.parse({"handle": {"type": "r3router", "v": 1, "segments": segments},
                    "fields": {"routed_experts": {"dtype": "uint8", "shape": [20000, 48, 8]}}})
                began = time.monotonic()
                assert np.array_equal(await reader.read(ref), rows)
                print(f"{rows.nbytes / (time.monotonic() - began) / 1e9:.2f} GB/s")
                assert np.array_equal(await reader.read(ref, 14990, 15010), rows[14990:15010])
                for path in paths:
                    async with http.delete(f"http://127.0.0.1:{port}/{path.stem}") as got:
                        assert got.status == 204
                try:
                    await reader.read(ref)
                except RowsGone:
                    pass
                else:
                    raise AssertionError("released rows were read")
                await asyncio.sleep(1.5)
    finally:
        agent.kill(); agent.wait(); store.remove(); parent.rmdir()
    print("OK")

asyncio.run(main())
"""


def test_rows_are_read_from_the_agents_memory(tmp_path: Path) -> None:
    script = tmp_path / "read.py"
    script.write_text(SCRIPT)
    source = Path(sys.modules["r3router"].__file__ or "").parent.parent if "r3router" in sys.modules else Path("python").resolve()
    done = subprocess.run(
        [str(environment.python()), str(script)],
        env={"PYTHONPATH": str(source), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.endswith("OK\n"), done.stdout + done.stderr[-4000:]
    print(done.stdout)
