"""The names of `sglang_router.launch_router`, and its flags against the peer's own."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from processes import call, environment, free_port, started, until_ok
from r3router.cli.options import peer_flags, settings
from r3router.launch_router import RouterArgs, launch_router, parse_router_args, sources

ROOT = Path(__file__).parents[2]
PEER = Path(os.environ.get("R3ROUTER_PEERS") or ROOT / ".venv-peers") / "sglang-router" / "bin" / "python"
needs_peer = pytest.mark.skipif(not PEER.exists(), reason="sglang-router is not installed; run `make peer-sglang-router`")

# Defaults that differ from the peer's, as the help of each says.
OWN_DEFAULTS = {"queue_size", "queue_timeout_secs", "assignment_mode"}
# The peer's class leaves these to its other defaults; its flags have ours.
NONE_IN_CLASS = {"log_level", "prometheus_port", "prometheus_host", "prometheus_duration_buckets", "request_id_headers"}


def peer(code: str) -> Any:
    env = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(PEER), "-c", code], capture_output=True, text=True, env=env, timeout=120, check=True)
    return json.loads(done.stdout)


PEER_PARSER = """
import argparse, json
from sglang_router.launch_router import RouterArgs
p = argparse.ArgumentParser()
RouterArgs.add_cli_args(p)
"""


def given(*args: str) -> dict[str, Any]:
    """The flags that a command line hands to the core."""
    return sources(parse_router_args(args))["flags"]


@needs_peer
def test_every_flag_of_the_peer_is_taken_with_its_default_and_none_is_listed_that_it_lacks() -> None:
    theirs = peer(PEER_PARSER + "print(json.dumps({a.option_strings[-1]: a.default for a in p._actions if a.dest != 'help'}))")
    listed = {s["flag"] for s in settings() if s["peer"] is not None} | {f["flag"] for f in peer_flags()}
    assert listed == set(theirs)
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    ours = {a.option_strings[0]: a.default for a in parser._actions}
    for flag, default in theirs.items():
        if flag.lstrip("-").replace("-", "_") in OWN_DEFAULTS:
            continue
        # An empty list, an empty mapping and None say the same: nothing.
        assert (ours[flag] or None) == (default or None), flag


@needs_peer
def test_the_table_says_the_defaults_that_the_peers_help_prints() -> None:
    theirs = peer(PEER_PARSER + "print(json.dumps({a.dest: str(a.default) for a in p._actions if a.dest != 'help'}))")
    table = {s["name"]: s["peer"] for s in settings() if s["peer"] is not None} | {f["name"]: f["default"] for f in peer_flags()}
    assert table == theirs


@needs_peer
def test_every_field_of_the_peers_class_is_there_with_its_default() -> None:
    code = (
        "import json, dataclasses; from sglang_router.launch_router import RouterArgs; print(json.dumps(dataclasses.asdict(RouterArgs())))"
    )
    ours = RouterArgs()
    for name, default in peer(code).items():
        value = getattr(ours, name)
        if name not in OWN_DEFAULTS | NONE_IN_CLASS:
            assert value == default, name


@needs_peer
@pytest.mark.parametrize(
    "args",
    [
        "--pd-disaggregation --prefill http://a:1 8998 --prefill http://b:2 none --prefill http://c:3 --decode http://d:4 --decode http://e:5",
        "--worker-urls http://a:1 http://b:2 --policy round_robin --port 8000 --host 127.0.0.1",
        "--worker-urls --request-id-headers --cors-allowed-origins",
        "--selector a=b c=d --prefill-selector x=y --decode-selector z=w",
        "--jwt-role-mapping Gateway.Admin=admin Gateway.User=User --control-plane-api-keys k1:Name:ADMIN:secret:with:colons",
        "--retry-backoff-multiplier 2 --cache-threshold 0.5 --prometheus-duration-buckets 0.1 1 10 --max-concurrent-requests -1",
        "--tls-cert-path c --tls-key-path k --dp-aware --disable-retries --max-concurrent 5",
    ],
)
def test_a_command_line_means_the_same_as_for_the_peer(args: str) -> None:
    words = args.split()
    code = (
        "import json, dataclasses; from sglang_router.launch_router import parse_router_args\n"
        f"print(json.dumps(dataclasses.asdict(parse_router_args({words!r}))))"
    )
    theirs = peer(code)
    ours = json.loads(json.dumps({name: getattr(parse_router_args(words), name) for name in theirs}))
    for name in OWN_DEFAULTS | {"prometheus_duration_buckets", "request_id_headers"}:
        if not ours[name] or name in OWN_DEFAULTS:
            theirs.pop(name)
            ours.pop(name)
    assert ours == theirs


def test_what_is_not_written_is_not_handed_on_and_numbers_may_have_units() -> None:
    assert given() == {}
    assert given("--port", "30000", "--queue-size", "100000") == {}
    flags = given(
        "--request-timeout-secs", "4h", "--r3-arena-bytes", "32GiB", "--no-admission", "--window", "12", "--policy", "prefix_hash"
    )
    assert flags == {"request_timeout_secs": "4h", "r3_arena_bytes": "32GiB", "admission": False, "window": 12, "policy": "prefix_hash"}
    pd = given("--pd-disaggregation", "--prefill", "http://a:1", "8998", "--prefill", "http://b:2", "none", "--decode", "http://c:3")
    assert pd == {"pd_disaggregation": True, "prefill": [["http://a:1", 8998], ["http://b:2"]], "decode": ["http://c:3"]}


def test_selectors_come_as_words_or_as_one() -> None:
    for words in (["app=engine", "tier=a=b"], ["app=engine tier=a=b"], ["app=engine", "tier=a=b", "noise"]):
        assert parse_router_args(["--selector", *words]).selector == {"app": "engine", "tier": "a=b"}


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--prefill", "http://a:1", "x"], "--prefill http://a:1 x: expected URL [PORT|none]"),
        (["--control-plane-api-keys", "id:name:root:s3cret"], "word 1 is not id:name:role:key"),
        (["--jwt-role-mapping", "a=root"], "--jwt-role-mapping a=root: expected"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_a_word_that_cannot_be_read_ends_the_launch_and_no_key_is_shown(args: list[str], error: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_router_args(args)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert error in told
    assert "s3cret" not in told


def test_a_frameworks_parser_gets_the_flags_with_a_prefix_and_keeps_its_own() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="10.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--window", default="the framework's own")
    parser.add_argument("--model-path", default="the framework's own")
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    args = parser.parse_args(
        [
            "--router-policy",
            "manual",
            "--router-prefill",
            "http://a:1",
            "9",
            "--worker-urls",
            "http://b:2",
            "--router-balance-abs-threshold",
            "10",
        ]
    )
    made = RouterArgs.from_cli_args(args, use_router_prefix=True)
    assert (made.host, made.port, made.policy, made.window, made.model_path) == ("10.0.0.1", 8000, "manual", "computed", None)
    assert (made.prefill_urls, made.worker_urls, made.balance_abs_threshold) == ([("http://a:1", 9)], ["http://b:2"], 10)
    flags = [option for action in parser._actions for option in action.option_strings]
    assert len(flags) == len(set(flags))
    bare = {f for f in flags if not f.startswith(("--router-", "--no-router-"))}
    assert bare == {"-h", "--help", "--host", "--port", "--window", "--model-path", "--worker-urls"}


def test_fields_may_be_set_after_parsing_and_survive_a_spawn() -> None:
    args = RouterArgs.from_cli_args(argparse.Namespace(), use_router_prefix=True)
    args.host, args.port, args.prometheus_port, args.log_level = "127.0.0.1", 3333, 4444, "warn"
    args.policy, args.request_timeout_secs, args.pd_disaggregation = "consistent_hashing", 14400, True
    again = pickle.loads(pickle.dumps(args))  # noqa: S301 - our own bytes
    assert again == args
    assert sources(again)["flags"] == {
        "host": "127.0.0.1",
        "port": 3333,
        "prometheus_port": 4444,
        "log_level": "warn",
        "policy": "consistent_hashing",
        "request_timeout_secs": 14400,
        "pd_disaggregation": True,
    }


def test_a_daemon_process_listens_without_workers_and_ends_by_sigterm() -> None:
    """As miles and slime run it."""
    args = RouterArgs(host="127.0.0.1", port=free_port(), prometheus_port=free_port(), log_level="warn", pd_disaggregation=True)
    args.disable_circuit_breaker = args.disable_health_check = True
    args.balance_abs_threshold, args.balance_rel_threshold, args.dp_aware, args.assignment_mode = 10, 1.2, True, "min_load"
    process = multiprocessing.get_context("spawn").Process(target=launch_router, args=(args,), daemon=True)
    process.start()
    try:
        url = f"http://127.0.0.1:{args.port}"
        deadline = time.monotonic() + 30
        while call(f"{url}/liveness")[0] != 200:
            assert process.is_alive(), process.exitcode
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert call(f"{url}/workers") == (
            200,
            {"workers": [], "total": 0, "stats": {"prefill_count": 0, "decode_count": 0, "regular_count": 0}},
        )
        assert call(f"{url}/readiness")[0] == 503
        process.terminate()
        process.join(10)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def test_the_module_serves_with_warnings_for_what_it_ignores(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "r3router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", "0"]
    with started(tmp_path / "log", *command, "--cache-threshold", "0.5", "--selector", "a=b") as process:
        until_ok(f"http://127.0.0.1:{port}/liveness", process)
        assert process.stop(signal.SIGTERM) == 0
        log = re.sub(r"\x1b\[[0-9;]*m", "", process.output())
    warnings = [line for line in log.splitlines() if " WARN " in line]
    assert len(warnings) == 2, log
    assert "--cache-threshold: ignored: " in warnings[0] + warnings[1]
    assert "selector: without effect: " in warnings[0] + warnings[1]


@pytest.mark.parametrize("module", [["r3router.launch_router"], ["r3router", "serve"]])
def test_what_cannot_be_honoured_stops_the_start_with_every_reason(module: list[str]) -> None:
    args = [
        "--history-backend",
        "redis",
        "--redis-url",
        "redis://x",
        "--mcp-config-path",
        "m.yaml",
        "--backend",
        "sglang",
    ]
    args += ["--control-plane-api-keys", "id:name:admin:s3cret", "--policy", "nonsense"]
    done = subprocess.run(
        [sys.executable, "-m", *module, *args], capture_output=True, text=True, env=environment(), timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert {error.split(": ")[1] for error in errors} == {
        *("--history-backend", "--mcp-config-path", "--control-plane-api-keys", "--policy")
    }
    assert "s3cret" not in done.stderr
    assert all(": not supported; " in error for error in errors if not error.startswith("Error: --policy"))
