"""Read and check the files with the credentials for TLS to Triton.

Does not import gRPC, because the process that forks the workers also uses this module.
"""

import ssl
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from app.resilience import last_valid


class CredentialsError(Exception):
    """A certificate or key cannot be used. The message is one line, and never contains any content of a file."""


@dataclass(frozen=True)
class Credentials:
    """Credentials for TLS, in PEM."""

    roots: bytes
    """Certificates of the trusted CAs."""
    key: bytes | None = field(default=None, repr=False)
    certificates: bytes | None = None


def load(folder: str) -> Credentials | None:
    """Read and check credentials, or return the last valid ones; None without TLS, for an empty path.

    The folder has the certificates of the CAs, `ca.crt`, and optionally a client certificate and its key, `tls.crt` and `tls.key`.
    Raises CredentialsError if a file is not valid, and no process of this host has read valid ones before.
    """
    if not folder:
        return None
    return last_valid.load("triton_tls", folder, partial(_load, Path(folder)), Credentials, CredentialsError)


def _load(folder: Path) -> Credentials:
    roots = _read_certificates(folder / "ca.crt")
    certificate, key = folder / "tls.crt", folder / "tls.key"
    if not certificate.exists() and not key.exists():
        return Credentials(roots)
    certificates = _read_certificates(certificate)
    return Credentials(roots, _read_key(key, certificate), certificates)


def _read_certificates(path: Path) -> bytes:
    content = _read(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise CredentialsError(f"{path} is not a certificate in PEM") from error
    return content


def _read_key(path: Path, certificate: Path) -> bytes:
    def refuse() -> NoReturn:
        raise CredentialsError(f"{path} is encrypted; a key without a passphrase is needed")

    content = _read(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(certificate, path, refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CredentialsError(f"{path} is not the key of {certificate}") from error
        raise CredentialsError(f"{path} is not a private key in PEM") from error
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"{path}: {error.strerror}") from error
