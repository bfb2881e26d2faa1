"""Check what listens at the API's address: a gateway, nothing, or another program."""

from pathlib import Path

from app.doctor.finding import Finding, failure, ok, warning
from app.host import ports
from app.host.http import get_status
from app.settings.schema import Settings

_SECONDS = 2.0
_OK = 200


def check(settings: Settings) -> Finding:
    """Check the sockets or the port in the settings."""
    paths = [path for path in settings.sockets if path is not None]
    return _check_sockets(paths) if paths else _check_port(settings)


def _check_sockets(paths: list[Path]) -> Finding:
    answering = [str(path) for path in paths if get_status("http://localhost/livez", _SECONDS, path) == _OK]
    if answering:
        return ok("gateway", f"{len(answering)} of {len(paths)} gateways answer: {', '.join(answering)}")
    return ok("gateway", f"no gateway answers at {', '.join(map(str, paths))}")


def _check_port(settings: Settings) -> Finding:
    port, url = settings.port, settings.local_url
    try:
        is_free = ports.is_free(settings.host, port)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        reason = getattr(error, "strerror", None) or error
        return failure("gateway", f"the API cannot listen on {settings.address}: {reason}", "NEREID_HOST=127.0.0.1, or ::")
    if is_free:
        return ok("gateway", f"nothing listens at {url} yet")
    if get_status(f"{url}/livez", _SECONDS) != _OK:
        pid, command = ports.holder(port) or (0, "")
        if ports.NEREID.search(command):
            text = f"a Nereid, process {pid} ({command}), listens at {url}, but does not answer"
            return failure("gateway", text, f"kill -9 {pid}")
        by = f", process {pid} ({command})," if pid else ""
        text = f"something else{by} listens at {url}: the API cannot"
        return warning("gateway", text, "end it, or choose another port: --port 4613")
    is_ready = get_status(f"{url}/readyz", _SECONDS) == _OK
    return ok("gateway", f"a gateway runs at {url}, and is {'ready' if is_ready else 'not ready'}")
