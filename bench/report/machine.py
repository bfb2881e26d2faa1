"""The machines and versions of a record."""

import ipaddress
import platform
import shutil
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

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
