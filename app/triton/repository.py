"""The folders and config files of a model repository."""

import os
import re
from hashlib import sha256
from pathlib import Path

CONFIG_NAME = "embedded"
"""Name of the configs for the embedded Triton, in a model's folder `configs`."""
DESCRIPTION = "model.toml"
"""File with the description of an added model, in its folder."""
REMOVED = ".removed"
"""File with the names of models that were removed and the last version of each, one model per line."""
LOCK = ".lock"
"""File that is locked while added models are changed, and whose time is that of the last change."""
_LAST_VERSION = re.compile(r"^(\S+)(?: ([1-9][0-9]{0,8}))?$", re.MULTILINE)
_CONTENT = re.compile(r"^\s*[^#\s]", re.MULTILINE)


def config_path(folder: Path, *, is_embedded: bool) -> Path:
    """Return the path of the config in a model's folder that the embedded Triton, or another one, reads."""
    own = folder / "configs" / f"{CONFIG_NAME}.pbtxt"
    return own if is_embedded and own.is_file() else folder / "config.pbtxt"


def last_change(repository: Path, name: str = LOCK) -> int:
    """Return when added models were last changed, or another such file, in nanoseconds; 0 if never."""
    try:
        return (repository / name).stat().st_mtime_ns
    except OSError:
        return 0


def files_of(folder: Path) -> list[Path]:
    """Return all files in a folder and in its folders, sorted, without what Python caches there when Triton loads the model."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")


def identify(folder: Path) -> str:
    """Return what changes whenever the description or a version in a model's folder is changed, even to a file of the same content.

    It is empty if the model has no description, or a file cannot be read.
    """
    facts = []
    try:
        for path in [folder / DESCRIPTION, *(path for version in folder.glob("[0-9]*") for path in files_of(version))]:
            with path.open("rb") as file:  # opened, because only then a client of NFS asks its server
                found = os.fstat(file.fileno())
            facts.append((str(path.relative_to(folder)), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    except OSError:
        return ""
    return sha256(repr(sorted(facts)).encode()).hexdigest()


def model_folders(repository: Path) -> list[Path]:
    """Return the folders of all models; none if there is no repository. Raise `OSError` if it cannot be read."""
    paths = sorted(repository.iterdir()) if repository.is_dir() else []
    return [path for path in paths if path.is_dir() and not path.name.startswith(".")]  # others are unfinished


def added_models(repository: Path) -> set[str]:
    """Return the names of the models that have a description; raise `OSError` if the repository cannot be read."""
    return {folder.name for folder in model_folders(repository) if (folder / DESCRIPTION).is_file()}


def removed_models(repository: Path) -> set[str]:
    """Return the names of the models that were removed, and not added again."""
    return {*last_versions(repository)} - added_models(repository)


def last_versions(repository: Path) -> dict[str, int]:
    """Return the last version that each removed model had; raise `OSError` if the repository cannot be read."""
    path = repository / REMOVED
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return {name: int(version or 1) for name, version in _LAST_VERSION.findall(text)}


def loadable_models(repository: Path) -> list[str]:
    """Return the models that the embedded Triton loads: with a config, not of comments only, and a version that has a file."""
    names = []
    for folder in model_folders(repository):
        config = config_path(folder, is_embedded=True)
        has_version = any(path.parent.name.isdigit() for path in folder.glob("*/*"))
        if has_version and config.is_file() and _CONTENT.search(config.read_text(encoding="utf-8")):
            names.append(folder.name)
    return names
