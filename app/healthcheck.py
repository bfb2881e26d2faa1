"""Liveness check of the API. It must start fast, because a container runs it every few seconds."""

from app.host.http import get_status
from app.settings.schema import Settings

_SECONDS = 3.0
_OK = 200


def failure(settings: Settings) -> str:
    """Request `/livez` of every instance, and return a one-line error message; an empty one if all respond.

    It does not depend on Triton, whose failures a restart of the API would not fix.
    """
    url = settings.local_url
    for socket in settings.sockets:
        status = get_status(f"{url}/livez", _SECONDS, socket)
        if status != _OK:
            return f"{socket or url} {'does not answer' if status is None else f'answers {status}'}"
    return ""
