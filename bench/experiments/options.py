"""Options that several experiments share."""

import argparse
from pathlib import Path
from typing import Any, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - no public name
"""The subcommands of a command line, to which an experiment adds its own."""


def add_shared(command: argparse.ArgumentParser, **defaults: float | None) -> None:
    """Add some of the options of `_SHARED`, with these defaults."""
    for name, default in defaults.items():
        command.add_argument(f"--{name}", default=default, **_SHARED[name])


def describe(options: argparse.Namespace) -> dict[str, str]:
    """Return the options that have a value, for a record."""
    values = {name: value for name, value in vars(options).items() if name not in {"run", "plan", "lineup", "json"} and value}
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


def new_file(text: str) -> Path:
    """Parse the path of a file in a folder that exists, which is known before a long measurement."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


_SHARED: dict[str, dict[str, Any]] = {
    "clients": {"type": count, "help": "number of concurrent clients"},
    "workers": {"type": count, "help": "worker processes per server"},
    "seconds": {"type": positive, "help": "seconds per measurement"},
    "rounds": {"type": count, "help": "rounds, interleaved"},
    "json": {"type": new_file, "metavar": "OUT", "help": "write the results here, for compare and report"},
}
"""Arguments of `add_argument` by name."""
