"""The native core. Everything passes as JSON text, so that the binding has no logic of its own; see python/README.md."""

from typing import Final

__version__: Final[str]
BUILD: Final[str]

class R3RouterError(Exception): ...
class SettingsError(R3RouterError): ...
class RunError(R3RouterError): ...

def settings_schema() -> str: ...
def check_settings(sources: str) -> str: ...
def settings_page() -> str: ...
def bench_load(plan: str) -> str: ...
def bench_backend(plans: str) -> None: ...
def bench_relay(port: int, prefill: str, decode: str) -> None: ...

__all__ = [
    "BUILD",
    "R3RouterError",
    "RunError",
    "SettingsError",
    "__version__",
    "bench_backend",
    "bench_load",
    "bench_relay",
    "check_settings",
    "settings_page",
    "settings_schema",
]
