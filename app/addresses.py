"""Where the API listens, and at which address it can be reached from this machine."""

from pathlib import Path

from app.config import Settings


def sockets(settings: Settings) -> list[Path | None]:
    """Return where each instance listens; None is host and port."""
    if not settings.instances:
        return [Path(settings.socket).resolve() if settings.socket else None]
    folder = Path(settings.socket_folder).resolve()
    return [folder / f"nereid-{number}.sock" for number in range(1, settings.instances + 1)]


def local_url(settings: Settings) -> str:
    """Return the URL at which an API that listens on host and port can be reached from here."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 - compared only
    return f"http://[{address}]:{settings.port}" if ":" in address else f"http://{address}:{settings.port}"
