"""The NIXL package, under whichever of its names it is installed. It needs no torch."""

from __future__ import annotations

import importlib
from typing import Any, Final

NAMES: Final = ("nixl", "nixl_cu12", "nixl_cu13")
"""The meta package, and the packages for one CUDA release that it chooses from; these also work alone, and without a GPU."""


def load() -> Any:
    """The module with `nixl_agent` and `nixl_agent_config`.

    Raises:
        RuntimeError: none of them can be imported; why each cannot.
    """
    why = []
    for name in NAMES:
        try:
            return importlib.import_module(f"{name}._api")
        except Exception as error:  # noqa: PERF203 - a broken native library can raise anything
            why.append(f"{name}: {error}")
    raise RuntimeError("; ".join(why))
