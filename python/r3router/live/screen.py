"""The terminal of `r3router top`: draws the table, reads keys, drains and undrains. The table itself is in `table`."""

from __future__ import annotations

import contextlib
import curses
import queue
import textwrap
import threading
import time
from dataclasses import replace
from typing import Any, Final

from r3router.live.admin import Admin, AdminError
from r3router.live.table import Choice, Json, chosen, fitting, heading, line, name, summary

HELP: Final = (
    "up down PgUp PgDn Home End   move",
    "s / S                        sort by the next / last column",
    "r                            turn the order",
    "f                            next role: all, prefill, decode, regular",
    "/                            filter by words; Esc takes it away",
    "w                            one line a worker, or a rank",
    "d / u                        drain / undrain the line's rank",
    "D / U                        drain / undrain its whole worker",
    "!                            what is wrong with the fleet",
    "q                            leave",
    "",
    "RUN running, XFER in transfer, WIN the computed window, QUEUE waits at the engine,",
    "ROWS MAMB KV parts in use, TAU unqueued time to delivery, R3 payload bytes to leave.",
)
FOOT: Final = "q quit  s sort  r turn  f role  / filter  w worker  d drain  u undrain  ! findings  ? help"
ESC: Final = 27
KEY_WAIT_MS: Final = 100
# A state that a person must look at is red, one that somebody wanted is yellow.
RED: Final = {"failed", "down", "ejected", "unhealthy"}
YELLOW: Final = {"closed", "pending", "draining", "drained"}


class Poller(threading.Thread):
    """Asks for the table again and again; the newest answer or the reason for none is in `latest`."""

    def __init__(self, admin: Admin, interval_s: float) -> None:
        super().__init__(daemon=True)
        self._admin = admin
        self._interval_s = interval_s
        self._now = threading.Event()
        self.latest: queue.SimpleQueue[Json | AdminError] = queue.SimpleQueue()

    def ask_now(self) -> None:
        """Does not wait for the interval to end."""
        self._now.set()

    def run(self) -> None:
        while True:
            try:
                self.latest.put(self._admin.get("/admin/ranks"))
            except AdminError as error:
                self.latest.put(error)
            self._now.wait(self._interval_s)
            self._now.clear()


class Screen:
    """What is shown, and what keys do to it."""

    def __init__(self, window: curses.window, admin: Admin, interval_s: float, choice: Choice) -> None:
        self.window = window
        self.admin = admin
        self.choice = choice
        self.table: Json | None = None
        self.problem = ""
        self.said = ""
        self.said_at = 0.0
        self.selected: str | None = None
        self.top = 0
        self.page = 10
        self.overlay: list[str] = []
        self.typing: str | None = None
        self.asking: tuple[str, Json, str] | None = None
        self.poller = Poller(admin, interval_s)

    def run(self) -> None:
        """Until a person leaves."""
        with contextlib.suppress(curses.error):
            curses.curs_set(0)
        self.colours()
        self.window.timeout(KEY_WAIT_MS)
        self.poller.start()
        while True:
            self.take()
            self.draw()
            key = self.window.getch()
            if key != -1 and not self.pressed(key):
                return

    def colours(self) -> None:
        """Where the terminal has them."""
        self.red = self.yellow = 0
        with contextlib.suppress(curses.error):
            curses.start_color()
            curses.use_default_colors()
            curses.init_pair(1, curses.COLOR_RED, -1)
            curses.init_pair(2, curses.COLOR_YELLOW, -1)
            self.red, self.yellow = curses.color_pair(1), curses.color_pair(2)

    def take(self) -> None:
        """The newest answer."""
        while not self.poller.latest.empty():
            answer = self.poller.latest.get()
            if isinstance(answer, AdminError):
                self.problem = str(answer)
            else:
                self.table, self.problem = answer, ""

    def lines(self) -> list[Json]:
        """The ranks that are shown, in order."""
        return chosen(self.table["ranks"], self.choice) if self.table else []

    def place(self, lines: list[Json]) -> int:
        """Where the selected line is now: it is followed when the order changes."""
        for at, rank in enumerate(lines):
            if name(rank) == self.selected:
                return at
        return 0

    # --- drawing --------------------------------------------------------------------------------------------------

    def put(self, y: int, text: str, style: int = 0) -> None:
        """One line, cut to the terminal. The last cell of the last line cannot be written."""
        height, width = self.window.getmaxyx()
        if 0 <= y < height:
            with contextlib.suppress(curses.error):
                self.window.addnstr(y, 0, text.ljust(width), width - (y == height - 1), style)

    def draw(self) -> None:
        """Everything anew; curses sends what differs."""
        self.window.erase()
        height, width = self.window.getmaxyx()
        above = summary(self.table, width) if self.table else ["r3router top: waiting for an answer"]
        for y, text in enumerate(above):
            self.put(y, text, curses.A_BOLD if y == 0 else 0)
        columns = fitting(width)
        y = len(above)
        self.put(y, heading(columns, self.choice), curses.A_REVERSE)
        lines = self.lines()
        at = self.place(lines)
        self.page = max(height - y - 2, 1)
        self.top = max(min(self.top, at, max(len(lines) - self.page, 0)), at - self.page + 1)
        for row, rank in enumerate(lines[self.top : self.top + self.page]):
            style = self.red if rank["state"] in RED else self.yellow if rank["state"] in YELLOW else 0
            here = curses.A_STANDOUT if self.top + row == at else 0
            self.put(y + 1 + row, line(rank, columns), style | here)
        if lines and self.selected is None:
            self.selected = name(lines[0])
        self.put(height - 1, self.foot(lines), curses.A_REVERSE if self.asking or self.typing is not None else curses.A_DIM)
        if self.overlay:
            self.draw_overlay(height, width)
        self.window.refresh()

    def foot(self, lines: list[Json]) -> str:
        """The last line: a question, what is typed, what was said, or the keys."""
        if self.asking:
            return f"{self.asking[2]}? y / n"
        if self.typing is not None:
            return f"filter: {self.typing}_"
        if self.problem:
            return self.problem
        if self.said and time.monotonic() - self.said_at < 5:
            return self.said
        shown = [f"filter: {self.choice.filter}"] if self.choice.filter else []
        shown += [f"{self.choice.role} only"] if self.choice.role else []
        if shown and self.table:
            return f"{', '.join(shown)} ({len(lines)} lines)  Esc shows all  {FOOT}"
        return FOOT

    def draw_overlay(self, height: int, width: int) -> None:
        """A page over the table; any key closes it."""
        for y in range(height):
            self.put(y, self.overlay[y] if y < len(self.overlay) and y < height - 1 else "")
        self.put(height - 1, "any key goes back", curses.A_REVERSE)

    # --- keys -----------------------------------------------------------------------------------------------------

    def pressed(self, key: int) -> bool:
        """What a key does; false to leave."""
        if self.overlay:
            self.overlay = []
        elif self.asking:
            path, body, what = self.asking
            self.asking = None
            if key in (ord("y"), ord("Y")):
                self.act(path, body, what)
        elif self.typing is not None:
            self.typed(self.typing, key)
        elif key in (ord("q"), ord("Q")):
            return False
        elif key != curses.KEY_RESIZE and not self.moved(key):
            self.ordered(key)
        return True

    def typed(self, text: str, key: int) -> None:
        """The filter, letter by letter; it works while it is typed."""
        if key == ESC:
            self.typing, self.choice = None, replace(self.choice, filter="")
            return
        if key in (curses.KEY_ENTER, 10, 13):
            self.typing = None
            return
        if key in (curses.KEY_BACKSPACE, 8, 127):
            text = text[:-1]
        elif 32 <= key < 127:
            text += chr(key)
        self.typing, self.choice, self.selected = text, replace(self.choice, filter=text), None

    def moved(self, key: int) -> bool:
        """Whether the key moves the selection."""
        steps = {
            curses.KEY_UP: -1,
            ord("k"): -1,
            curses.KEY_DOWN: 1,
            ord("j"): 1,
            curses.KEY_PPAGE: -self.page,
            curses.KEY_NPAGE: self.page,
            curses.KEY_HOME: -(1 << 20),
            curses.KEY_END: 1 << 20,
        }
        if key not in steps:
            return False
        lines = self.lines()
        if lines:
            at = min(max(self.place(lines) + steps[key], 0), len(lines) - 1)
            self.selected = name(lines[at])
        return True

    def ordered(self, key: int) -> None:
        """Keys that choose, ask or show."""
        letter = chr(key) if 0 < key < 256 else ""
        before = self.choice
        if letter in ("s", "S"):
            self.choice = self.choice.next_sort(1 if letter == "s" else -1)
        elif letter == "r":
            self.choice = replace(self.choice, turned=not self.choice.turned)
        elif letter == "f" and self.table:
            self.choice = self.choice.next_role(r["role"] for r in self.table["ranks"])
        elif letter == "w":
            self.choice = replace(self.choice, by_worker=not self.choice.by_worker)
        elif letter == "/":
            self.typing = self.choice.filter
        elif key == ESC:
            self.choice = replace(self.choice, filter="", role="")
        elif letter in ("d", "D", "u", "U"):
            self.ask(letter)
        elif letter == "!":
            self.overlay = self.findings()
        elif letter in ("?", "h"):
            self.overlay = list(HELP)
        if self.choice != before:
            # Another order is chosen to see what comes first in it.
            self.selected = None

    def ask(self, letter: str) -> None:
        """Asks before it changes something."""
        lines = self.lines()
        if not lines:
            return
        rank = lines[self.place(lines)]
        verb = "drain" if letter in ("d", "D") else "undrain"
        whole = letter in ("D", "U") or rank["rank"] is None
        body: Json = {"worker": rank["worker"]} if whole else {"worker": rank["worker"], "rank": rank["rank"]}
        bare = str(rank["url"]).removeprefix("http://")
        what = f"{verb} {'all ranks of ' + bare if whole else name(rank)}"
        self.asking = (f"/admin/{verb}", body, what)

    def act(self, path: str, body: Json, what: str) -> None:
        """Does what was asked and says how it went."""
        try:
            answer = self.admin.post(path, body)
            still = f", {answer['open']} still open" if answer["state"] == "draining" else ""
            self.said = f"{what}: {answer['state']}{still}"
        except AdminError as error:
            self.said = f"{what}: {error}"
        self.said_at = time.monotonic()
        self.poller.ask_now()

    def findings(self) -> list[str]:
        """What is wrong, for reading."""
        try:
            found: list[Any] = self.admin.get("/admin/findings")["findings"]
        except AdminError as error:
            return [str(error)]
        if not found:
            return ["Nothing is wrong, as far as the engines tell. `r3router check` looks at more."]
        width = max(self.window.getmaxyx()[1] - 4, 20)
        lines = []
        for finding in found:
            lines.append(f"{finding['number']}. {finding['severity']} {finding['code']} {', '.join(finding['workers'][:2])}")
            for text in (finding["what"], f"Change: {finding['advice']}."):
                lines += ["   " + part for part in textwrap.wrap(text, width)]
        return lines


def show(admin: Admin, interval_s: float, choice: Choice) -> None:
    """Takes the terminal until a person leaves.

    Raises:
        curses.error: the terminal is none, or is not known.
    """
    curses.wrapper(lambda window: Screen(window, admin, interval_s, choice).run())
