"""Two records, before and after."""

import sys
from pathlib import Path

from bench import results
from bench.results import Record, Run

MORE_IS_BETTER = {"requests/s", "mean batch"}
NOISE = 2.0
"""Percent below which a change is not called better or worse."""


def report(before: Path, after: Path) -> int:
    """Print every number of both with its change."""
    try:
        print(to_text(results.load(before), results.load(after)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def to_text(before: Record, after: Record) -> str:
    """Set runs of the same contestant, load and model against each other."""
    earlier = {run.key: run for run in before.runs}
    later = {run.key: run for run in after.runs}
    parts = _differences(before, after)
    parts += [f"\n{_title(run)}\n{_pair(earlier[key], run)}" for key, run in later.items() if key in earlier]
    lonely = [run for run in [*before.runs, *after.runs] if (run.key in earlier) != (run.key in later)]
    parts += [f"\nonly in {'the first' if run.key in earlier else 'the second'}: {_title(run)}" for run in lonely]
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


def _pair(before: Run, after: Run) -> str:
    rows = [["", "before", "after", "change", ""]]
    for name in [*before.figures, *(name for name in after.figures if name not in before.figures)]:
        old, new = before.figures.get(name), after.figures.get(name)
        texts = ["-" if value is None else results.number(value) for value in (old, new)]
        rows.append([name, *texts, *_change(name, old, new)])
    return results.table(rows)


def _change(name: str, old: float | None, new: float | None) -> tuple[str, str]:
    if old is None or new is None or old == new:
        return ("=" if old == new else "", "")
    if not old:
        return f"+{results.number(new)}", "better" if name in MORE_IS_BETTER else "worse"
    percent = (new - old) / old * 100
    verdict = "" if abs(percent) < NOISE else "better" if (percent > 0) == (name in MORE_IS_BETTER) else "worse"
    return f"{percent:+.1f} %", verdict
