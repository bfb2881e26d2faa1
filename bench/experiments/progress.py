"""What a person at a terminal sees while a measurement runs; a file gets none of it."""

import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench.load.driver import Progress as Report
from bench.load.outcome import Outcome


def say(message: str = "") -> None:
    """Show a message until the next one; without one, clear the line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)


def with_bar(label: str, seconds: float, measure: Callable[[Report], Outcome]) -> Outcome:
    """Draw a bar while `measure` runs, which reports its progress."""
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
