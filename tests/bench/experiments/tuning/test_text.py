"""What the user is told."""

from bench.experiments.tuning.figures import Trial
from bench.experiments.tuning.text import result_lines
from bench.experiments.tuning.variant import Variant
from tests.bench.experiments.tuning.support import make_trial

PRESENT, OTHER = (Variant(instances=count, calls=0) for count in (1, 2))
TRIED = {PRESENT: make_trial(20.0, 10.0), OTHER: make_trial(40.0, 8.0)}
ROUNDS = {variant: [trial] * 3 for variant, trial in TRIED.items()}


def test_the_last_line_is_the_choice_and_why_nothing_changes() -> None:
    def last(rounds: dict[Variant, list[Trial]], chosen: Variant) -> str:
        return list(result_lines(TRIED, rounds, PRESENT, chosen))[-1]

    assert last(ROUNDS, OTHER) == "choice: instances 2, K default: 2.00 x the throughput, 0.80 x the p99"
    assert last(ROUNDS, PRESENT) == "choice: as it is; nothing was better by 5% in every round"
    assert "could not be compared" in last({}, PRESENT)
