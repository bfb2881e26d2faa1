"""The origin of Label Studio, and the token that it wants of whom it gives its images to."""

from pathlib import Path

from app.remote import address
from app.remote.address import TrustedOrigin


def origin(url: str, token_file: str) -> TrustedOrigin | None:
    """Return the origin of Label Studio, from which images may be fetched; None without an address.

    Source of its `Authorization`: `get_local_path` of label-studio-sdk.

    Args:
        url: Of Label Studio; empty if there is none.
        token_file: File with its access token; empty if it needs none.

    Raises:
        UrlNotAllowed: The address is not an http or https URL.
        ValueError, OSError: The file cannot be read, or has no token.
    """
    if not url:
        return None
    found = address.parse_origin(url)
    return found._replace(authorization=f"Token {_read_token(token_file)}") if token_file else found


def _read_token(file: str) -> str:
    token = Path(file).read_text(encoding="ascii").strip()
    if not token or not token.isprintable() or " " in token:
        raise ValueError("there is no token in the file")
    return token
