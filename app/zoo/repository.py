"""The models of a model repository that have a description: their configs are generated, and each version has a folder."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from app.host.program import Busy, CommandError, NoSuchModel
from app.model.reference import NAME, refer_to, split_reference
from app.telemetry.logging import say
from app.triton.repository import DESCRIPTION, LOCK, REMOVED, last_versions, model_folders
from app.zoo import configs, description
from app.zoo.description import Description

NETWORK = "model.onnx"
PREVIOUS = ".previous"
"""In the folder for unfinished files: versions that are replaced because they are added again."""
_SCRATCH = ".add-"


def require_name(name: str) -> str:
    """Return the name of a model; raise CommandError if it is not allowed."""
    if not NAME.fullmatch(name):
        raise CommandError(f"{name!r} is not a name of a model: letters, digits, and `_`, `-` and `.` after the first, at most 64")
    return name


class Repository:
    """Writes added models to a model repository, one writer at a time, also of several hosts; a killed one changes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, name: str, *, is_published: bool = False) -> Description | None:
        """Return the description of a model, or None; raise CommandError for a wrong name, or without a valid description."""
        # A published model may have a version without a description, because earlier programs pulled it so.
        folder = self.path / require_name(name)
        found = description.load(folder)
        if found is None and any(
            path.suffix == ".pbtxt" or (path.parent.name.isdigit() and not is_published) for path in folder.glob("**/*")
        ):
            what = f"{folder} has versions or configs without a model.toml, and stays as it is"
            raise CommandError(f"{what}; {'remove it first' if is_published else 'choose another --name'}")
        return found

    def models(self) -> dict[str, Description]:
        """Return the descriptions of all added models by name; warn of those that are not valid. Raises CommandError."""
        try:
            folders = model_folders(self.path)
        except OSError as error:
            raise CommandError(f"{error.filename}: {error.strerror}") from error
        found = {}
        for folder in folders:
            try:
                if (one := description.load(folder)) is not None:
                    found[folder.name] = one
            except CommandError as error:
                say(f"warning: {error}")
        return found

    @contextmanager
    def writing(self, *, waits: bool = False) -> Iterator[Path]:
        """Keep other writers out; yield a folder on the same disk for unfinished files. Raises CommandError, Busy."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = _open_lock(self.path / LOCK)
            try:
                self._lock(lock, waits=waits)
                for abandoned in self.path.glob(f"{_SCRATCH}*"):
                    shutil.rmtree(abandoned, ignore_errors=True)
                with TemporaryDirectory(dir=self.path, prefix=_SCRATCH) as scratch:
                    yield Path(scratch)
            finally:
                os.close(lock)
        except OSError as error:
            raise CommandError(f"{error.filename or self.path}: {error.strerror or error}") from error

    def _lock(self, lock: int, *, waits: bool) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not waits:
                raise Busy(f"another process changes the models in {self.path}; try again when it has ended") from error
            say(f"waiting for another process that changes the models in {self.path}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            text = f"{self.path / LOCK} cannot be locked: {error.strerror}"
            raise CommandError(f"{text}; write to a local folder, and copy the model from there") from error

    def put(self, name: str, scratch: Path, new: Description, version: str) -> None:
        """Put the files in `scratch` as this version of a description; call it while `writing`."""
        folder, prepared = self.path / name, scratch / name
        found = description.load(folder)
        (prepared / version).mkdir(parents=True)
        for file in (configs.HALF, NETWORK):
            if (scratch / file).is_file():
                sync(scratch / file)
                (scratch / file).rename(prepared / version / file)
        if (folder / version / NETWORK).is_file() and (found is None or version in found.versions):  # added again
            shutil.copytree(folder / version, scratch / PREVIOUS / version)
            _swap(prepared, folder, name, new)
            return
        if not folder.exists():
            _write(prepared, name, new)
            prepared.rename(folder)
            return
        if found and not (prepared / version / configs.HALF).is_file():
            _write(folder, name, found, is_half=False)
        shutil.rmtree(folder / version, ignore_errors=True)  # of an addition that was killed
        (prepared / version).rename(folder / version)
        try:
            _write(folder, name, new)
        except BaseException:
            shutil.rmtree(folder / version, ignore_errors=True)
            raise

    def load_into(self, apply: Callable[[str], str], name: str, old: Description | None, previous: Path | None = None) -> str:
        """Let `apply` load a changed model, and return why it cannot now; restore the previous description if it raises."""
        # `previous` is the folder of versions that were replaced. Call it while `writing`.
        try:
            return apply(name)
        except BaseException:
            new = self._find(name, "")
            if previous is not None and previous.is_dir():
                _swap(previous, self.path / name, name, old or new)
            elif old is None:
                self.remove(name)
            if old is None:
                for written in (Path(DESCRIPTION), *configs.generate(name, new)):
                    (self.path / name / written).unlink(missing_ok=True)
                with suppress(OSError):
                    (self.path / name / "configs").rmdir()
            else:
                self.write(name, msgspec.structs.replace(old, last_version=new.last_version))  # a Triton may have had that one
                for version in new.versions.keys() - old.versions.keys():
                    shutil.rmtree(self.path / name / version)
            with suppress(CommandError):  # Triton keeps what it has
                apply(name)
            say(f"the models in {self.path} are as before")
            raise

    def use(self, reference: str) -> Description:
        """Make a version the default one, or write the configs again, while `writing`; raise CommandError if there is none."""
        name, version = split_reference(reference)
        found = self._find(name, version)
        new = msgspec.structs.replace(found, default_version=int(version)) if version else found
        if not (network := self.path / name / str(new.default_version) / NETWORK).is_file():
            raise CommandError(f"there is no file {network}")
        self.write(name, new)
        return new

    def remove(self, reference: str) -> None:
        """Remove a version, or all that was added of a model, while `writing`; raise CommandError, also for the default version."""
        name, version = split_reference(reference)
        found = self._find(name, version)
        rest = {number: sha256 for number, sha256 in found.versions.items() if version and number != version}
        folder = self.path / name
        if not rest:
            # Tritons elsewhere unload these, and a cache or an index cannot tell two models of the same name and version.
            removed = last_versions(self.path)
            removed[name] = max(found.last_version, removed.get(name, 0))
            _write_files({self.path / REMOVED: "".join(f"{model} {number}\n" for model, number in removed.items())})
            for number in found.versions:
                shutil.rmtree(folder / number, ignore_errors=True)
            for path in [*configs.generate(name, found), Path(DESCRIPTION)]:
                (folder / path).unlink(missing_ok=True)
            for path in (folder / "configs", folder):
                with suppress(OSError):  # it contains something else
                    path.rmdir()
            return
        if version == str(found.default_version):
            raise CommandError(f"{reference} is the default version; first: nereid use {refer_to(name, max(rest, key=int))}")
        golden = {number: values for number, values in found.golden.items() if number in rest}
        unchecked = tuple(number for number in found.unchecked if number in rest)
        new = msgspec.structs.replace(found, versions=rest, golden=golden, unchecked=unchecked)
        _write(folder, name, new, is_half=configs.runs_half(folder, found))  # the folder of the version is still there
        shutil.rmtree(folder / version, ignore_errors=True)
        self.write(name, new)

    def write(self, name: str, new: Description) -> None:
        """Write the description of a model, and its configs; call it while `writing`."""
        _write(self.path / name, name, new)

    def write_configs(self) -> None:
        """Write configs that differ from the descriptions, after a change by hand or an interruption; raise CommandError."""
        pending = {name: found for name, found in self.models().items() if configs.outdated(self.path / name, name, found)}
        if pending:
            with self.writing():
                for name, found in pending.items():
                    self.write(name, found)

    def _find(self, name: str, version: str) -> Description:
        found = self.load(name)
        if found is None:
            raise NoSuchModel(
                f"there is no model {name} in {self.path}; it has {', '.join(self.models()) or 'none that was added'}"
            )
        if version and version not in found.versions:
            raise NoSuchModel(f"{name} has no version {version}; it has {', '.join(found.versions)}")
        return found


def _write(folder: Path, name: str, new: Description, *, is_half: bool | None = None) -> None:
    # The description first, so that no config has a version more.
    texts = {} if description.load(folder) == new else {Path(DESCRIPTION): description.dump(new)}
    texts |= configs.outdated(folder, name, new, is_half=is_half)
    _write_files({folder / path: text for path, text in texts.items()})


def _write_files(texts: Mapping[Path, str]) -> None:
    # Each in full or not at all, and none if the disk is full.
    unfinished = {path: path.with_name(f".{path.name}.unfinished") for path in texts}
    try:
        for path, text in texts.items():
            path.parent.mkdir(exist_ok=True)
            unfinished[path].write_text(text, encoding="utf-8")
            sync(unfinished[path])
        for path in texts:
            unfinished[path].replace(path)
    finally:
        for path in unfinished.values():
            path.unlink(missing_ok=True)


def _swap(versions: Path, folder: Path, name: str, new: Description) -> None:
    # At no time with a config that names a missing file.
    replaced = [path.name for path in versions.iterdir()]
    is_half = all(((versions if version in replaced else folder) / version / configs.HALF).is_file() for version in new.versions)
    # It raises for a config that was written by hand, before anything is replaced.
    configs.outdated(folder, name, new, is_half=is_half)
    if not is_half:
        _write(folder, name, new, is_half=False)
    for version, file in product(replaced, (configs.HALF, NETWORK)):
        if (versions / version / file).is_file():
            sync(versions / version / file)
            (versions / version / file).replace(folder / version / file)
        else:
            (folder / version / file).unlink(missing_ok=True)
    if is_half:
        _write(folder, name, new)


def _open_lock(path: Path) -> int:
    flags = os.O_CREAT | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | flags, 0o644)  # NFS locks only what is open for writing
    except PermissionError:  # another user's
        return os.open(path, os.O_RDONLY | flags, 0o644)


def sync(path: Path) -> None:
    """Write a file to the disk, so that after a power failure it is not empty under its final name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
