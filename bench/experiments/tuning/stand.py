"""Measure variants of a model: a new API process for each, in front of one Triton."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from app.settings.schema import Settings
from bench.experiments.tuning.figures import TOLERATED, Trial
from bench.experiments.tuning.hosts import Host
from bench.experiments.tuning.variant import Variant
from bench.harness.errors import ContestantError
from bench.harness.ports import find_free
from bench.harness.processes import running, variables
from bench.load.closed_loop import drive_closed_loop
from bench.load.driver import PATIENCE_SECONDS, Progress, run
from bench.load.images import Sample
from bench.load.open_loop import drive_open_loop
from bench.load.outcome import Outcome
from bench.load.tally import REJECTIONS

SHARE = 0.7
"""Default of the fixed rate, as a share of the current variant's capacity."""

# The load comes from this machine, without keys, and waits for each response. With a short deadline, the gateway would reject
# requests to a slow variant, and clients that retry at once would keep the machine busy.
_MEASURED = {
    "host": "127.0.0.1",
    "socket": "",
    "api_keys_file": "",
    "drain_delay_seconds": 0.0,
    "timeout_seconds": PATIENCE_SECONDS,
    "max_timeout_seconds": PATIENCE_SECONDS,
}
_WARM_UP_CLIENTS = 4
_WARM_UP_SHARE = 0.25


class Load(msgspec.Struct, frozen=True):
    """The load on a variant."""

    samples: Sequence[Sample]
    clients: int
    """Number of clients that send requests back to back."""
    seconds: float
    """Duration of each of the two loads."""
    rate: float | None = None
    """Rate of the second load in requests per second; None for a share of the current variant's capacity."""


class Stand:
    """Measures variants of a model in a Triton."""

    def __init__(
        self,
        host: Host,
        load: Load,
        *,
        logs: Path,
        progress: Progress,
    ) -> None:
        """Prepare for trials.

        Args:
            host: Runs the model.
            load: The load on each variant.
            logs: The folder for the output of processes.
            progress: Called during the load.
        """
        self._host = host
        self._running: tuple[Variant, Settings] | None = None
        self._load = load
        self._log = logs / "api.log"
        self._progress = progress

    def measure(self, variant: Variant, rate: float | None = None) -> Trial:
        """Measure a variant.

        Args:
            variant: The variant.
            rate: The fixed rate in requests per second, unless the load has one; None for a share of its own throughput.

        Raises:
            ContestantError: The variant cannot be run, or returns wrong results.
        """
        with self._api(self._run(variant), variant.calls) as url:
            self._ask_again(url, _WARM_UP_CLIENTS, self._load.seconds * _WARM_UP_SHARE)
            throughput = self._ask_again(url, self._load.clients, self._load.seconds).rate
            rate = self._load.rate or rate or throughput * SHARE
            return Trial(throughput, rate, self._ask_steadily(url, rate) if throughput > rate else None)

    def _run(self, variant: Variant) -> Settings:
        """Run the variant, unless it is already running."""
        if self._running is None or self._running[0] != variant.config:
            self._running = None
            self._running = variant.config, self._host.run(variant.config)
        return self._running[1]

    def _ask_again(self, url: str, clients: int, seconds: float) -> Outcome:
        outcome = run(drive_closed_loop(url, self._load.samples, clients=clients, seconds=seconds, progress=self._progress))
        failed = sum(count for status, count in outcome.statuses.items() if status not in {"200", *REJECTIONS})
        if not outcome.correct or failed > TOLERATED * outcome.correct:
            answers = ", ".join(f"{count} x {status}" for status, count in outcome.statuses.items())
            raise ContestantError(f"not all answers are correct: {answers or 'there was none'}")
        return outcome

    def _ask_steadily(self, url: str, rate: float) -> Outcome:
        return run(drive_open_loop(url, self._load.samples, rate=rate, seconds=self._load.seconds, progress=self._progress))

    @contextmanager
    def _api(self, settings: Settings, calls: int | None) -> Iterator[str]:
        """Run the API until the block ends; yield the URL for posting images."""
        (port,) = find_free(1)
        changes: dict[str, Any] = {} if calls is None else {"calls_in_flight": calls}
        settings = msgspec.structs.replace(settings, **_MEASURED, port=port, **changes)
        with running([sys.executable, "-m", "app", "api"], variables(settings), port, "/readyz", self._log) as server:
            yield f"{server.url}/predict/{settings.model}"
