"""A folder of links to the server, its environment and the loadable models, with a path without special characters.

Triton starts the processes of its Python backend with a shell command that contains unquoted paths.
"""

import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from app.embedded.launch import loadable_models
from app.settings.schema import Settings

_UNQUOTED = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
# Unlike in /tmp, old files are not removed there while Triton runs.
_ELSEWHERE = "/dev/shm"  # noqa: S108 - tempfile makes the name


def make(settings: Settings, home: Path) -> Path:
    """Make the folder with the links `server` and `python`, and a link in `models` for each loadable model.

    The folder is in `home`; it is a private one elsewhere if there is no room, or if that path needs quoting in a shell.

    Args:
        settings: The settings with the model repository and Triton's port, which is part of the folder's name.
        home: The folder where Triton is installed.

    Raises:
        OSError: The folder cannot be made.
    """
    remove(settings, home)
    place = home / _name(settings)
    if _UNQUOTED.fullmatch(str(place)):
        with suppress(OSError):
            place.mkdir()
            return _fill(place, settings, home)
    return _fill(Path(tempfile.mkdtemp(prefix=f"nereid-{_name(settings)}-", dir=_ELSEWHERE)), settings, home)


def remove(settings: Settings, home: Path) -> None:
    """Remove the folder, including leftovers of a killed process."""
    for folder in (home / _name(settings), *Path(_ELSEWHERE).glob(f"nereid-{_name(settings)}-*")):
        shutil.rmtree(folder, ignore_errors=True)


def _fill(folder: Path, settings: Settings, home: Path) -> Path:
    for name in ("server", "python"):
        (folder / name).symlink_to(home / name)
    models = folder / "models"
    models.mkdir()
    repository = Path(settings.model_repository).resolve()
    for name in loadable_models(repository):  # Triton loads all models that it finds; those not pulled would fail
        (models / name).symlink_to(repository / name)
    return folder


def _name(settings: Settings) -> str:
    return f"links-{settings.triton_grpc_port}"
