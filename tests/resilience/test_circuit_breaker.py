"""A circuit opens after failures, and a probe closes it again."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import TritonUnavailable
from app.resilience import circuit_breaker
from app.resilience.circuit_breaker import CircuitBreaker
from app.resilience.worker_table import WorkerTable
from tests.fakes.clock import Clock
from tests.support import OpenTable, captured_log, eventually


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.resilience.circuit_breaker")


@pytest.fixture(autouse=True)
def _impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe every few milliseconds."""
    monkeypatch.setattr(circuit_breaker, "_FIRST_PROBE_SECONDS", 0.005)
    monkeypatch.setattr(circuit_breaker, "_MAX_PROBE_SECONDS", 0.005)


class Probe:
    """A probe that waits until the test lets it succeed or fail."""

    def __init__(self) -> None:
        self.error: Exception | None = TritonUnavailable("Triton does not answer")
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.calls = 0
        self.running = 0
        self.most_running = 0

    async def __call__(self) -> None:
        self.calls += 1
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await self.may_end.wait()
        finally:
            self.running -= 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def probe() -> Probe:
    return Probe()


@pytest.fixture
async def breaker(table: WorkerTable, probe: Probe) -> AsyncIterator[CircuitBreaker]:
    """A closed circuit; nothing of it may be left in the end."""
    made = CircuitBreaker(table, "tiny", "triton:8001", probe)
    yield made
    await made.close()
    assert probing() == []


def state_of(breaker: CircuitBreaker) -> str:
    """Return the state; mypy would narrow the attribute to a constant."""
    return breaker.state


def probing() -> list[str]:
    return [repr(task) for task in asyncio.all_tasks() if "_recover" in repr(task)]


def note(breaker: CircuitBreaker, calls: str) -> None:
    """Record calls that succeeded (.) and failed (x)."""
    for one in calls:
        if one == "x":
            breaker.note_failure()
        else:
            breaker.note_success()


async def is_closed_again(breaker: CircuitBreaker) -> bool:
    """Wait until the circuit is closed."""
    return await eventually(lambda: breaker.state == "closed")


@pytest.mark.parametrize(
    ("calls", "state"),
    [
        ("", "closed"),
        ("xxxx", "closed"),
        ("xxxxx", "open"),
        (".....xxxxx", "open"),
        ("xxxx.xxxx", "closed"),
        ("xxxx.xxxxx", "open"),
        ("xxx.xxx.xxxx", "closed"),
        ("xxxxx...", "open"),
    ],
)
async def test_five_failures_in_succession_open_the_circuit(breaker: CircuitBreaker, calls: str, state: str) -> None:
    """A success in between is a new start; once it is open, only the probe closes it."""
    note(breaker, calls)

    assert state_of(breaker) == state


@pytest.mark.parametrize(
    ("calls", "state"),
    [
        ("x." * 9 + "x", "closed"),  # 19 calls
        ("x." * 9 + "xx", "open"),
        ("." * 11 + "xx." * 9 + "x", "closed"),  # 19 of 39
        ("." * 11 + "xx." * 9 + "xx", "open"),  # 20 of 40
        (".." + ".x" * 49, "closed"),  # 49 of 100
        (".x" * 9 + ".." + "x", "closed"),  # 10 of 21
        (".x" * 9 + ".." + "xx", "open"),  # 11 of 22
    ],
)
@pytest.mark.usefixtures("clock")
async def test_the_circuit_opens_when_half_of_the_calls_fail(breaker: CircuitBreaker, calls: str, state: str) -> None:
    """Half of at least twenty calls must fail; fewer say too little."""
    note(breaker, calls)

    assert state_of(breaker) == state


@pytest.mark.parametrize(
    ("seconds", "state"),
    [(0, "open"), (5, "open"), (9.9, "open"), (10, "closed"), (11, "closed"), (19.9, "closed"), (20, "closed"), (1e6, "closed")],
)
@pytest.mark.parametrize("start", [1000, 1007])
async def test_only_the_calls_of_the_last_ten_seconds_count(
    breaker: CircuitBreaker, clock: Clock, start: int, seconds: float, state: str
) -> None:
    clock.now = start
    note(breaker, "x." * 9 + "x")
    clock.now += seconds
    note(breaker, ".x")

    assert state_of(breaker) == state


async def test_calls_of_different_seconds_count_together(breaker: CircuitBreaker, clock: Clock) -> None:
    """The test has two calls in each of the last ten seconds."""
    for _ in range(9):
        note(breaker, "x.")
        clock.now += 1
    note(breaker, ".")
    assert state_of(breaker) == "closed"
    note(breaker, "x")

    assert state_of(breaker) == "open"


async def test_old_successes_do_not_hide_failures(breaker: CircuitBreaker, clock: Clock) -> None:
    """Half of the calls of the last ten seconds are enough to open the circuit, however many were answered before."""
    note(breaker, "." * 1000)
    clock.now += 10
    note(breaker, "x." * 9 + "xx")

    assert state_of(breaker) == "open"


async def test_failures_in_succession_may_be_rare(breaker: CircuitBreaker, clock: Clock) -> None:
    for _ in range(5):
        assert state_of(breaker) == "closed"
        note(breaker, "x")
        clock.now += 60

    assert state_of(breaker) == "open"


async def test_a_circuit_that_opens_in_one_worker_opens_in_all(open_table: OpenTable, probe: Probe, clock: Clock) -> None:
    """Each worker closes its own, with a probe of its own; one in which a call has succeeded since is not told again."""
    probes = [probe, Probe(), Probe()]
    one, other, third = (CircuitBreaker(open_table(), "tiny", "triton:8001", own) for own in probes)
    elsewhere = CircuitBreaker(open_table(), "tiny", "another:8001", probe)
    other.note_success()
    clock.now += 1
    note(one, "xxxxx")
    clock.now += 1
    third.note_success()

    assert [breaker.is_closed for breaker in (one, other, third, elsewhere)] == [False, False, True, True]
    probes[1].error = None
    clock.now += 1
    assert await is_closed_again(other)
    assert [breaker.is_closed for breaker in (one, other, third)] == [False, True, True]
    probe.error = None
    assert await is_closed_again(one)
    for breaker in (one, other, third):
        await breaker.close()


async def test_the_probe_closes_the_circuit(breaker: CircuitBreaker, probe: Probe) -> None:
    probe.error = None
    note(breaker, "xxxxx")
    assert (state_of(breaker), probe.calls) == ("open", 0)

    assert await is_closed_again(breaker)
    assert await eventually(lambda: probing() == [])
    assert probe.calls == 1


async def test_the_probe_is_repeated_while_it_fails(breaker: CircuitBreaker, probe: Probe) -> None:
    note(breaker, "xxxxx")
    assert await eventually(lambda: probe.calls > 3)
    assert state_of(breaker) != "closed"
    probe.error = None

    assert await is_closed_again(breaker)


async def test_there_is_one_probe_at_a_time(breaker: CircuitBreaker, probe: Probe) -> None:
    """A slow probe is waited for, whatever the results of calls still in progress."""
    probe.error = None
    probe.may_end.clear()
    note(breaker, "xxxxx")
    assert await eventually(lambda: probe.running == 1)
    note(breaker, "xxxxx.xxxxx.....")
    await asyncio.sleep(0)
    assert (probe.calls, state_of(breaker), len(probing())) == (1, "half_open", 1)
    probe.may_end.set()

    assert await is_closed_again(breaker)
    assert (probe.calls, probe.most_running) == (1, 1)


async def test_a_closed_circuit_starts_anew(breaker: CircuitBreaker, probe: Probe, clock: Clock) -> None:
    """What was counted before it closed is forgotten, of both kinds; it can open again."""
    probe.error = None
    note(breaker, "x." * 12 + "xxxxx")
    assert await is_closed_again(breaker)
    assert clock.now == 1000
    note(breaker, "xxxx")
    assert state_of(breaker) == "closed"
    note(breaker, "." + "x." * 6 + "x")
    assert state_of(breaker) == "closed"  # 11 of 19 since then
    note(breaker, "xxxx")
    assert state_of(breaker) == "open"

    assert await is_closed_again(breaker)


async def test_the_circuit_passes_from_open_to_half_open_to_closed(table: WorkerTable, probe: Probe) -> None:
    """Back to open if the probe fails; while it is half open, only the probe is tried."""
    states: list[str] = []

    class Noting(CircuitBreaker):
        def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401
            super().__setattr__(name, value)
            if name == "state":
                states.append(value)
                if len(states) > 3:
                    probe.error = None

    breaker = Noting(table, "tiny", "triton:8001", probe)
    note(breaker, "xxxxx")
    assert await is_closed_again(breaker)
    await breaker.close()

    assert states == ["closed", "open", "half_open", "open", "half_open", "closed"]


async def test_a_probe_that_fails_unexpectedly_is_repeated(
    breaker: CircuitBreaker, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has the exception; the circuit would else stay open for ever."""
    log = captured_log(monkeypatch, circuit_breaker)
    probe.error = ValueError("out of order")
    note(breaker, "xxxxx")
    assert await eventually(lambda: probe.calls > 1)
    probe.error = None

    assert await is_closed_again(breaker)
    unexpected = [call for call in log if call.method_name == "exception"]
    assert unexpected
    assert {(call.args, call.kwargs["model"]) for call in unexpected} == {(("probe failed unexpectedly",), "tiny")}


async def test_opening_and_closing_are_logged(breaker: CircuitBreaker, probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each; a probe that fails as expected is not worth a line."""
    log = captured_log(monkeypatch, circuit_breaker)
    note(breaker, "xxxxxxx")
    assert await eventually(lambda: probe.calls > 2)
    probe.error = None
    assert await is_closed_again(breaker)
    assert await eventually(lambda: probing() == [])

    assert [(call.method_name, call.args, call.kwargs["model"]) for call in log] == [
        ("warning", ("circuit opened",), "tiny"),
        ("warning", ("circuit closed",), "tiny"),
    ]


async def test_probes_become_rarer_but_not_rare(table: WorkerTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    async def probe() -> None:
        if len(waited) < 7:
            raise TritonUnavailable("Triton does not answer")

    patched = SimpleNamespace(sleep=sleep, create_task=asyncio.create_task, gather=asyncio.gather)
    monkeypatch.setattr(circuit_breaker, "asyncio", patched)
    breaker = CircuitBreaker(table, "tiny", "triton:8001", probe)
    note(breaker, "xxxxx")
    assert await is_closed_again(breaker)
    await breaker.close()

    assert waited == [0.1, 0.2, 0.4, 0.8, 1, 1, 1]


@pytest.mark.parametrize("is_slow", [True, False])
async def test_closing_ends_the_probing(breaker: CircuitBreaker, probe: Probe, is_slow: bool) -> None:  # noqa: FBT001
    """During a probe as well as between two of them; the circuit stays open."""
    if is_slow:
        probe.may_end.clear()
    note(breaker, "xxxxx")
    assert await eventually(lambda: probe.calls > 0)
    await breaker.close()

    assert probing() == []
    assert probe.running == 0
    assert state_of(breaker) != "closed"


@pytest.mark.parametrize("calls", ["", "x.x", "xxxxx"])
async def test_closing_is_possible_at_any_time(breaker: CircuitBreaker, calls: str) -> None:
    note(breaker, calls)
    await breaker.close()
    await breaker.close()

    assert probing() == []
