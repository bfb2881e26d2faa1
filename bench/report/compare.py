"""Comparison of two records, before and after."""

from collections.abc import Sequence
from math import comb

from bench.report.measurements import Run
from bench.report.records import Record
from bench.report.text import number, spread, table

MORE_IS_BETTER = {"requests/s", "mean batch", "goodput", "peak/s"}
MAX_CHANCE = 0.01
"""Maximum chance that the rounds of two equal servers lie apart: there are two dozen figures."""


def compare(before: Record, after: Record) -> str:
    """Compare the runs of the same contestant, experiment, model and load, figure by figure: medians, and ratios of all rounds."""
    earlier = {run.key: run for run in before.runs}
    later = {run.key: run for run in after.runs}
    parts = _differences(before, after)
    parts += [f"\n{_title(run)}{_figures(earlier[key], run)}" for key, run in later.items() if key in earlier]
    parts += [f"\nonly in the first: {_title(run)}" for key, run in earlier.items() if key not in later]
    parts += [f"\nonly in the second: {_title(run)}" for key, run in later.items() if key not in earlier]
    return "\n".join(parts)


def _title(run: Run) -> str:
    return f"{run.contestant}, {run.mode}, {run.load}, {run.model}"


def _differences(before: Record, after: Record) -> list[str]:
    lines = [f"before: {before.when}, commit {before.commit or '?'}", f"after:  {after.when}, commit {after.commit or '?'}"]
    if before.machine != after.machine:
        lines.append(f"NOT THE SAME MACHINE: {before.machine!r} against {after.machine!r}")
    if before.server != after.server:
        lines.append(f"NOT THE SAME SERVER: {before.server or 'of the bench'} against {after.server or 'of the bench'}")
    names = sorted({*before.versions, *after.versions})
    changed = [name for name in names if before.versions.get(name) != after.versions.get(name)]
    lines += [f"{name}: {before.versions.get(name, '-')} -> {after.versions.get(name, '-')}" for name in changed]
    lines.append("rounds do not show what changed on the machine between the two: bench versus --before measures both in turn")
    return lines


def _figures(before: Run, after: Run) -> str:
    counts = max(1, len(before.rounds)), max(1, len(after.rounds))
    note = "" if _is_enough(*counts) else f": {counts[0]} and {counts[1]} runs are too few to judge a change"
    rows = [["", "before", "after", "after / before (min..max)", ""]]
    for name in dict.fromkeys([*before.figures, *after.figures]):
        old, new = before.values(name), after.values(name)
        ratios = [two / one for one in old for two in new if one]
        rows.append([name, number(before.median(name)), number(after.median(name)), spread(ratios), _judge(name, old, new)])
    return f"{note}\n{table(rows)}"


def _is_enough(before: int, after: int) -> bool:
    """Return whether that many rounds of two equal servers seldom lie apart: each order of them is as likely as another."""
    return 2 / comb(before + after, before) <= MAX_CHANCE


def _judge(name: str, old: Sequence[float], new: Sequence[float]) -> str:
    """Judge a change by its rounds, which must not overlap."""
    if not _is_enough(len(old), len(new)) or max(min(old), min(new)) <= min(max(old), max(new)):
        return ""
    return "better" if (min(new) > max(old)) == (name in MORE_IS_BETTER) else "worse"
