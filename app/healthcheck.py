"""Ask the API that the settings describe whether it lives. It must start fast: a container runs it every few seconds."""

from app.host.http import get_status
from app.settings.schema import Settings

_SECONDS = 3.0
_OK = 200


def failure(settings: Settings) -> str:
    """Ask every instance for `/livez`, which does not depend on Triton: a restart would not help against a failure of that.

    Returns:
        What is wrong, in one line; empty if all of them answer.
    """
    url = settings.local_url
    for socket in settings.sockets:
        status = get_status(f"{url}/livez", _SECONDS, socket)
        if status != _OK:
            return f"{socket or url} {'does not answer' if status is None else f'answers {status}'}"
    return ""
