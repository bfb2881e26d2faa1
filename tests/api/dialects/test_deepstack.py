"""The dialect of DeepStack and CodeProject.AI, as their clients read it."""

from datetime import UTC
from email.utils import parsedate_to_datetime
from itertools import takewhile
from typing import Any, ClassVar

import httpx
import pytest

from app.api.dialects import deepstack
from app.api.parameters.parse import parse_parameters
from tests.api.dialects.conformance import Box, Conformance, Sent
from tests.support import SCENE, json


class TestConformance(Conformance):
    name = "deepstack"
    pixel_error = 0.5
    statuses: ClassVar[dict[int, int]] = {415: 400, 422: 400}
    paths = ("/v1/vision/detection", "/v1/vision/custom/six_columns")

    def request(self, image: bytes, confidence: float = 0.25) -> Sent:
        return Sent("/v1/vision/detection", {"files": {"image": ("a.jpg", image)}, "data": {"min_confidence": str(confidence)}})

    def boxes(self, answer: Any, width: int, height: int) -> list[Box]:  # noqa: ANN401, ARG002
        assert answer["success"] is True
        assert answer["count"] == len(answer["predictions"])
        return [
            Box(one["label"], one["confidence"], (one["x_min"], one["y_min"], one["x_max"], one["y_max"]))
            for one in answer["predictions"]
        ]

    def is_error(self, answer: Any, status: int) -> bool:  # noqa: ANN401
        return answer["success"] is False and bool(answer["error"]) and (answer["duration"], answer["code"]) == (0, status)

    def with_key(self, sent: Sent, key: str) -> Sent:
        return sent._replace(arguments={**sent.arguments, "data": {**sent.arguments["data"], "api_key": key}})


FORM: dict[str, Any] = {"files": {"image": SCENE}}


async def test_an_answer_has_what_clients_of_both_services_read(server: httpx.AsyncClient) -> None:
    """It is never chunked: Blue Iris could not read that."""
    response = await server.post("/v1/vision/detection", **FORM)
    answer = json(response)

    assert {"success", "predictions", "duration", "count", "message", "inferenceMs", "processMs", "canUseGPU"} <= set(answer)
    assert (answer["code"], answer["command"], answer["moduleId"]) == (200, "detect", "nereid")
    assert parsedate_to_datetime(answer["timestampUTC"]).tzinfo == UTC
    assert int(response.headers["content-length"]) == len(response.content)


async def test_at_most_as_many_objects_as_the_query_says(server: httpx.AsyncClient) -> None:
    """Frigate's detector has room for 20 objects."""
    limited = json(await server.post("/v1/vision/detection?max_objects=1", **FORM))
    own = json(await server.post("/detect", content=SCENE))

    assert [one["label"] for one in limited["predictions"]] == [own["detections"][0]["class_name"]]
    assert limited["message"] == f"Found {own['detections'][0]['class_name']}"


@pytest.mark.parametrize(
    ("form", "count"),
    [
        ({"api_key": ""}, 1),
        ({"api_key": "", "min_confidence": ""}, 1),
        ({"api_key": "", "max_objects": "2"}, 2),
        ({"api_key": "", "min_confidence": "0.4"}, 2),
        ({"api_key": "a-key"}, 2),
        ({}, 2),
    ],
)
async def test_frigate_gets_no_more_objects_than_it_has_room_for(
    server: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, form: dict[str, str], count: int
) -> None:
    """Its form has an empty key and no minimum score; those of other clients have not, and get all objects."""
    monkeypatch.setattr(deepstack, "_FRIGATE_ROWS", 1)

    assert json(await server.post("/v1/vision/detection", **FORM, data=form))["count"] == count


@pytest.mark.parametrize(("given", "least"), [("", 0.4), ("0", 0.0), ("0.7", 0.7)])
def test_an_empty_minimum_is_that_of_deepstack(given: str, least: float) -> None:
    assert parse_parameters([("min_confidence", given)], deepstack._Parameters).options.confidence == least  # noqa: SLF001


async def test_frigate_loses_no_object(server: httpx.AsyncClient) -> None:
    """It stops at the first score below 0.4 and at the first name that it does not know, so its users set those in the query."""
    known = {"blue"}
    answer = json(await server.post("/v1/vision/detection?classes=blue", **FORM))
    read = list(takewhile(lambda one: one["confidence"] >= 0.4 and one["label"] in known, answer["predictions"]))
    own = json(await server.post("/detect?confidence=0.4", content=SCENE))

    assert len(read) == sum(found["class_name"] in known for found in own["detections"]) == 1


async def test_no_class_is_no_filter(server: httpx.AsyncClient) -> None:
    assert json(await server.post("/v1/vision/detection?classes=", **FORM))["count"] == 2


async def test_a_model_in_the_path(server: httpx.AsyncClient) -> None:
    answer = json(await server.post("/v1/vision/custom/yolo_head", **FORM))
    unknown = await server.post("/v1/vision/custom/nothing-like-it", **FORM)

    assert (answer["command"], answer["count"]) == ("custom", 2)
    assert unknown.status_code == 404
    assert unknown.json()["success"] is False


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_detectors_are_listed(server: httpx.AsyncClient, method: str) -> None:
    answer = json(await server.request(method, "/v1/vision/custom/list"))

    assert "six_columns" in answer["models"]
    assert "efficientnet_lite0" not in answer["models"]
    assert (answer["success"], answer["command"], answer["statusData"]) == (True, "list", None)


async def test_there_is_never_an_update(server: httpx.AsyncClient) -> None:
    """Clients ask for updates before they show the service as working."""
    answer = json(await server.get("/v1/status/updateavailable"))

    assert answer["success"] is True
    assert answer["updateAvailable"] is False
    assert {"major", "minor", "patch", "preRelease", "securityUpdate", "build", "file", "releaseNotes"} == set(answer["current"])
