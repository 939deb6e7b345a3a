"""Numbers with bounds, as the core declares them."""

import json
import math
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    Type = click.ParamType[Any]
else:
    # Older releases of click have no type arguments here.
    Type = click.ParamType


class Bounded(Type):
    """A finite number from `low` to `high`."""

    def __init__(self, kind: type[int] | type[float], low: float, high: float) -> None:
        self.kind, self.low, self.high = kind, low, high
        self.name = "integer" if kind is int else "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; a usage error with the option's name otherwise."""
        try:
            number = self.kind(value)
        except ValueError:
            self.fail(f"{value!r} is not {'a whole number' if self.kind is int else 'a number'}.", param, ctx)
        if not math.isfinite(number) or not self.low <= number <= self.high:
            self.fail(f"{value} is not between {self.low:g} and {self.high:g}.", param, ctx)
        return number


def bounded(bounds: str, name: str, kind: Any) -> Any:
    """The type of an option: with the core's bounds where it has some."""
    declared: dict[str, tuple[float, float]] = json.loads(bounds)
    return Bounded(kind, *declared[name]) if name in declared and kind in (int, float) else kind
