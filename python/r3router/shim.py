"""A package `sglang_router` for frameworks that import it: `python -m r3router.shim install|remove|status`.

It is installed only when asked for, never over another `sglang_router`, and as a distribution of its own, so that `pip install
sglang-router` and `pip uninstall sglang-router` take it away again.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import sys
import sysconfig
from pathlib import Path
from typing import Final

from r3router import __version__
from r3router.output import may_close

VERSION: Final = f"0.3.2+r3router.{__version__}"
"""Of the surface that it provides. Frameworks compare it with 0.3.0 and older."""
PACKAGE: Final = "sglang_router"
INFO: Final = f"{PACKAGE}-{VERSION}.dist-info"
MARK: Final = "# Written by `python -m r3router.shim install`; `python -m r3router.shim remove` takes it away."

FILES: Final = {
    f"{PACKAGE}/__init__.py": f'''{MARK}
"""The names of sglang-router, provided by r3router."""

from sglang_router.version import __version__

__all__ = ["__version__"]
''',
    f"{PACKAGE}/version.py": f"{MARK}\n__version__ = {VERSION!r}\n",
    f"{PACKAGE}/router_args.py": f"""{MARK}
from r3router.launch_router import RouterArgs

__all__ = ["RouterArgs"]
""",
    f"{PACKAGE}/launch_router.py": f"""{MARK}
from r3router.launch_router import RouterArgs, launch_router, main, parse_router_args

__all__ = ["RouterArgs", "launch_router", "main", "parse_router_args"]

if __name__ == "__main__":
    main()
""",
    f"{INFO}/METADATA": f"""Metadata-Version: 2.1
Name: sglang-router
Version: {VERSION}
Summary: The names of sglang-router, provided by r3router
Requires-Dist: r3router
""",
    f"{INFO}/INSTALLER": "r3router\n",
    f"{INFO}/top_level.txt": f"{PACKAGE}\n",
}


class Taken(Exception):
    """Another `sglang_router` is there."""


def others(folder: Path) -> list[Path]:
    """What stands in `folder`, or where Python looks for modules, and is another `sglang_router`."""
    found = []
    for place in dict.fromkeys([folder, *(Path(entry or ".") for entry in sys.path)]):
        if not place.is_dir():
            continue
        found += [path for path in (place / PACKAGE, place / f"{PACKAGE}.py") if path.exists() and not is_ours(path)]
        found += [path for path in place.glob(f"{PACKAGE}-*.dist-info") if path.name != INFO and not is_ours(path)]
    return found


def is_ours(path: Path) -> bool:
    """Whether a package or a dist-info was written by this module, of whatever version."""
    if path.name.endswith(".dist-info"):
        installer = path / "INSTALLER"
        return installer.is_file() and installer.read_text("utf-8").strip() == "r3router"
    init = path / "__init__.py"
    return init.is_file() and init.read_text("utf-8").startswith(MARK)


def install(folder: Path) -> list[Path]:
    """Writes the package into `folder`; raises `Taken` when another is there or would be hidden."""
    if there := others(folder):
        raise Taken(
            f"{there[0]} is another sglang_router; uninstall it first (pip uninstall sglang-router), or use an environment without it"
        )
    remove(folder)
    record = []
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = text.encode()
        path.write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}")
    own = folder / INFO / "RECORD"
    own.write_text("\n".join([*record, f"{INFO}/RECORD,,", ""]), "utf-8")
    return [folder / PACKAGE, folder / INFO]


def remove(folder: Path) -> list[Path]:
    """Takes away what `install` wrote, of whatever version; everything else stays. Returns the folders that are gone."""
    gone = []
    for path in (folder / PACKAGE, *folder.glob(f"{PACKAGE}-*.dist-info")):
        if not path.is_dir() or not is_ours(path):
            continue
        names = {Path(name).name for name in FILES} | {"RECORD", "REQUESTED"}
        for file in [*path.glob("__pycache__/*.pyc"), *(path / name for name in names)]:
            file.unlink(missing_ok=True)
        for left in (path / "__pycache__", path):
            # A file that somebody else put there keeps its folder.
            if left.is_dir() and not any(left.iterdir()):
                left.rmdir()
        gone.append(path)
    return gone


def main() -> None:
    """Exit status 1 when another `sglang_router` is there, or when there was nothing to remove."""
    with may_close():
        run()


def run() -> None:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m r3router.shim", description="Provide the package sglang_router with r3router's names.")
    parser.add_argument("what", choices=["install", "remove", "status"])
    default = Path(sysconfig.get_path("purelib"))
    parser.add_argument("--folder", type=Path, default=default, help=f"where packages lie (default: {default})")
    args = parser.parse_args()
    folder: Path = args.folder
    if args.what == "install":
        try:
            written = install(folder)
        except Taken as error:
            sys.exit(f"Error: {error}")
        print(f"installed sglang_router {VERSION}: {', '.join(map(str, written))}")
    elif args.what == "remove":
        gone = remove(folder)
        print(f"removed: {', '.join(map(str, gone))}" if gone else f"there is no sglang_router of r3router in {folder}")
        sys.exit(0 if gone else 1)
    else:
        ours = (folder / PACKAGE).is_dir() and is_ours(folder / PACKAGE)
        print(
            "sglang_router is r3router's"
            if ours
            else f"sglang_router is {others(folder)[0]}"
            if others(folder)
            else "there is no sglang_router"
        )


if __name__ == "__main__":
    main()
