"""How long each stage of a request took."""

from time import perf_counter

STAGES = ("read", "model", "queue", "decode", "batch", "infer", "post")
"""The stages of a request, in order."""
FETCH = "fetch"
"""The stage between `read` and `model` in which an image is fetched, if the request names it by its address."""
DRAW = "draw"
"""The stage after `post` in which a picture is drawn, if the request asks for one."""


class Timing:
    """Stopwatch of one request, started when it is created. Durations are milliseconds."""

    def __init__(self) -> None:
        self._start = self._lap_start = perf_counter()
        self.stages: dict[str, float] = {}
        """Duration of each stage."""
        self._starts: dict[str, float] = {}
        self._descriptions: dict[str, str] = {}
        self._extra_stage = ""
        """The stage in progress, if it is none of `STAGES`."""

    def begin(self, stage: str) -> None:
        """Note that the stage in progress, until the next lap, is none of `STAGES`."""
        self._extra_stage = stage

    def start_lap(self) -> None:
        """Start the next lap now; the time since the last one belongs to no stage."""
        self._lap_start = perf_counter()

    def lap(self, stage: str, description: str = "") -> None:
        """Record the time since the last lap (or the start) as `stage`, and what else a caller may want to know of it."""
        now = perf_counter()
        self._starts[stage] = self._lap_start
        self.stages[stage] = (now - self._lap_start) * 1e3
        self._lap_start = now
        self._extra_stage = ""
        if description:
            self._descriptions[stage] = description

    def fail(self) -> str:
        """Record the time since the last lap as the stage that `begin` named, or else as the first of `STAGES` that has not ended.

        Returns:
            That stage.
        """
        stage = self._extra_stage or next((stage for stage in STAGES if stage not in self.stages), STAGES[-1])
        self.lap(stage)
        return stage

    @property
    def total(self) -> float:
        """Milliseconds since the start."""
        return (perf_counter() - self._start) * 1e3

    def intervals(self) -> list[tuple[str, float, float]]:
        """Return the name of each stage, and when it began and ended, in milliseconds since the start."""
        # A copy: a thread whose request has timed out may still record a stage.
        stages = list(self.stages.copy().items())
        begun = [(self._starts[stage] - self._start) * 1e3 for stage, _ in stages]
        return [(stage, begin, begin + duration) for (stage, duration), begin in zip(stages, begun, strict=True)]

    def server_timing(self) -> str:
        """Render the value of a Server-Timing header."""
        entries = {**self.stages, "total": self.total}
        described = {name: f'{name};desc="{text}"' for name, text in self._descriptions.items()}
        return ", ".join(f"{described.get(name, name)};dur={value:.2f}" for name, value in entries.items())
