"""One HTML page of one or more records, without scripts or downloads, with plots as SVG."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from bench.report.contest_sections import contest_section
from bench.report.overload_sections import overload_sections
from bench.report.records import Record
from bench.report.run_sections import run_sections
from bench.report.scaling_sections import scaling_section

_STYLE = Path(__file__).with_name("page.css")


def page(records: Sequence[tuple[str, Record]]) -> str:
    """Draw the page of several records, given with file names."""
    sections = [
        *run_sections(records),
        *overload_sections(records),
        *(contest_section(contest) for _, record in records for contest in record.contests),
        *(scaling_section(scaling) for _, record in records for scaling in record.scalings),
    ]
    about = "".join(_about(name, record) for name, record in records)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Nereid: bench</title>'
    style = f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>"
    body = f"<h1>Nereid: bench</h1>{about}{''.join(sections)}"
    return f'<!doctype html>\n<html lang="en"><head>{head}{style}</head><body>{body}</body></html>\n'


def _about(name: str, record: Record) -> str:
    machine = record.machine
    summary = f"{name}: {record.when}, commit {record.commit or '?'}, {machine.processor}, {machine.cores} cores, {machine.system}"
    details = ", ".join(f"{key} {value}" for key, value in (record.versions | record.settings).items())
    return f"<p>{escape(summary)}</p><details><summary>versions and settings</summary>{escape(details)}</details>"
