"""The command line: python -m bench accuracy | instances."""

import argparse
import sys
from pathlib import Path

from bench import accuracy, instances


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
    options = parser.parse_args()
    return int(options.run(options) or 0)


if __name__ == "__main__":
    sys.exit(main())
