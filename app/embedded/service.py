"""Restart a program when it ends or fails."""

import math
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Protocol

from app.host.program import CommandError
from app.telemetry.logging import say

# The first restart is immediate; the delay doubles with each further one within a minute.
_MEMORY_SECONDS = 60.0
_FIRST_DELAY_SECONDS = 0.5
_MAX_DELAY_SECONDS = 10.0
_MAX_FAILED_STARTS = 5
_MAX_PAUSE_SECONDS = 3600.0
# A failed check is repeated sooner.
_CHECK_SECONDS, _RECHECK_SECONDS = 5.0, 1.0
_STARTING_CHECK_SECONDS = 0.3
_MAX_FAILED_CHECKS = 2


class ServiceError(Exception):
    """The program cannot be kept running; the message is one line for the user."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
        """The exit code of the gateway."""


class CheckError(CommandError):
    """A running program does not work; the message is part of a line for the user."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final
        """Whether to skip another check before the restart."""


class Program(Protocol):
    """The program of a service."""

    name: str
    ready_seconds: float
    """Maximum time until it passes its first check."""

    def spawn(self) -> object:
        """Start the program without waiting for it; raise `CommandError` if that is not possible."""

    def poll(self) -> int | None:
        """Return the exit code; None while the program runs."""

    def check(self) -> None:
        """Check that the program works, and raise `CheckError` if not. This may take seconds; it is called in a thread."""

    def kill(self) -> None:
        """Kill the program and its children."""


class Service:
    """Watches a program without blocking."""

    def __init__(self, program: Program, *, is_ready: bool = False, gives_up: bool = True) -> None:
        """Watch a program, which runs already if `is_ready`; unless it `gives_up`, it is started however often that fails."""
        self.program = program
        self.is_ready = is_ready
        """Whether the program has passed a check since its start."""
        self._gives_up = gives_up
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="check")
        self._check: Future[None] | None = None
        self._next_check = monotonic()
        self._failed_checks = 0
        self._was_ready = is_ready
        self._failed_starts = 0
        self._ends: list[float] = []
        self._told = ""
        self._defect, self._noted_at = "", 0.0
        """What others have found since the last restart, and when."""
        self._defect_at, self._pause = -math.inf, _MEMORY_SECONDS
        """When a defect last led to a restart, and for how long none does then."""
        self._start_at: float | None = None if is_ready else monotonic()
        self._started_at = monotonic()

    def tick(self) -> None:
        """Start, check or restart the program, several times a second; raise ServiceError if it fails for good."""
        if self._start_at is not None:
            if monotonic() >= self._start_at:
                self._spawn()
            return
        code = self.program.poll()
        if code is not None:
            self._restart(f"exited with code {code}", code or 1)
            return
        if self._defect and self.is_ready and monotonic() >= self._defect_at + self._pause:
            # The pause is a minute, and doubles, up to an hour, with each restart that did not help for a minute.
            has_helped = self._noted_at >= self._defect_at + _MEMORY_SECONDS
            self._pause = _MEMORY_SECONDS if has_helped else min(2 * self._pause, _MAX_PAUSE_SECONDS)
            self._defect_at = monotonic()
            self._restart(f"does not work ({self._defect})", 1)
            return
        if self._check is None:
            if monotonic() >= self._next_check:
                self._check = self._checker.submit(self.program.check)
        elif self._check.done():
            error = self._check.exception()
            self._check = None
            if error is not None and not isinstance(error, CheckError):
                raise error
            self._note_check(error)

    def note_defect(self, reason: str) -> None:
        """Restart the program because of what others have found, after a pause, in which the rest of it works."""
        if self._start_at is None and not self._defect:  # otherwise it is that of a process which has ended
            self._defect, self._noted_at = reason, monotonic()

    def close(self) -> None:
        """Stop watching the program."""
        self._checker.shutdown(wait=False, cancel_futures=True)

    def _spawn(self) -> None:
        self._start_at, self._check = None, None
        self._failed_checks = 0
        self._started_at = self._next_check = monotonic()
        try:
            self.program.spawn()
        except CommandError as error:
            self._restart(f"could not be started ({error})", 1)

    def _note_check(self, error: CheckError | None) -> None:
        if error is None:
            self._failed_checks = 0
            self._next_check = monotonic() + _CHECK_SECONDS
            if not self.is_ready:
                self.is_ready = self._was_ready = True
                self._failed_starts = 0
            return
        if not self.is_ready:
            self._next_check = monotonic() + _STARTING_CHECK_SECONDS
            if error.is_final:
                self._restart(f"does not start ({error})", 1)
            elif monotonic() - self._started_at > self.program.ready_seconds:
                self._restart(f"was not ready after {self.program.ready_seconds:g} s ({error})", 1)
            return
        self._failed_checks += 1
        self._next_check = monotonic() + _RECHECK_SECONDS
        if error.is_final or self._failed_checks >= _MAX_FAILED_CHECKS:
            self._restart(f"does not work ({error})", 1)

    def _restart(self, reason: str, code: int) -> None:
        now = monotonic()
        self.program.kill()
        is_known, self._told = not (self.is_ready or self._gives_up) and reason == self._told, reason
        if not self.is_ready:
            self._failed_starts += 1
            if self._gives_up and (not self._was_ready or self._failed_starts >= _MAX_FAILED_STARTS):
                raise ServiceError(f"{self.program.name} {reason}", code)
        self.is_ready, self._defect = False, ""
        self._ends = [*(end for end in self._ends if now - end < _MEMORY_SECONDS), now]
        again = len(self._ends) - 2
        delay = 0.0 if again < 0 else min(_FIRST_DELAY_SECONDS * 2**again, _MAX_DELAY_SECONDS)
        self._start_at = now + delay
        if not is_known:  # what goes on for days is told once
            say(f"{self.program.name} {reason}; restarting it" + (f" in {delay:g} s" if delay else ""))
