"""The command line: python -m bench NAME."""

import argparse
import sys
from pathlib import Path

from app.host.program import CommandError
from app.settings.schema import SettingsError
from app.triton.config_file import ConfigFileError
from bench.experiments import (
    demo,
    fair,
    gpu,
    locust,
    overload,
    profile,
    server_load,
    side_by_side,
    stages,
    streams,
    tune,
    vectors,
)
from bench.experiments.options import Commands
from bench.harness.errors import ContestantError
from bench.report.compare import compare
from bench.report.records import RecordError, load_record

_INTERRUPTED = 130
# Each has a one-line message for the user.
_FAILURES = (ContestantError, SettingsError, CommandError, ConfigFileError, RecordError)


def main(arguments: list[str] | None = None) -> int:
    """Run one experiment or show earlier results; return the exit code. Without arguments, run `capacity`."""
    parser = argparse.ArgumentParser(prog="bench", description="Measure Nereid.")
    commands = parser.add_subparsers(required=True, metavar="name", dest="experiment")
    for module in (side_by_side, server_load, overload, fair, demo, streams, locust, stages, profile, tune, vectors, gpu):
        module.add_to(commands)
    _add_results(commands)
    options = parser.parse_args((sys.argv[1:] if arguments is None else arguments) or ["capacity"])
    try:
        return int(options.run(options))
    except _FAILURES as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def _add_results(commands: Commands) -> None:
    command = commands.add_parser("compare", help="what changed between two --json files")
    command.add_argument("before", type=Path)
    command.add_argument("after", type=Path)
    command.set_defaults(run=_compare)
    command = commands.add_parser("report", help="one HTML page of --json files")
    command.add_argument("files", type=Path, nargs="+")
    command.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="the page")
    command.set_defaults(run=_report)


def _compare(options: argparse.Namespace) -> int:
    print(compare(load_record(options.before), load_record(options.after)))
    return 0


def _report(options: argparse.Namespace) -> int:
    from bench.report.page import page  # noqa: PLC0415 - its charts take long to import

    records = [(file.stem, load_record(file)) for file in options.files]
    try:
        options.output.write_text(page(records), encoding="utf-8")
    except OSError as error:
        print(f"{options.output}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"written: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
