"""Durations of the stages of a request."""

from time import perf_counter

STAGES = ("read", "model", "queue", "decode", "batch", "infer", "post")
"""The stages of a request, in order."""
WAITS = {"queue", "batch"}
"""The stages in which a request only waits for others."""
FETCH, CACHE, DRAW, SEARCH = "fetch", "cache", "draw", "search"
"""Further stages: an image is fetched by its URL or a result is looked for, both before `model`; a picture is drawn, after `post`;
the database of search is asked."""


class Timing:
    """Stopwatch of one request, started on creation. Durations are in milliseconds."""

    def __init__(self) -> None:
        self.began = self._lap_start = perf_counter()
        """When it was started, seconds; the clock is that of `monotonic`."""
        self.stages: dict[str, float] = {}
        self.steps: dict[str, tuple[float, float]] = {}
        """Begin and end of each step of a cascade, since the start; they overlap."""
        self._starts: dict[str, float] = {}
        self.descriptions: dict[str, str] = {}
        """Those of the recorded stages that have one."""
        self._extra_stage = ""
        """The stage in progress, if it is not in `STAGES`."""

    def begin(self, stage: str) -> None:
        """Set the stage in progress until the next lap; for stages that are not in `STAGES`."""
        self._extra_stage = stage

    def start_lap(self, already: float = 0.0) -> None:
        """Start the next lap now, or so many milliseconds ago. The time since the last lap is not assigned to any stage."""
        self._lap_start = perf_counter() - already / 1e3

    def lap(self, stage: str, description: str = "") -> None:
        """Record the time since the last lap (or the start) as `stage`, with an optional description for Server-Timing."""
        now = perf_counter()
        self._starts[stage] = self._lap_start
        self.stages[stage] = (now - self._lap_start) * 1e3
        self._lap_start = now
        self._extra_stage = ""
        if description:
            self.descriptions[stage] = description

    def fail(self) -> str:
        """Record the stage in progress, named by `begin` or else the first of `STAGES` that is not recorded, and return it."""
        stage = self._extra_stage or next((stage for stage in STAGES if stage not in self.stages), STAGES[-1])
        self.lap(stage)
        return stage

    def end_step(self, step: str, began: float) -> float:
        """Record a step of a cascade that has run since `began`, of `perf_counter`; return how long, in milliseconds."""
        begin, end = self.steps[step] = (began - self.began) * 1e3, self.total
        return end - begin

    @property
    def total(self) -> float:
        """Milliseconds since the start."""
        return (perf_counter() - self.began) * 1e3

    def intervals(self) -> list[tuple[str, float, float]]:
        """Return the name, begin and end of each stage and step, in milliseconds since the start."""
        # Copied because a thread may still record a stage after a timeout.
        stages = self.stages.copy()
        spans = [(stage, begin := (self._starts[stage] - self.began) * 1e3, begin + took) for stage, took in stages.items()]
        return spans + [(step, *span) for step, span in self.steps.items()]

    def server_timing(self, total: float) -> str:
        """Render the value of a Server-Timing header, which ends with the time since the start."""
        entries = [*self.stages.items()]
        for step, (begin, end) in self.steps.items():
            entries.append((step, end - begin))
        texts = []
        for name, value in (*entries, ("total", total)):
            described = f'{name};desc="{self.descriptions[name]}"' if name in self.descriptions else name
            texts.append(f"{described};dur={value:.2f}")
        return ", ".join(texts)
