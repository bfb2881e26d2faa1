"""The part of a page about contests."""

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from statistics import median

from bench.report.charts import Bar, draw_bars
from bench.report.contest_text import COMPARED, spread
from bench.report.contests import Contest, ContestantResult
from bench.report.html import row, section, table
from bench.report.measurements import KINDS
from bench.report.plots import batch_plots, cpu_plot, latency_plot, stage_bar, stage_plot
from bench.report.svg import colour
from bench.report.text import number

_FIGURES = {
    "requests/s": "requests/s",
    "p50": "p50",
    "p99": "p99",
    "errors %": "errors %",
    "batch": "mean batch",
    "queue": "queue",
    **{f"cpu {kind}": f"cpu {kind}" for kind in KINDS},
}
"""Columns and the figures in them."""


def contest_section(contest: Contest) -> str:
    """Draw a contest with all its rounds; empty without contestants."""
    entries = [entry for entry in contest.entries if entry.rounds]
    if not entries:
        return ""
    colours = {entry.name: colour(place) for place, entry in enumerate(entries)}
    missing = "".join(f"<p>{escape(name)} was left out: {escape(why)}</p>" for name, why in contest.left_out.items())
    plots = [_comparisons(contest), _throughput(contest, entries, colours), _latency(entries, colours)]
    costs = {entry.name: {kind: entry.median(f"cpu {kind}") for kind in KINDS} for entry in entries}
    plots += [f"<h3>CPU per request</h3>{cpu_plot(costs)}", _stages(entries), _batches(entries, colours)]
    count = len(entries[0].rounds)
    text = f"Medians of {count} interleaved rounds, a dot for each; {contest.clients} clients, {contest.workers} workers each."
    return section(contest.title, text, missing + _standings(entries) + "".join(plots))


def _standings(entries: Sequence[ContestantResult]) -> str:
    rows = []
    for entry in entries:
        values = [(entry.median(figure), figure == "errors %" and entry.median(figure) > 0) for figure in _FIGURES.values()]
        rows.append(row(entry.name, entry.model, values, entry.note))
    return table(["", "model", *_FIGURES], rows)


def _comparisons(contest: Contest) -> str:
    rows = []
    for comparison in contest.comparisons:
        for name, base in comparison.pairs:
            cells = "".join(f"<td>{spread(contest.ratios(name, base, figure))}</td>" for figure in COMPARED.values())
            rows.append(f"<tr><td>{escape(name)}</td><td>{escape(base)}</td>{cells}</tr>")
    if not rows:
        return ""
    return f"<h3>Ratios, median of the rounds (min..max)</h3>{table(['', 'against', *COMPARED], rows)}"


def _throughput(contest: Contest, entries: Sequence[ContestantResult], colours: Mapping[str, str]) -> str:
    first = entries[0].name
    bars = []
    for entry in entries:
        rate = entry.median("requests/s")
        ratios = contest.ratios(entry.name, first, "requests/s") if entry.name != first else []
        label = f"{number(rate)}/s" + (f", {median(ratios):.2f} x" if ratios else "")
        bars.append(Bar(entry.name, {entry.name: rate}, label, [one.outcome.rate for one in entry.rounds]))
    return f"<h3>Requests per second</h3>{draw_bars(bars, colours, has_legend=False)}"


def _latency(entries: Sequence[ContestantResult], colours: Mapping[str, str]) -> str:
    answered = {
        entry.name: [one.outcome.latency for one in entry.rounds]
        for entry in entries
        if any(one.outcome.correct for one in entry.rounds)
    }
    return f"<h3>Latency</h3>{latency_plot(answered, colours)}" if answered else ""


def _stages(entries: Sequence[ContestantResult]) -> str:
    bars = [
        stage_bar(entry.name, stages, f"p50 {number(entry.median('p50'))} ms")
        for entry in entries
        if (stages := _median_stages(entry))
    ]
    return f"<h3>Stages</h3>{stage_plot(bars)}" if bars else ""


def _median_stages(entry: ContestantResult) -> dict[str, float]:
    names = dict.fromkeys(stage for one in entry.rounds for stage in one.outcome.stages)
    return {stage: median(one.outcome.stages.get(stage, 0.0) for one in entry.rounds) for stage in names}


def _batches(entries: Sequence[ContestantResult], colours: Mapping[str, str]) -> str:
    means = {entry.name: entry.median("mean batch") for entry in entries}
    if not any(means.values()):
        return ""
    bars = [Bar(name, {name: mean}, f"{mean:.1f}") for name, mean in means.items()]
    sizes: dict[str, Counter[str]] = {entry.name: Counter() for entry in entries}
    for entry in entries:
        for one in entry.rounds:
            sizes[entry.name].update(one.triton.batches if one.triton else {})
    return (
        f"<h3>Mean batch</h3>{draw_bars(bars, colours, has_legend=False)}"
        f"<h3>Share of Triton's executions by batch size</h3>{batch_plots(sizes)}"
    )
