"""Rows of the live table: filtered, sorted, summed and written into a given number of columns. Pure; knows no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

Json = dict[str, Any]
Rank = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column: its heading, its width, what it shows, what it sorts by (largest first where `falls`)."""

    name: str
    head: str
    width: int
    show: Callable[[Rank], str]
    key: Callable[[Rank], Any]
    falls: bool = True
    left: bool = False


def number(value: Any) -> float:
    """For sorting: what is not known comes last."""
    return float(value) if isinstance(value, int | float) else float("-inf")


def count(value: Any) -> str:
    """1,234 as 1234, 12,345 as 12k; `-` when it is not known."""
    if not isinstance(value, int | float):
        return "-"
    return short(value) if abs(value) >= 10_000 else f"{value:.0f}"


def short(value: float) -> str:
    """Three figures and a unit: 97.4M, 5.13M, 812k."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.0f}{unit}" if scaled >= 99.95 else f"{scaled:.1f}{unit}"
    return f"{value:.0f}"


def seconds(value: Any) -> str:
    """0.25s, 2.3s, 45s, 12m, 3h20, 4d."""
    if not isinstance(value, int | float):
        return "-"
    if value < 1:
        return f"{value:.2f}s"
    if value < 10:
        return f"{value:.1f}s"
    if value < 100:
        return f"{value:.0f}s"
    minutes = value / 60
    if minutes < 100:
        return f"{minutes:.0f}m"
    hours = int(minutes / 60)
    return f"{hours}h{int(minutes) % 60:02d}" if hours < 48 else f"{hours // 24}d"


def used(rank: Rank, what: str) -> float | None:
    """The part in use, 0 to 1 (above 1 where others overfill it); `None` when nothing bounds it."""
    whole, free = rank.get(what), rank.get(f"{what}_free")
    if not isinstance(whole, int | float) or not isinstance(free, int | float) or whole <= 0:
        return None
    return (whole - free) / whole


def part(rank: Rank, what: str) -> str:
    """The part in use, as a percentage."""
    share = used(rank, what)
    return "-" if share is None else f"{share * 100:.0f}%"


def name(rank: Rank) -> str:
    """Address and rank, without the scheme."""
    bare = str(rank["url"]).removeprefix("http://").removeprefix("https://")
    if "ranks" in rank:
        return f"{bare} x{rank['ranks']}"
    return bare if rank["rank"] is None else f"{bare}@{rank['rank']}"


def natural(text: str) -> list[Any]:
    """For sorting names: numbers by their value."""
    parts: list[Any] = []
    digits = ""
    for letter in text + "\0":
        if letter.isdigit():
            digits += letter
            continue
        if digits:
            parts.append((1, int(digits), ""))
            digits = ""
        parts.append((0, 0, letter))
    return parts


def transfers(rank: Rank) -> str:
    """In transfer, of the window."""
    moving, window = rank["in_transfer"], rank["window"]
    return f"{count(moving)}/{count(window)}" if window is not None else count(moving)


# What needs a person comes first.
STATES: Final = {
    "failed": 0,
    "down": 1,
    "ejected": 2,
    "unhealthy": 3,
    "closed": 4,
    "pending": 5,
    "draining": 6,
    "drained": 7,
    "full": 8,
    "open": 9,
}
# In order of importance: a narrow terminal shows the first ones.
NAME: Final = Column("rank", "RANK", 21, name, lambda r: natural(name(r)), falls=False, left=True)
COLUMNS: Final = (
    NAME,
    Column("role", "R", 1, lambda r: str(r["role"])[:1].upper(), lambda r: str(r["role"]), falls=False, left=True),
    Column("state", "STATE", 8, lambda r: str(r["state"]), lambda r: STATES.get(str(r["state"]), 9), falls=False, left=True),
    Column("running", "RUN", 4, lambda r: count(r["running"]), lambda r: number(r["running"])),
    Column("transfer", "XFER/WIN", 8, transfers, lambda r: number(r["in_transfer"])),
    Column("queue", "QUEUE", 5, lambda r: count(r["waiting"]), lambda r: number(r["waiting"])),
    Column("rows", "ROWS", 4, lambda r: part(r, "rows"), lambda r: number(used(r, "rows"))),
    Column("mamba", "MAMB", 4, lambda r: part(r, "mamba"), lambda r: number(used(r, "mamba"))),
    Column("kv", "KV", 4, lambda r: part(r, "kv"), lambda r: number(used(r, "kv"))),
    Column("tau", "TAU", 5, lambda r: seconds(r["tau_s"]), lambda r: number(r["tau_s"])),
    Column("r3", "R3", 5, lambda r: short(r["r3_bytes"] or 0), lambda r: number(r["r3_bytes"])),
    Column("breaker", "BREAKER", 9, lambda r: str(r["breaker"]), lambda r: str(r["breaker"]), left=True),
    Column("open", "OPEN", 5, lambda r: count(r["open"]), lambda r: number(r["open"])),
    Column("foreign", "OTHERS", 6, lambda r: count(r["foreign"]), lambda r: number(r["foreign"])),
    Column("uncached", "UNCACHED", 8, lambda r: count(r["uncached"]), lambda r: number(r["uncached"])),
    Column("rate", "RATE", 6, lambda r: f"{r['rate']:.1f}" if r["rate"] else "-", lambda r: number(r["rate"])),
    Column("age", "AGE", 5, lambda r: seconds(r["report_age_s"]), lambda r: number(r["report_age_s"])),
    Column("version", "SGLANG", 12, lambda r: str(r["version"] or "-"), lambda r: str(r["version"] or ""), left=True),
    Column("why", "WHY", 40, lambda r: str(r["why"] or ""), lambda r: str(r["why"] or ""), left=True),
)
BY_NAME: Final = {column.name: column for column in COLUMNS}
SORTS: Final = ("rank", "state", "running", "transfer", "queue", "rows", "mamba", "kv", "tau", "r3")
ROLES: Final = ("", "prefill", "decode", "regular")


@dataclass(frozen=True)
class Choice:
    """What a person has chosen to see."""

    sort: str = "rank"
    turned: bool = False
    filter: str = ""
    role: str = ""
    by_worker: bool = False

    def next_sort(self, step: int) -> Choice:
        """The next column to sort by."""
        at = (SORTS.index(self.sort) + step) % len(SORTS)
        return replace(self, sort=SORTS[at], turned=False)

    def next_role(self, there: Iterable[str]) -> Choice:
        """The next role that is there, then all of them."""
        seen = set(there)
        known = ["", *(role for role in ROLES[1:] if role in seen)]
        at = known.index(self.role) if self.role in known else 0
        return replace(self, role=known[(at + 1) % len(known)])


def matches(rank: Rank, words: str) -> bool:
    """Whether every word is in what the line says."""
    said = f"{name(rank)} {rank['role']} {rank['state']} {rank['why'] or ''} {rank['version'] or ''}".lower()
    return all(word in said for word in words.lower().split())


def merged(ranks: Sequence[Rank]) -> list[Rank]:
    """One line a worker: sums, and the worst state."""
    workers: dict[str, list[Rank]] = {}
    for rank in ranks:
        workers.setdefault(rank["worker"], []).append(rank)
    return [one(group) for group in workers.values()]


def one(group: Sequence[Rank]) -> Rank:
    """Several ranks as one."""

    def add(field: str) -> Any:
        known = [r[field] for r in group if isinstance(r[field], int | float)]
        return sum(known) if known else None

    worst = min(group, key=lambda r: STATES.get(str(r["state"]), 9))
    sums = ("running", "waiting", "in_transfer", "open", "foreign", "window", "rows", "rows_free", "mamba", "mamba_free", "kv", "kv_free")
    summed = {field: add(field) for field in (*sums, "uncached", "rate")}
    known_tau = [r["tau_s"] for r in group if r["tau_s"] is not None]
    ages = [r["report_age_s"] for r in group if r["report_age_s"] is not None]
    return {
        **worst,
        **summed,
        "rank": None,
        "ranks": len(group),
        "tau_s": max(known_tau, default=None),
        "report_age_s": max(ages, default=None),
        # Counted an engine, and told with each of its ranks.
        "r3_bytes": max((r["r3_bytes"] or 0) for r in group),
    }


def chosen(ranks: Sequence[Rank], choice: Choice) -> list[Rank]:
    """The lines that a person wants to see, in their order."""
    lines = [r for r in ranks if not choice.role or r["role"] == choice.role]
    if choice.by_worker:
        lines = merged(lines)
    lines = [r for r in lines if matches(r, choice.filter)]
    column = BY_NAME[choice.sort]
    lines.sort(key=lambda r: natural(name(r)))
    lines.sort(key=column.key, reverse=column.falls != choice.turned)
    return lines


def fitting(width: int) -> list[Column]:
    """The columns that have room; the name takes what is left, up to 48."""
    columns: list[Column] = []
    taken = -1
    for column in COLUMNS:
        if taken + 1 + column.width > width and columns:
            break
        columns.append(column)
        taken += 1 + column.width
    spare = min(max(width - taken, 0), 48 - NAME.width)
    columns[0] = replace(NAME, width=NAME.width + spare)
    return columns


def cut(text: str, width: int, left: bool, keep: int = 0) -> str:
    """`text` in exactly so many columns; of one that is too long, the last `keep` letters stay."""
    if len(text) > width:
        return text[: width - 1 - keep] + "…" + text[len(text) - keep :]
    return text.ljust(width) if left else text.rjust(width)


def tail(column: Column, text: str) -> int:
    """Letters at the end that must be seen: of a name its rank, or how many ranks there are."""
    at = max(text.rfind("@"), text.rfind(" x"))
    return len(text) - at if column.name == "rank" and at >= 0 else 0


def heading(columns: Sequence[Column], choice: Choice) -> str:
    """The line of headings; the one that sorts has an arrow."""
    cells = []
    for column in columns:
        head = column.head
        if column.name == choice.sort:
            mark = "v" if column.falls != choice.turned else "^"
            head = (head + mark)[: column.width] if len(head) < column.width else head[: column.width - 1] + mark
            head = head if column.width > 1 else mark
        cells.append(cut(head, column.width, column.left))
    return " ".join(cells)


def line(rank: Rank, columns: Sequence[Column]) -> str:
    """One line of the table."""
    cells = ((column, column.show(rank)) for column in columns)
    return " ".join(cut(text, column.width, column.left, tail(column, text)) for column, text in cells)


def summary(table: Json, width: int) -> list[str]:
    """What stands above the table: the router, its queue and arena, and each role in one line."""
    requests, arena, findings = table["requests"], table["arena"], table["findings"]
    flags = [flag for flag, on in (("PAUSED", table["paused"]), ("DRAINING", table["draining"])) if on]
    wrong = [f"{n} {what}{'s' if n != 1 else ''}" for what in ("error", "warning") if (n := findings[f"{what}s"])]
    first = [
        f"r3router {table['version']}",
        f"up {seconds(table['uptime_s'])}",
        f"live {requests['live']}",
        f"queued {requests['queued']}" + (f" (oldest {seconds(requests['oldest_s'])})" if requests["queued"] else ""),
        f"R3 {short(arena['used'])}B of {short(arena['cap'])}B",
        *flags,
    ]
    lines = ["  ".join(first)[:width]]
    for role in ROLES[1:]:
        ranks = [r for r in table["ranks"] if r["role"] == role]
        if not ranks:
            continue
        total = one(ranks)
        good = sum(r["state"] in ("open", "full") for r in ranks)
        parts = [f"{role:<7} {good} of {len(ranks)} ranks", f"{count(total['running'])} running", f"{transfers(total)} in transfer"]
        parts += [f"{what} {part(total, what)}" for what in ("rows", "kv") if used(total, what) is not None]
        lines.append("  ".join(parts)[:width])
    if wrong:
        lines.append(f"{', '.join(wrong)}: press ! to read"[:width])
    return lines


def plain(table: Json, choice: Choice, width: int) -> str:
    """The whole table as text, for `--once`."""
    columns = fitting(width)
    body = [line(rank, columns).rstrip() for rank in chosen(table["ranks"], choice)]
    return "\n".join(
        [*(text.removesuffix(": press ! to read") for text in summary(table, width)), heading(columns, choice).rstrip(), *body]
    )
