"""The private folder of an embedded Triton: its socket, and links to the server, its environment and the loadable models.

The links give them paths without special characters: Triton starts the processes of its Python backend with a shell command that
contains unquoted paths.
"""

import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from app.embedded.launch import loadable_models
from app.embedded.service import StartError
from app.settings.schema import PREFIX, TRITON_SOCKET, Settings


def require_private(path: Path) -> None:
    """Check that only this user can listen in a folder for Triton's socket, if it exists.

    Raises:
        StartError: It is not a folder, or others may enter it.
    """
    with suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise StartError(f"{path}, for Triton's socket, is not a private folder of this user; remove it")


class TritonFolder:
    """The folder in the settings. It belongs to one process at a time, and only its user can enter it."""

    def __init__(self, settings: Settings) -> None:
        self.path = settings.triton_folder
        self.socket = self.path / TRITON_SOCKET
        self._home = Path(settings.triton_home).resolve()
        self._repository = Path(settings.model_repository).resolve()
        self._descriptor: int | None = None
        """Locks the folder; None while it does not belong to this process. The kernel unlocks it when the process ends."""

    def claim(self) -> None:
        """Create the folder, or take over that of an ended process, unless it belongs to this one.

        Raises:
            StartError: It belongs to another process or to another user, or cannot be created.
        """
        if self._is_held():
            return
        self._close()
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            require_private(self.path)
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
        except OSError as error:
            self._close()
            raise StartError(f"{self.path}, for Triton's socket, cannot be used: {error.strerror}") from error
        if not self._is_held():  # its last owner may just have removed it
            raise StartError(
                f"another process runs the Triton in {self._home}; end it, or choose another folder with {PREFIX}TRITON_HOME"
            )

    def fill(self) -> None:
        """Make the links `server` and `python`, and a link in `models` for each loadable model; remove what was in the folder.

        Raises:
            OSError: They cannot be made.
        """
        self.clear()
        for name in ("server", "python"):
            (self.path / name).symlink_to(self._home / name)
        models = self.path / "models"
        models.mkdir()
        for name in loadable_models(self._repository):  # Triton loads all models that it finds; those not pulled would fail
            (models / name).symlink_to(self._repository / name)

    def clear(self) -> None:
        """Remove what is in the folder."""
        for entry in list(self.path.iterdir()) if self._is_held() else ():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)

    def give_up(self) -> None:
        """Remove the folder, if it belongs to this process."""
        if self._is_held():
            shutil.rmtree(self.path, ignore_errors=True)
        self._close()

    def _is_held(self) -> bool:
        """Return whether this process has locked the folder and it is still there; systemd may remove it when the user logs out."""
        with suppress(OSError):
            return self._descriptor is not None and os.path.samestat(os.fstat(self._descriptor), self.path.lstat())
        return False

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
