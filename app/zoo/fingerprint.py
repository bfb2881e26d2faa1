"""Fingerprints of networks: what a cached result depends on, besides the image and the spec of the model."""

from collections.abc import Callable
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path

from app.host.program import CommandError
from app.triton.repository import CLEARED, files_of, identify, last_change
from app.zoo import description


class FingerprintReader:
    """Reads fingerprints of the models in a repository."""

    def __init__(self, repository: Path, is_loaded: Callable[[str, str], bool]) -> None:
        """`is_loaded` gets a model's name and what `identify` returns; it returns whether all Tritons have loaded just that."""
        self._repository, self._is_loaded = repository, is_loaded
        self._known: dict[tuple[str, str], tuple[str, bytes]] = {}
        """What `identify` has returned, and the fingerprint, by name and version."""

    def read(self, name: str, version: str) -> bytes:
        """Return the fingerprint of a version; an empty one if it has no description, or Triton may run something else.

        It changes with the content of the network's files and of the description, and when the cache is cleared.
        """
        folder = self._repository / name
        identity = identify(folder)
        if not identity or not self._is_loaded(name, identity):
            return b""
        known, fingerprint = self._known.get((name, version), ("", b""))
        if known != identity or not fingerprint:
            fingerprint = _read(folder, version)
            if identify(folder) != identity:  # it was changed while it was read
                return b""
            self._known[name, version] = identity, fingerprint
        return fingerprint and fingerprint + b"%d" % last_change(self._repository, CLEARED)


def _read(folder: Path, version: str) -> bytes:
    """Hash the description and the files of a version; a model that runs the network of another one has no fingerprint."""
    with suppress(OSError, CommandError):
        found = description.load(folder)
        if found is not None and version in found.versions and not found.pixel_model:
            facts = [repr((found.recipe, found.versions[version]))]
            for path in files_of(folder / version):
                with path.open("rb") as file:
                    facts.append(f"{path.relative_to(folder)} {file_digest(file, 'sha256').hexdigest()}")
            return sha256(repr(facts).encode()).digest()
    return b""
