"""The API and the embedded Triton side by side: watched, and stopped in order."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import app
from app.config import Settings
from app.embedded.server import EmbeddedTriton, EmbeddedTritonError
from app.host.processes import die_with_parent, kill_group, wait_for_answer
from app.telemetry.logging import say
from app.triton import shared_memory

DRAIN_SECONDS = 30
"""How long requests in progress may take to end."""

_ROOT = str(Path(app.__file__).parents[1])
_POLL_SECONDS = 0.2
_SECOND_SIGNAL_SECONDS = 2
# A Triton that ends sooner than this after its start would do so again.
_MIN_UPTIME_SECONDS = 10.0


def supervise(settings: Settings, triton: EmbeddedTriton | None) -> int:
    """Run the API; restart Triton when it ends; return when the API ends.

    Returns:
        An exit code: the API's own, or 0 after a signal.

    Raises:
        EmbeddedTritonError: Triton ended right after its start, or could not be restarted.
    """
    api = subprocess.Popen(
        # With -P, a package `app` in the current folder cannot take the place of this one.
        [sys.executable, "-P", "-m", "app", "api"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))},
        start_new_session=True,  # a Ctrl-C reaches only us
        preexec_fn=die_with_parent,  # noqa: PLW1509 - there are no threads here
    )
    try:
        _announce(settings, api)
        started = time.monotonic()
        while (code := api.poll()) is None:
            time.sleep(_POLL_SECONDS)
            if triton is None or triton.poll() is None:
                continue
            if time.monotonic() - started < _MIN_UPTIME_SECONDS:
                raise EmbeddedTritonError(f"Triton exited with code {triton.poll()} right after its start; its log is {triton.log}")
            say(f"Triton exited with code {triton.poll()}; restarting it; its last log is {triton.log}.1")
            triton.stop()
            triton.start()
            started = time.monotonic()
    except KeyboardInterrupt:
        say("waiting for requests in progress")
        return 0
    else:
        say(f"the API exited with code {code}")
        return code
    finally:
        ignore_signals()
        _stop(api)
        if triton is not None:  # with another Triton, the next worker sweeps, because that Triton must be told as well
            shared_memory.sweep()


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM from now on, so that a second Ctrl-C does not interrupt the clean-up."""
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, signal.SIG_IGN)


def _stop(api: "subprocess.Popen[bytes]") -> None:
    """End the API once its requests have ended; kill it if that takes too long."""
    api.terminate()
    with suppress(subprocess.TimeoutExpired):
        api.wait(_SECOND_SIGNAL_SECONDS)
    # Granian loses a signal that reaches a worker between its start and its first request. Such a worker receives the
    # second one; a worker that is draining already ignores it.
    with suppress(ProcessLookupError):
        os.killpg(api.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        api.wait(DRAIN_SECONDS)
    kill_group(api)


def _announce(settings: Settings, api: "subprocess.Popen[bytes]") -> None:
    """Tell the user when the API answers."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 - compared only
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    if wait_for_answer(f"{url}/livez", api) is not None:
        say(f"ready: POST {url}/detect, documentation at {url}/docs; Ctrl-C stops everything")
