"""The credentials for TLS to Triton: files that are read and checked.

Never imports gRPC, so that they can be checked where workers are forked.
"""

import ssl
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from app.resilience import last_valid

# Where systems have the certificates of all CAs that they trust: Debian, Fedora, SUSE, Alpine.
_SYSTEM_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


class CredentialsError(Exception):
    """A certificate or key cannot be used. The message is one line for the user and never repeats a file's content."""


@dataclass(frozen=True)
class Credentials:
    """What gRPC needs for TLS, PEM."""

    roots: bytes
    """Certificates of the CAs, one of which Triton's certificate must come from."""
    key: bytes | None = field(default=None, repr=False)
    """Private key of our own certificate; None without one."""
    certificates: bytes | None = None
    """Our own certificate, and those between it and its CA."""


def load(files: tuple[str, str, str] | None) -> Credentials | None:
    """Read credentials and check that they are complete, or recall the last valid ones.

    Args:
        files: CA, own certificate and its key. The CA may be empty for those of the system, the others both for none.
            None without TLS.

    Returns:
        The credentials; None without TLS.

    Raises:
        CredentialsError: A file cannot be read, or is not what it should be, and no process of this host knows earlier ones.
    """
    if files is None:
        return None
    return last_valid.load("triton_tls", "\n".join(files), partial(_load, *files), Credentials, CredentialsError)


def _load(ca: str, certificate: str, key: str) -> Credentials:
    roots = _read_certificates(ca or _system_file())
    if not certificate:
        return Credentials(roots)
    certificates = _read_certificates(certificate)
    return Credentials(roots, _read_key(key, certificate), certificates)


def _system_file() -> str:
    """Find the system's CAs; gRPC by itself would take those that it brings along."""
    for path in (ssl.get_default_verify_paths().cafile, *_SYSTEM_FILES):
        if path and Path(path).is_file():
            return path
    raise CredentialsError("this system has no file of CA certificates; set NEREID_TRITON_CA_FILE")


def _read_certificates(path: str) -> bytes:
    content = _read(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise CredentialsError(f"{path} is not a certificate in PEM") from error
    return content


def _read_key(path: str, certificate: str) -> bytes:
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


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CredentialsError(f"{path}: {error.strerror}") from error
