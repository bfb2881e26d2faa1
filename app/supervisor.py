"""The API and the embedded Triton side by side: watched, and stopped in order."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import httpx

from app import arena, embedded
from app.config import Settings
from app.embedded import EmbeddedError
from app.log import say

DRAIN_SECONDS = 30
"""How long requests under way may take to end."""

_POLL_SECONDS = 0.2
_DEAF_SECONDS = 2
# A Triton that ends sooner than this after its start will not do better the next time.
_LIVED_SECONDS = 10.0


def supervise(settings: Settings, triton: embedded.Server | None) -> int:
    """Run the API; start Triton again when it dies; end when the API ends.

    Returns:
        An exit code: the API's own, or 0 after a signal.

    Raises:
        EmbeddedError: Triton died right after its start, or could not be started again.
    """
    api = subprocess.Popen(
        [sys.executable, "-m", "app", "api"],
        start_new_session=True,  # a Ctrl-C is for us
        preexec_fn=embedded.die_with_parent,  # noqa: PLW1509 - no threads here
    )
    try:
        _announce(settings, api)
        started = time.monotonic()
        while (code := api.poll()) is None:
            time.sleep(_POLL_SECONDS)
            if triton is None or triton.poll() is None:
                continue
            if time.monotonic() - started < _LIVED_SECONDS:
                raise EmbeddedError(f"Triton ended with code {triton.poll()} right after its start; its log is {triton.log}")
            say(f"Triton ended with code {triton.poll()}; starting it again; what it logged is in {triton.log}.1")
            triton.stop()
            triton.start()
            started = time.monotonic()
    except KeyboardInterrupt:
        say("waiting for requests under way to end")
        return 0
    else:
        say(f"the API ended with code {code}")
        return code
    finally:
        ignore_signals()
        _stop(api)
        if triton is not None:  # another Triton has to be told, too, by the next worker
            arena.sweep()  # of workers that had to be killed


def _stop(api: "subprocess.Popen[bytes]") -> None:
    """End the API once its requests have ended; by force if that takes too long."""
    api.terminate()
    with suppress(subprocess.TimeoutExpired):
        api.wait(_DEAF_SECONDS)
    # Granian loses a signal that reaches a worker between its start and its first request; a second one is heard,
    # and a worker that drains does not mind it.
    with suppress(ProcessLookupError):
        os.killpg(api.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        api.wait(DRAIN_SECONDS)
    with suppress(ProcessLookupError):  # workers outlive a parent that was killed
        os.killpg(api.pid, signal.SIGKILL)
    api.wait()


def ignore_signals() -> None:
    """Let nothing cut the cleaning short, such as a second Ctrl-C."""
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, signal.SIG_IGN)


def _announce(settings: Settings, api: "subprocess.Popen[bytes]") -> None:
    """Say so when the API answers."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 - compared only
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    while api.poll() is None:
        try:
            httpx.get(f"{url}/livez", timeout=1, trust_env=False)
        except httpx.HTTPError:
            time.sleep(_POLL_SECONDS)
        else:
            say(f"ready: POST {url}/detect, documentation at {url}/docs; Ctrl-C stops everything")
            return
