"""Flags with a varying number of words, which click does not have: `--prefill URL [PORT]` and `--worker-urls URL URL`."""

from collections.abc import Mapping, Sequence
from typing import Literal

Arity = Literal["switch", "one", "many", "url_port"]


def fold(args: Sequence[str], arities: Mapping[str, Arity]) -> list[str]:
    """Returns `args` in which every such flag has one value and is repeated instead.

    `--worker-urls a b` becomes `--worker-urls a --worker-urls b`, `--prefill u 1` becomes `--prefill "u 1"`. A word belongs to a
    flag until the next one that begins with `-`; `--prefill` takes two at most. A list without words is an empty one and says nothing, as
    in `--worker-urls $WORKERS` without workers.
    """
    out: list[str] = []
    at = 0
    while at < len(args):
        word = args[at]
        at += 1
        if word == "--":
            out += args[at - 1 :]
            break
        flag, equals, first = word.partition("=")
        arity = arities.get(flag, "one")
        if arity not in ("many", "url_port"):
            out.append(word)
            # The value of a flag with one word may itself look like a flag, such as -1.
            if arity == "one" and flag in arities and not equals and at < len(args):
                out.append(args[at])
                at += 1
            continue
        values = [first] if equals else []
        limit = 2 if arity == "url_port" else len(args)
        while at < len(args) and len(values) < limit and not args[at].startswith("-"):
            values.append(args[at])
            at += 1
        if arity == "url_port":
            out += [flag, " ".join(values)] if values else [flag]
        else:
            for value in values:
                out += [flag, value]
    return out
