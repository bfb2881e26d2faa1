"""The private folders of embedded programs, with their sockets; that of Triton has links to the server, and more.

The links give them paths without special characters: Triton starts the processes of its Python backend with a shell command that
contains unquoted paths.
"""

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from app.embedded.install import CPU_FOLDER, GPU_FOLDER
from app.host.program import CommandError
from app.settings.schema import PREFIX, TRITON_SOCKET, Settings
from app.telemetry.logging import say
from app.triton.repository import identify, loadable_models

# Triton ends within five seconds, and then its models.
_CLAIM_ATTEMPTS = 150
_POLL_SECONDS = 0.1
_LOADED = "loaded"
_DEVICE = "device"
_HOMES = {"Triton": "TRITON_HOME", "PostgreSQL": "DATABASE_HOME"}


class Device(NamedTuple):
    """What runs the models of an embedded Triton."""

    gpu: str = ""
    """The name of the GPU; empty for the CPU."""
    why_cpu: str = ""

    @property
    def provider(self) -> Literal["CUDAExecutionProvider", "CPUExecutionProvider"]:
        """With what ONNX Runtime runs the models there."""
        return "CUDAExecutionProvider" if self.gpu else "CPUExecutionProvider"


_CPU = Device()


class PrivateFolder:
    """A folder with a socket. It belongs to one process at a time, and is never removed: an API may go on connecting to it."""

    def __init__(self, path: Path, home: str, program: str, owner: int | None = None) -> None:
        self.path = path
        self._home = Path(home).resolve()
        self._program, self._owner = program, os.geteuid() if owner is None else owner
        self.descriptor = -1
        """Locks the folder, also for a program that inherits it; -1 while the folder does not belong to this process."""

    def make(self) -> None:
        """Make the folder, or check it; in /dev/shm, which is sticky, no other user can replace it then."""
        try:
            self.path.mkdir(mode=0o700)
            if self._owner != os.geteuid():
                os.chown(self.path, self._owner, -1)
        except FileExistsError:
            self.check()
        except OSError as error:
            raise CommandError(f"{self.path}, for {self._program}'s socket, cannot be made: {error.strerror}") from error

    def check(self) -> None:
        """Raise CommandError, with what to do after a semicolon, unless only this user, or the owner, can listen in the folder."""
        with suppress(FileNotFoundError):
            found = self.path.lstat()
            if found.st_uid != self._owner:
                raise CommandError(
                    f"{self.path}, for {self._program}'s socket, belongs to user {found.st_uid}, and this is user {self._owner}; "
                    f"run this as that user (sudo -u '#{found.st_uid}'), let root remove it, or choose another "
                    f"{PREFIX}{_HOMES[self._program]}"
                )
            if not stat.S_ISDIR(found.st_mode) or stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
                raise CommandError(f"{self.path}, for {self._program}'s socket, is not a folder of mode 700; remove it")

    def claim(self, attempts: int = _CLAIM_ATTEMPTS) -> None:
        """Make the folder, or take over that of an ended process; raise CommandError if it belongs to another one."""
        # A program whose starter was killed ends, too, but needs a moment for that; it is waited for.
        if self.is_held():
            return
        self._close()
        for attempt in range(attempts):
            self.make()  # again, if it was removed meanwhile
            if self._lock():
                return
            if attempt == 1:
                say(f"another process runs the {self._program} in {self._home}; trying for 15 s, in case it is ending")
            time.sleep(_POLL_SECONDS)
        raise CommandError(
            f"another process, such as a second `serve` or one in a container with this /dev/shm, runs the {self._program} in "
            f"{self._home}; end it, or choose another folder with {PREFIX}{_HOMES[self._program]}"
        )

    @contextmanager
    def unclaimed_on_error(self) -> Iterator[None]:
        """Give the folder up if the block, which claims it, raises, unless it belonged to this process before."""
        was_held = self.is_held()
        try:
            yield
        except BaseException:
            if not was_held:
                self.give_up()
            raise

    def clear(self) -> None:
        """Remove what is in the folder, if it belongs to this process."""
        for entry in list(self.path.iterdir()) if self.is_held() else ():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)

    def give_up(self) -> None:
        """Leave the folder, empty, to other processes."""
        self.clear()
        self._close()

    def _lock(self) -> bool:
        try:
            self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process has locked it, or systemd has just removed it
            self._close()
        return self.is_held()

    def is_held(self) -> bool:
        """Return whether this process has locked the folder and it is still there; systemd may remove it when the user logs out."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self.descriptor), self.path.lstat())
        return False

    def _close(self) -> None:
        # It stays locked while a program that has inherited the descriptor runs.
        with suppress(OSError):
            os.close(self.descriptor)
        self.descriptor = -1


class TritonFolder(PrivateFolder):
    """That of the Triton in the settings."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.triton_folder, settings.triton_home, "Triton")
        self.socket = self.path / TRITON_SOCKET
        self._repository = Path(settings.model_repository).resolve()

    def fill(self, device: Device = _CPU) -> None:
        """Make links `server` and `python`, and one in `models` for each loadable model; remove what was there; raise OSError."""
        self.clear()
        (self.path / _DEVICE).write_text("\n".join(device), encoding="utf-8")
        (self.path / "server").symlink_to(self._home / "server")
        (self.path / "python").symlink_to(self._home / (GPU_FOLDER if device.gpu else CPU_FOLDER))
        models = self.path / "models"
        models.mkdir()
        for name in loadable_models(self._repository):  # Triton loads all models that it finds; those not pulled would fail
            (models / name).symlink_to(self._repository / name)
            self.note_loaded(name, identify(self._repository / name))

    def drop_removed_models(self) -> None:
        """Remove the links to models that are gone, with which Triton could not list the others."""
        with suppress(OSError):  # Triton is being stopped, another process does the same, or their disk fails
            for link in (self.path / "models").iterdir():
                if not link.exists():
                    link.unlink()

    @property
    def device(self) -> Device | None:
        """What runs the models of the Triton that was started last; None if it was stopped."""
        try:
            gpu, _, why_cpu = (self.path / _DEVICE).read_text(encoding="utf-8").partition("\n")
        except OSError:
            return None
        return Device(gpu, why_cpu)

    def note_loaded(self, model: str, identity: str) -> None:
        """Record what `identify` returned before Triton loaded a model; raise OSError if that is not possible."""
        loaded = self.path / _LOADED
        loaded.mkdir(exist_ok=True)
        (loaded / model).write_text(identity, encoding="ascii")

    def has_loaded(self, model: str, identity: str) -> bool:
        """Return whether Triton has loaded just these files of a model, or will before it answers."""
        try:
            return (self.path / _LOADED / model).read_text(encoding="ascii") == identity
        except OSError:
            return False


def device_of(settings: Settings) -> Device | None:
    """Return what runs the models of the embedded Triton; None if it was stopped, or with a Triton elsewhere."""
    return None if settings.triton_endpoints else TritonFolder(settings).device


def has_gpu(settings: Settings) -> bool:
    """Return whether the embedded Triton runs its models on a GPU."""
    device = device_of(settings)
    return device is not None and bool(device.gpu)


def runs_elsewhere(folder: PrivateFolder) -> bool:
    """Return whether another process runs the program of a folder, or starts it."""
    try:
        folder.claim(attempts=1)
    except CommandError:
        return True
    folder.give_up()
    return False
