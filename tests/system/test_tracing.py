"""One request, traced from its caller through the API to Triton, in real processes."""

import asyncio
import secrets
import shutil
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from app.embedded.server import EmbeddedTriton
from app.settings.schema import Settings
from tests.fakes.otlp import attributes_of, receiving_traces
from tests.faults.serving import running_gateway
from tests.support import SCENE, triton_home

MODEL, SPAN = "six_columns", "b7ad6b7169203331"
TRITONS = {"InferRequest", MODEL, "compute"}
"""Names of Triton's spans of a request."""


async def test_a_request_is_traced_from_its_caller_to_triton(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home, models = triton_home(tmp_path), tmp_path / "models"
    shutil.copytree(Path(settings.model_repository, MODEL), models / MODEL)
    options: dict[str, Any] = {"model": MODEL, "model_repository": str(models), "triton_home": home, "tracing": True}
    triton = EmbeddedTriton(msgspec.structs.replace(settings, **options))
    with receiving_traces() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds; Triton's default is five seconds
        triton.start()
        try:
            monkeypatch.setenv("OTEL_SERVICE_NAME", "the-gateway")
            async with (
                running_gateway("", tmp_path, workers=1, timeout_seconds=30, **options) as gateway,
                httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
            ):

                async def ask(caller: str) -> httpx.Response:
                    response = await client.post("/detect", content=SCENE, headers={"traceparent": caller})
                    assert response.status_code == 200, response.text
                    return response

                untraced = await ask(f"00-{SPAN}{SPAN}-{SPAN}-00")
                asked: dict[str, httpx.Response] = {}
                # Triton's exporter may lose the spans of a request.
                while not (whole := [trace for trace in asked if receiver.of_trace(trace).keys() >= TRITONS]):
                    trace = secrets.token_hex(16)
                    asked[trace] = await ask(f"00-{trace}-{SPAN}-01")
                    await asyncio.sleep(1)
        finally:
            triton.stop()

    traced, spans = asked[trace := whole[0]], receiver.of_trace(trace)
    request, inference, model = spans["POST /detect"], spans["InferRequest"], spans[MODEL]
    # Questions whether the gateway runs are traced, too.
    assert SPAN + SPAN not in {span.trace_id.hex() for span in receiver.spans if not span.name.startswith("GET ")}
    assert request.parent_span_id.hex() == SPAN
    stages = [span.name for span in receiver.children(request) if span != inference]
    assert stages == ["read", "model", "queue", "decode", "batch", "infer", "post"]
    assert attributes_of(request)["nereid.model"] == MODEL
    assert set(receiver.services) == {"the-gateway", "triton-inference-server"}
    assert traced.headers["traceparent"] == f"00-{trace}-{request.span_id.hex()}-01"
    assert untraced.headers["traceparent"].endswith("-00")
    assert (inference.parent_span_id, model.parent_span_id) == (request.span_id, inference.span_id)
    assert attributes_of(model)["triton.request_id"] == traced.headers["x-request-id"]
    assert [span.name for span in receiver.children(model)] == ["compute"]
    line = gateway.wait_for_line(traced.headers["x-request-id"])
    assert (line["trace_id"], line["span_id"]) == (trace, request.span_id.hex())
