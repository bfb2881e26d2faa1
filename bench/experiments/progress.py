"""Progress output on a terminal; nothing is written to a file."""

import sys
from collections.abc import Callable
from time import monotonic
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench.load.driver import Progress as Report
from bench.load.outcome import Outcome

_DRAW_SECONDS = 0.25


def say(message: str = "") -> None:
    """Show a message until the next one; without one, clear the line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)


def with_bar(label: str, seconds: float, measure: Callable[[Report], Outcome]) -> Outcome:
    """Draw a bar while `measure` runs and reports its progress."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return measure(lambda _seconds, _requests: None)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[count]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=seconds, count="")

        def report(elapsed: float, requests: int) -> None:
            text = f"{requests} answers, {requests / elapsed:.0f}/s" if elapsed else ""
            progress.update(task, completed=min(elapsed, seconds), count=text)

        return measure(report)


class BudgetBar:
    """A bar for a time budget, with a line for each result above it; a file gets only the lines."""

    def __init__(self, seconds: float) -> None:
        """Start a budget of `seconds`. The bar is drawn without a thread, so that processes can be forked."""
        console = Console(stderr=True, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, auto_refresh=False)
        self._task = self._progress.add_task("", total=seconds)
        self._start = self._drawn = monotonic()
        self._seconds = seconds

    def __enter__(self) -> Self:
        if self._progress.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def doing(self, text: str) -> None:
        """Show the current activity."""
        self._progress.update(self._task, description=text)
        self._draw()

    def note(self, line: str) -> None:
        """Print a line."""
        self._progress.console.print(line, markup=False, highlight=False)

    def tick(self, _elapsed: float, _requests: int) -> None:
        """Update the bar, at most a few times a second."""
        if monotonic() - self._drawn > _DRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        self._drawn = monotonic()
        self._progress.update(self._task, completed=min(self._drawn - self._start, self._seconds))
        if self._progress.console.is_terminal:
            self._progress.refresh()
