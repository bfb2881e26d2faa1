"""What each dialect must hold: the boxes of the gateway's own answer, its own errors, the same keys and limits.

The test file of a dialect has a subclass of `Conformance`, which says how its requests and answers look.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image, ImageDraw

from app.api.admission import middleware
from app.main import create_app
from app.settings.schema import Settings
from tests.api.conftest import write_keys
from tests.faults.corpus import bombs, damage
from tests.imaging.samples import encode, exif_of
from tests.support import SCENE, captured_log, json, sample_image, started

SECRET = "not-a-secret"  # noqa: S105 - it protects nothing
KEY = f"camera.{SECRET}"
URLENCODED = "application/x-www-form-urlencoded"
_MEANT = {502, 503, 504}
"""Of statuses above 499: Triton has failed."""
_DOCUMENTS = [
    *(b"", b"null", b"[]", b"{}", b'{"image": 1}', b'{"image": {"type": "base64", "value": 7}}', b"\xff\xfe" * 50),
    *(
        b'{"input": [{"type": "image_url", "url": "data:,"}]}',
        b'{"input": [%s{}]}' % (b'{"type": "image_url", "url": ""},' * 100_000),
    ),
    *(b"[" * 3000, b'{"a":' * 3000, b'{"image": [[]], "api_key": NaN}'),
    *(b'{"confidence": 1%s, "model_id": null, "max_detections": -1}' % (b"0" * 400), b'{"class_filter": {"a": ["\\ud800"]}}'),
]


class Box(NamedTuple):
    """A detected object; corners in pixels of the upright image."""

    name: str
    score: float
    corners: tuple[float, float, float, float]


class Sent(NamedTuple):
    path: str
    arguments: dict[str, Any]
    """For httpx."""


class Conformance(ABC):
    """Tests for every dialect, at its own paths and below its name."""

    name: str
    score_error = 1e-4
    pixel_error = 0.01
    """Half of what an answer is rounded to."""
    statuses: ClassVar[dict[int, int]] = {}
    """Statuses of errors that are not the gateway's."""
    paths: Sequence[str]
    """All that take POST."""

    @abstractmethod
    def request(self, image: bytes, confidence: float = 0.25) -> Sent:
        """Build the dialect's request for the objects in an image."""

    @abstractmethod
    def boxes(self, answer: Any, width: int, height: int) -> list[Box]:  # noqa: ANN401 - any JSON
        """Parse an answer about an image of this size in pixels."""

    def is_error(self, answer: Any, status: int) -> bool:  # noqa: ANN401, ARG002 - any JSON
        """Return whether the answer is the dialect's error for this status."""
        return list(answer) == ["error"] and isinstance(answer["error"], str) and bool(answer["error"])

    def with_key(self, sent: Sent, key: str) -> Sent:
        """Add an API key as the dialect's clients send it."""
        return with_header(sent, "Authorization", f"Bearer {key}")

    @pytest.mark.parametrize("seed", range(4))
    async def test_boxes_are_those_of_the_gateways_own_answer(self, server: httpx.AsyncClient, seed: int) -> None:
        random = Random(seed)  # noqa: S311 - no secret
        image, width, height = random_scene(random)
        confidence = random.choice([0.0, 0.25, 0.5, 0.85, 0.95, 1.0])
        own = json(await server.post(f"/detect?boxes=pixel&confidence={confidence}", content=image))
        expected = [Box(d["class_name"], d["confidence"], (d["x1"], d["y1"], d["x2"], d["y2"])) for d in own["detections"]]
        sent = self.request(image, confidence)
        prefix = random.choice(["", f"/{self.name}"])
        found = self.boxes(json(await server.post(prefix + sent.path, **sent.arguments)), width, height)

        assert [box.name for box in found] == [box.name for box in expected]
        np.testing.assert_allclose([box.score for box in found], [box.score for box in expected], atol=self.score_error)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one.corners, other.corners, atol=self.pixel_error + 0.011)

    async def test_bad_image_or_parameter_gets_an_error_of_the_dialect(
        self, server: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = captured_log(monkeypatch, middleware)
        for image in (b"", b"this is not an image", sample_image("chelsea.jpg")[:5000], bombs()[0]):
            sent = self.request(image)
            response = await server.post(sent.path, **sent.arguments)
            own = (await server.post("/detect", content=image)).status_code

            assert 400 <= response.status_code < 500
            assert self.is_error(response.json(), response.status_code), response.text
            assert not image or response.status_code == self.statuses.get(own, own)
            assert not image or [line.kwargs["model"] for line in log[-2:]] == ["six_columns"] * 2
        sent = self.request(SCENE)
        for query in ("model=nothing-like-it", "version=99", "timeout_ms=0", "confidence=x", "image=1", "%ff=%fe", "model=%00"):
            response = await server.post(f"{sent.path}?{query}", **sent.arguments)

            assert response.status_code < 500, query
            assert response.status_code == 200 or self.is_error(response.json(), response.status_code), response.text

    @pytest.mark.parametrize("seed", range(2))
    async def test_hostile_requests_get_errors_of_the_dialect(self, server: httpx.AsyncClient, seed: int) -> None:
        random, sent = Random(seed), self.request(SCENE)  # noqa: S311 - no secret
        request = server.build_request("POST", sent.path, **sent.arguments)
        own, own_type = await request.aread(), request.headers.get("Content-Type", "")
        for path in self.paths:
            for body, content_type in [
                *((body, own_type) for body in (damage(own, random), own[: random.randrange(len(own))], random.randbytes(500))),
                *((own, kind) for kind in ("multipart/form-data", "application/json", URLENCODED, "text/plain")),
                *((document, "application/json") for document in _DOCUMENTS),
            ]:
                response = await server.post(f"/{self.name}{path}", content=body, headers={"Content-Type": content_type})

                assert response.status_code < 500 or response.status_code in _MEANT, (path, content_type, body[:200])
                assert response.status_code == 200 or self.is_error(response.json(), response.status_code), (path, response.text)

    async def test_keys_and_limits_are_those_of_the_gateway(self, served: Settings, tmp_path: Path) -> None:
        sizes = {"max_file_size_mb": 0.2, "max_batch_size_mb": 0.2}
        file = write_keys(tmp_path, ("camera", SECRET, "detect"))
        own = msgspec.structs.replace(served, model="six_columns", api_keys_file=file, dialects=self.name, **sizes)
        async with started(create_app(own)) as server:
            sent = self.request(SCENE)
            for one, status in (
                (sent, 401),
                (self.with_key(sent, "camera.wrong"), 401),
                (self.with_key(sent, KEY), 200),
                (with_header(self.request(bytes(300_000)), "X-API-Key", KEY), 413),
            ):
                response = await server.post(one.path, **one.arguments)
                assert response.status_code == status, response.text
                assert status == 200 or self.is_error(response.json(), status)


def with_header(sent: Sent, name: str, value: str) -> Sent:
    headers = {**sent.arguments.get("headers", {}), name: value}
    return sent._replace(arguments={**sent.arguments, "headers": headers})


def random_scene(random: Random) -> tuple[bytes, int, int]:
    """Draw rectangles; return the file, and width and height of the upright image."""
    width, height = random.choice([(16, 16), (33, 20), (200, 100), (640, 480), (480, 640), (2000, 1500), (64, 640)])
    image = Image.new("RGB", (width, height), random.choice(["white", "black"]))
    draw = ImageDraw.Draw(image)
    for colour in random.sample(["red", "blue"], random.randint(0, 2)):
        x, y = random.randrange(width // 2), random.randrange(height // 2)
        draw.rectangle((x, y, x + random.randrange(4, 4 + width // 2), y + random.randrange(4, 4 + height // 2)), fill=colour)
    if random.random() < 0.1:
        image = image.convert("L")
    orientation = random.randint(1, 8)
    upright = (height, width) if orientation > 4 else (width, height)  # these turn by a quarter
    return encode(image, random.choice(["JPEG", "PNG", "WEBP"]), exif=exif_of(orientation)), *upright
