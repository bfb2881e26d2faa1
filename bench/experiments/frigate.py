"""Whether responses arrive within the timeout of Frigate's detector `deepstack`.

Source: Frigate's frigate/detectors/plugins/deepstack.py: a JPEG of the size of its model, and the default of `api_timeout`.
"""

from io import BytesIO

from PIL import Image, ImageOps

from bench.harness.lineup import DEFAULT, Lineup
from bench.load.closed_loop import drive_closed_loop
from bench.load.dialects import Request, deepstack
from bench.load.driver import run as drive
from bench.load.images import Sample
from bench.report.text import number

TIMEOUT_MS = 100.0
"""Frigate's default timeout."""
SIDE = 320
"""Width and height of its images."""
HEAD = ("model", "clients", "answers/s", "p50 ms", "p99 ms", f"within {TIMEOUT_MS:g} ms")
"""Columns of the result of `measure`."""

_CLIENTS = (1, 2, 4)


def measure(lineup: Lineup, model: str, jpeg: bytes, seconds: float) -> list[tuple[str, ...]]:
    """Send Frigate's request for an image to a gateway with this model; return a row for each number of clients.

    Raises:
        ContestantError: The gateway does not start.
    """
    request = to_request(jpeg)
    sample = Sample("Frigate", request.body, frozenset())
    rows = []
    with lineup.start(lineup.contestant(DEFAULT, model)) as server:
        for clients in _CLIENTS:
            outcome = drive(drive_closed_loop(f"{server.url}{request.path}", [sample], clients=clients, seconds=seconds))
            latencies = (number(outcome.percentile(percent)) for percent in (50, 99))
            rows.append((model, str(clients), number(outcome.rate), *latencies, f"{outcome.share_within(TIMEOUT_MS):.1%}"))
    return rows


def to_request(jpeg: bytes) -> Request:
    """Make Frigate's request for an image."""
    with Image.open(BytesIO(jpeg)) as image:
        fitted = ImageOps.fit(image.convert("RGB"), (SIDE, SIDE))
    file = BytesIO()
    fitted.save(file, "JPEG")
    return deepstack(file.getvalue(), "").other
