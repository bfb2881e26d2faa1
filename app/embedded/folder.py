"""The private folder of an embedded Triton: its socket, and links to the server, its environment and the loadable models.

The links give them paths without special characters: Triton starts the processes of its Python backend with a shell command that
contains unquoted paths.
"""

import fcntl
import os
import shutil
from pathlib import Path

from app.embedded.launch import loadable_models
from app.embedded.service import StartError
from app.settings.schema import PREFIX, TRITON_SOCKET, Settings


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
        if self._descriptor is not None:
            return
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise StartError(f"{self.path}, for Triton's socket, cannot be used: {error.strerror}") from error
        try:
            self._require_own(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

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
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)

    def give_up(self) -> None:
        """Remove the folder, if it belongs to this process."""
        if self._descriptor is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = None

    def _require_own(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise StartError(f"{self.path}, for Triton's socket, is not a private folder of this user; remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_locked = False
        else:  # its last owner may just have removed it
            is_locked = self.path.exists() and os.path.samestat(found, self.path.stat())
        if not is_locked:
            raise StartError(
                f"another process runs the Triton in {self._home}; end it, or choose another folder with {PREFIX}TRITON_HOME"
            )
