"""A program that is watched: restarted at once, then later and later, until nothing helps, and without ever waiting for it."""

import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest

from app.embedded.service import CheckError, Program, Service, ServiceError
from app.host.processes import kill_group
from app.host.program import CommandError
from tests import processes
from tests.fakes.clock import Clock
from tests.processes import wait_for

DOWN = CheckError("it does not answer")


class Script:
    name = "the program"

    def __init__(self, *checks: Exception | None, ready_seconds: float = 1e9) -> None:
        self.ready_seconds = ready_seconds
        self.checks = list(checks)
        """What the next checks find; None is a success, as is every check after the last one."""
        self.code: int | None = None
        """Its exit code; None while it runs."""
        self.cannot_start: str | None = None
        self.may_check = threading.Event()
        """Checks wait for it."""
        self.may_check.set()
        self.spawned = self.killed = self.checked = self.found = 0
        self.checked_in: set[threading.Thread] = set()

    def spawn(self) -> None:
        self.spawned += 1
        self.code = None
        if self.cannot_start is not None:
            raise CommandError(self.cannot_start)

    def poll(self) -> int | None:
        return self.code

    @property
    def check(self) -> Callable[[], None]:
        """A check; counted as soon as it is ordered, in the thread that orders it."""
        self.checked += 1
        return self.run_check

    def run_check(self) -> None:
        self.checked_in.add(threading.current_thread())
        result = self.checks.pop(0) if self.checks else None
        assert self.may_check.wait(processes.PATIENCE_SECONDS)
        self.found += 1
        if result is not None:
            raise result

    def kill(self) -> None:
        self.killed += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.embedded.service")


Watch = Callable[..., Service]


@pytest.fixture
def watch(clock: Clock) -> Iterator[Watch]:  # noqa: ARG001 - it has to stand still before the service looks at it
    services: list[Service] = []

    def make(program: Program, *, is_ready: bool = False) -> Service:
        services.append(Service(program, is_ready=is_ready))
        return services[-1]

    yield make
    for service in services:
        service.close()


def until(service: Service, holds: Callable[[], bool]) -> None:
    """Let the service look after its program until a condition holds."""

    def look() -> bool:
        service.tick()
        return holds()

    wait_for(look)


def until_checked(service: Service, program: Script, count: int) -> None:
    """Look after the program until it has been checked that often, and the service has seen what was found."""
    until(service, lambda: program.found >= count and service._check is None)  # noqa: SLF001 - it is not seen at once


def look_often(service: Service) -> None:
    """Look after the program; more than the first look would not order a check if that did not."""
    for _ in range(10):
        service.tick()


def see_it_end(service: Service, program: Script, code: int = 1) -> None:
    program.code = code
    service.tick()


def test_program_is_started_by_the_first_look(watch: Watch) -> None:
    program = Script()
    service = watch(program)
    assert program.spawned == 0

    service.tick()
    assert (program.spawned, service.is_ready) == (1, False)


def test_program_is_ready_once_a_check_has_succeeded(watch: Watch, clock: Clock) -> None:
    program = Script(DOWN, DOWN)
    service = watch(program)
    for checks in (1, 2):
        until_checked(service, program, checks)
        look_often(service)
        assert (program.checked, service.is_ready) == (checks, False)
        clock.now += 0.3

    until(service, lambda: service.is_ready)
    assert (program.spawned, program.killed, program.checked) == (1, 0, 3)


def test_program_that_runs_already_is_not_started(watch: Watch) -> None:
    program = Script()
    service = watch(program, is_ready=True)
    until_checked(service, program, 1)

    assert service.is_ready
    assert program.spawned == 0


def test_ready_program_is_checked_every_five_seconds(watch: Watch, clock: Clock) -> None:
    program = Script()
    service = watch(program)
    until(service, lambda: service.is_ready)
    clock.now += 4.9
    look_often(service)
    assert program.checked == 1

    clock.now += 0.2
    until_checked(service, program, 2)


def test_looking_never_waits_for_a_check(watch: Watch) -> None:
    program = Script()
    program.may_check.clear()
    service = watch(program)
    until(service, lambda: program.checked == 1)
    look_often(service)
    assert (program.checked, program.found, service.is_ready) == (1, 0, False)
    assert threading.current_thread() not in program.checked_in

    program.may_check.set()
    until(service, lambda: service.is_ready)


def test_restarts_come_later_and_later(watch: Watch, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    program = Script()
    service = watch(program, is_ready=True)
    delays = [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    for number, delay in enumerate(delays, 1):
        see_it_end(service, program, number)
        assert not service.is_ready
        assert program.killed == number  # what it has left behind is ended
        if delay:
            clock.now += delay - 0.01
            look_often(service)
            assert program.spawned == number - 1
            clock.now += 0.01
        service.tick()
        assert program.spawned == number
        until(service, lambda: service.is_ready)

    shown = ["", " in 0.5 s", " in 1 s", " in 2 s", " in 4 s", " in 8 s", " in 10 s", " in 10 s"]
    assert capsys.readouterr().err.splitlines() == [
        f"nereid: the program exited with code {number}; restarting it{delay}" for number, delay in enumerate(shown, 1)
    ]


def test_a_restart_that_is_a_minute_ago_does_not_count(watch: Watch, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """A program that ends once an hour is restarted at once each time."""
    program = Script()
    service = watch(program, is_ready=True)
    for _ in range(3):
        see_it_end(service, program)
        service.tick()
        until(service, lambda: service.is_ready)
        clock.now += 61

    assert program.spawned == 3
    assert capsys.readouterr().err.splitlines() == ["nereid: the program exited with code 1; restarting it"] * 3


@pytest.mark.parametrize(
    ("found", "restarts"),
    [
        ([None, DOWN, None, DOWN, None], 0),
        ([None, DOWN, DOWN, None], 1),
        ([None, DOWN, DOWN, None, DOWN, None], 1),
    ],
    ids=["single failures", "two in a row", "two in a row, and later a single one"],
)
def test_two_failed_checks_in_a_row_restart_the_program(
    watch: Watch, clock: Clock, capsys: pytest.CaptureFixture[str], found: list[Exception | None], restarts: int
) -> None:
    """A single failure may be an accident."""
    program = Script(*found)
    service = watch(program)

    def is_over() -> bool:
        clock.now += 1
        return program.found > len(found)  # the last check starts when those before it have been evaluated

    until(service, is_over)

    assert (program.killed, program.spawned) == (restarts, 1 + restarts)
    assert capsys.readouterr().err == restarts * "nereid: the program does not work (it does not answer); restarting it\n"


def test_a_defect_that_others_find_restarts_the_program_once_a_minute(
    watch: Watch, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Script()
    service = watch(program, is_ready=True)
    for restarts in (1, 2):
        service.note_defect("a part has died")
        service.note_defect("a part has died")
        until(service, lambda: service.is_ready)
        service.note_defect("a part has died")
        look_often(service)
        assert (program.killed, program.spawned, service.is_ready) == (restarts, restarts, True)
        clock.now += 61

    assert capsys.readouterr().err == 2 * "nereid: the program does not work (a part has died); restarting it\n"


def test_a_defect_that_a_restart_does_not_mend_is_restarted_later_and_later(watch: Watch, clock: Clock) -> None:
    service = watch(Script(), is_ready=True)
    service.note_defect("wrong")
    restarted_at = clock.now
    for pause in (60, 120, 240, 480, 960, 1920, 3600, 3600):
        until(service, lambda: service.is_ready)
        clock.now = restarted_at + pause - 1
        service.note_defect("wrong")
        assert service.is_ready
        clock.now = restarted_at = restarted_at + pause
        service.note_defect("wrong")
        assert not service.is_ready
    for pause in (7200, 60):
        until(service, lambda: service.is_ready)
        clock.now = restarted_at = restarted_at + pause
        service.note_defect("wrong")
        assert not service.is_ready


def test_failed_check_is_repeated_sooner(watch: Watch, clock: Clock) -> None:
    program = Script(DOWN)
    service = watch(program, is_ready=True)
    until_checked(service, program, 1)
    look_often(service)
    assert program.checked == 1
    clock.now += 1.1

    until_checked(service, program, 2)


def test_the_check_of_a_process_that_has_ended_does_not_count(watch: Watch, clock: Clock) -> None:
    """Its late success must not make the next process ready."""
    program = Script(None, DOWN, DOWN, DOWN)
    program.may_check.clear()
    service = watch(program, is_ready=True)
    until(service, lambda: program.checked == 1)
    see_it_end(service, program)
    service.tick()
    program.may_check.set()
    for checks in (2, 3, 4):
        until_checked(service, program, checks)
        assert not service.is_ready
        look_often(service)
        clock.now += 1

    until(service, lambda: service.is_ready)
    assert program.checked == 5


@pytest.mark.parametrize(("code", "exit_code"), [(7, 7), (1, 1), (0, 1), (-11, -11)])
def test_a_first_start_that_fails_is_final(watch: Watch, code: int, exit_code: int) -> None:
    """It would fail again; the exit code is the program's, but never that of a success."""
    program = Script(*[DOWN] * 100)
    service = watch(program)
    service.tick()
    with pytest.raises(ServiceError, match=f"^the program exited with code {code}$") as caught:
        see_it_end(service, program, code)

    assert caught.value.code == exit_code
    assert (program.spawned, program.killed) == (1, 1)


def test_a_program_that_cannot_be_started_at_all_is_final(watch: Watch) -> None:
    program = Script()
    program.cannot_start = "port 4600 is in use"
    service = watch(program)
    with pytest.raises(ServiceError, match=r"^the program could not be started \(port 4600 is in use\)$") as caught:
        service.tick()

    assert caught.value.code == 1


def test_a_program_that_is_never_ready_is_final(watch: Watch, clock: Clock) -> None:
    program = Script(*[DOWN] * 100, ready_seconds=5)
    service = watch(program)
    for _ in range(10):
        until_checked(service, program, program.found + 1)
        look_often(service)
        clock.now += 0.5
    assert program.killed == 0

    clock.now += 0.1
    with pytest.raises(ServiceError, match=r"^the program was not ready after 5 s \(it does not answer\)$"):
        until(service, lambda: False)
    assert program.killed == 1


def test_a_program_that_may_fail_is_started_again_and_again(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Even one that never worked, such as a database whose disk is full."""
    program = Script()
    program.cannot_start = "no room"
    service = Service(program, gives_up=False)
    for _ in range(30):
        clock.now += 10
        look_often(service)
    assert 30 <= program.spawned < 35
    program.cannot_start = None
    clock.now += 10
    until(service, lambda: service.is_ready)
    service.close()
    assert capsys.readouterr().err == "nereid: the program could not be started (no room); restarting it\n"


def test_five_failed_starts_in_a_row_are_final(watch: Watch, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    program = Script(ready_seconds=5)
    service = watch(program, is_ready=True)
    see_it_end(service, program, -9)
    program.cannot_start = "port 4600 is in use"
    service.tick()
    program.cannot_start = None
    clock.now += 0.5
    service.tick()
    see_it_end(service, program, 2)
    program.checks = [DOWN] * 100
    clock.now += 1
    service.tick()
    until_checked(service, program, 1)
    clock.now += 6
    until(service, lambda: program.killed == 4)
    clock.now += 4
    service.tick()
    see_it_end(service, program, 3)
    clock.now += 10
    service.tick()
    with pytest.raises(ServiceError, match=r"^the program exited with code 4$") as caught:
        see_it_end(service, program, 4)

    assert caught.value.code == 4
    assert program.spawned == 5
    assert capsys.readouterr().err.splitlines() == [
        "nereid: the program exited with code -9; restarting it",
        "nereid: the program could not be started (port 4600 is in use); restarting it in 0.5 s",
        "nereid: the program exited with code 2; restarting it in 1 s",
        "nereid: the program was not ready after 5 s (it does not answer); restarting it in 2 s",
        "nereid: the program exited with code 3; restarting it in 4 s",
    ]


def test_failed_starts_are_forgotten_once_it_works(watch: Watch, clock: Clock) -> None:
    program = Script()
    service = watch(program, is_ready=True)
    for _ in range(2):
        see_it_end(service, program)
        for _ in range(4):
            clock.now += 10
            program.cannot_start = "the disk is full"
            service.tick()
        program.cannot_start = None
        clock.now += 10
        until(service, lambda: service.is_ready)

    assert program.spawned == 10


def test_an_error_of_the_check_itself_is_not_hidden(watch: Watch) -> None:
    """Only a `CheckError` says something about the program."""
    service = watch(Script(ZeroDivisionError("a defect")), is_ready=True)

    with pytest.raises(ZeroDivisionError, match="a defect"):
        until(service, lambda: False)


def test_closing_waits_for_nothing(watch: Watch) -> None:
    program = Script()
    program.may_check.clear()
    service = watch(program, is_ready=True)
    until(service, lambda: bool(program.checked_in))
    service.close()
    assert program.found == 0

    program.may_check.set()
    (checker,) = program.checked_in
    wait_for(lambda: not checker.is_alive())
    assert program.found == 1


class Sleeper:
    """A real process that counts as working while it runs."""

    name = "sleep"
    ready_seconds = 60.0

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> None:
        self.process = subprocess.Popen(["sleep", "60"], start_new_session=True)

    def poll(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def check(self) -> None:
        if self.poll() is not None:
            raise DOWN

    def kill(self) -> None:
        if self.process is not None:
            kill_group(self.process)


def test_a_process_that_was_killed_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    with processes.no_process_left():
        program = Sleeper()
        service = Service(program)
        until(service, lambda: service.is_ready)
        first = program.process
        assert first is not None
        first.kill()
        until(service, lambda: program.process is not first and service.is_ready)

        assert program.poll() is None
        assert capsys.readouterr().err == "nereid: sleep exited with code -9; restarting it\n"
        program.kill()
        service.close()
