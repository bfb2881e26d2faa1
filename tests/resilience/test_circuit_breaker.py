"""A circuit opens after failures, and a probe closes it again."""

import asyncio
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from structlog.testing import CapturingLogger

from app.errors import TritonUnavailable
from app.resilience import circuit_breaker
from app.resilience.circuit_breaker import CircuitBreaker
from tests.machines import Machine, check
from tests.support import OpenTable, eventually

WORKERS = st.integers(0, 2)
CALLS = st.sampled_from([".", "x", "xxx", "xxxxx", "..", "x.x.x.x", "xx.xx.xx.", "." * 11, ".x" * 10, "x." * 9 + "x", "." * 100])
"""Calls that succeeded (.) and failed (x)."""


class Circuit:
    """A circuit, and what its state should be."""

    def __init__(self, table: Any, triton: str = "triton:8001") -> None:  # noqa: ANN401
        self.breaker = CircuitBreaker(table, "tiny", triton, self._probe)
        self.state = "closed"
        self.calls: list[tuple[int, str]] = []
        """Second and result of each call since it was closed."""
        self.opened = 0.0
        self.succeeded = 0.0
        self.wait = self.probe_at = 0.0
        self.probes: list[asyncio.Future[None]] = []
        """The one that has not ended, if any."""

    async def _probe(self) -> None:
        self.probes.append(asyncio.get_running_loop().create_future())
        try:
            await self.probes[-1]
        finally:
            self.probes.clear()

    def is_to_open(self, now: float) -> bool:
        """Five failures in a row are too many, and so is half of at least twenty calls within ten seconds."""
        recent = [call for second, call in self.calls if int(now) - second < 10]
        return [call for _, call in self.calls[-5:]] == ["x"] * 5 or 20 <= len(recent) <= 2 * recent.count("x")

    def open(self, now: float, at: float) -> None:
        self.state, self.opened, self.wait, self.probe_at = "open", at, 0.1, now + 0.1


class Circuits(Machine):
    """Three workers call one Triton, whose probes end when a rule says so; a fourth circuit, of another Triton, stays closed."""

    TIMED = ("app.resilience.circuit_breaker",)

    def __init__(self) -> None:
        super().__init__()
        self.log = CapturingLogger()
        self.patch.setattr(circuit_breaker, "LOG", self.log)
        self.logged: list[str] = []
        tables = self.open_tables(3)
        self.circuits = [Circuit(table) for table in tables]
        self.elsewhere = Circuit(tables[0], "another:8001")

    def opens(self, circuit: Circuit, at: float) -> None:
        circuit.open(self.clock.now, at)
        self.logged.append("circuit opened")

    @rule(worker=WORKERS, calls=CALLS)
    def note(self, worker: int, calls: str) -> None:
        circuit = self.circuits[worker]
        note = {".": circuit.breaker.note_success, "x": circuit.breaker.note_failure}
        for call in calls:
            self.call(note[call]) if call == "x" else note[call]()
            circuit.calls.append((int(self.clock.now), call))
            if call == ".":
                circuit.succeeded = self.clock.now
            elif circuit.state == "closed" and circuit.is_to_open(self.clock.now):
                self.opens(circuit, self.clock.now)
            assert circuit.breaker.is_open == (circuit.state != "closed")

    @rule(worker=WORKERS)
    def ask(self, worker: int) -> None:
        """What was opened elsewhere opens here, unless a call has succeeded since."""
        circuit = self.circuits[worker]
        opened = max(other.opened for other in self.circuits)
        if circuit.state == "closed" and opened > circuit.succeeded:
            self.opens(circuit, opened)
        asked: list[bool] = []
        self.call(lambda: asked.append(circuit.breaker.is_closed))
        assert asked == [circuit.state == "closed"]

    @rule(seconds=st.sampled_from([0.125, 0.25, 0.5, 0.875, 1, 5, 9.75, 10, 60]))
    def let_pass(self, seconds: float) -> None:
        """Probes become rarer, but at least one a second."""
        self.skip(seconds)
        for circuit in self.circuits:
            if circuit.state == "open" and circuit.probe_at <= self.clock.now:
                circuit.state, circuit.wait = "half_open", min(2 * circuit.wait, 1.0)

    @precondition(lambda self: any(circuit.probes for circuit in self.circuits))
    @rule(data=st.data(), error=st.sampled_from([None, None, TritonUnavailable("no"), ValueError("out of order")]))
    def end_probe(self, data: st.DataObject, error: Exception | None) -> None:
        self.end(data.draw(st.sampled_from([circuit for circuit in self.circuits if circuit.probes])), error)

    @rule(workers=st.permutations(range(3)))
    def spread(self, workers: list[int]) -> None:
        """The first worker opens its circuit, the second succeeds after that, the third is told, and then the second is asked."""
        self.note(workers[0], "xxxxx")
        self.let_pass(0.0625)
        self.note(workers[1], ".")
        self.let_pass(0.0625)
        self.ask(workers[2])
        self.ask(workers[1])

    @rule(worker=WORKERS, seconds=st.sampled_from([9, 9.75, 10, 11]))
    def fail_slowly(self, worker: int, seconds: float) -> None:
        self.let_pass(60)
        self.note(worker, "x." * 9 + "x")
        self.let_pass(seconds)
        self.note(worker, ".x")

    @rule(worker=WORKERS, failures=st.integers(0, 6), error=st.sampled_from([TritonUnavailable("no"), ValueError("out of order")]))
    def recover(self, worker: int, failures: int, error: Exception) -> None:
        circuit = self.circuits[worker]
        for failure in range(failures + 1):
            self.let_pass(1)
            if circuit.probes:
                self.end(circuit, error if failure < failures else None)

    def end(self, circuit: Circuit, error: Exception | None) -> None:
        (probe,) = circuit.probes
        self.call(partial(probe.set_exception, error) if error else partial(probe.set_result, None))
        circuit.state, circuit.probe_at = "open", self.clock.now + circuit.wait
        if error is None:
            circuit.state, circuit.calls, circuit.opened, circuit.succeeded = "closed", [], 0.0, self.clock.now
            self.logged.append("circuit closed")
        elif isinstance(error, ValueError):
            self.logged.append("probe failed unexpectedly")

    @invariant()
    def states_are_as_expected(self) -> None:
        for circuit in self.circuits:
            assert circuit.breaker.is_open == (circuit.state != "closed")
            assert len(circuit.probes) == (circuit.state == "half_open")
        assert self.elsewhere.breaker.is_closed
        assert [call.args[0] for call in self.log.calls] == self.logged
        assert {call.kwargs["model"] for call in self.log.calls} <= {"tiny"}

    def finish(self) -> None:
        """Closing ends the probing, at any time and more than once; what is open stays open."""
        for circuit in [*self.circuits, self.elsewhere] * 2:
            is_open = circuit.breaker.is_open
            self.run(circuit.breaker.close())
            assert circuit.breaker.is_open == is_open
        assert not [task for task in asyncio.all_tasks(self.loop) if not task.done()]


@pytest.mark.parametrize("runs", [17, pytest.param(50, marks=pytest.mark.system)])
def test_circuits_of_a_host(runs: int) -> None:
    check(Circuits, runs=runs, steps=30)


async def test_wrong_answers_open_the_circuit_of_all_workers(open_table: OpenTable) -> None:
    """Calls succeed, which looks well; and a worker whose own probes have been right twice is not told again."""
    answers = [TritonUnavailable("wrong")]

    async def probe() -> None:
        if answers:
            raise answers[0]

    one, other = (CircuitBreaker(open_table(), "tiny", "triton:8001", probe) for _ in range(2))
    one.open_for_wrong_answers("zeros")
    other.note_success()
    assert not other.is_closed
    assert (one.is_wrong, other.is_wrong, other.is_wrong_for_first) == (True, True, True)
    answers.clear()
    await eventually(lambda: one.is_closed and other.is_closed)
    assert not other.is_wrong_for_first
    one.note_success()
    other.open_for_wrong_answers("zeros again")
    assert not one.is_closed
    for circuit in (one, other):
        await circuit.close()
