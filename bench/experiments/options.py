"""Options that several experiments share."""

import argparse
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - no public name
"""The subcommands of a command line, to which an experiment adds its own."""


def add_images(command: argparse.ArgumentParser) -> None:
    """Add the option for a folder of images."""
    command.add_argument("--images", type=Path, metavar="DIR", help="images to send: a folder of JPEGs, scaled down to COCO's size")


def add_before(
    command: argparse.ArgumentParser, text: str = "another checkout of this project, to measure its Nereid beside today's"
) -> None:
    """Add the option for another checkout."""
    command.add_argument("--before", type=Path, metavar="PATH", help=text)


def add_clients(command: argparse.ArgumentParser, default: int = 32) -> None:
    """Add the option for the number of clients."""
    command.add_argument("--clients", type=count, default=default, help="number of concurrent clients")


def add_workers(command: argparse.ArgumentParser) -> None:
    """Add the option for the number of processes."""
    command.add_argument("--workers", type=count, default=2, help="worker processes per server")


def add_seconds(command: argparse.ArgumentParser, default: float) -> None:
    """Add the option for the length of a measurement."""
    command.add_argument("--seconds", type=positive, default=default, help="seconds per measurement")


def add_rounds(command: argparse.ArgumentParser, default: int) -> None:
    """Add the option for the number of rounds."""
    command.add_argument("--rounds", type=count, default=default, help="rounds per server, interleaved")


def describe(options: argparse.Namespace) -> dict[str, str]:
    """Return the options that have a value, for a record."""
    values = {name: value for name, value in vars(options).items() if name not in {"run", "json"} and value}
    return {name: ", ".join(map(str, value)) if isinstance(value, list) else str(value) for name, value in values.items()}


def count(text: str) -> int:
    """Parse a whole number, at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def positive(text: str) -> float:
    """Parse a number above zero."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above zero")
    return value
