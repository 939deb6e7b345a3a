"""The command line: help, errors that name the flag, precedence."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from r3router import __version__
from r3router.cli.words import fold
from r3router.native import core
from r3router.reference import drifted

ROOT = Path(__file__).parents[2]


def r3router(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("R3ROUTER_")}
    return subprocess.run(
        [sys.executable, "-m", "r3router", *args], capture_output=True, text=True, env={**clean, **(env or {})}, timeout=60, check=False
    )


def checked(*args: str, env: dict[str, str] | None = None) -> dict[str, str]:
    """`name = value` lines of `serve --check`, without the origins."""
    done = r3router("serve", "--check", *args, env=env)
    assert done.returncode == 0, done.stderr
    return dict(re.match(r"(\w+) = (.*?)\s+# ", line).groups() for line in done.stdout.splitlines() if not line.startswith("#"))


def schema() -> list[dict]:
    return json.loads(core.settings_schema())


def test_version_is_that_of_both_halves_and_of_the_workspace():
    done = r3router("version")
    assert done.stdout.startswith(f"r3router {__version__} (")
    assert core.__version__ == __version__
    assert f'\nversion = "{__version__}"\n' in (ROOT / "Cargo.toml").read_text()


def test_halves_of_different_versions_refuse_to_run():
    code = "import r3router; r3router.__version__ = '0.0.1'; import r3router.native"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"the Python half of r3router is 0.0.1 and the native core is {core.__version__}" in done.stderr


def test_help_lists_the_commands_and_needs_no_native_core():
    done = r3router("--help")
    assert done.returncode == 0
    for command in ("serve", "emulate", "simulate", "demo", "version"):
        assert re.search(rf"^  {command}\s+\S", done.stdout, re.MULTILINE)
    code = "import sys, r3router.cli; sys.exit('r3router._core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_of_serve_has_every_setting_in_its_section():
    text = r3router("serve", "--help").stdout
    sections = [row["group"] for row in schema()]
    places = [text.index(f"\n{section}:\n") for section in dict.fromkeys(sections)]
    assert places == sorted(places)
    for row in schema():
        assert re.search(rf"^  {row['flag']}(?=[ ,\n])", text, re.MULTILINE), row["flag"]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--prot", "1"], "--prot: there is no such option; did you mean --port?"),
        (["--max-payload", "1"], "--max-payload: there is no such option; did you mean --max-payload-size?"),
        (["--qqqqqq"], "--qqqqqq: there is no such option; see `python -m r3router serve --help` for all of them"),
        (["--port", "99999"], "--port: `99999` is not a port from 0 to 65535; expected a port"),
        (["--port"], "Option '--port' requires an argument."),
        (["--window", "wide"], "--window: `wide` is neither computed, unbounded nor a number above 0"),
        (["--decode", "http://d:1"], "--decode: decode workers need PD mode; add --pd-disaggregation, or use --worker-urls"),
        (["--pd-disaggregation", "--prefill", "http://a:1", "x"], "--prefill: the bootstrap port `x` is not a port from 1 to 65535"),
        (["--config", "/nonexistent.toml"], "--config: /nonexistent.toml cannot be read"),
        (["--request-timeout-secs", "5 parsecs"], "--request-timeout-secs: `5 parsecs` has an unknown unit `parsecs`"),
    ],
)
def test_an_error_names_the_flag_and_the_mend_and_leaves_with_2(args: list[str], error: str):
    done = r3router("serve", *args)
    assert done.returncode == 2
    assert f"Error: {error}" in done.stderr
    assert "Traceback" not in done.stderr


def test_all_wrong_settings_are_told_at_once():
    done = r3router("serve", "--port", "x", "--kv-margin", "3", env={"R3ROUTER_THREDS": "1"})
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert [line.split(": ")[1] for line in lines] == ["R3ROUTER_THREDS", "--port", "--kv-margin"]
    assert "did you mean R3ROUTER_THREADS?" in lines[0]


def test_a_command_that_is_left_out_is_named():
    done = r3router("--prefill", "http://a:1")
    assert done.returncode == 2
    assert "write `python -m r3router serve --prefill …`" in done.stderr


def test_flag_wins_over_variable_over_file_over_default(tmp_path: Path):
    file = tmp_path / "r3.toml"
    file.write_text("port = 1\nthreads = 2\nqueue_size = 3\n")
    values = checked("--config", str(file), "--port", "31", env={"R3ROUTER_PORT": "21", "R3ROUTER_THREADS": "22"})
    assert (values["port"], values["threads"], values["queue_size"]) == ("31", "22", "3")
    assert values["prometheus_port"] == "29000"
    by_variable = checked(env={"R3ROUTER_CONFIG": str(file)})
    assert (by_variable["port"], by_variable["threads"]) == ("1", "2")


def test_workers_are_written_as_for_sglang_router():
    values = checked(
        *["--pd-disaggregation", "--prefill", "http://a:1", "8998", "--prefill", "b:2", "none", "--prefill", "c:3"],
        *["--decode", "http://d:4", "--decode", "E:5/", "--max-concurrent-requests", "-1", "--disable-retries"],
    )
    assert json.loads(values["prefill"]) == ["http://a:1 8998", "http://b:2", "http://c:3"]
    assert json.loads(values["decode"]) == ["http://d:4", "http://e:5"]
    assert (values["max_concurrent_requests"], values["disable_retries"]) == ("-1", "true")
    regular = checked("--worker-urls", "http://a:1", "http://b:2", "--port", "0")
    assert json.loads(regular["worker_urls"]) == ["http://a:1", "http://b:2"]


def test_a_switch_in_a_file_is_undone_by_its_flag(tmp_path: Path):
    file = tmp_path / "r3.toml"
    file.write_text("admission = false\ndisable_retries = true\n")
    values = checked("--config", str(file), "--admission", "--no-disable-retries")
    assert (values["admission"], values["disable_retries"]) == ("true", "false")
    assert checked("--no-admission")["admission"] == "false"


def test_words_that_vary_in_number_are_folded_into_repeated_flags():
    arities = {"--prefill": "url_port", "--worker-urls": "many", "--port": "one", "--dp-aware": "switch"}
    assert fold(["--prefill", "a", "1", "--prefill=b", "none", "--prefill", "c"], arities) == [
        *["--prefill", "a 1", "--prefill", "b none", "--prefill", "c"]
    ]
    assert fold(["--worker-urls", "a", "b", "--dp-aware", "x"], arities) == ["--worker-urls", "a", "--worker-urls", "b", "--dp-aware", "x"]
    assert fold(["--port", "-1", "--worker-urls", "--dp-aware"], arities) == ["--port", "-1", "--dp-aware"]
    assert fold(["--prefill"], arities) == ["--prefill"]
    assert fold(["--port", "--worker-urls", "a"], arities) == ["--port", "--worker-urls", "a"]
    assert fold(["--prefill", "a", "1", "2"], arities) == ["--prefill", "a 1", "2"]
    assert fold(["--", "--worker-urls", "a"], arities) == ["--", "--worker-urls", "a"]


def test_the_reference_pages_are_those_of_the_code():
    assert drifted(ROOT) == [], "run `make docs`"


def test_one_exception_tree():
    assert issubclass(core.SettingsError, core.R3RouterError)
    assert issubclass(core.RunError, core.R3RouterError)
    with pytest.raises(core.SettingsError, match="not the expected JSON"):
        core.check_settings("{")


def test_emulate_takes_every_option_of_the_core_and_explains_it():
    from r3router.cli.emulate import OPTIONS

    assert [name for name, _, _ in OPTIONS] == list(json.loads(core.emulate_options()))
    text = r3router("emulate", "--help").stdout
    for name, _, _ in OPTIONS:
        assert re.search(rf"^  --{name.replace('_', '-')} ", text, re.MULTILINE), name


def test_a_fleet_that_cannot_be_is_refused_before_anything_listens():
    done = r3router("emulate", "--decode-engines", "3")
    assert done.returncode == 2
    assert "--decode 4 ranks cannot be spread evenly over --decode-engines 3" in done.stderr


def test_a_port_that_is_taken_ends_with_1_and_names_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = r3router("emulate", "--port", str(port))
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert str(port) in done.stderr


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("emulate", "--scale", "0"),
        ("emulate", "--scale", "-1"),
        ("emulate", "--scale", "nan"),
        ("emulate", "--scale", "1001"),
        ("emulate", "--max-running", "0"),
        ("emulate", "--port", "70000"),
        ("emulate", "--port", "-1"),
        ("emulate", "--experts", "1"),
        ("emulate", "--layers", "0"),
        ("emulate", "--timeout", "inf"),
        ("emulate", "--threads", "x"),
        ("emulate", "--host", "localhost"),
        ("demo", "--scale", "nan"),
        ("demo", "--seconds", "0"),
        ("demo", "--per-gpu", "0"),
        ("demo", "--column", "z"),
    ],
)
def test_numbers_out_of_bounds_are_refused_by_the_options_name(command: str, option: str, value: str):
    done = r3router(command, option, value)
    assert done.returncode == 2
    assert option in done.stderr and value in done.stderr, done.stderr


def test_simulate_says_what_it_plays_while_it_plays(tmp_path: Path):
    text = "limit_s = 500\n[workload]\ncount = 5\nconcurrency = 2\n[[workload.classes]]\n"
    text += 'new_tokens = { kind = "fixed", tokens = 100 }\noutput = { kind = "fixed", tokens = 10 }\n'
    for name in ("one", "two"):
        (tmp_path / f"{name}.toml").write_text(text)
    done = r3router("simulate", str(tmp_path / "one.toml"), str(tmp_path / "two.toml"))
    assert done.returncode == 0, done.stderr
    told = done.stderr.splitlines()
    assert [line.split(":")[0] for line in told] == ["[1/2] one", "[1/2] one", "[2/2] two", "[2/2] two"]
    assert "completed 5, failed 0" in told[1] and "playing" in told[2]
    assert done.stdout.count("\n") == 3, "the table alone is the output"
    (tmp_path / "bad.toml").write_text(text.replace("500", "nan"))
    done = r3router("simulate", str(tmp_path / "bad.toml"))
    assert done.returncode == 2 and "limit_s" in done.stderr


def test_no_key_is_shown_by_config_show_wherever_it_was_set(tmp_path: Path) -> None:
    file = tmp_path / "r3.toml"
    file.write_text('worker_api_key = "k-file-1"\n', "utf-8")
    done = r3router("config", "show", "--config", str(file), "--api-key", "k-flag-2", env={"R3ROUTER_ADMIN_API_KEY": "k-env-3"})
    assert done.returncode == 0, done.stderr
    for name in ("api_key", "worker_api_key", "admin_api_key"):
        assert name in done.stdout, "it is set, and that is shown"
    for key in ("k-file-1", "k-flag-2", "k-env-3"):
        assert key not in done.stdout + done.stderr
