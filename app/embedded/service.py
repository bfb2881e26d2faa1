"""A program that is started again when it ends or fails."""

import math
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Protocol

from app.telemetry.logging import say

# The first restart comes at once, and each one after it within a minute later than the one before.
_MEMORY_SECONDS = 60.0
_FIRST_DELAY_SECONDS = 0.5
_MAX_DELAY_SECONDS = 10.0
_MAX_FAILED_STARTS = 5
# A check that fails is repeated sooner.
_CHECK_SECONDS, _RECHECK_SECONDS = 5.0, 1.0
_STARTING_CHECK_SECONDS = 0.3
_MAX_FAILED_CHECKS = 2


class ServiceError(Exception):
    """The program cannot be kept running; the message is one line for the user."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
        """The exit code of the whole service."""


class StartError(Exception):
    """A program cannot be started; the message is one line for the user."""


class CheckError(Exception):
    """A program that runs does not work; the message is a part of a line for the user."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final
        """Whether another check would prove nothing."""


class Program(Protocol):
    """What a service runs."""

    name: str
    """For the user."""
    ready_seconds: float
    """How long it may take to pass its first check."""
    is_always_checked: bool
    """Whether it is checked again after it has passed."""

    def spawn(self) -> object:
        """Start it, without waiting for it.

        Raises:
            StartError: It cannot be started.
        """

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""

    def check(self) -> None:
        """Find out whether it works; may take seconds, and is called from a thread.

        Raises:
            CheckError: It does not.
        """

    def kill(self) -> None:
        """End it, and all that it has started, at once."""


class Service:
    """Watches a program without ever waiting for it."""

    def __init__(self, program: Program, *, is_ready: bool = False) -> None:
        """Watch a program, which is running already if it `is_ready`, and otherwise is started by the first `tick`."""
        self.program = program
        self.is_ready = is_ready
        """Whether the program has passed its check since it was started."""
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="check")
        self._check: Future[None] | None = None
        self._next_check = monotonic()
        self._failed_checks = 0
        self._was_ready = is_ready
        self._failed_starts = 0
        self._ends: list[float] = []
        self._defect_at = -math.inf
        self._start_at: float | None = None if is_ready else monotonic()
        self._started_at = monotonic()

    def tick(self) -> None:
        """Start the program, or look after it; to be called several times a second.

        Raises:
            ServiceError: It ended before it has ever worked, or does not work after several starts.
        """
        if self._start_at is not None:
            if monotonic() >= self._start_at:
                self._spawn()
            return
        code = self.program.poll()
        if code is not None:
            self._restart(f"exited with code {code}", code or 1)
            return
        if self._check is None:
            if monotonic() >= self._next_check and (self.program.is_always_checked or not self.is_ready):
                self._check = self._checker.submit(self.program.check)
        elif self._check.done():
            error = self._check.exception()
            self._check = None
            if error is not None and not isinstance(error, CheckError):
                raise error
            self._note_check(error)

    def note_defect(self, reason: str) -> None:
        """Restart the program because of what others have found, but once a minute at most: meanwhile the rest of it works."""
        if self.is_ready and monotonic() - self._defect_at >= _MEMORY_SECONDS:
            self._defect_at = monotonic()
            self._restart(f"does not work ({reason})", 1)

    def close(self) -> None:
        """Do not watch it any more."""
        self._checker.shutdown(wait=False, cancel_futures=True)

    def _spawn(self) -> None:
        self._start_at, self._check = None, None
        self._failed_checks = 0
        self._started_at = self._next_check = monotonic()
        try:
            self.program.spawn()
        except StartError as error:
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
            if monotonic() - self._started_at > self.program.ready_seconds:
                self._restart(f"was not ready after {self.program.ready_seconds:g} s ({error})", 1)
            return
        self._failed_checks += 1
        self._next_check = monotonic() + _RECHECK_SECONDS
        if error.is_final or self._failed_checks >= _MAX_FAILED_CHECKS:
            self._restart(f"does not work ({error})", 1)

    def _restart(self, reason: str, code: int) -> None:
        """End what is left of the program, and let it start again after a while."""
        now = monotonic()
        self.program.kill()
        if not self.is_ready:
            self._failed_starts += 1
            if not self._was_ready or self._failed_starts >= _MAX_FAILED_STARTS:
                raise ServiceError(f"{self.program.name} {reason}", code)
        self.is_ready = False
        self._ends = [*(end for end in self._ends if now - end < _MEMORY_SECONDS), now]
        again = len(self._ends) - 2
        delay = 0.0 if again < 0 else min(_FIRST_DELAY_SECONDS * 2**again, _MAX_DELAY_SECONDS)
        self._start_at = now + delay
        say(f"{self.program.name} {reason}; restarting it" + (f" in {delay:g} s" if delay else ""))
