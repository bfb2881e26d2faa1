"""The command line: python -m bench NAME."""

import argparse
import sys
from pathlib import Path

from bench import accuracy, compare, instances, limit, modes, processes, profile, report, stages, versus, workers


def main() -> int:
    """Run one measurement."""
    parser = argparse.ArgumentParser(prog="bench", description="Measure Nereid.")
    commands = parser.add_subparsers(required=True, metavar="name")
    command = commands.add_parser("accuracy", help="served boxes against an independent reference (a server must run)")
    command.add_argument("--url", default="http://127.0.0.1:4603", help="of the server")
    command.add_argument("--pictures", type=Path, default=Path("tests/pictures"), help="a folder of JPEGs")
    command.add_argument("--model", default="yolo11n", help="to ask")
    command.add_argument("--network", type=Path, help="the published network; without it, it is fetched")
    command.set_defaults(run=lambda options: accuracy.report(options.url, options.model, options.pictures, options.network))
    command = commands.add_parser("instances", help="two Triton instances of one thread against one of two")
    command.add_argument("--seconds", type=float, default=8.0, help="of each round")
    command.add_argument("--rounds", type=int, default=3, help="of each contestant, in turn")
    command.set_defaults(run=lambda options: instances.report(options.seconds, options.rounds))
    _add_versus(commands)
    _add_costs(commands)
    modes.add_to(commands)
    _add_files(commands)
    options = parser.parse_args()
    try:
        return int(options.run(options) or 0)
    except processes.ContestantError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _add_versus(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser("versus", help="Nereid beside other stacks, on the same Triton, in interleaved rounds")
    command.add_argument("--model", choices=versus.MODELS, default="null", help="that Triton runs")
    command.add_argument(
        "--contests", nargs="+", choices=versus.CONTESTS, default=[], help="what to compare; else what suits the model"
    )
    command.add_argument("--only", nargs="+", choices=versus.NAMES, default=[], help="entrants; else all")
    command.add_argument("--rounds", type=int, default=5, help="of each entrant, in turn")
    command.add_argument("--seconds", type=float, default=8.0, help="of each round")
    command.add_argument("--clients", type=int, default=32, help="that ask at the same time")
    command.add_argument("--workers", type=int, default=2, help="processes of each entrant")
    command.add_argument("--pictures", type=Path, help="a folder of JPEGs, shrunk to COCO's size")
    command.add_argument("--json", type=Path, metavar="OUT", help="file for everything that was measured")
    command.add_argument("--install", action="store_true", help="make the reference's environment first, if it is not there")
    command.set_defaults(run=versus.run)


def _add_costs(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser("limit", help="what the machine could do at most, and how far Nereid is from it")
    command.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    command.add_argument("--clients", type=int, default=32, help="that ask at the same time")
    command.add_argument("--workers", type=int, default=2, help="processes of the server")
    command.add_argument("--pictures", type=Path, help="a folder of JPEGs, shrunk to COCO's size")
    command.set_defaults(run=lambda options: limit.report(options.seconds, options.clients, options.workers, options.pictures))
    command = commands.add_parser("stages", help="CPU time of a request by step, Nereid's and others'")
    command.add_argument("--runs", type=int, default=5, help="of each candidate, in turn")
    command.add_argument("--seconds", type=float, default=2.0, help="of each run")
    command.add_argument("--pictures", type=Path, help="a folder of JPEGs, shrunk to COCO's size")
    command.set_defaults(run=lambda options: stages.report(options.runs, options.seconds, options.pictures))
    command = commands.add_parser("workers", help="how many processes and threads are best")
    command.add_argument("--seconds", type=float, default=5.0, help="of each round")
    command.add_argument("--rounds", type=int, default=3, help="of each case, in turn")
    command.add_argument("--clients", type=int, default=32, help="that ask at the same time")
    command.add_argument("--pictures", type=Path, help="a folder of JPEGs, shrunk to COCO's size")
    command.set_defaults(run=lambda options: workers.report(options.seconds, options.rounds, options.clients, options.pictures))
    command = commands.add_parser("profile", help="a flame graph of a worker under load, by py-spy")
    command.add_argument("seconds", type=int, nargs="?", default=60, help="to record")
    command.add_argument("out", type=Path, nargs="?", default=Path("profile.svg"), help="the SVG file")
    command.add_argument("--name", choices=versus.NAMES, default="nereid_shm", help="entrant of `versus` to watch")
    command.add_argument("--clients", type=int, default=32, help="that ask at the same time")
    command.add_argument("--workers", type=int, default=2, help="processes of the server")
    command.set_defaults(
        run=lambda options: profile.report(options.seconds, options.out, options.name, options.clients, options.workers)
    )


def _add_files(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser("compare", help="what changed between two --json files")
    command.add_argument("before", type=Path)
    command.add_argument("after", type=Path)
    command.set_defaults(run=lambda options: compare.report(options.before, options.after))
    command = commands.add_parser("report", help="one HTML page of --json files")
    command.add_argument("files", type=Path, nargs="+")
    command.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="the page")
    command.set_defaults(run=lambda options: report.report(options.files, options.output))


if __name__ == "__main__":
    sys.exit(main())
