"""HTTP and nothing else: reads the body, answers the same JSON to everybody. Run by Granian, as Nereid is."""

import sys
from collections.abc import Awaitable, Callable
from typing import Any

_BODY = b'{"detections":[],"num_detections":0,"status":"success"}'
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(_BODY)).encode())]


async def app(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    """Answer one request."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": _BODY})


def main(port: int, workers: int) -> None:
    """Serve until told to stop."""
    # Imported here: the app itself needs nothing.
    from granian import Granian  # noqa: PLC0415
    from granian.constants import HTTPModes, Interfaces, Loops  # noqa: PLC0415
    from granian.log import LogLevels  # noqa: PLC0415

    Granian(
        "bench.contestants.http_only:app",
        port=port,
        workers=workers,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        websockets=False,
        loop=Loops.uvloop,
        log_level=LogLevels.warning,
    ).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
