"""What the user is told."""

from bench.experiments.tuning.text import result_lines, trial_line
from bench.experiments.tuning.variant import Variant
from tests.bench.experiments.tuning.support import make_trial

PRESENT, OTHER, REST = (Variant(instances=count, calls=0) for count in (1, 2, 3))
TRIED = {PRESENT: make_trial(20.0, 10.0), OTHER: make_trial(40.0, 8.0), REST: make_trial(30.0, None)}
ROUNDS = {variant: [TRIED[variant]] * 3 for variant in (PRESENT, OTHER)}


def test_a_trial_is_one_line() -> None:
    """Throughput, p50, p99 and the variant; no latency where the rate was too high."""
    assert trial_line(OTHER, TRIED[OTHER]).split(maxsplit=3) == ["40.0", "8.0", "8.0", "instances 2, K default"]
    assert trial_line(REST, TRIED[REST]).split()[:3] == ["30.0", "-", "-"]


def test_the_table_marks_the_front_and_ends_with_the_choice() -> None:
    """What was compared comes first, the highest throughput on top; what was tried once follows."""
    head, *lines, choice = result_lines(TRIED, ROUNDS, PRESENT, OTHER)

    assert "3 interleaved rounds" in head
    assert [line[0] for line in lines] == ["*", " ", " ", " "]
    assert [line.split("instances")[-1] for line in lines[:2]] == [" 2, K default", " 1, K default (present)"]
    assert lines[3] == trial_line(REST, TRIED[REST])
    assert choice == "choice: instances 2, K default: 2.00 x the throughput, 0.80 x the p99"


def test_it_says_why_nothing_changes() -> None:
    assert list(result_lines(TRIED, ROUNDS, PRESENT, PRESENT))[-1] == "choice: as it is; nothing was better by 5% in every round"
    assert "could not be compared" in list(result_lines(TRIED, {}, PRESENT, PRESENT))[-1]
