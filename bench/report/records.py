"""Records of bench sessions, stored as JSON files, with the machines and versions."""

import ipaddress
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

from bench.report.measurements import Run

COMMIT = Path(__file__).parents[2] / "commit"
"""Where this is no checkout: a file with the commit of which this is a copy."""

_PACKAGES = ("nereid", "granian", "litestar", "msgspec", "numpy", "pillow", "pillow-simd", "simplejpeg", "tritonclient", "uvloop")


class Machine(msgspec.Struct, frozen=True):
    """The machine of a record, where the load came from."""

    system: str
    processor: str
    cores: int
    memory_gib: float
    python: str

    def __str__(self) -> str:
        return f"{self.processor}, {self.cores} cores, {self.system}"


class Server(msgspec.Struct, frozen=True):
    """Where the server of a record was."""

    host: str
    """Name or address, and the port if the URL had one."""
    address: str
    """The IP address of the connections."""
    is_here: bool
    """Whether it is an address of the machine that the load came from."""

    def __str__(self) -> str:
        return f"{self.host} ({self.address}), {'this machine' if self.is_here else 'another machine'}"


def describe_server(host: str, address: str) -> Server:
    """Describe the server at an IP address."""
    own = {one.address for addresses in psutil.net_if_addrs().values() for one in addresses}
    return Server(host, address, address in own or ipaddress.ip_address(address).is_loopback)


def describe_machine() -> Machine:
    """Describe this machine."""
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        cores=len(psutil.Process().cpu_affinity() or []) or psutil.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        python=platform.python_version(),
    )


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that matter here."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def read_commit() -> str | None:
    """Return the commit of this checkout, with a `+` if files are changed; None without git."""
    if COMMIT.is_file():
        return COMMIT.read_text(encoding="ascii").strip()
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "describe", "--always", "--exclude=*", "--dirty=+"]
    described = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return described.stdout.strip() or None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


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


def load_record(path: Path, kind: type[Record] = Record) -> Record:
    """Read a record of a kind.

    Raises:
        RecordError: The file cannot be read, or is not a record of this version of the bench.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} is not a record of this bench: {error}") from error
