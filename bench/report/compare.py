"""Comparison of two records, before and after."""

from bench.report.measurements import Run
from bench.report.records import Record
from bench.report.text import number, table

MORE_IS_BETTER = {"requests/s", "mean batch", "goodput", "peak/s"}
NOISE_PERCENT = 2.0
"""Smaller changes count as neither better nor worse."""


def compare(before: Record, after: Record) -> str:
    """Compare the runs of the same contestant, experiment, model and load, figure by figure."""
    earlier = {run.key: run for run in before.all_runs}
    later = {run.key: run for run in after.all_runs}
    parts = _differences(before, after)
    parts += [f"\n{_title(run)}\n{_figures(earlier[key], run)}" for key, run in later.items() if key in earlier]
    parts += [f"\nonly in the first: {_title(run)}" for key, run in earlier.items() if key not in later]
    parts += [f"\nonly in the second: {_title(run)}" for key, run in later.items() if key not in earlier]
    return "\n".join(parts)


def _title(run: Run) -> str:
    return f"{run.contestant}, {run.mode}, {run.load}, {run.model}"


def _differences(before: Record, after: Record) -> list[str]:
    lines = [f"before: {before.when}, commit {before.commit or '?'}", f"after:  {after.when}, commit {after.commit or '?'}"]
    if before.machine != after.machine:
        lines.append(f"NOT THE SAME MACHINE: {before.machine} against {after.machine}")
    names = sorted({*before.versions, *after.versions})
    changed = [name for name in names if before.versions.get(name) != after.versions.get(name)]
    lines += [f"{name}: {before.versions.get(name, '-')} -> {after.versions.get(name, '-')}" for name in changed]
    return lines


def _figures(before: Run, after: Run) -> str:
    rows = [["", "before", "after", "change", ""]]
    for name in dict.fromkeys([*before.figures, *after.figures]):
        old, new = before.figures.get(name), after.figures.get(name)
        rows.append([name, number(old), number(new), *_change(name, old, new)])
    return table(rows)


def _change(name: str, old: float | None, new: float | None) -> tuple[str, str]:
    """Describe a change and judge it."""
    if old is None or new is None:
        return "", ""
    if old == new:
        return "=", ""
    if not old:
        return f"+{number(new)}", "better" if name in MORE_IS_BETTER else "worse"
    percent = (new - old) / old * 100
    verdict = "" if abs(percent) < NOISE_PERCENT else "better" if (percent > 0) == (name in MORE_IS_BETTER) else "worse"
    return f"{percent:+.1f} %", verdict
