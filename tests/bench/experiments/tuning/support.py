"""Made-up trials."""

from bench.experiments.tuning.figures import Trial
from tests.bench.support import make_outcome


def make_trial(throughput: float, milliseconds: float | None = 10.0) -> Trial:
    """Make up a trial with such a latency; None: the fixed rate was too high."""
    return Trial(throughput, 5.0, None if milliseconds is None else make_outcome([milliseconds] * 20))
