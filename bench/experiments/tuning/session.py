"""Trials within a time budget; each result is shown."""

from collections import deque
from statistics import mean
from time import monotonic

from bench.experiments.progress import BudgetBar
from bench.experiments.tuning.figures import Trial
from bench.experiments.tuning.stand import Stand
from bench.experiments.tuning.text import trial_line
from bench.experiments.tuning.variant import Variant
from bench.harness.errors import ContestantError

_RECENT = 4


class Session:
    """The trials of a tuning session."""

    def __init__(self, stand: Stand, bar: BudgetBar, seconds: float) -> None:
        self._stand = stand
        self._bar = bar
        self._seconds = seconds
        self._end = monotonic() + seconds
        self._took: deque[float] = deque(maxlen=_RECENT)

    def measure(self, variant: Variant, rate: float | None = None) -> Trial:
        """Measure a variant. Raises the same errors as `Stand.measure`."""
        self._bar.doing(str(variant))
        start = monotonic()
        trial = self._stand.measure(variant, rate)
        self._took.append(monotonic() - start)
        self._bar.note(trial_line(variant, trial))
        return trial

    def attempt(self, variant: Variant, rate: float | None, *, within: float | None = None) -> Trial | None:
        """Measure a variant; return None if it cannot be run, or would exceed a share of the time.

        The second trial is always run: without it, nothing can be compared.
        """
        if within is not None and len(self._took) > 1 and not self.trials_left(within):
            return None
        try:
            return self.measure(variant, rate)
        except ContestantError as error:
            self._bar.note(f"  left out: {variant}: {error}")
            return None

    def trials_left(self, share: float = 1.0) -> int:
        """Return the number of trials that fit in the rest of a share of the time, based on the last trials."""
        left = self._end - (1 - share) * self._seconds - monotonic()
        return max(0, int(left / mean(self._took)))
