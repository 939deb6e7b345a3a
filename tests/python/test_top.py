"""`r3router top`: the table at 80 columns and for 256 ranks, its keys in a real terminal, drain through the admin listener."""

from __future__ import annotations

import fcntl
import json
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from processes import call, emulating, environment, free_port, serving
from r3router.live.table import BY_NAME, COLUMNS, SORTS, Choice, chosen, fitting, heading, line, plain, seconds, short
from terminal import Terminal, terminal

TOP = [sys.executable, "-m", "r3router", "top"]


def rank(worker: int, number: int, role: str = "decode", **facts: Any) -> dict[str, Any]:
    """One rank as the admin listener tells it."""
    return {
        "worker": f"w{worker}",
        "url": f"http://{role}-{worker}.rollout.svc.cluster.local:30000",
        "rank": number,
        "role": role,
        "state": "open",
        "why": "",
        "running": number,
        "waiting": 12 + number,
        "in_transfer": number % 5,
        "open": 8,
        "foreign": 0,
        "window": None if role == "prefill" else 16,
        "rows": 128,
        "rows_free": 128 - number,
        "mamba": 128,
        "mamba_free": 64,
        "kv": 5_130_000,
        "kv_free": 2_565_000,
        "uncached": 9_000 if role == "prefill" else None,
        "tau_s": None if role == "prefill" else 2.34,
        "rate": 1.5,
        "r3_bytes": 97_400_000,
        "breaker": "closed",
        "drained": False,
        "report_age_s": 0.2,
        "legs_open": 8,
        "version": "0.5.23",
        "since_s": 60.0,
        **facts,
    }


def table(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer."""
    return {
        "version": "0.1.0",
        "uptime_s": 11_520.0,
        "paused": False,
        "draining": False,
        "requests": {"live": 412, "queued": 96, "queued_bytes": 1, "oldest_s": 12.0, "queue_size": 100_000, "bound": 7},
        "arena": {"reserved": 1 << 30, "used": 1 << 29, "cap": 8 << 30},
        "findings": {"errors": 0, "warnings": 1},
        "decisions": {},
        "ranks": ranks,
    }


def fleet(ranks: int = 256) -> list[dict[str, Any]]:
    """A quarter prefill, four ranks a worker."""
    return [rank(at // 4, at % 4, "prefill" if at < ranks // 4 else "decode") for at in range(ranks)]


FINDING = {
    "number": 1,
    "severity": "warning",
    "code": "r3.egress",
    "workers": ["http://p:1"],
    "what": "one detokenizer",
    "advice": "run four",
}


class Listener:
    """An admin listener with a made-up fleet; drains change it."""

    def __init__(self, ranks: list[dict[str, Any]], key: str | None = None) -> None:
        self.ranks = ranks
        self.key = key
        self.changes: list[tuple[str, dict[str, Any]]] = []

    def answer(self, path: str, body: bytes, key: str | None) -> tuple[int, Any]:
        if self.key and key != f"Bearer {self.key}":
            return 401, {"error": {"message": "no key was sent", "advice": "send the --admin-api-key"}}
        if path == "/admin/ranks":
            return 200, table(self.ranks)
        if path == "/admin/findings":
            return 200, {"findings": [FINDING]}
        if path in ("/admin/drain", "/admin/undrain"):
            asked = json.loads(body)
            self.changes.append((path, asked))
            for one in self.ranks:
                if one["worker"] == asked["worker"] and asked.get("rank", one["rank"]) == one["rank"]:
                    one["state"] = "drained" if path == "/admin/drain" else "open"
            return 200, {"state": "drained" if path == "/admin/drain" else "in choice", "open": 0}
        return 404, {}


@contextmanager
def listening(listener: Listener) -> Iterator[str]:
    """Its URL while it answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, answer = listener.answer(self.path, body, self.headers.get("authorization"))
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


# --- the table ---------------------------------------------------------------------------------------------------------


def test_at_80_columns_every_line_of_256_ranks_fits_and_has_what_decides() -> None:
    ranks = fleet()
    columns = fitting(80)
    assert [c.name for c in columns] == ["rank", "role", "state", "running", "transfer", "queue", "rows", "mamba", "kv", "tau", "r3"]
    lines = plain(table(ranks), Choice(), 80).splitlines()
    assert len(lines) == 256 + 5
    assert max(len(text) for text in lines) <= 80
    shown = line(ranks[-1], columns)
    assert shown == "decode-63.rollout.s…@3 D open        3     3/16    15   2%  50%  50%  2.3s 97.4M"
    assert heading(columns, Choice()).split() == ["RANK^", "R", "STATE", "RUN", "XFER/WIN", "QUEUE", "ROWS", "MAMB", "KV", "TAU", "R3"]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 132, 200, 300])
def test_a_wider_terminal_shows_more_and_no_line_is_longer(width: int) -> None:
    columns = fitting(width)
    assert len(line(rank(0, 0), columns)) <= width
    assert len(heading(columns, Choice(sort="kv"))) <= width
    assert (len(columns) == len(COLUMNS)) == (width >= 200)


def test_numbers_are_short_and_unknown_ones_a_dash() -> None:
    assert [short(v) for v in (0, 999, 1_000, 97_400_000, 5_130_000, 999_960)] == ["0", "999", "1.0k", "97.4M", "5.1M", "1000k"]
    assert [seconds(v) for v in (0.25, 2.34, 45, 720, 12_000, 400_000, None)] == ["0.25s", "2.3s", "45s", "12m", "3h20", "4d", "-"]
    unknown = rank(0, 0, mamba=None, mamba_free=None, running=None, tau_s=None)
    assert line(unknown, fitting(80)).count(" - ") == 3


@pytest.mark.parametrize("sort", SORTS)
def test_every_sort_puts_the_most_first_and_turns(sort: str) -> None:
    ranks = [rank(1, n, state=s, tau_s=t) for n, s, t in ((0, "open", 1.0), (2, "down", None), (1, "full", 3.0))]
    column = BY_NAME[sort]
    keys = [column.key(r) for r in chosen(ranks, Choice(sort=sort))]
    assert keys == sorted(keys, reverse=column.falls)
    turned = [column.key(r) for r in chosen(ranks, Choice(sort=sort, turned=True))]
    assert turned == sorted(keys, reverse=not column.falls)


def test_names_sort_by_their_numbers_and_filters_take_every_word() -> None:
    ranks = [rank(w, 0) for w in (10, 9, 100)]
    assert [r["worker"] for r in chosen(ranks, Choice())] == ["w9", "w10", "w100"]
    ranks = fleet(16)
    ranks[15]["state"] = "drained"
    assert [r["rank"] for r in chosen(ranks, Choice(filter="DECODE drained"))] == [3]
    assert len(chosen(ranks, Choice(role="prefill"))) == 4


def test_workers_are_sums_with_the_worst_state_and_the_payload_once() -> None:
    ranks = fleet(16)
    ranks[7]["state"] = "ejected"
    lines = chosen(ranks, Choice(by_worker=True, sort="state"))
    assert [w["state"] for w in lines] == ["ejected", "open", "open", "open"]
    worst = lines[0]
    assert (worst["running"], worst["in_transfer"], worst["window"], worst["rows"]) == (6, 6, 64, 512)
    assert worst["r3_bytes"] == 97_400_000
    assert line(worst, fitting(80)).startswith("decode-1.rollout.s… x4 D ejected")


# --- the terminal ------------------------------------------------------------------------------------------------------


def body(screen: Terminal) -> list[str]:
    """The lines of ranks."""
    return [text for text in screen.lines() if "@" in text or " x4 " in text]


def test_256_ranks_are_read_sorted_filtered_and_drained_at_80_columns() -> None:
    listener = Listener(fleet())
    with listening(listener) as url, terminal(*TOP, "--url", url, "--interval", "0.2") as screen:
        screen.shows("r3router 0.1.0  up 3h12  live 412  queued 96 (oldest 12s)")
        screen.shows("prefill 64 of 64 ranks")
        screen.shows("decode  192 of 192 ranks")
        assert len(body(screen)) == 24 - 4 - 2
        assert all(len(text) <= 80 for text in screen.lines())
        # Natural order: decode-16 comes first, and End leads to the last prefill.
        assert body(screen)[0].startswith("decode-16.rollout.s…@0 D open")
        screen.press("\x1b[4~")
        screen.until(lambda: body(screen)[-1].split()[1] == "P", "the last line is a prefill rank")
        screen.press("\x1b[1~")
        screen.press("ss")
        screen.shows("RUNv")
        screen.until(lambda: body(screen)[0].split()[3] == "3", "the most running are first")
        screen.press("r")
        screen.until(lambda: body(screen)[0].split()[3] == "0", "the least running are first")
        screen.press("f")
        screen.shows("prefill only (64 lines)")
        screen.press("f/decode-17.\r")
        screen.shows("filter: decode-17., decode only (4 lines)")
        assert len(body(screen)) == 4
        screen.press("d")
        screen.shows("drain decode-17.rollout.svc.cluster.local:30000@0? y / n")
        screen.press("n")
        screen.shows("q quit")
        assert listener.changes == []
        screen.press("dy")
        screen.shows("drained")
        screen.until(lambda: any(" drained " in text for text in body(screen)), "the rank is drained")
        assert listener.changes == [("/admin/drain", {"worker": "w17", "rank": 0})]
        screen.press("D")
        screen.shows("drain all ranks of decode-17")
        screen.press("y")
        screen.until(lambda: sum(" drained " in text for text in body(screen)) == 4, "all four are drained")
        screen.press("Uy")
        screen.until(lambda: not any(" drained " in text for text in body(screen)), "they are back")
        assert listener.changes[1:] == [("/admin/drain", {"worker": "w17"}), ("/admin/undrain", {"worker": "w17"})]
        screen.press("w")
        screen.shows(" x4 D open")
        screen.press("!")
        screen.shows("1. warning r3.egress http://p:1")
        screen.shows("Change: run four.")
        screen.press(" ?")
        screen.shows("one line a worker, or a rank")
        screen.press("xq")
        assert screen.ends() == 0


def test_a_listener_that_goes_away_is_said_and_the_last_table_stays() -> None:
    listener = Listener(fleet(16))
    with ExitStack() as held:
        with listening(listener) as url:
            screen = held.enter_context(terminal(*TOP, "--url", url, "--interval", "0.2"))
            screen.shows("decode  12 of 12 ranks")
        screen.shows("does not answer")
        assert len(body(screen)) == 16
        screen.press("q")
        assert screen.ends() == 0


def test_a_terminal_that_is_resized_is_drawn_anew() -> None:
    with listening(Listener(fleet(16))) as url, terminal(*TOP, "--url", url) as screen:
        screen.shows("TAU")
        fcntl.ioctl(screen.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 132, 0, 0))
        screen.screen.resize(24, 132)
        # A kernel sends it to those whose terminal it is; this one is only lent.
        screen.process.send_signal(signal.SIGWINCH)
        screen.shows("BREAKER")
        screen.press("q")
        assert screen.ends() == 0


def top(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOP, *args],
        capture_output=True,
        text=True,
        env={**environment(), **(env or {})},
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_without_a_terminal_it_prints_once_and_what_is_wrong_is_said() -> None:
    listener = Listener(fleet(16), key="k")
    with listening(listener) as url:
        done = top("--url", url)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "Error: 401 no key was sent; send the --admin-api-key\n"
        done = top("--url", url, "--sort", "running", "--role", "decode", env={"R3ROUTER_ADMIN_API_KEY": "k", "COLUMNS": "80"})
        assert done.returncode == 0, done.stderr
        assert [text.split()[3] for text in done.stdout.splitlines() if "@" in text] == [n for n in "3210" for _ in range(3)]
        assert "press !" not in done.stdout
        assert len(json.loads(top("--url", url, "--json", "--admin-api-key", "k").stdout)["ranks"]) == 16
        done = top("--url", url, "--sort", "nothing")
        assert done.returncode == 2
    done = top("--url", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert "does not answer" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_shows_a_real_router_and_drains_a_rank_of_it(tmp_path: Path) -> None:
    port = free_port()
    with (
        emulating(tmp_path, "--prefill", "2", "--decode", "4", "--fast") as flags,
        serving(tmp_path, *flags, "--admin-port", str(port), path="/readiness") as (url, _),
        terminal(*TOP, "--url", f"127.0.0.1:{port}", "--interval", "0.2", "--role", "decode") as screen,
    ):
        screen.shows("decode  4 of 4 ranks")
        assert len(body(screen)) == 4
        screen.press("j")
        screen.press("dy")
        screen.shows(": drained")
        screen.until(lambda: [text.split()[2] for text in body(screen)] == ["open", "drained", "open", "open"], "rank 1 is drained")
        status, answer = call(url + "/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}})
        assert status == 200, answer
        screen.press("uy")
        screen.until(lambda: [text.split()[2] for text in body(screen)] == ["open"] * 4, "it is back")
        screen.press("q")
        assert screen.ends() == 0
