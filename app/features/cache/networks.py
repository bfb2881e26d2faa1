"""Fingerprints of networks: what a cached result depends on, besides the image and the spec of the model."""

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from hashlib import file_digest, sha256
from pathlib import Path

from app.host.program import CommandError
from app.triton.repository import files_of, identify, last_change
from app.zoo import configs, description

CLEARED = ".cache-cleared"
"""File in the model repository whose time is that of the last `nereid cache clear`."""


def read(repository: Path, is_loaded: Callable[[str, str], bool], name: str, version: str) -> bytes:
    """Return the fingerprint of a version: its files, description and the last clearing; empty if Triton may run something else."""
    # `is_loaded` gets the name and what `identify` returns; it returns whether all Tritons have loaded just that.
    folder = repository / name
    identity = identify(folder)
    if identity and is_loaded(name, identity):
        with suppress(OSError, CommandError):
            fingerprint = _hash(folder, version, identity)
            return fingerprint and fingerprint + b"%d" % last_change(repository, CLEARED)
    return b""


@lru_cache(256)  # by what the files are; errors are not kept
def _hash(folder: Path, version: str, identity: str) -> bytes:
    # A model that runs the network of another one has no fingerprint.
    found = description.load(folder)
    if found is None or version not in found.versions or found.pixel_model:
        return b""
    facts = [repr((found.recipe, found.versions[version], configs.runs_half(folder, found)))]
    for path in files_of(folder / version):
        with path.open("rb") as file:
            facts.append(f"{path.relative_to(folder)} {file_digest(file, 'sha256').hexdigest()}")
    if identify(folder) != identity:
        raise OSError("the files were changed while they were read")
    return sha256(repr(facts).encode()).digest()
