"""A contest as text for a terminal."""

from collections.abc import Iterator, Sequence
from statistics import median

from bench.load.driver import BUSY_SHARE
from bench.report.contests import Contest
from bench.report.measurements import KINDS, PERCENTILES
from bench.report.text import number, table

COMPARED = {"throughput": "requests/s", "gateway's CPU": "cpu gateway", "p50": "p50"}
"""Titles of the comparisons between contestants, and their figures."""
_COLUMNS = {
    "req/s": "requests/s",
    "mean": "mean",
    **{f"p{percent}": f"p{percent}" for percent in PERCENTILES},
    "errors %": "errors %",
    **{f"{kind} CPU": f"cpu {kind}" for kind in KINDS},
    "batch": "mean batch",
    "queue": "queue",
}
"""Columns of the table, and their figures."""


def contest_text(contest: Contest) -> str:
    """Describe a contest: a table, the ratios between contestants, and remarks."""
    return "\n".join([*_table(contest), *_ratios(contest), *_remarks(contest)])


def spread(values: Sequence[float]) -> str:
    """Describe ratios by their median, the smallest and the largest."""
    return f"{median(values):.2f} x ({min(values):.2f}..{max(values):.2f})" if values else "-"


def _table(contest: Contest) -> Iterator[str]:
    count = max((len(entry.rounds) for entry in contest.entries), default=0)
    yield f"{contest.title}; {contest.workers} workers; medians of {count} interleaved rounds of {contest.seconds:g} s"
    rows = [("", *_COLUMNS, "MiB a worker (unshared)", "model")]
    for entry in contest.entries:
        memory = f"{max(entry.resident_mib, default=0):.0f} ({max(entry.unshared_mib, default=0):.0f})"
        rows.append((entry.name, *(number(entry.median(figure)) for figure in _COLUMNS.values()), memory, entry.model))
    yield table(rows)
    yield "times in ms; CPU: of the gateway, of Triton, of the processes of its models and of the client, per request"


def _ratios(contest: Contest) -> Iterator[str]:
    for comparison in contest.comparisons:
        yield f"against {comparison.title}, median of the rounds' ratios (min..max):"
        width = max(15, *(len(name) for name, _ in comparison.pairs))
        for name, base in comparison.pairs:
            parts = (f"{what} {spread(contest.ratios(name, base, figure))}" for what, figure in COMPARED.items())
            yield f"  {name:{width}} {', '.join(parts)}"


def _remarks(contest: Contest) -> Iterator[str]:
    """Return remarks on the table."""
    for name, reason in contest.left_out.items():
        yield f"{name} is left out: {reason}"
    entries = [entry for entry in contest.entries if entry.rounds]
    for entry in entries:
        if contest.clients == 1 and entry.rounds[0].outcome.stages:
            overhead = median(one.outcome.overhead_p50 for one in entry.rounds)
            yield f"{entry.name}: {overhead:.2f} ms of a request (p50) are neither decoding nor Triton, as the client sees it"
    busy = [entry.name for entry in entries if any(one.outcome.driver_cpu > BUSY_SHARE for one in entry.rounds)]
    if busy:
        yield f"the client used more than {BUSY_SHARE:.0%} of a core with {', '.join(busy)}: those may be faster than shown"
    failed = [entry.name for entry in entries if any(one.outcome.failed for one in entry.rounds)]
    if failed:
        yield f"answers were wrong or missing: {', '.join(failed)}"
    yield from sorted({one.triton_note for entry in entries for one in entry.rounds if one.triton_note})
