"""Records of bench sessions, stored as JSON files."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from bench.report.machine import Machine, Server, describe_machine, package_versions, read_commit
from bench.report.measurements import Run


class RecordError(Exception):
    """A file is no record; the message is one line for the user."""


class Record(msgspec.Struct, kw_only=True):
    """One session of the bench."""

    when: str
    commit: str | None
    machine: Machine
    versions: dict[str, str]
    settings: dict[str, str]
    """The options of the command line."""
    runs: list[Run]
    server: Server | None = None
    """None if the bench started the servers itself, on this machine."""


def make_record(settings: Mapping[str, str], runs: Sequence[Run], server: Server | None = None) -> Record:
    """Make a record of measurements, with this machine and the versions."""
    return Record(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=read_commit(),
        machine=describe_machine(),
        versions=package_versions(),
        settings=dict(settings),
        runs=list(runs),
        server=server,
    )


def save_record(path: Path, record: Record) -> None:
    """Write a record as indented JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def load_record(path: Path) -> Record:
    """Read a record.

    Raises:
        RecordError: The file cannot be read, or is not a record of this version of the bench.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} is not a record of this bench: {error}") from error
