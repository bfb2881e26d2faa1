"""Images in Label Studio."""

from time import monotonic
from typing import Any

import httpx
from litestar.exceptions import ClientException, HTTPException

ONCE = httpx.Limits(max_keepalive_connections=0)
"""No connection is used twice: a server may close an idle one just when it is used again."""

_JPEG = "/9j/"
"""Prefix of a JPEG in base64, which must not be taken for a path."""
_MAX_BYTES = 64 << 20
_MAX_SECONDS = 30
_MAX_REDIRECTS = 3
# Label Studio responds with 406 if only images are accepted. A picture does not become smaller by compression, but a bomb does.
_HEADERS = {"Accept": "image/*, */*;q=0.1", "Accept-Encoding": "identity"}


class Studio:
    """Fetches images from Label Studio, from exactly its scheme, host and port."""

    def __init__(self, url: str, token: str) -> None:
        """Raise ValueError if the URL or the token cannot be one. The URL is empty to fetch nothing, the token to send none."""
        if url:
            check_url("LABEL_STUDIO_URL", url)
        if not (token.isascii() and token.isprintable()) or " " in token:  # it becomes a header
            raise ValueError("LABEL_STUDIO_API_KEY: expected a token, without white space")
        self._url = url.rstrip("/")
        self._token = token
        self._origin = _origin(url)
        self._client = httpx.Client(headers=_HEADERS, timeout=10, limits=ONCE)

    def image(self, text: str) -> dict[str, Any]:
        """Return the image of a task as httpx's arguments for the gateway.

        That is its content if it lies in Label Studio. Otherwise it is base64 or an address, which the gateway judges.
        """
        for _ in range(1 + _MAX_REDIRECTS):
            is_path = text.startswith("/") and not text.startswith(_JPEG)
            if is_path and not self._url:
                raise ClientException("the image is in Label Studio, and LABEL_STUDIO_URL does not say where")
            url = self._url + text if is_path else text
            try:
                if not url.startswith(("http://", "https://")) or _origin(url) != self._origin:
                    return {"json": {"image": text}}
                with self._client.stream("GET", url, headers=self._authorization()) as response:
                    if response.next_request is None:
                        return {"content": _read(response)}
                    text = str(response.next_request.url)
            except httpx.InvalidURL as error:
                raise ClientException("the address of the image is not valid") from error
            except httpx.RequestError as error:
                raise HTTPException("Label Studio does not answer", status_code=424) from error
        raise HTTPException(f"Label Studio redirects more than {_MAX_REDIRECTS} times", status_code=424)

    def _authorization(self) -> dict[str, str]:
        """Return the header with the token. A personal one is exchanged for one of a few minutes."""
        if not self._token.startswith("eyJ"):
            return {"Authorization": f"Token {self._token}"} if self._token else {}
        answer = self._client.post(f"{self._url}/api/token/refresh/", json={"refresh": self._token})
        try:
            return {"Authorization": f"Bearer {answer.raise_for_status().json()['access']}"}
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
            status = answer.status_code
            raise HTTPException(f"Label Studio refuses LABEL_STUDIO_API_KEY: status {status}", status_code=424) from error


def check_url(variable: str, url: str) -> None:
    """Raise ValueError unless a variable has the URL of a server."""
    try:
        scheme, host, _ = _origin(url)
    except httpx.InvalidURL:
        scheme = host = ""
    if scheme not in {"http", "https"} or not host:
        raise ValueError(f"{variable}: expected an http or https URL such as http://localhost:8080")


def _origin(url: str) -> tuple[str, str, int | None]:
    parsed = httpx.URL(url)
    return parsed.scheme, parsed.host, parsed.port


def _read(response: httpx.Response) -> bytes:
    """Return the body; raise HTTPException if there is none, or it is too large or too slow."""
    if not response.is_success:
        raise HTTPException(f"Label Studio answered with status {response.status_code}", status_code=424)
    body, begin = bytearray(), monotonic()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > _MAX_BYTES:
            raise HTTPException(f"an image has at most {_MAX_BYTES >> 20} MiB", status_code=413)
        if monotonic() - begin > _MAX_SECONDS:
            raise HTTPException(f"Label Studio takes more than {_MAX_SECONDS} s to send an image", status_code=424)
    return bytes(body)
