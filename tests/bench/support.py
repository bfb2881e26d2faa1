"""What tests of the bench share: made-up answers and measurements, and the arenas of processes."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from app.triton.shared_memory import SHM
from bench.load.outcome import Outcome, encode_latencies
from bench.report.measurements import Measurement, Run, TritonUse

CAT = b'{"detections":[{"class_name":"cat"},{"class_name":"person"}],"model":{"name":"yolo11n"}}'
DOG = b'{"detections":[{"class_name":"dog"}]}'


def arenas_of(pids: Iterable[int]) -> list[Path]:
    """Return the shared-memory arenas that processes have created."""
    return [path for pid in pids for path in SHM.glob(f"nereid-{pid}-*")]


def make_outcome(milliseconds: Sequence[float], **statuses: int) -> Outcome:
    """Make up an outcome of two seconds with these latencies; statuses are given as s200=1, error=2."""
    counted = {name.removeprefix("s"): count for name, count in statuses.items()} or {"200": len(milliseconds)}
    return Outcome(
        seconds=2.0,
        requests=sum(counted.values()),
        statuses=counted,
        latency=encode_latencies(value / 1e3 for value in milliseconds),
        stages={"decode": 2.0, "infer": 5.0, "total": 9.0},
        driver_cpu=0.25,
    )


def make_run(scale: float = 1.0, rounds: int = 0, **changes: object) -> Run:
    """Make up a run with latencies of `scale` times 10 to 109 ms, and so many rounds like it."""
    outcome = make_outcome([scale * value for value in range(10, 110)])
    use = TritonUse(inferences=100, executions=40, queue_ms=1.5, compute_ms=30.0, batches={"1": 10, "3": 30})
    cpu = {"gateway": 3.0, "triton": 0.5, "stubs": 40.0, "client": 0.25}
    made = Run(contestant="nereid", mode="full", model="yolo11n", clients=4, outcome=outcome, triton=use, cpu_ms=cpu)
    held = [Measurement(outcome=outcome, triton=use, cpu_ms=cpu)] * rounds
    return msgspec.structs.replace(made, figures={}, rounds=held, **changes)
