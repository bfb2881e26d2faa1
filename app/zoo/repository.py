"""The added models of a model repository: each has a description, generated configs and a folder per version."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from app.host.program import CommandError
from app.model.reference import refer_to, split_reference
from app.triton.repository import LOCK
from app.zoo import configs, description
from app.zoo.description import Description

NETWORK = "model.onnx"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_SCRATCH = ".add-"


class Repository:
    """A model repository in which added models are written, one writer at a time. What is killed leaves the previous state."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, name: str) -> Description | None:
        """Return the description of a model; None if it is not in the repository.

        Raises:
            CommandError: The name is not allowed, the model was not added with `add`, or its description is not valid.
        """
        if not _NAME.fullmatch(name):
            raise CommandError(
                f"{name!r} is not a name of a model: letters, digits, and `_`, `-` and `.` after the first, at most 64"
            )
        folder = self.path / name
        found = description.load(folder)
        if found is None and any(path.suffix == ".pbtxt" or path.parent.name.isdigit() for path in folder.glob("**/*")):
            raise CommandError(
                f"{folder} has versions or configs that are not from `add`, and stays as it is; choose another --name"
            )
        return found

    def models(self) -> dict[str, Description]:
        """Return the descriptions of all added models by name."""
        found = {folder.name: description.load(folder) for folder in sorted(self.path.glob("[!.]*/"))}
        return {name: one for name, one in found.items() if one is not None}

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """Keep other writers out; yield a folder on the same disk for unfinished files.

        Raises:
            CommandError: Another process writes, or the disk cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / LOCK).open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise CommandError(f"another process changes the models in {self.path}; try again when it has ended") from error
                for abandoned in self.path.glob(f"{_SCRATCH}*"):
                    shutil.rmtree(abandoned, ignore_errors=True)
                with TemporaryDirectory(dir=self.path, prefix=_SCRATCH) as scratch:
                    yield Path(scratch)
        except OSError as error:
            raise CommandError(f"{error.filename or self.path} cannot be written: {error.strerror or error}") from error

    def put(self, name: str, network: Path, new: Description) -> None:
        """Put a file, on the same disk, as the default version of its description; call it while `writing`."""
        folder, version = self.path / name, str(new.default_version)
        prepared = network.parent / name
        (prepared / version).mkdir(parents=True)
        network.rename(prepared / version / NETWORK)
        if not folder.exists():
            _write(prepared, name, new)
            prepared.rename(folder)
            return
        shutil.rmtree(folder / version, ignore_errors=True)  # of an addition that was killed
        (prepared / version).rename(folder / version)
        _write(folder, name, new)

    def use(self, reference: str) -> Description:
        """Make a version the default one; without a version, write the configs again. Call it while `writing`.

        Raises:
            CommandError: There is no such model or version.
        """
        name, version = split_reference(reference)
        found = self._find(name, version)
        new = msgspec.structs.replace(found, default_version=int(version)) if version else found
        self.write(name, new)
        return new

    def remove(self, reference: str) -> None:
        """Remove a version, or a whole model; call it while `writing`.

        Raises:
            CommandError: There is no such model or version, or it is the default one among others.
        """
        name, version = split_reference(reference)
        found = self._find(name, version)
        rest = {number: sha256 for number, sha256 in found.versions.items() if version and number != version}
        if not rest:
            shutil.rmtree((self.path / name).rename(self.path / f"{_SCRATCH}removed-{name}"))
            return
        if version == str(found.default_version):
            raise CommandError(f"{reference} is the default version; first: nereid use {refer_to(name, max(rest, key=int))}")
        self.write(name, msgspec.structs.replace(found, versions=rest))
        shutil.rmtree(self.path / name / version)

    def restore(self, name: str, old: Description | None) -> None:
        """Restore a model's previous description, and remove the version that it does not have; call it while `writing`."""
        new = self._find(name, "")
        if old is None:
            self.remove(name)
            return
        self.write(name, old)
        for version in new.versions.keys() - old.versions.keys():
            shutil.rmtree(self.path / name / version)

    def write(self, name: str, new: Description) -> None:
        """Write the description of a model, and its configs; call it while `writing`."""
        _write(self.path / name, name, new)

    def write_configs(self) -> None:
        """Write the configs that differ from the descriptions, after a change by hand or an interruption.

        Raises:
            CommandError: A description is not valid, or a config cannot be written.
        """
        pending = {name: found for name, found in self.models().items() if configs.outdated(self.path / name, name, found)}
        if pending:
            with self.writing():
                for name, found in pending.items():
                    self.write(name, found)

    def _find(self, name: str, version: str) -> Description:
        found = self.load(name)
        if found is None:
            raise CommandError(
                f"there is no model {name} in {self.path}; it has {', '.join(self.models()) or 'none that was added'}"
            )
        if version and version not in found.versions:
            raise CommandError(f"{name} has no version {version}; it has {', '.join(found.versions)}")
        return found


def _write(folder: Path, name: str, new: Description) -> None:
    """Write the description and the configs, as far as they differ."""
    texts = configs.outdated(folder, name, new)
    if description.load(folder) != new:
        texts = {Path(description.FILE_NAME): description.dump(new), **texts}
    for path, text in texts.items():
        target = folder / path
        target.parent.mkdir(exist_ok=True)
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(target)
        finally:
            with suppress(OSError):
                unfinished.unlink()
