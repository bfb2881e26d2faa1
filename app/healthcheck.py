"""Liveness check of the API. It must start fast, because a container runs it every few seconds."""

from app.host.http import get_status
from app.settings.schema import Settings

_SECONDS = 3.0
_OK = 200


def failure(settings: Settings) -> str:
    """Request `/livez` of every instance, which does not depend on Triton; return an error message, empty if all respond."""
    url = settings.local_url
    for socket in settings.sockets:
        status = get_status(f"{url}/livez", _SECONDS, socket)
        if status != _OK:
            return f"{socket or url} {'does not answer' if status is None else f'answers {status}'}"
    return ""
