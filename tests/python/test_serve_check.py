"""`serve --check` and `serve` refuse the same settings with the same words: a check that says less than the start is worth nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from processes import environment, serving

# Name, flags, the place that is said, what is said of it. `{dir}` is a folder with server.pem, server.key, other.key and text.pem.
Row = tuple[str, list[str], str, str]
CERT = ["--tls-cert-path", "{dir}/server.pem"]
TABLE: list[Row] = [
    ("no certificate", ["--tls-cert-path", "{dir}/none.pem", "--tls-key-path", "{dir}/server.key"], "--tls-cert-path", "No such file"),
    ("no key", [*CERT, "--tls-key-path", "{dir}/none.key"], "--tls-key-path", "No such file"),
    ("no PEM", ["--tls-cert-path", "{dir}/text.pem", "--tls-key-path", "{dir}/server.key"], "--tls-cert-path", "no certificate is in it"),
    ("no key in it", [*CERT, "--tls-key-path", "{dir}/text.pem"], "--tls-key-path", "{dir}/text.pem"),
    ("another's key", [*CERT, "--tls-key-path", "{dir}/other.key"], "--tls-cert-path", "{dir}/server.pem"),
    (
        "no authority of clients",
        [*CERT, "--tls-key-path", "{dir}/server.key", "--tls-client-ca-paths", "{dir}/none.pem"],
        "--tls-client-ca-paths",
        "No such file",
    ),
    ("no authority of engines", ["--ca-cert-paths", "{dir}/text.pem"], "--ca-cert-paths", "no certificate is in it"),
    (
        "no certificate for engines",
        ["--client-cert-path", "{dir}/none.pem", "--client-key-path", "{dir}/server.key"],
        "--client-cert-path",
        "No such file",
    ),
    ("host without address", ["--host", "nowhere.invalid"], "--host", "`nowhere.invalid` has no address"),
    ("host elsewhere", ["--host", "192.0.2.1"], "--host", "cannot be listened on"),
    ("metrics elsewhere", ["--prometheus-host", "192.0.2.1", "--prometheus-port", "9"], "--prometheus-host", "cannot be listened on"),
    (
        "admin without address",
        ["--admin-host", "nowhere.invalid", "--admin-api-key", "k", "--admin-port", "9"],
        "--admin-host",
        "`nowhere.invalid` has no address",
    ),
    ("logs in a file", ["--log-dir", "{dir}/text.pem"], "--log-dir", "cannot be written"),
    ("logs in the system's", ["--log-dir", "/proc/logs"], "--log-dir", "cannot be written"),
    ("store nowhere", ["--r3-store-dir", "{dir}/none"], "--r3-store-dir", "cannot be kept"),
    ("spill in a file", ["--r3-spill-dir", "{dir}/text.pem"], "--r3-spill-dir", "cannot be kept"),
    ("handover nowhere", ["--handover-socket", "{dir}/none/socket"], "--handover-socket", "no socket can be at"),
    ("handover over a file", ["--handover-socket", "{dir}/text.pem"], "--handover-socket", "something else is there"),
    (
        "no service account",
        ["--service-discovery", "--selector", "app=x", "--service-discovery-account-dir", "{dir}"],
        "--service-discovery",
        "in a pod whose service account",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    authority = trustme.CA()
    for name in ("server", "other"):
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(str(made / f"{name}.key"))
        issued.cert_chain_pems[0].write_to_path(str(made / f"{name}.pem"))
    (made / "text.pem").write_text("no certificate")
    return made


def run(flags: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    alone = ["--host", "127.0.0.1", "--port", "0", "--prometheus-port", "0", "--admin-port", "0"]
    return subprocess.run(
        [sys.executable, "-m", "r3router", "serve", *alone, *flags],
        capture_output=True,
        text=True,
        env={**environment(), "COLUMNS": "1000"},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(("name", "flags", "place", "what"), TABLE, ids=[row[0] for row in TABLE])
def test_a_check_refuses_what_the_start_refuses_in_the_same_words(
    tmp_path: Path, folder: Path, name: str, flags: list[str], place: str, what: str
) -> None:
    flags = [flag.format(dir=folder) for flag in flags]
    started, checked = run(flags, tmp_path), run([*flags, "--check"], tmp_path)
    said = [line for line in checked.stderr.splitlines() if line.startswith("Error: ")]
    assert (started.returncode, checked.returncode) == (2, 2), (started, checked)
    assert said == [line for line in started.stderr.splitlines() if line.startswith("Error: ")]
    assert said[0].startswith(f"Error: {place}: "), said
    assert what.format(dir=folder) in said[0], said
    assert "; " in said[0], "it does not say what to do"
    assert checked.stdout == "", "a report of settings that are refused"
    assert "Traceback" not in checked.stderr + started.stderr


def test_what_is_wrong_with_a_line_of_the_file_is_said_at_that_line(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "r3.toml"
    file.write_text(f'threads = 1\ntls_cert_path = "{folder}/server.pem"\ntls_key_path = "{folder}/none.key"\n')
    checked = run(["--config", str(file), "--check"], tmp_path)
    assert checked.returncode == 2
    assert checked.stderr.startswith(f"Error: {file}:3: tls_key_path: {folder}/none.key: No such file"), checked.stderr


def test_a_check_of_what_a_router_serves_with_is_good_and_leaves_nothing_behind(tmp_path: Path, folder: Path) -> None:
    # The port is taken by the router whose settings are looked at: that is no fault of theirs.
    with serving(tmp_path) as (url, process):
        port = url.rpartition(":")[2]
        place = tmp_path / "here"
        place.mkdir()
        flags = [*CERT, "--tls-key-path", "{dir}/server.key", "--log-dir", f"{place}/logs", "--handover-socket", f"{place}/socket"]
        flags = [flag.format(dir=folder) for flag in flags]
        checked = run([*flags, "--port", port, "--check"], tmp_path)
        assert (checked.returncode, checked.stderr) == (0, "")
        assert f"port = {port}" in checked.stdout
        assert list(place.iterdir()) == []
        assert process.process.poll() is None
        with socket.create_connection(("127.0.0.1", int(port)), timeout=5):
            pass
