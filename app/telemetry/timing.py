"""How long each stage of a request took."""

from time import perf_counter

STAGES = ("read", "model", "queue", "decode", "infer", "post")
"""The stages of a request for detection, in order."""


class Timing:
    """Stopwatch of one request, started when it is created. All times are milliseconds."""

    def __init__(self) -> None:
        self._start = self._lap_start = perf_counter()
        self.stages: dict[str, float] = {}

    def start_lap(self) -> None:
        """Start the next lap now; the time since the last one belongs to no stage."""
        self._lap_start = perf_counter()

    def lap(self, stage: str) -> None:
        """Record the time since the last lap (or the start) as `stage`."""
        now = perf_counter()
        self.stages[stage] = (now - self._lap_start) * 1e3
        self._lap_start = now

    @property
    def stage(self) -> str:
        """The first of `STAGES` that has not ended."""
        return next((stage for stage in STAGES if stage not in self.stages), STAGES[-1])

    @property
    def total(self) -> float:
        """Milliseconds since the start."""
        return (perf_counter() - self._start) * 1e3

    def server_timing(self) -> str:
        """Render the value of a Server-Timing header."""
        entries = {**self.stages, "total": self.total}
        return ", ".join(f"{name};dur={value:.2f}" for name, value in entries.items())
