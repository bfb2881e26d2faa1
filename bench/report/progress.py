"""Progress output on a terminal; nothing is written to a file."""

import sys
from time import monotonic

from bench.load.driver import Progress

_DRAW_SECONDS = 0.25


def say(message: str = "") -> None:
    """Show a message until the next one; without one, clear the line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)


def watch(label: str, seconds: float) -> Progress:
    """Return what shows the progress of a load of so many seconds, a few times a second."""
    drawn = 0.0

    def show(elapsed: float, requests: int) -> None:
        nonlocal drawn
        if monotonic() - drawn > _DRAW_SECONDS:
            drawn = monotonic()
            say(f"{label}: {min(elapsed, seconds):.0f} of {seconds:g} s, {requests:,} answers")

    return show
