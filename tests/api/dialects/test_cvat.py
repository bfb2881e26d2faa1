"""The dialect of Nuclio's dashboard, as CVAT reads it."""

from base64 import b64encode
from json import loads
from typing import Any

import httpx

from tests.api.dialects.conformance import Box, Conformance, Sent
from tests.support import SCENE, json

HEADERS = {
    "x-nuclio-project-name": "cvat",
    "x-nuclio-function-namespace": "nuclio",
    "x-nuclio-invoke-via": "domain-name",
    "X-Nuclio-Invoke-Timeout": "120s",
}
"""What CVAT sends with each request."""


def invocation(image: bytes, model: str, **others: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    headers = {**HEADERS, "x-nuclio-function-name": model, "x-nuclio-path": "/"}
    return {"json": {**others, "image": b64encode(image).decode()}, "headers": headers}


class TestConformance(Conformance):
    name = "cvat"
    paths = ("/api/function_invocations",)

    def request(self, image: bytes, confidence: float = 0.25) -> Sent:
        return Sent(self.paths[0], invocation(image, "six_columns", threshold=confidence))

    def boxes(self, answer: Any, width: int, height: int) -> list[Box]:  # noqa: ANN401, ARG002
        assert all((one["type"], one["attributes"]) == ("rectangle", []) for one in answer)
        return [Box(one["label"], float(one["confidence"]), tuple(one["points"])) for one in answer]

    def is_error(self, answer: Any, status: int) -> bool:  # noqa: ANN401, ARG002
        return list(answer) == ["error"] and bool(answer["error"])

    def with_key(self, sent: Sent, key: str) -> Sent:
        """Add the credentials that CVAT sends for `CVAT_NUCLIO_HOST=ID:SECRET@host`."""
        name, _, secret = key.partition(".")
        return sent._replace(arguments={**sent.arguments, "auth": (name, secret)})


async def test_functions_have_what_cvat_reads(server: httpx.AsyncClient) -> None:
    listed = json(await server.get("/api/functions", headers=HEADERS))

    assert "efficientnet_lite0" not in listed
    for name, one in listed.items():
        annotations = one["metadata"]["annotations"]
        labels = [label["name"] for label in loads(annotations["spec"])]
        assert one["metadata"]["name"] == name
        assert (annotations["type"], int(annotations["version"])) == ("detector", 1)
        assert len(labels) == len(set(labels))
        assert one["spec"]["description"]
        assert one["status"] == {"state": "ready", "httpPort": 0}
        assert json(await server.get(f"/api/functions/{name}", headers=HEADERS)) == one
    assert loads(listed["six_columns"]["metadata"]["annotations"]["spec"]) == [
        {"id": 0, "name": "red", "type": "rectangle"},
        {"id": 1, "name": "blue", "type": "rectangle"},
    ]


async def test_an_unknown_function_is_404(server: httpx.AsyncClient) -> None:
    """CVAT shows this error to its user."""
    for response in (
        await server.get("/api/functions/nothing-like-it", headers=HEADERS),
        await server.get("/api/functions/efficientnet_lite0", headers=HEADERS),
        await server.post("/api/function_invocations", **invocation(SCENE, "nothing-like-it")),
    ):
        assert response.status_code == 404
        assert response.json()["error"]


async def test_the_threshold_is_that_of_cvats_own_functions_unless_it_is_set(server: httpx.AsyncClient) -> None:
    """CVAT sends no threshold unless its user sets one."""
    for others in ({}, {"threshold": None}):
        answer = json(await server.post("/api/function_invocations", **invocation(SCENE, "six_columns", **others)))
        own = json(await server.post("/detect?confidence=0.5", content=SCENE))

        assert [one["label"] for one in answer] == [one["class_name"] for one in own["detections"]]


async def test_a_bad_invocation_is_400(server: httpx.AsyncClient) -> None:
    for image, others in ((b"", {}), (SCENE, {"threshold": 1.5}), (SCENE, {"threshold": "high"}), (SCENE, {"threshold": [1.5]})):
        response = await server.post("/api/function_invocations", **invocation(image, "six_columns", **others))

        assert response.status_code == 400, response.text
        assert response.json()["error"]
