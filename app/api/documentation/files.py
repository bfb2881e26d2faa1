"""Send files that are part of the program."""

from pathlib import Path

from litestar.types import Receive, Scope, Send

Header = tuple[bytes, bytes]


class FileResponse:
    """Sends a file. The server reads it piece by piece if it can: a client that does not read it costs no memory."""

    def __init__(self, path: Path, media_type: str, headers: tuple[Header, ...] = ()) -> None:
        self._path = path
        self._headers = [(b"content-type", media_type.encode()), *headers]

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
        """Send the response."""
        length = self._path.stat().st_size
        headers = [*self._headers, (b"content-length", b"%d" % length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if "http.response.pathsend" in (scope.get("extensions") or {}):
            await send({"type": "http.response.pathsend", "path": str(self._path)})  # type: ignore[arg-type]  # an extension
        else:
            await send({"type": "http.response.body", "body": self._path.read_bytes(), "more_body": False})
