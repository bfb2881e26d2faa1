"""One request, traced from its caller through the API to Triton, in real processes."""

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from app.embedded.server import EmbeddedTriton
from app.settings.schema import Settings
from tests.fakes.otlp import attributes_of, receiving_traces
from tests.faults.serving import running_gateway
from tests.support import SCENE, triton_home

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LATER = TRACE[::-1]


async def test_a_request_is_traced_from_its_caller_to_triton(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = triton_home(tmp_path)
    triton = EmbeddedTriton(msgspec.structs.replace(settings, triton_home=home, model="six_columns", tracing=True))
    options = {"model": "six_columns", "model_repository": settings.model_repository, "triton_home": home, "tracing": "true"}
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
                    return await client.post("/detect", content=SCENE, headers={"traceparent": caller})

                responses = [await ask(f"00-{SPAN}{SPAN}-{SPAN}-00"), await ask(f"00-{TRACE}-{SPAN}-01")]
                assert [response.status_code for response in responses] == [200, 200]
                # Triton may keep the last spans until it has others, and lose them when it is stopped.
                while not {"InferRequest", "six_columns", "compute"} <= {span.name for span in receiver.of_trace(TRACE)}:
                    await ask(f"00-{LATER}-{SPAN}-01")
                    await asyncio.sleep(1)
        finally:
            triton.stop()

    untraced, traced = responses
    spans = {span.name: span for span in receiver.of_trace(TRACE)}
    request, inference, model = (spans[name] for name in ("POST /detect", "InferRequest", "six_columns"))
    # Questions whether the gateway runs are traced, too.
    assert {span.trace_id.hex() for span in receiver.spans if not span.name.startswith("GET ")} <= {TRACE, LATER}
    assert request.parent_span_id.hex() == SPAN
    stages = [span.name for span in receiver.children(request) if span != inference]
    assert stages == ["read", "model", "queue", "decode", "batch", "infer", "post"]
    assert attributes_of(request)["nereid.model"] == "six_columns"
    assert set(receiver.services) == {"the-gateway", "triton-inference-server"}
    assert traced.headers["traceparent"] == f"00-{TRACE}-{request.span_id.hex()}-01"
    assert untraced.headers["traceparent"].endswith("-00")
    assert (inference.parent_span_id, model.parent_span_id) == (request.span_id, inference.span_id)
    assert attributes_of(model)["triton.request_id"] == traced.headers["x-request-id"]
    assert [span.name for span in receiver.children(model)] == ["compute"]
    line = gateway.wait_for_line(traced.headers["x-request-id"])
    assert (line["trace_id"], line["span_id"]) == (TRACE, request.span_id.hex())
