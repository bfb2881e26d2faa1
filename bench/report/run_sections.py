"""The part of a page about single runs."""

from collections.abc import Mapping, Sequence

from bench.report.charts import Axis, Line, draw_lines, linear_axis, log_axis
from bench.report.html import row, section, table
from bench.report.measurements import KINDS, PERCENTILES, Run
from bench.report.plots import batch_plots, cpu_plot, latency_plot, stage_bar, stage_plot
from bench.report.records import Record
from bench.report.svg import COLOURS, colour
from bench.report.text import number

_FIGURES = (
    "requests/s",
    "mean",
    *(f"p{percent}" for percent in PERCENTILES),
    "max",
    "errors %",
    "mean batch",
    "queue",
    *(f"cpu {kind}" for kind in KINDS),
)


def run_sections(records: Sequence[tuple[str, Record]]) -> list[str]:
    """Draw the runs of several records, given with file names; overload runs have separate sections."""
    runs, series = _named(records)
    if not runs:
        return []
    colours = {name: colour(place) for place, name in enumerate(runs)}
    sections = [section("Numbers", "Times in milliseconds; CPU time per request, by process.", _numbers(runs))]
    sections += _latency(runs, colours) + _over_clients(series)
    stages = [
        stage_bar(name, run.outcome.stages, f"{number(run.outcome.mean)} ms") for name, run in runs.items() if run.outcome.stages
    ]
    if stages:
        text = "Mean time of each step according to the server (Server-Timing); to the right, the mean latency at the client."
        sections.append(section("Stages", text, stage_plot(stages)))
    cpu = {name: run.cpu_ms for name, run in runs.items() if run.cpu_ms}
    if cpu:
        sections.append(section("CPU per request", "CPU time per request, by process.", cpu_plot(cpu)))
    batches = batch_plots({name: run.triton.batches for name, run in runs.items() if run.triton})
    if batches:
        sections.append(section("Batch sizes", "Share of Triton's executions by batch size.", batches))
    return sections


def _named(records: Sequence[tuple[str, Record]]) -> tuple[dict[str, Run], dict[str, list[Run]]]:
    """Name runs by their differences, and series of runs that differ only in their load."""
    described = [
        ((run.contestant, file, run.model, run.load), run) for file, record in records for run in record.runs if not run.overload
    ]
    telling = [place for place in range(4) if len({parts[place] for parts, _ in described}) > 1] or [3]
    runs: dict[str, Run] = {}
    series: dict[str, list[Run]] = {}
    for parts, run in described:
        name = ", ".join(parts[place] for place in telling)
        runs[name if name not in runs else f"{name} ({len(runs)})"] = run
        series.setdefault(", ".join(parts[place] for place in telling if place < 3) or parts[0], []).append(run)  # noqa: PLR2004
    return runs, series


def _numbers(runs: Mapping[str, Run]) -> str:
    rows = []
    for name, run in runs.items():
        values = [(run.figures.get(figure), figure == "errors %" and run.figures[figure] > 0) for figure in _FIGURES]
        rows.append(row(name, run.model, values))
    return table(["", "model", *_FIGURES], rows)


def _latency(runs: Mapping[str, Run], colours: Mapping[str, str]) -> list[str]:
    answered = {name: [run.outcome.latency] for name, run in runs.items() if run.outcome.correct}
    if not answered:
        return []
    text = "How long the slowest answers took: at 99, one in a hundred took longer than the curve. Both axes are logarithmic."
    text += f" The first {COLOURS} of {len(answered)} runs." if len(answered) > COLOURS else ""
    return [section("Latency", text, latency_plot(answered, colours))]


def _over_clients(series: Mapping[str, Sequence[Run]]) -> list[str]:
    """Draw throughput and p99 over clients for each series with several numbers of clients."""
    counted = {name: [(run.clients, run) for run in runs if run.clients] for name, runs in series.items()}
    counted = {
        name: sorted(runs, key=lambda pair: pair[0]) for name, runs in counted.items() if len({clients for clients, _ in runs}) > 1
    }
    if not counted:
        return []
    colours = {name: colour(place) for place, name in enumerate(counted)}
    rates = [Line(name, [(float(clients), run.outcome.rate) for clients, run in runs]) for name, runs in counted.items()]
    tails = [Line(name, [(float(clients), run.outcome.percentile(99)) for clients, run in runs]) for name, runs in counted.items()]
    counts = sorted({x for line in rates for x, _ in line.points})
    across = Axis(counts[0], counts[-1], {count: f"{count:g}" for count in counts}, "clients", is_log=True)
    up = linear_axis(max(y for line in rates for _, y in line.points), "requests/s")
    tail = log_axis([y for line in tails for _, y in line.points], "p99, ms")
    text = "Correct answers per second, and the time within which 99 of 100 answers arrived."
    plots = draw_lines(rates, across, up, colours, dots=True) + draw_lines(tails, across, tail, colours, dots=True)
    return [section("Throughput over clients", text, plots)]
