"""Download a published network as a package or from a URL, or find it in a local file or mirror."""

import re
from pathlib import Path

import httpx

from app.host.packages import download_npm, download_wheel, extract_member, verify_sha256
from app.host.program import CommandError
from app.zoo.registry import PublishedModel

_PACKAGES = {".whl", ".tgz"}


def download(entry: PublishedModel, folder: Path, *, source: Path | None = None, sha256: str | None = None) -> Path:
    """Download or find the file of a published network, and verify its SHA-256; raise CommandError if that fails."""
    # `source` is a file, or a folder that mirrors the sources; `sha256` is that of a custom network instead of the registry's.
    network = _find(entry, source, folder) if source is not None else _fetch(entry, folder)
    verify_sha256(network, sha256 or entry.sha256)
    for member, digest in entry.others.items():
        verify_sha256(network.with_name(Path(member).name), digest)
    return network


def _fetch(entry: PublishedModel, folder: Path) -> Path:
    if entry.wheel:
        return _extract(entry, download_wheel(entry.wheel, folder), folder)
    if entry.npm:
        return _extract(entry, download_npm(entry.npm, folder), folder)
    if entry.url:
        return fetch_url(entry.url, folder / entry.file_name)
    raise CommandError("the registry names neither a package nor a URL")


def _find(entry: PublishedModel, source: Path, folder: Path) -> Path:
    if source.is_dir():
        package, file = _plain(entry.wheel or entry.npm or "/"), source / entry.file_name
        packages = [path for path in source.iterdir() if path.suffix in _PACKAGES and _plain(path.stem).startswith(package)]
        source = packages[0] if packages and not file.is_file() else file
    if not source.is_file():
        raise CommandError(f"there is no file {source}")
    return _extract(entry, source, folder) if source.suffix in _PACKAGES else source


def _plain(name: str) -> str:
    # As a package's name and version begin both in a requirement and in the name of its file.
    return re.sub("[^a-z0-9.]+", "_", name.lower().strip("@")) + "_"


def _extract(entry: PublishedModel, package: Path, folder: Path) -> Path:
    paths = {member: folder / Path(member).name for member in (entry.member or "", *entry.others)}
    for member, path in paths.items():
        extract_member(package, member, path)
    return folder / entry.file_name


def fetch_url(url: str, target: Path) -> Path:
    """Download a file; raise CommandError if it cannot be reached or is not available."""
    try:
        trust = httpx.create_ssl_context()
    except OSError as error:
        raise CommandError(f"the certificates of CAs cannot be read ({error}); is SSL_CERT_FILE right?") from error
    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=30, verify=trust) as answer, target.open("wb") as file:
            answer.raise_for_status()
            if answer.url.scheme != "https" and url.startswith("https"):
                raise CommandError(f"{url} leads to {answer.url}, which is not https")
            file.writelines(answer.iter_bytes())
    except httpx.HTTPStatusError as error:
        raise CommandError(f"{url} is not available: {error.response.status_code} {error.response.reason_phrase}") from error
    except httpx.HTTPError as error:
        raise CommandError(f"{url} cannot be reached: {str(error) or type(error).__name__}") from error
    return target
