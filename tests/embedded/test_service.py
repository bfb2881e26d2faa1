"""A program that is watched: restarted at once, then later and later, until nothing helps, and without ever waiting for it."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any
from unittest.mock import Mock

import pytest

from app.embedded.service import CheckError, Service, ServiceError
from app.host.program import CommandError
from tests.processes import PATIENCE_SECONDS, wait_for
from tests.support import Clock

DOWN = CheckError("it does not answer")
DEAD = CheckError("a process has died", is_final=True)


class Watched(Executor):
    """A service with its program, and in the place of the thread for checks."""

    name = "the program"

    def __init__(self, clock: Clock, *, ready_seconds: float = 1e9, **how: bool) -> None:
        self.clock, self.ready_seconds = clock, ready_seconds
        self.code: int | None = None
        """Its exit code; None while it runs."""
        self.cannot_start = ""
        self.spawned = 0
        self.checks: list[Future[Any]] = []
        self.poll, self.check, self.kill = lambda: self.code, Mock(), Mock()
        self.service = Service(self, **how)
        self.service._checker = self  # type: ignore[assignment]  # noqa: SLF001 - checks end when a test says so

    def spawn(self) -> None:
        self.spawned += 1
        self.code = None
        if self.cannot_start:
            raise CommandError(self.cannot_start)

    @property
    def killed(self) -> int:
        return self.kill.call_count

    def submit(self, *_: object) -> Future[Any]:  # type: ignore[override]
        self.checks.append(Future())
        return self.checks[-1]

    def look(self, seconds: float = 0) -> None:
        """Look after the program, later than before, and often: only the first look may have an effect."""
        self.clock.now += seconds
        for _ in range(5):
            self.service.tick()

    def end(self, code: int = 1, *, after: float = 0) -> None:
        self.look(after)
        self.code = code
        self.service.tick()

    def find(self, error: Exception | None = None, *, after: float = 0, check: int = -1) -> None:
        self.look(after)
        self.checks[check].set_exception(error) if error else self.checks[check].set_result(None)
        self.look()


Watch = Callable[..., Watched]
Said = Callable[[], list[str]]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    clock = Clock(monkeypatch, "app.embedded.service")
    return lambda **how: Watched(clock, **how)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return lambda: [line.removeprefix("nereid: the program ") for line in capsys.readouterr().err.splitlines()]


def test_program_is_ready_once_a_check_has_succeeded_and_is_checked_every_five_seconds(watch: Watch) -> None:
    """Sooner while it starts, and after a failed check."""
    program = watch()
    assert program.spawned == 0
    starting = [(0, 1, DOWN), (0.29, 1, None), (0.02, 2, DOWN), (0.31, 3, None)]
    for number, (after, checks, found) in enumerate([*starting, (4.9, 3, None), (0.2, 4, DOWN), (0.9, 4, None), (0.2, 5, None)]):
        program.look(after)
        assert (program.spawned, len(program.checks), program.service.is_ready) == (1, checks, number > 3), number
        if not program.checks[-1].done():
            program.find(found)
    assert program.killed == 0


def test_restarts_come_later_and_later_but_not_after_a_minute(watch: Watch, said: Said) -> None:
    program = watch(is_ready=True)
    for number, delay in enumerate((0, 0.5, 1, 2, 4, 8, 10, 10), 1):
        program.end(number)
        assert not program.service.is_ready
        assert program.killed == number  # what it has left behind is ended
        if delay:
            program.look(delay - 0.01)
            assert program.spawned == number - 1
        program.find(after=0.01)
        assert (program.spawned, program.service.is_ready) == (number, True)
        assert said() == [f"exited with code {number}; restarting it" + (f" in {delay:g} s" if delay else "")]
    for _ in range(2):
        program.end(after=61)
        program.find()
    assert said() == ["exited with code 1; restarting it"] * 2


@pytest.mark.parametrize(
    ("found", "restarts"),
    [([DOWN, None, DOWN, None], 0), ([DOWN, DOWN, None, DOWN], 1), ([DEAD, None, DEAD], 2)],
    ids=["single accidents", "twice in a row", "final"],
)
def test_failed_checks_restart_the_program(watch: Watch, said: Said, found: list[Exception | None], restarts: int) -> None:
    program = watch(is_ready=True)
    for error in found:
        program.find(error, after=5)
    assert program.killed == restarts
    assert said() == [f"does not work ({found[0]}); restarting it" + " in 0.5 s" * place for place in range(restarts)]


def test_defect_that_a_restart_does_not_mend_is_restarted_later_and_later(watch: Watch) -> None:
    """The program runs a pause of a minute, and then longer ones, in which the rest of it works."""
    program = watch()
    program.look()
    program.service.note_defect("wrong")
    assert program.killed == 0  # it starts
    program.find()
    program.service.note_defect("wrong")
    program.look()
    for pause in (60, 120, 240, 480, 960, 1920, 3600, 3600):
        program.service.note_defect("wrong")  # while it starts
        program.find()
        restarted = program.killed
        program.service.note_defect("wrong")
        program.look(pause - 1)
        assert program.killed == restarted
        program.look(1)
        assert program.killed == restarted + 1


@pytest.mark.parametrize(
    ("code", "cannot_start", "said", "exit_code"),
    [
        (7, "", "exited with code 7", 7),
        (0, "", "exited with code 0", 1),  # never a success
        (None, "port 4600 is in use", "could not be started (port 4600 is in use)", 1),
        (None, "", "was not ready after 5 s (it does not answer)", 1),
    ],
)
def test_first_start_that_fails_is_final(watch: Watch, code: int | None, cannot_start: str, said: str, exit_code: int) -> None:
    program = watch(ready_seconds=5)
    program.cannot_start = cannot_start
    with pytest.raises(ServiceError) as caught:  # noqa: PT012 - each of them may fail
        program.look()
        if code is not None:
            program.end(code)
        for after in (0, 5, 1):
            program.find(DOWN, after=after)
    assert (str(caught.value), caught.value.code, program.spawned) == (f"the program {said}", exit_code, 1)


def test_program_that_may_fail_is_started_again_and_again(watch: Watch, said: Said) -> None:
    """Even one that never worked, such as a database whose disk is full; what goes on for days is told once."""
    program = watch(gives_up=False)
    program.cannot_start = "no room"
    for _ in range(30):
        program.look(10)
    assert 30 <= program.spawned < 35
    program.cannot_start = ""
    program.find(after=10)
    assert program.service.is_ready
    assert said() == ["could not be started (no room); restarting it"]


def test_five_failed_starts_in_a_row_are_final_unless_it_has_worked_between(watch: Watch, said: Said) -> None:
    program = watch(is_ready=True, ready_seconds=5)
    for _ in range(2):
        program.end()
        program.cannot_start = "no room"
        for _ in range(4):
            program.look(10)
        program.cannot_start = ""
        program.find(after=10)
    said()
    program.end(-9, after=61)
    program.end(2, after=0.5)
    program.find(DOWN, after=1)
    program.find(DOWN, after=6)
    for code in (3, 4):
        program.end(code, after=8)
    with pytest.raises(ServiceError, match=r"^the program exited with code 5$") as caught:
        program.end(5, after=10)

    assert (program.spawned, caught.value.code) == (15, 5)
    assert said() == [
        "exited with code -9; restarting it",
        "exited with code 2; restarting it in 0.5 s",
        "was not ready after 5 s (it does not answer); restarting it in 1 s",
        "exited with code 3; restarting it in 2 s",
        "exited with code 4; restarting it in 4 s",
    ]


def test_neither_looking_nor_closing_waits_for_a_check(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    checking, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def check() -> None:
        checking.set()
        assert may_end.wait(PATIENCE_SECONDS)
        ended.set()

    program = watch()
    monkeypatch.setattr(program, "check", check)
    service = Service(program, is_ready=True)
    service.tick()
    assert checking.wait(PATIENCE_SECONDS)
    service.tick()
    service.close()
    assert not ended.is_set()
    may_end.set()
    wait_for(ended.is_set)
