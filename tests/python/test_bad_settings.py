"""A table of bad settings: each is refused at start, with the flag, the variable or the line of the file, and with how to mend it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from processes import environment

PD = "--pd-disaggregation"

# Name, flags, variables, file (as r3.toml), where it must be said to stand, how it must be said to be mended.
Row = tuple[str, list[str], dict[str, str], str, str, str]
TABLE: list[Row] = [
    ("unknown flag", ["--prot", "1"], {}, "", "--prot", "did you mean --port?"),
    ("unknown variable", [], {"R3ROUTER_PROT": "1"}, "", "R3ROUTER_PROT", "did you mean R3ROUTER_PORT?"),
    ("unknown key", [], {}, 'host = "::1"\nque_size = 3', "r3.toml:2: que_size", "did you mean queue_size?"),
    ("port too large", ["--port", "99999"], {}, "", "--port: `99999`", "expected a port"),
    ("port no number", [], {"R3ROUTER_PORT": "http"}, "", "R3ROUTER_PORT: `http`", "expected a port"),
    ("port in the file", [], {}, 'threads = 1\n\nport = "x"', "r3.toml:3: port: `x`", "expected a port"),
    ("list for one value", [], {}, "port = [1, 2]", "r3.toml:1: port", "expected a port"),
    ("misspelt policy", ["--policy", "round_robbin"], {}, "", "--policy: `round_robbin`", "did you mean `round_robin`?"),
    ("unknown level", ["--log-level", "loud"], {}, "", "--log-level: `loud`", "is not one of debug, info, warn, error"),
    ("unknown transport", ["--r3-transport", "fast"], {}, "", "--r3-transport: `fast`", "is not one of inline, ref"),
    ("window of words", ["--window", "wide"], {}, "", "--window: `wide`", "neither computed, unbounded nor a number above 0"),
    ("window of zero", [], {}, "window = 0", "r3.toml:1: window: `0`", "neither computed, unbounded nor a number above 0"),
    ("margin too large", ["--kv-margin", "0.95"], {}, "", "--kv-margin: `0.95`", "it must be between 0 and 0.9"),
    ("polls too often", ["--poll-interval-ms", "1"], {}, "", "--poll-interval-ms: `1ms`", "it must be between 5ms and 60000ms"),
    ("duration", ["--request-timeout-secs", "5x"], {}, "", "--request-timeout-secs: `5x`", "expected a duration, such as 300"),
    ("size", ["--max-payload-size", "12XB"], {}, "", "--max-payload-size: `12XB`", "expected a size in bytes, such as"),
    ("size too small", ["--max-payload-size", "10"], {}, "", "--max-payload-size", "it must be at least 1024bytes"),
    ("negative count", ["--queue-size", "-1"], {}, "", "--queue-size: `-1`", "expected a whole number"),
    ("negative limit", ["--max-concurrent-requests", "-2"], {}, "", "--max-concurrent-requests: `-2`", "-1 for no limit"),
    ("switch of words", [], {"R3ROUTER_ADMISSION": "maybe"}, "", "R3ROUTER_ADMISSION: `maybe`", "expected true or false"),
    ("gRPC engine", ["--worker-urls", "grpc://x:1"], {}, "", "--worker-urls: worker url", "HOST:PORT"),
    ("path in an address", ["--worker-urls", "http://x:1/v1"], {}, "", "--worker-urls", "a path is not allowed"),
    ("bare IPv6", [PD, "--decode", "http://2001:db8::a:30000"], {}, "", "--decode", "an IPv6 address in brackets"),
    ("engine twice", ["--worker-urls", "http://d:1", "D:1/"], {}, "", "--worker-urls: `http://d:1`", "name each engine once"),
    ("decode without PD", [], {"R3ROUTER_DECODE": "http://d:1"}, "", "R3ROUTER_DECODE", "add --pd-disaggregation"),
    ("regular with PD", [PD, "--worker-urls", "http://x:1"], {}, "", "--worker-urls", "name them with --prefill URL [PORT]"),
    ("empty key", [], {"R3ROUTER_API_KEY": ""}, "", "R3ROUTER_API_KEY: it is empty", "leave it out, or give it"),
    ("empty worker key", ["--worker-api-key", ""], {}, "", "--worker-api-key: it is empty", "leave it out, or give it"),
    ("bootstrap port", [PD, "--prefill", "http://p:1", "70000"], {}, "", "--prefill: the bootstrap port `70000`", "a port from 1 to 65535"),
    (
        "key of two words",
        [],
        {"R3ROUTER_WORKER_API_KEY": "s3 cret"},
        "",
        "R3ROUTER_WORKER_API_KEY: the key has characters",
        "expected a key",
    ),
    (
        "pauses that shrink",
        ["--retry-max-backoff-ms", "10"],
        {},
        "",
        "--retry-max-backoff-ms",
        "make it at least --retry-initial-backoff-ms",
    ),
    ("port of the metrics", ["--prometheus-port", "30000"], {}, "", "--prometheus-port: port 30000", "choose another port for metrics"),
    ("port of the admin", [], {}, "admin_port = 30000", "r3.toml:1: admin_port: port 30000", "choose another port for the admin listener"),
    ("admin for all", ["--admin-host", "0.0.0.0"], {}, "", "--admin-host: `0.0.0.0`", "set --admin-api-key (or R3ROUTER_ADMIN_API_KEY)"),
    (
        "control nowhere",
        ["--admin-port", "0", "--no-control-on-main-port"],
        {},
        "",
        "--no-control-on-main-port",
        "set --admin-port, or leave --control-on-main-port on",
    ),
    ("bits beyond", ["--worker-allow", "10.0.0.1/8"], {}, "", "--worker-allow: `10.0.0.1/8`", "did you mean 10.0.0.0/8?"),
    ("no host", [], {"R3ROUTER_WORKER_ALLOW": "http://a"}, "", "R3ROUTER_WORKER_ALLOW: `http://a`", "a network such as 10.0.0.0/8"),
    (
        "engine off the list",
        ["--worker-allow", "10.0.0.0/8", "--worker-urls", "http://192.0.2.1:1"],
        {},
        "",
        "--worker-urls: worker http://192.0.2.1:1",
        "add the host to --worker-allow",
    ),
    ("metadata", ["--worker-urls", "http://169.254.169.254"], {}, "", "--worker-urls: worker http://169.254.169.254:80", "name an engine"),
    ("path of health", ["--health-check-endpoint", "health"], {}, "", "--health-check-endpoint: `health`", "begin it with /"),
    (
        "buckets",
        ["--prometheus-duration-buckets", "1", "0.5"],
        {},
        "",
        "--prometheus-duration-buckets: the bounds [1.0, 0.5]",
        "smallest first",
    ),
    ("origin", [], {}, 'cors_allowed_origins = ["http://a\\u0001"]', "r3.toml:1: cors_allowed_origins", "write scheme://host[:port]"),
    (
        "origin of a word",
        ["--cors-allowed-origins", "foo"],
        {},
        "",
        '--cors-allowed-origins: "foo" is no origin',
        "write scheme://host[:port]",
    ),
    (
        "origin with a path",
        [],
        {"R3ROUTER_CORS_ALLOWED_ORIGINS": "https://a.example/app"},
        "",
        "R3ROUTER_CORS_ALLOWED_ORIGINS",
        "or * for all",
    ),
    ("id in two words", ["--request-id-headers", "x id"], {}, "", '--request-id-headers: "x id" is no name', "each as one word"),
    ("id that is a key", [], {}, 'request_id_headers = ["Authorization"]', "r3.toml:1: request_id_headers", "ids are logged"),
    ("more than all experts", ["--r3-experts", "5", "--r3-top-k", "8"], {}, "", "--r3-top-k: a token cannot", "at most --r3-experts"),
    ("more than all experts in the file", [], {}, "r3_experts = 5\nr3_top_k = 8", "r3.toml:2: r3_top_k", "at most --r3-experts"),
    ("no attempt", ["--retry-max-retries", "0"], {}, "", "--retry-max-retries: `0`", "it must be between 1 and 1000"),
    ("no request at once", ["--max-concurrent-requests", "0"], {}, "", "--max-concurrent-requests: `0`", "it must be between 1 and"),
    ("public word", ["--r3-public-url", "router:30000"], {}, "", '--r3-public-url: "router:30000" has no scheme', "give http://HOST:PORT"),
    ("public query", [], {}, 'r3_public_url = "http://r:1/?x=1"', "r3.toml:1: r3_public_url", "give http://HOST:PORT"),
    (
        "spill into the store",
        ["--r3-store-dir", ".", "--r3-spill-dir", "./", "--r3-arena-bytes", "1MiB"],
        {},
        "",
        "--r3-spill-dir",
        "on a disk",
    ),
    ("path of two words", ["--health-check-endpoint", "/he alth"], {}, "", '--health-check-endpoint: "/he alth"', "without spaces"),
    (
        "path with a host",
        ["--health-check-endpoint", "//engine/health"],
        {},
        "",
        '--health-check-endpoint: "//engine',
        "without spaces and host",
    ),
    ("annotation", ["--bootstrap-port-annotation", "a b"], {}, "", '--bootstrap-port-annotation: "a b"', "letters, digits"),
    ("namespace", [], {"R3ROUTER_SERVICE_DISCOVERY_NAMESPACE": "My Engines"}, "", "R3ROUTER_SERVICE_DISCOVERY_NAMESPACE", "or * for all"),
    (
        "metadata in one number",
        ["--worker-urls", "http://2852039166"],
        {},
        "",
        "--worker-urls: worker http://169.254.169.254:80",
        "name an engine",
    ),
    (
        "metadata in hexadecimal",
        ["--worker-urls", "0xa9fea9fe:80"],
        {},
        "",
        "--worker-urls: worker http://169.254.169.254:80",
        "name an engine",
    ),
    ("no such number", ["--worker-urls", "http://10.0.0.256:1"], {}, "", "--worker-urls", "HOST:PORT"),
    ("store nowhere", ["--r3-store-dir", "/nowhere/at/all"], {}, "", "--r3-store-dir", "name a directory on tmpfs that exists"),
    ("spill nowhere", ["--r3-spill-dir", "/nowhere/at/all"], {}, "", "--r3-spill-dir", "name a directory that exists"),
    (
        "arena too large",
        ["--r3-arena-bytes", "4000TiB", "--r3-transport", "ref"],
        {},
        "",
        "4000TiB of --r3-arena-bytes",
        "or lower --r3-arena-bytes",
    ),
    ("no file", ["--config", "/nowhere/r3.toml"], {}, "", "--config: /nowhere/r3.toml cannot be read", "give the path of a TOML file"),
    ("no TOML", [], {}, "port = 1\nhost = ", "r3.toml:2: not TOML", "write one `key = value` a line"),
    ("not here", ["--mcp-config-path", "x"], {}, "", "--mcp-config-path: not supported", "; "),
    ("clock that stands", ["--time-scale", "0"], {}, "", "--time-scale: `0.0`", "it must be between 1 and 1000"),
    ("log nowhere", ["--log-dir", "/dev/null/logs"], {}, "", "--log-dir: /dev/null/logs", "cannot be written"),
]


def test_the_table_has_forty_different_rows() -> None:
    assert len({row[0] for row in TABLE}) == len(TABLE) >= 40


@pytest.mark.parametrize(("name", "flags", "env", "file", "where", "mend"), TABLE, ids=[row[0] for row in TABLE])
def test_a_bad_setting_is_refused_at_start_with_its_place_and_its_mend(
    tmp_path: Path, name: str, flags: list[str], env: dict[str, str], file: str, where: str, mend: str
) -> None:
    if file:
        (tmp_path / "r3.toml").write_text(file)
        flags = [*flags, "--config", str(tmp_path / "r3.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "r3router", "serve", *flags],
        capture_output=True,
        text=True,
        env={**environment(), **env, "COLUMNS": "1000"},
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "listens on" not in done.stdout
    lines = [line.removeprefix("Error: ") for line in done.stderr.splitlines() if line.startswith("Error: ")]
    found = [line for line in lines if where in line]
    assert found, f"{where!r} is not in:\n{done.stderr}"
    assert any(mend in line for line in found), f"{mend!r} is not in:\n{done.stderr}"
    place = where.split(":")[0].split()[0]
    if place.startswith(("--", "R3ROUTER_")):
        assert found[0].startswith(place), found[0]
    elif place == "r3.toml":
        assert found[0].startswith(f"{tmp_path}{os.sep}r3.toml:"), found[0]
    assert "Traceback" not in done.stderr
    assert "s3 cret" not in done.stderr


ROOT = Path(__file__).parents[2]
# What the tables of wrong names use on purpose.
WRONG = {"R3ROUTER_PROT", "R3ROUTER_THREDS"}


def test_no_variable_of_the_tools_around_the_router_is_refused_as_a_setting(tmp_path: Path) -> None:
    # make, CI, tests and benchmarks start routers with their own variables in the environment.
    places = [
        ROOT / "Makefile",
        ROOT / ".ci/run",
        *ROOT.glob("tests/**/*.py"),
        *ROOT.glob("benches/**/*.py"),
        *ROOT.glob("rust/*/benches/*.rs"),
    ]
    names = {name for place in places for name in re.findall(r"R3ROUTER_[A-Z0-9_]*[A-Z0-9]", place.read_text())} - WRONG
    assert len(names) > 20
    refused = []
    file = tmp_path / "r3.toml"  # One of them names the file of settings.
    file.touch()
    for name in sorted(names):
        done = subprocess.run(
            [sys.executable, "-m", "r3router", "serve", "--policy", "none such"],
            env={**environment(), name: str(file)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 2 and "--policy: `none such`" in done.stderr, done.stderr
        if "there is no such setting" in done.stderr:
            refused.append(name)
    assert refused == []
