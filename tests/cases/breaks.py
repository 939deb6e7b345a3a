"""Shows that the tests of the field cases can fail: breaks one behaviour at a time and runs the case's tests.

    python tests/cases/breaks.py               all cases
    python tests/cases/breaks.py KVX-1 RM-2    some; the table in README.md keeps the other rows

Each break is one edit of the source in a copy of the tree (in the build folder), so the working tree is not touched. A break whose text is
not found exactly once in its file is an error (`test_breaks.py` checks that on every run of the tests), and a case whose tests still pass
when it is broken makes the command fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- breaks: written by breaks.py -->", "<!-- end of breaks -->"


@dataclass(frozen=True)
class Break:
    """One behaviour, broken by one edit."""

    case: str
    """The case; `JSN-1 routes` is JSN-1 on the routes beside generation. `restart` is no field case but a promise of the same weight."""
    what: str
    file: str
    old: str
    new: str
    at: str = "tests/cases"
    """Where its tests are, unless they are those of the routes."""
    named: str = ""
    """What the names of its tests have in them, where that is not the case."""

    @property
    def tests(self) -> str:
        """What the names of the case's tests have in them."""
        return self.named or f"test_{self.case.split()[0].lower().replace('-', '_')}_"

    @property
    def where(self) -> str:
        """Where its tests are."""
        return "tests/cases/test_routes.py" if " routes" in self.case else self.at


BREAKS = [
    Break(
        "KVX-1",
        "decode ranks take requests whatever they hold",
        "rust/core/src/fleet/judge.rs",
        "            if amount <= 0 {\n                return Err(reason);",
        "            if amount <= -1_000_000_000 {\n                return Err(reason);",
    ),
    Break(
        "KVX-2",
        "a transfer that was given up frees its slot at once",
        "rust/core/src/admission/settle.rs",
        "let leaks = matches!(outcome, Outcome::Failed { how: Failure::Deadline, .. });",
        "let leaks = false;",
    ),
    Break(
        "ADM-1",
        "the reserve for growth is left out of the KV budget",
        "rust/core/src/capacity.rs",
        "(self.prompt_kv(prompt) + self.reserved_decode).max(i64::from(prompt) + growth)",
        "self.prompt_kv(prompt).max(growth.min(0))",
    ),
    Break(
        "ADM-2",
        "a request counts as one state slot",
        "rust/core/src/capacity.rs",
        "i64::from(slots) / per_request)",
        "i64::from(slots))",
    ),
    Break(
        "DPR-1",
        "the room does not follow the prefill rank",
        "rust/core/src/room.rs",
        "let rank = u64::from(rank) % ranks;",
        "let rank = u64::from(rank).wrapping_add(self.random.next() >> 8) % ranks;",
    ),
    Break(
        "DPR-2",
        "decode's leg gets prefill's rank",
        "rust/proxy/src/dispatch.rs",
        "routed_dp_rank: rank_field(decode, decode_rank).filter(|_| !plain),",
        "routed_dp_rank: named,",
    ),
    Break(
        "RM-1",
        "the client's room stays in the body",
        "rust/core/src/wire/scan.rs",
        '    "bootstrap_room",\n',
        '    "bootstrap_room_",\n',
    ),
    Break(
        "RM-2",
        "attempts share a room",
        "rust/core/src/room.rs",
        "            let base = permute(self.drawn.wrapping_add(self.seed)) << 16;",
        "            let base = permute(self.seed) << 16;\n            self.random = SplitMix::new(self.seed);",
    ),
    Break(
        "RM-3",
        "the sub-requests of a split call keep an n of their own",
        "rust/core/src/wire/splice.rs",
        'add(Bytes::from_static(b"1"));',
        'add(Bytes::from_static(b"2"));',
    ),
    Break(
        "LEG-1",
        "the surviving leg is not aborted",
        "rust/proxy/src/live.rs",
        "if !targets.is_empty() && open_legs != LegResult::Ok && !plain {",
        "if targets.len() > 9 && open_legs != LegResult::Ok && !plain {",
    ),
    Break(
        "ABT-1",
        "a client that leaves ends nothing on the engines",
        "rust/proxy/src/live.rs",
        "self.0.finish(Outcome::Cancelled, LegResult::Cancelled);",
        "self.0.finish(Outcome::Cancelled, LegResult::Ok);",
    ),
    Break(
        "SSE-1",
        "the end marker is looked for anywhere in the text",
        "rust/proxy/src/relay.rs",
        "                    Some(Ok(mut piece)) => {\n",
        '                    Some(Ok(mut piece)) => {\n                        if let Some(at) = memmem::find(&piece, b"[DONE]") {\n'
        "                            piece.truncate(at + 6);\n                        }\n",
    ),
    Break(
        "SSE-2",
        "the error event of a broken stream is cut off",
        "rust/proxy/src/relay.rs",
        "let event = error_event(error);",
        "let event = error_event(error).slice(..20);",
    ),
    Break(
        "HTTP-1",
        "a reused connection that dies is not replaced",
        "rust/proxy/src/upstream.rs",
        "if written.is_none_or(|at| at.elapsed() < STALE) =>",
        "if written.is_none_or(|at| at.elapsed() < STALE) && call.pieces.len() > 1000 =>",
    ),
    Break(
        "HTTP-2",
        "bodies over 2 MB are refused whatever the option says",
        "rust/proxy/src/routes.rs",
        "Ok(()) => receiver.body(incoming, app.settings.max_payload_size)",
        "Ok(()) => receiver.body(incoming, app.settings.max_payload_size.min(2 << 20))",
    ),
    Break(
        "JSN-1",
        "a field that the client did not send is added as null",
        "rust/core/src/wire/splice.rs",
        "    if let Some(rid) = owned.rid {\n",
        '    member(head, "lora_path", "null");\n    if let Some(rid) = owned.rid {\n',
    ),
    Break(
        "JSN-2",
        "escapes of half a surrogate pair are refused",
        "rust/core/src/wire/cursor.rs",
        "if !digits.is_some_and(|d| d.iter().all(u8::is_ascii_hexdigit)) {",
        'if !digits.is_some_and(|d| d.iter().all(u8::is_ascii_hexdigit) && !d.to_ascii_lowercase().starts_with(b"d8")) {',
    ),
    Break(
        "LPM-1",
        "prefill's logprob lists are not merged",
        "rust/proxy/src/merge/weave.rs",
        "        if plan.logprobs\n            && let Some(p) = prefill\n",
        "        if plan.logprobs\n            && context.output == Some(u32::MAX)\n            && let Some(p) = prefill\n",
    ),
    Break(
        "R3-1",
        "one row of the prompt is taken from decode",
        "rust/core/src/r3/rows.rs",
        "let prefill_rows = (prefill - prefill_skip.min(prefill)).min(total);",
        "let prefill_rows = (prefill - prefill_skip.min(prefill)).min(total).saturating_sub(1);",
    ),
    Break(
        "R3-2",
        "an aborted request is held to the row count of a whole one",
        "rust/proxy/src/merge/resolve.rs",
        "    if seq.aborted {\n",
        "    if seq.aborted && seq.prompt.is_none() {\n",
    ),
    Break(
        "R3-3",
        "a stream may end without the rows that were asked for",
        "rust/proxy/src/merge/stream.rs",
        "            self.missing()?;\n",
        "",
    ),
    Break(
        "R3-4",
        "rows that nobody fetched are kept for ever",
        "rust/proxy/src/store/keep.rs",
        "take_while(|(at, _)| *at <= now)",
        "take_while(|(at, _)| *at == now.min(1))",
    ),
    Break(
        "BAL-1",
        "a cancelled leg stays in the worker's load",
        "rust/proxy/src/live.rs",
        "                    leg.worker.leg_ended(open_legs);\n",
        "",
    ),
    Break(
        "CB-1",
        "an engine's 4xx is charged to its breaker",
        "rust/proxy/src/leg.rs",
        "Kind::EngineRejected => (LegResult::Rejected, None),",
        "Kind::EngineRejected => (LegResult::Rejected, Some(Failure::Server)),",
    ),
    Break(
        "CB-2",
        "an open breaker lets everything through",
        "rust/core/src/health.rs",
        "matches!(self.state, State::Closed | State::HalfOpen { probing: false })",
        "matches!(self.state, State::Closed | State::HalfOpen { .. } | State::Open { .. })",
    ),
    Break(
        "DPR-3",
        "a key that is known goes to any rank",
        "rust/core/src/policy/keys.rs",
        "        if let Some(home) = self.find(ask.fleet, ask.request.key) {",
        "        if let Some(home) = self.find(ask.fleet, ask.request.key).filter(|home| *home == u32::MAX) {",
    ),
    Break(
        "EPT-1",
        "a broadcast reaches one engine only",
        "rust/proxy/src/control.rs",
        "    for worker in workers {\n        let call = sent(",
        "    for worker in workers.into_iter().take(1) {\n        let call = sent(",
    ),
    Break(
        "RL-2",
        "the list shows a rank in the address",
        "rust/proxy/src/registration.rs",
        '        "url": &*registration.shown,\n        "worker_type"',
        '        "url": format!("{}@0", registration.shown),\n        "worker_type"',
    ),
    Break(
        "WRK-1",
        "an engine whose health check fails is taken as active",
        "rust/proxy/src/probe.rs",
        "Ok(answer) if answer.status >= 500 =>",
        "Ok(answer) if answer.status >= 600 =>",
    ),
    Break(
        "URL-1",
        "the brackets of an IPv6 address are lost",
        "rust/proxy/src/address.rs",
        '(format!("[{ip}]"), port)',
        '(format!("{ip}"), port)',
    ),
    Break(
        "MEM-1",
        "the table of prefixes is a thousand times its limit",
        "rust/core/src/affinity.rs",
        "        let lines = bytes.saturating_sub(8 * LINE + runs::BYTES) / (ENTRY_BYTES * WAYS);",
        "        let lines = bytes.saturating_mul(1000) / (ENTRY_BYTES * WAYS);",
    ),
    Break(
        "JSN-1 routes",
        "a pass-through call loses the end of its body",
        "rust/proxy/src/passthrough.rs",
        "        pieces: Arc::from([body]),",
        '        pieces: Arc::from([Bytes::from(serde_json::json!({ "model": member(&body, "model") }).to_string())]),',
    ),
    Break(
        "JSN-2 routes",
        "a pass-through body is not looked at",
        "rust/proxy/src/passthrough.rs",
        "    an_object(&body)?;\n",
        "",
    ),
    Break(
        "HTTP-2 routes",
        "the limit of bodies holds for generation only",
        "rust/proxy/src/routes.rs",
        "    let body = receiver.body(incoming, app.settings.max_payload_size).await?;",
        "    let body = receiver.body(incoming, u64::MAX).await?;",
    ),
    Break(
        "WRK-2",
        "a refused connect is taken for a connection that broke",
        "rust/proxy/src/leg.rs",
        "        Fault::Connect(_) => Kind::Connect,",
        "        Fault::Connect(_) => Kind::Reset,",
        at="tests/proxy/test_bad_days.py",
    ),
    Break(
        "HLT-1",
        "bytes that come from an engine are no sign of life",
        "rust/proxy/src/keeper.rs",
        "    if app.gate.is_paused() || alive {",
        "    if app.gate.is_paused() {",
        at="tests/proxy/test_bad_days.py",
    ),
    Break(
        "RL-1",
        "one engine's success makes a refusal of another one a success",
        "rust/proxy/src/control.rs",
        "        status => status,\n    };\n    let lines",
        "        status => if ok > 0 { 200 } else { status },\n    };\n    let lines",
        at="tests/proxy/test_bad_days.py",
    ),
    Break(
        "MET-1",
        "the router's own 503 for an open breaker is booked as an engine's failure",
        "rust/proxy/src/metrics.rs",
        "            Kind::NoWorkers => Self::NoWorkers,",
        "            Kind::NoWorkers => Self::EngineFailed,",
        at="tests/proxy/test_metrics.py",
    ),
    Break(
        "AUT-1",
        "the router's own small questions carry no key",
        "rust/proxy/src/ask.rs",
        "&Call::get(Uri::from_static(path)).with_key(key), limit",
        '&Call::get(Uri::from_static(path)).with_key(key.filter(|_| path != "/v1/loads")), limit',
        at="tests/proxy/test_security.py",
    ),
    Break(
        "K8S-1",
        "an engine whose pod is gone keeps what runs on it",
        "rust/proxy/src/discovery.rs",
        "                            keeper::dead(&self.app, &entry);",
        "                            registration::remove(&self.app, &entry);",
        at="tests/k8s",
    ),
    Break(
        "restart",
        "the new router binds while the old one still does",
        "rust/proxy/src/server.rs",
        "            app.gate.set_held(true);",
        "            app.gate.set_held(false);",
        at="tests/proxy/test_overlap.py",
        named="restarts_by_overlap",
    ),
]


def problems() -> list[str]:
    """Breaks that do not fit the source any more."""
    found = []
    for one in BREAKS:
        count = (ROOT / one.file).read_text().count(one.old)
        if count != 1:
            found.append(f"{one.case}: its text stands {count} times in {one.file}")
    return found


def copy_tree(to: Path) -> None:
    """The tracked files as they are now."""
    if to.exists():
        shutil.rmtree(to)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    for name in filter(None, names):
        source, target = ROOT / name, to / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def run(one: Break, tree: Path, target: Path) -> tuple[bool, str]:
    """Whether the case's tests fail when it is broken, and pytest's last line."""
    path = tree / one.file
    whole = path.read_text()
    path.write_text(whole.replace(one.old, one.new))
    env = {**os.environ, "CARGO_TARGET_DIR": str(target), "PYTHONPATH": str(tree / "python"), "CARGO_INCREMENTAL": "1"}
    env.pop("VIRTUAL_ENV", None)
    try:
        subprocess.run(["cargo", "build", "--quiet", "-p", "r3router-py"], cwd=tree, env=env, check=True)
        shutil.copy2(target / "debug" / "lib_core.so", tree / "python" / "r3router" / "_core.abi3.so")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-k", one.tests, one.where]
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=600)
    finally:
        path.write_text(whole)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 0 or not failed:
        return False, (done.stdout.strip().splitlines() or ["no output"])[-1]
    name = re.sub(r"^(FAILED|ERROR) tests/(cases/)?", "", failed[0]).split(" - ")[0]
    return True, name


def page_rows() -> dict[str, str]:
    """The rows of the page by case."""
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    return {row.split("|")[1].strip(): row for row in table.splitlines() if re.match(r"\| ([A-Z0-9]+-\d|restart)", row)}


def write_rows(rows: dict[str, str]) -> None:
    """Writes them in the order of the breaks."""
    kept = [rows[one.case] for one in BREAKS if one.case in rows]
    table = "\n".join(["| case | what was broken | where | first test that caught it |", "|---|---|---|---|", *kept])
    head, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")


def main() -> int:
    """Runs the breaks that are named, or all."""
    wrong = problems()
    if wrong:
        print("\n".join(wrong))
        return 1
    chosen = [one for one in BREAKS if not sys.argv[1:] or one.case in sys.argv[1:]]
    target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    tree = target / "breaks"
    copy_tree(tree)
    rows, good = page_rows(), True
    for one in chosen:
        began = time.monotonic()
        caught, line = run(one, tree, target)
        good &= caught
        verdict = f"`{line}`" if caught else f"NOT CAUGHT: {line}"
        rows[one.case] = f"| {one.case} | {one.what} | `{one.file}` | {verdict} |"
        print(f"{one.case:7} {'caught' if caught else 'NOT CAUGHT'} in {time.monotonic() - began:.0f} s: {line}", flush=True)
    shutil.rmtree(tree)
    write_rows(rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
