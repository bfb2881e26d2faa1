"""The rounds of a contest."""

from bench.report.contests import ContestantResult
from bench.report.records import make_record
from tests.bench.support import make_contest, make_measurement, make_run


def test_a_contestant_is_represented_by_its_median_round() -> None:
    contest = make_contest()
    contest.entries[1].resident_mib = [100.0, 120.0]
    record = make_record({}, [make_run()], [contest])
    _, reference, nereid = record.all_runs

    assert nereid.key == ("nereid", "versus: null, 32 clients", "null", "32 clients")
    assert nereid.outcome.rate == 350
    assert nereid.figures["worker MiB"] == 120
    assert reference.outcome.rate == 100


def test_ratios_are_of_the_same_round() -> None:
    """Noise that affects a whole round does not change them."""
    entries = [
        ContestantResult(name=name, model="null", rounds=[make_measurement(rate) for rate in rates])
        for name, rates in (("reference", [100.0, 50.0]), ("nereid_shm", [400.0, 200.0]))
    ]

    assert make_contest(entries=entries).ratios("nereid_shm", "reference", "requests/s") == [4, 4]
