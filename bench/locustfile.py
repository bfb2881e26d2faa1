"""A Locust client that sends images to /detect and /classify with a generic HTTP client.

`./just bench locust` runs it in a separate environment; it imports nothing from this project. With Locust installed,
`locust --locustfile bench/locustfile.py --host http://127.0.0.1:4603` shows Locust's page in a browser.
"""

import random
import sys
from pathlib import Path
from typing import Any, ClassVar

from locust import FastHttpUser, constant, events, tag, task

_SAMPLES = Path(__file__).parents[1] / "tests" / "images"


@events.init_command_line_parser.add_listener
def _add_options(parser: Any, **_: Any) -> None:  # noqa: ANN401 - Locust's
    parser.add_argument("--images", default=str(_SAMPLES), help="folder of the JPEGs that are sent")


@events.init.add_listener
def _read_images(environment: Any, **_: Any) -> None:  # noqa: ANN401 - Locust's
    folder = Path(environment.parsed_options.images)
    Caller.images = [path.read_bytes() for path in sorted(folder.glob("*.jpg"))]
    if not Caller.images:
        sys.exit(f"{folder} contains no JPEG")


@events.quitting.add_listener
def _show_errors(environment: Any, **_: Any) -> None:  # noqa: ANN401 - Locust's
    for error in environment.stats.errors.values():
        print(f"{error.occurrences} x {error.method} {error.name}: {error.error}", file=sys.stderr)


class Caller(FastHttpUser):
    """A client that sends its next image as soon as it has a response."""

    wait_time = constant(0)
    images: ClassVar[list[bytes]] = []

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

    def _send(self, path: str) -> None:
        self.client.post(path, data=random.choice(self.images), headers={"Content-Type": "image/jpeg"})  # noqa: S311 - not a secret
