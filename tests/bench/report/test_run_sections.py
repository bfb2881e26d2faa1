"""The part of a page about single runs."""

from bench.report.page import page
from tests.bench.report.elements import Elements
from tests.bench.support import make_outcome, make_run, make_runs_record


def test_a_run_without_answers_can_be_drawn() -> None:
    dead = make_run(outcome=make_outcome([], error=10), triton=None, triton_note="gone", cpu_ms={})
    text = page([("dead", make_runs_record(dead))])

    assert not Elements(text).open
    assert "100" in text


def test_runs_with_the_same_number_of_clients_can_be_drawn() -> None:
    runs = [make_run(clients=clients) for clients in (1, 4, 4)]

    assert "Throughput over clients" in page([("x", make_runs_record(*runs))])


def test_runs_are_named_by_what_distinguishes_them() -> None:
    """Properties that all runs share are left out; files are distinguished by their names."""
    text = page([("before", make_runs_record(make_run())), ("after", make_runs_record(make_run()))])

    assert text.count('<td title="">before</td>') == text.count('<td title="">after</td>') == 1
