"""The incident on real engines: one prefill and one decode engine behind one router after the other, the same load each time.

    python incident.py all [--cpu] [--until 540] [--columns unbounded,inline,ref] [--seconds 70] [--outstanding 96] [--out DIR]

starts the engines, or finds those of an earlier command; warms them; runs the columns that fit before `--until` seconds; compares rows with
a unified engine; writes `results.json`, `table.md` and the engines' logs. See README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import engines
import model
import report
from check import compare
from engines import CPU, GPU, Engine, Size, call, free_port, spawn

HERE = Path(__file__).resolve().parent
BEGAN = time.monotonic()
GRAPHS_S = 260
"""So long decode may take to come up with CUDA graphs."""
COLUMNS = ("unbounded", "peer", "inline", "ref")


def say(text: str) -> None:
    """A line with the time since the start."""
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {text}", flush=True)


def bring_up(size: Size, folder: Path, spread: bool, graphs: bool, until: float) -> list[Engine]:
    """The three engines, found or started. Decode is started again without CUDA graphs when it does not come up with them."""
    state = folder / "engines.json"
    there = engines.found(state)
    if there is not None:
        say("the engines of the earlier command answer")
        return there
    path = model.make(folder / "model", not size.cpu)
    (folder / "aside").touch()

    def start(role: str, gpu: int, graphs: bool = False) -> Engine:
        return engines.start(role, size, path, folder, gpu=gpu, graphs=graphs, plug_in=True)

    decode_gpu = 1 if spread else 0
    if size.cpu:  # one after another, or they take twice as long on two cores
        started = []
        for role in ("prefill", "decode", "unified"):
            started.append(start(role, 0))
            engines.wait(started[-1], until)
    else:
        started = [start("prefill", 0), start("decode", decode_gpu, graphs), start("unified", 0)]
    for at, engine in enumerate(started):
        if engines.wait(engine, min(until, BEGAN + GRAPHS_S) if engine.role == "decode" and graphs else until):
            say(f"{engine.role} is up")
            continue
        print(engines.tail(engine), flush=True)
        if engine.role != "decode" or not graphs or time.monotonic() > until - 60:
            raise SystemExit(f"{engine.role} did not come up")
        say("decode did not come up; once more without CUDA graphs")
        engine.stop()
        Path(engine.log).rename(folder / "decode-graphs.log")
        started[at] = start("decode", decode_gpu)
        if not engines.wait(started[at], until):
            print(engines.tail(started[at]), flush=True)
            raise SystemExit("decode did not come up without CUDA graphs")
    engines.save(state, started)
    return started


def router(name: str, prefill: Engine, decode: Engine, size: Size, shape: model.Shape, folder: Path) -> tuple[int, str, str]:
    """Starts the router of a column: process, URL, URL of its metrics."""
    port, metrics = free_port(), free_port()
    common = ["--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    common += ["--prefill", prefill.url, str(prefill.bootstrap), "--decode", decode.url]
    if name == "peer":
        command = [os.environ.get("BENCH_PEER_PYTHON", sys.executable), "-m", "sglang_router.launch_router", *common]
        command += ["--disable-retries", "--disable-circuit-breaker"]
        health = "/health"
    else:
        command = [sys.executable, "-m", "r3router", "serve", *common, "--prometheus-host", "127.0.0.1", "--log-json"]
        command += ["--shutdown-grace-period-secs", "1", "--engine-waiting-timeout-secs", str(size.told_s)]
        command += ["--r3-layers", str(shape.layers), "--r3-top-k", str(shape.top_k), "--r3-experts", str(shape.experts)]
        if name == "unbounded":
            command += ["--no-admission", "--disable-retries", "--disable-circuit-breaker"]
        health = "/readiness"
    (folder / "commands.txt").open("a").write(" ".join(command) + "\n")
    pid = spawn(command, folder / f"router-{name}.log", {k: v for k, v in os.environ.items() if "proxy" not in k.lower()})
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if call(url + health, timeout=2)[0] == 200:
                if name == "peer":
                    time.sleep(3)  # it answers before it has its workers
                return pid, url, f"http://127.0.0.1:{metrics}"
        time.sleep(0.2)
    print((folder / f"router-{name}.log").read_text(errors="replace")[-2000:], flush=True)
    raise RuntimeError(f"the router {name} did not come up")


def end(pid: int, sig: int = signal.SIGKILL) -> None:
    """Ends a program that was started here."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, sig)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def column(
    name: str, started: list[Engine], size: Size, shape: model.Shape, folder: Path, *, seconds: float, samples: int, kind: str | None = None
) -> dict[str, Any]:
    """One column: its router, the load, the watch; then the engines are emptied and kept rows compared."""
    kind = kind or name
    prefill, decode, unified = started
    place = folder / name
    place.mkdir(exist_ok=True)
    aside = folder / "aside"
    aside.unlink(missing_ok=True) if kind == "ref" else aside.touch()
    offsets = {engine.role: Path(engine.log).stat().st_size for engine in (prefill, decode)}
    pid, url, metrics = router(kind, prefill, decode, size, shape, folder)
    spec = {
        "folder": str(place),
        "url": url,
        "seconds": seconds,
        "outstanding": size.outstanding,
        "prefixes": size.prefixes,
        "fresh": size.fresh,
        "outputs": size.outputs,
        "layers": shape.layers,
        "top_k": shape.top_k,
        "transport": "ref" if kind == "ref" else "inline",
        "samples": samples,
    }
    (place / "load.json").write_text(json.dumps(spec))
    watched = {
        "out": str(place / "watch.jsonl"),
        "engines": {"prefill": prefill.url, "decode": decode.url},
        "metrics": metrics,
        "pids": {"prefill": prefill.pid, "decode": decode.pid, "router": pid},
    }
    (place / "watch.json").write_text(json.dumps(watched))
    watcher = subprocess.Popen([sys.executable, str(HERE / "watch.py"), str(place / "watch.json")])
    began = time.time()
    try:
        load = subprocess.run([sys.executable, str(HERE / "load.py"), str(place / "load.json")], timeout=seconds + 60, check=False)
    finally:
        watcher.send_signal(signal.SIGTERM)
        watcher.wait(timeout=20)
        end(pid)
    logs = {}
    for engine in (prefill, decode):
        with Path(engine.log).open("rb") as log:
            log.seek(offsets[engine.role])
            logs[engine.role] = log.read().decode(errors="replace")
            (place / f"{engine.role}.log").write_text(logs[engine.role])
    drained = engines.idle([prefill, decode], 2 * size.waiting_s)
    result = report.column(name, place, seconds, logs)
    result |= {"began": began, "load_exit": load.returncode, "emptied": drained, "kind": kind, "outstanding": size.outstanding}
    result["compared"] = compare(place, unified.url, shape)
    return result


def warm(started: list[Engine], size: Size, shape: model.Shape, folder: Path, seconds: float) -> None:
    """A few requests, which compile what is compiled late, so that the first ones may meet the engines' clocks. In the end some must
    succeed: else there is nothing to measure."""
    small = replace(size, outstanding=12 if not size.cpu else 2, outputs=(24, 48) if not size.cpu else size.outputs)
    for attempt in range(3):
        result = column("warm", started, small, shape, folder, seconds=seconds, samples=2, kind="inline")
        say(f"warm {attempt}: {json.dumps({k: result[k] for k in ('outcomes', 'rows', 'compared', 'emptied', 'took', 'model_info')})}")
        if result["outcomes"].get("completed", 0) >= 2:
            return
    for engine in started:
        print(engine.role, engines.tail(engine), flush=True)
    raise SystemExit("nothing passes through the pair")


def main() -> None:
    """Reads the words and runs."""
    words = argparse.ArgumentParser()
    words.add_argument("what", choices=["all", "stop"])
    words.add_argument("--cpu", action="store_true")
    words.add_argument("--folder", type=Path, default=Path.home() / "bench-gpu")
    words.add_argument("--out", type=Path, default=Path.home() / "bench-gpu-out")
    words.add_argument("--until", type=float, default=540, help="seconds after the start at which all must be written")
    words.add_argument(
        "--columns", default="unbounded,inline,ref", help="NAME, NAME:KIND or NAME:KIND:SECONDS, kinds " + ", ".join(COLUMNS)
    )
    words.add_argument("--flush", default="cold", help="columns with this in their name begin with empty prefix caches")
    words.add_argument("--seconds", type=float, default=100)
    words.add_argument("--warm", type=float, default=30)
    words.add_argument("--outstanding", type=int)
    words.add_argument("--outputs", type=int, nargs=2)
    words.add_argument("--waiting", type=int)
    words.add_argument("--told", type=int, help="what r3router is told of the engines' waiting timeout")
    words.add_argument("--samples", type=int, default=4)
    words.add_argument("--one-gpu", action="store_true")
    words.add_argument("--no-graphs", action="store_true")
    given = words.parse_args()
    size = CPU if given.cpu else GPU
    changes = {
        "outstanding": given.outstanding,
        "outputs": given.outputs and tuple(given.outputs),
        "waiting_s": given.waiting,
        "told_s": given.told,
    }
    size = replace(size, **{name: value for name, value in changes.items() if value})
    folder: Path = given.folder
    for path in (folder, given.out):
        path.mkdir(parents=True, exist_ok=True)
    if given.what == "stop":
        for engine in engines.found(folder / "engines.json") or []:
            engine.stop()
        return
    results: list[dict[str, Any]] = []
    started: list[Engine] = []
    try:
        started = bring_up(size, folder, not given.one_gpu and not size.cpu, not given.no_graphs, BEGAN + given.until - 60)
        shape = model.shape(folder / "model" / "qwen3_5_moe")
        if not (folder / "warmed").exists():
            warm(started, size, shape, folder, given.warm)
            (folder / "warmed").touch()
        for entry in given.columns.split(","):
            name, kind, length = [*entry.split(":"), "", ""][:3]
            seconds = float(length or given.seconds)
            if BEGAN + given.until - time.monotonic() < seconds + size.waiting_s + 20:
                say(f"no time is left for {name}")
                continue
            if given.flush in name:
                say(f"flushed: {[call(f'{engine.url}/flush_cache', method='POST')[0] for engine in started[:2]]}")
            say(f"{name} begins")
            result = column(name, started, size, shape, folder, seconds=seconds, samples=given.samples, kind=kind or name)
            results.append(result)
            say(f"{name}: {json.dumps({k: result[k] for k in ('outcomes', 'rows', 'compared', 'emptied', 'took')})}")
    finally:
        done = {"size": asdict(size), "seconds": given.seconds, "columns": results}
        (given.out / "results.json").write_text(json.dumps(done, indent=1))
        (given.out / "table.md").write_text(report.table(results))
        report.pack(folder, given.out)
        if size.cpu:
            for engine in started:
                engine.stop()
    print(report.table(results))
    say("done")


if __name__ == "__main__":
    main()
