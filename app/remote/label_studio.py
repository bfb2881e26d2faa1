"""What Label Studio wants to know of whom it gives its images to."""

from collections.abc import Sequence
from pathlib import Path

from app.remote import address
from app.remote.address import AllowedHosts


def authorization(url: str, token_file: str, hosts: Sequence[str]) -> dict[tuple[str, int], str]:
    """Return the `Authorization` header for Label Studio, as `Fetcher` takes it; none without the address or a token.

    Source: `get_local_path` of label-studio-sdk.

    Args:
        url: Of Label Studio; empty if there is none.
        token_file: File with its access token; empty if it needs none.
        hosts: The hosts that are allowed, as `AllowedHosts` takes them.

    Raises:
        UrlNotAllowed: The address is not that of an allowed host.
        ValueError, OSError: The file cannot be read, or has no token.
    """
    if not url:
        return {}
    found = address.parse(url, AllowedHosts(hosts))
    if not token_file:
        return {}
    token = Path(token_file).read_text(encoding="ascii").strip()
    if not token or not token.isprintable() or " " in token:
        raise ValueError("there is no token in the file")
    return {(found.name, found.port): f"Token {token}"}
