"""A Locust client that sends images to /detect and /classify with a generic HTTP client.

`./just bench locust` runs it in a separate environment; it imports nothing from this project. With Locust installed,
`locust --locustfile bench/locustfile.py --host http://127.0.0.1:4603` shows Locust's page in a browser.
"""

import random
import ssl
import sys
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import gevent
from locust import FastHttpUser, events, tag, task

_FOR_EVER = 1e6
_sent = count()
_SAMPLES = Path(__file__).parents[1] / "tests" / "images"


@events.init_command_line_parser.add_listener
def _add_options(parser: Any, **_: Any) -> None:  # noqa: ANN401 - Locust's
    parser.add_argument("--images", default=str(_SAMPLES), help="folder of the JPEGs that are sent")
    parser.add_argument("--key-file", help="file with the API key")
    parser.add_argument("--ca", help="PEM file of the CAs to trust, instead of the system's")
    parser.add_argument("--requests", type=int, default=sys.maxsize, help="maximum number of requests")
    parser.add_argument("--polite", action="store_true", help="wait for the time in Retry-After")


@events.init.add_listener
def _read_files(environment: Any, **_: Any) -> None:  # noqa: ANN401 - Locust's
    options = environment.parsed_options
    folder = Path(options.images)
    Caller.images = [path.read_bytes() for path in sorted(folder.glob("*.jpg"))]
    if not Caller.images:
        sys.exit(f"{folder} contains no JPEG")
    if options.key_file:
        Caller.default_headers = {"Authorization": f"Bearer {Path(options.key_file).read_text(encoding='ascii').strip()}"}
    context = ssl.create_default_context(cafile=options.ca)
    Caller.ssl_context_factory = lambda *_: context


@events.quitting.add_listener
def _show_errors(environment: Any, **_: Any) -> None:  # noqa: ANN401 - Locust's
    for error in environment.stats.errors.values():
        print(f"{error.occurrences} x {error.method} {error.name}: {error.error}", file=sys.stderr)


class Caller(FastHttpUser):
    """A client that sends its next image as soon as it has a response."""

    insecure = False
    max_redirects = 0  # they could lead the load to any host
    images: ClassVar[list[bytes]] = []
    pause = 0.0

    @tag("detect")
    @task
    def detect(self) -> None:
        """Request detections."""
        self._send("/detect")

    @tag("classify")
    @task
    def classify(self) -> None:
        """Request a classification."""
        self._send("/classify")

    def wait_time(self) -> float:
        """Return the pause before the next request, in seconds."""
        return self.pause

    def _send(self, path: str) -> None:
        left = self.environment.parsed_options.requests - next(_sent)
        if left == 0:
            gevent.spawn(self.environment.runner.quit)  # which waits for this client, too
        if left <= 0:
            self.pause = _FOR_EVER  # until it is stopped; Locust warns of a client that has ended by itself meanwhile
            return
        image, headers = random.choice(self.images), {"Content-Type": "image/jpeg"}  # noqa: S311
        with self.client.post(path, data=image, headers=headers, catch_response=True) as response:
            if 300 <= response.status_code < 400:  # noqa: PLR2004
                response.failure("a redirect")
        seconds = (response.headers or {}).get("Retry-After", "")
        self.pause = float(seconds) if self.environment.parsed_options.polite and seconds.isdigit() else 0.0
