"""The Dockerfile, without Docker: what it copies is there, what it leaves behind, and who runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.tools import DEPLOY, ROOT

TEXT = (DEPLOY / "Dockerfile").read_text("utf-8")


def stages() -> dict[str, tuple[str, list[str]]]:
    """Stage -> what it is built on, and its instructions, lines joined."""
    found: dict[str, tuple[str, list[str]]] = {}
    for line in re.sub(r"\\\n\s*", "", TEXT).splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = (base, [])
        elif found and word.isupper():
            found[list(found)[-1]][1].append(line)
    return found


def test_what_is_copied_is_there_and_not_ignored():
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    wanted = {line[1:] for line in ignored if line.startswith("!")}
    copied = {source for line in stages()["build"][1] if line.startswith("COPY ") for source in line.split()[1:-1]}
    assert ignored[1] == "*"
    assert copied == wanted
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_the_toolchain_is_the_repositorys():
    channel = re.search(r'channel = "(.+)"', (ROOT / "rust-toolchain.toml").read_text("utf-8"))
    assert channel
    assert stages()["build"][0] == f"rust:{channel[1]}-slim-${{DEBIAN}}"


def test_a_build_of_the_wheel_has_every_workspace_member_and_file_that_it_names():
    members = re.search(r"members = \[(.*)\]", (ROOT / "Cargo.toml").read_text("utf-8"))
    assert members
    assert all((ROOT / m / "Cargo.toml").is_file() and m.startswith("rust/") for m in re.findall(r'"(.+?)"', members[1]))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    for key in ("manifest-path", "python-source", "readme"):
        path = re.search(rf'^{key} = "(.+)"', project, re.MULTILINE)
        assert path
        assert path[1].split("/")[0] in TEXT


@pytest.mark.parametrize("name", ["agent", "router"])
def test_an_image_runs_as_nobody_in_particular_and_has_no_tools_that_build(name: str):
    all_, lines, at = stages(), [], name
    while at in all_:
        at, own = all_[at]
        lines = own + lines
    assert at.startswith("python:")
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 10001:10001"]
    after = lines[lines.index(users[0]) :]
    assert not [line for line in after if line.startswith("RUN ")]
    assert [line for line in lines if line.startswith("ENTRYPOINT")] == ['ENTRYPOINT ["python", "-m", "r3router"]']
    assert "apt-get" not in " ".join(lines)


def test_the_last_stage_is_the_router():
    assert list(stages())[-1] == "router"


def test_no_stage_names_a_processor():
    assert not re.search(r"x86_64|amd64|aarch64|arm64", "\n".join(line for _, lines in stages().values() for line in lines))


def test_pods_use_the_user_and_the_paths_of_the_image():
    for path in [*DEPLOY.rglob("deployment.yaml"), *DEPLOY.rglob("router.yaml")]:
        assert "runAsUser: 10001" in path.read_text("utf-8"), path
    for path in [DEPLOY / "rbg" / "fleet.yaml", *(DEPLOY / "lws").glob("*e*ill.yaml"), DEPLOY / "lws" / "decode.yaml"]:
        assert "/opt/r3router/plugin/." in Path(path).read_text("utf-8"), path
    assert "--target /opt/r3router/plugin" in TEXT
