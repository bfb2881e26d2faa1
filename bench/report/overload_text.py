"""An experiment with overload as text for a terminal."""

from collections.abc import Sequence

from bench.report.measurements import Run
from bench.report.text import number, table

COLUMNS = {
    "offered/s": "offered/s",
    "goodput/s": "goodput",
    "p50": "p50",
    "p99": "p99",
    "late p99": "sent late p99",
    "rejected p50": "rejected p50",
    "rejected p99": "rejected p99",
    "gateway": "cpu gateway",
    "client": "cpu client",
    "RSS before": "resident MiB before",
    "RSS peak": "resident MiB peak",
    "RSS after": "resident MiB after",
    "PSS peak": "proportional MiB peak",
    "recovery": "recovery",
}
"""Columns and the figures in them."""


def overload_text(runs: Sequence[Run]) -> str:
    """Describe the servers under each load, grouped by phase."""
    rows = [["", "server", *COLUMNS, "responses"]]
    for run in runs:
        statuses = ", ".join(f"{status}: {count:,}" for status, count in run.outcome.statuses.items())
        rows.append([run.load, run.contestant, *(number(run.figures.get(figure)) for figure in COLUMNS.values()), statuses])
    notes = [
        "times in ms, from when a request was due: p50 and p99 of correct answers, and of rejections (429 and 503);",
        "late p99: 99 of 100 requests were sent or dropped within this time; gateway, client: CPU per request;",
        "RSS, PSS: memory of the largest worker, MiB: resident, and with an equal part of what it shares;",
        "recovery: median latency of a single client after the load, divided by that before it; a dash: it got no correct answer;",
        "responses: dropped: not sent, because all connections were in use; error: no answer",
    ]
    return "\n".join([table(rows), *notes])
