"""A folder of links to what Triton runs: to the models that can be loaded, and to itself, by paths without special characters.

Triton starts the processes of its Python backend with a shell command, in which it does not quote their paths.
"""

import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from app.embedded.launch import loadable_models
from app.settings.schema import Settings

_UNQUOTED = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
# Unlike /tmp, nobody removes what is old there: Triton reads the folder for as long as it runs.
_ELSEWHERE = "/dev/shm"  # noqa: S108 - the name is made by tempfile


def make(settings: Settings, home: Path) -> Path:
    """Make the folder, with the links `server` and `python`, and one in `models` for each model that can be loaded.

    It is in Triton's own folder, or, if that has no room or its path cannot be in a shell command, a private one elsewhere.

    Args:
        settings: Where the models are, and Triton's port, of which the folder's name is made.
        home: Where Triton is installed.

    Raises:
        OSError: It cannot be made.
    """
    remove(settings, home)
    place = home / _name(settings)
    if _UNQUOTED.fullmatch(str(place)):
        with suppress(OSError):
            place.mkdir()
            return _fill(place, settings, home)
    return _fill(Path(tempfile.mkdtemp(prefix=f"nereid-{_name(settings)}-", dir=_ELSEWHERE)), settings, home)


def remove(settings: Settings, home: Path) -> None:
    """Remove the folder, or what one that was killed has left of it."""
    for folder in (home / _name(settings), *Path(_ELSEWHERE).glob(f"nereid-{_name(settings)}-*")):
        shutil.rmtree(folder, ignore_errors=True)


def _fill(folder: Path, settings: Settings, home: Path) -> Path:
    for name in ("server", "python"):
        (folder / name).symlink_to(home / name)
    models = folder / "models"
    models.mkdir()
    repository = Path(settings.model_repository).resolve()
    for name in loadable_models(repository):  # Triton loads all that it finds, and those that were not pulled would fail
        (models / name).symlink_to(repository / name)
    return folder


def _name(settings: Settings) -> str:
    return f"links-{settings.triton_grpc_port}"
