"""How long each stage of one request took."""

from time import perf_counter


class Stages:
    """A stopwatch that starts with the request. Times are milliseconds."""

    def __init__(self) -> None:
        self._start = self._last = perf_counter()
        self.milliseconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Book the time since the last call (or the start) to `stage`."""
        now = perf_counter()
        self.milliseconds[stage] = (now - self._last) * 1e3
        self._last = now

    @property
    def total(self) -> float:
        """Milliseconds since the start."""
        return (perf_counter() - self._start) * 1e3

    def server_timing(self) -> str:
        """Render as the value of a Server-Timing header."""
        stages = {**self.milliseconds, "total": self.total}
        return ", ".join(f"{name};dur={value:.2f}" for name, value in stages.items())
