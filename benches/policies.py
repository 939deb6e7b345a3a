"""Policies: `python benches/policies.py [--write]`.

The same conversations go through sglang-router's cache_aware and through r3router's, in front of the same scripted engines, one rank each.
What an engine would have had cached is counted afterwards from what it was sent, in order: a beginning counts as cached on a rank when an
earlier prompt of that rank had it. Beside it stand the memory of prefixes under a flood of unique prompts and the time of a lookup
(`cargo bench --bench policies`). `--write` renders benches/results/policies.md with machine and date.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from e2e.processes import Measured, answers, free_port, peer_python, r3router_python, started, wait_until  # noqa: E402
from run import RESULTS, Rows, Verdict, at_most, machine, markdown, page  # noqa: E402
from scripted.client import Client  # noqa: E402
from scripted.engine import Engine  # noqa: E402
from scripted.fleet import Fleet  # noqa: E402
from scripted.leg import Leg  # noqa: E402

SESSIONS = 64
TURNS = 10
RANKS = 8
# Characters: about a thousand tokens of system prompt, 150 of each question, 250 of each answer.
SYSTEM = 4000
QUESTION = 600
ANSWER = 1000
# What an engine takes for one request, and what a client thinks between two turns, at most.
SERVICE_S = 0.03
PAUSE_S = 0.15
# Characters that are compared at once.
BLOCK = 16
LOGS = Path("target/bench-logs")


def words(rng: random.Random, length: int) -> str:
    """Text of a length that no other text has."""
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz    ", k=length))


@dataclass
class Trace:
    """Prompts of every turn of every session, and the pauses before them."""

    prompts: list[list[str]]
    pauses: list[list[float]]

    @classmethod
    def make(cls, seed: int = 7) -> Trace:
        """The same for every router."""
        rng = random.Random(seed)
        system = words(rng, SYSTEM)
        prompts, pauses = [], []
        for _ in range(SESSIONS):
            text, turns = system, []
            for _ in range(TURNS):
                text += words(rng, QUESTION)
                turns.append(text)
                text += words(rng, ANSWER)
            prompts.append(turns)
            pauses.append([rng.uniform(0, PAUSE_S) for _ in range(TURNS)])
        return cls(prompts, pauses)

    async def play(self, client: Client, tokens: bool) -> None:
        """All sessions side by side, each turn after the answer to the one before."""

        async def session(number: int) -> None:
            for prompt, pause in zip(self.prompts[number], self.pauses[number], strict=True):
                await asyncio.sleep(pause)
                body = {"input_ids": list(prompt.encode())} if tokens else {"text": prompt}
                got = await client.post("/generate", body | {"sampling_params": {"max_new_tokens": 4}})
                if got.status != 200:
                    raise RuntimeError(f"{got.status}: {got.body[:300]!r}")

        await asyncio.gather(*(session(number) for number in range(SESSIONS)))


def cached(legs: Sequence[Leg]) -> tuple[int, int]:
    """Characters that were cached, and all of them."""
    known: dict[tuple[str, int], set[int]] = {}
    hit = total = 0
    for leg in sorted(legs, key=lambda leg: leg.arrived):
        blocks = known.setdefault((leg.engine.name, leg.rank), set())
        body = leg.body.get("text") or bytes(leg.body["input_ids"]).decode()
        total += len(body)
        chain, counts = 0, True
        for at in range(0, len(body) - BLOCK + 1, BLOCK):
            chain = hash((chain, body[at : at + BLOCK]))
            counts = counts and chain in blocks
            hit += BLOCK * counts
            blocks.add(chain)
    return hit, total


@contextlib.contextmanager
def router(command: Sequence[str], flags: Sequence[str], name: str) -> Iterator[int]:
    """A router process that serves; gives its port."""
    port, metrics = free_port(), free_port()
    own = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    with started([*command, *own, "--log-level", "warn", *flags], LOGS / f"policies-{name}.log") as process:
        yield from ready(process, port)


def ready(process: Measured, port: int) -> Iterator[int]:
    """Gives the port once the router has workers."""
    wait_until(lambda: answers(f"http://127.0.0.1:{port}/readiness"), "the router", process)
    yield port


async def trial(name: str, command: Sequence[str], flags: Sequence[str], *, tokens: bool, engines: int) -> dict[str, Any]:
    """One router on the trace."""
    fleet = Fleet([Engine("regular", f"R{i}", dp_size=RANKS // engines, run_s=SERVICE_S) for i in range(engines)])
    await fleet.start()
    try:
        gate = await asyncio.to_thread(contextlib.ExitStack)
        with gate:
            port = await asyncio.to_thread(gate.enter_context, router(command, [*fleet.flags(), *flags], name.split()[0]))
            client = Client(port)
            await Trace.make().play(client, tokens)
            client.close()
    finally:
        await fleet.stop()
    if not name.startswith("sglang-router"):  # The rules are ours.
        fleet.check()
    legs = fleet.legs("regular")
    hit, total = cached(legs)
    requests = Counter((leg.engine.name, leg.rank) for leg in legs)
    return {
        "router": name,
        "prompts": "tokens" if tokens else "text",
        "ranks": f"{engines} x {RANKS // engines}",
        "hit rate": round(hit / total, 4),
        "requests, max / mean": round(max(requests.values()) * RANKS / len(legs), 3),
        "most": max(requests.values()),
        "least": min(requests.values()) if len(requests) == RANKS else 0,
    }


# The peer with its defaults, and with thresholds at which it balances this trace.
EVEN = ("--balance-abs-threshold", "2", "--balance-rel-threshold", "1.1")


def conversations() -> Rows:
    """Every router on the trace."""
    ours = [r3router_python(), "-m", "r3router.launch_router"]
    peer = peer_python("sglang-router")
    rows = []
    for tokens in (False, True):
        if peer:
            theirs = [peer, "-m", "sglang_router.launch_router", "--policy", "cache_aware"]
            rows.append(asyncio.run(trial("sglang-router cache_aware", theirs, (), tokens=tokens, engines=RANKS)))
            named = f"sglang-router cache_aware {' '.join(EVEN)}"
            rows.append(asyncio.run(trial(named, theirs, EVEN, tokens=tokens, engines=RANKS)))
        for engines in (RANKS, 2):
            rows.append(asyncio.run(trial("r3router cache_aware", ours, (), tokens=tokens, engines=engines)))
        rows.append(asyncio.run(trial("r3router round_robin", ours, ("--policy", "round_robin"), tokens=tokens, engines=RANKS)))
    return rows


def bounds() -> tuple[float, float]:
    """The hit rate when every session stays on one rank, with the system prompt computed once in all, and once on each rank."""
    trace = Trace.make()
    total = sum(len(prompt) for turns in trace.prompts for prompt in turns)
    new = sum(len(turns[-1]) - SYSTEM for turns in trace.prompts)
    return 1 - (new + SYSTEM) / total, 1 - (new + RANKS * SYSTEM) / total


def verdicts(rows: Rows) -> list[Verdict]:
    """The targets."""
    found: list[Verdict] = []
    for kind in ("text", "tokens"):
        ours = [row for row in rows if row["router"] == "r3router cache_aware" and row["prompts"] == kind]
        theirs = [row for row in rows if row["router"].startswith("sglang-router") and row["prompts"] == kind]
        least = min(row["hit rate"] for row in ours)
        spread = max(row["requests, max / mean"] for row in ours)
        for peer in theirs:
            text = f"{kind}: hit rate >= that of {peer['router']} (spread {peer['requests, max / mean']:g})"
            found.append((text, f"{least:g} and {peer['hit rate']:g}", least >= peer["hit rate"]))
        found.append(at_most(f"{kind}: max / mean load of ranks <= 1.2", spread, 1.2, ""))
    return found


def prefixes() -> str:
    """Memory and time of the table."""
    command = ["cargo", "bench", "--quiet", "--profile", "fast", "-p", "r3router-core", "--bench", "policies"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    got = json.loads(done.stdout.strip().splitlines()[-1])
    table = [
        {"unique prompts of 20 KB": f"{25_000 * (at + 1):,}", "resident MiB": rss, "blocks known": f"{entries:,}"}
        for at, (rss, entries) in enumerate(zip(got["rss_mib"], got["entries"], strict=True))
    ]
    times = [
        {"what": f"look up, known to its end ({got['blocks']} blocks)", "us": got["lookup_known_us"]},
        {"what": "look up, known by half", "us": got["lookup_half_us"]},
        {"what": "look up, unknown", "us": got["lookup_unknown_us"]},
        {"what": "look up and insert one of the prompts of 20 KB (mean)", "us": got["place_us"]},
        {"what": f"hash the {got['body_kib']} KiB of JSON of 60,000 ids", "us": got["hash_us"]},
    ]
    slowest = max(got[key] for key in ("lookup_known_us", "lookup_half_us", "lookup_unknown_us"))
    return page(
        f"Memory of prefixes with --max-tree-size {got['limit_mib']} MiB, and the lookup of 60,000 tokens",
        f"{markdown(table)}\n\n{markdown(times)}",
        [
            at_most("memory at its limit after 200,000 unique prompts of 20 KB", got["rss_mib"][-1], got["limit_mib"] + 1, "MiB"),
            at_most("lookup of 60,000 tokens <= 50 us", slowest, 50, "us"),
        ],
    )


def main() -> None:
    """Prints the page; writes it with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="render benches/results/policies.md")
    write = parser.parse_args().write
    rows = conversations()
    once, each = bounds()
    trace = page(
        f"Conversations: {SESSIONS} sessions of {TURNS} turns, one system prompt, {RANKS} ranks",
        f"{markdown(rows)}\n\nWith every session on one rank the hit rate is {once:.4f} when the system prompt is computed once in all, "
        f"which takes one rank for everybody, and {each:.4f} when each of the {RANKS} ranks computes it once.",
        verdicts(rows),
    )
    text = f"# Policies\n\n{datetime.date.today():%Y-%m-%d}, {machine()}. Written by `make bench-policies`.\n\n{trace}\n\n{prefixes()}\n"
    print(text)
    if write:
        (RESULTS / "policies.md").write_text(text)


if __name__ == "__main__":
    main()
