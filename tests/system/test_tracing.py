"""One request, traced from its caller through the API to Triton, in real processes."""

import json
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest

from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from tests.fakes.otlp import attributes_of, receiving_traces
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.faults.serving import running_gateway
from tests.support import SCENE, eventually, started, triton_home

pytestmark = pytest.mark.system

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_a_request_is_traced_from_its_caller_to_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTriton()
    fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    with receiving_traces() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "the-gateway")
        async with (
            serving(fake),
            running_gateway(fake.url, tmp_path, workers=1, tracing="true") as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
        ):
            traced = await client.post("/detect", content=SCENE, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
            untraced = await client.post("/detect", content=SCENE, headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
        # The worker has exported everything before it ended.
        request = receiver.named("POST /detect")
        stages = receiver.children(request)

    assert [response.status_code for response in (traced, untraced)] == [200, 200]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, SPAN)
    assert [stage.name for stage in stages] == ["read", "model", "queue", "decode", "batch", "infer", "post"]
    assert attributes_of(request)["nereid.model"] == "tiny"
    assert set(receiver.services) == {"the-gateway"}
    assert traced.headers["traceparent"] == fake.metadata[-2]["traceparent"] == f"00-{TRACE}-{request.span_id.hex()}-01"
    assert untraced.headers["traceparent"].endswith("-00")
    assert "traceparent" not in fake.metadata[-1]

    log = [json.loads(line) for line in (tmp_path / "gateway.log").read_text().splitlines() if line.startswith("{")]
    ids = {line["request_id"]: (line["trace_id"], line["span_id"]) for line in log if line.get("path") == "/detect"}
    assert ids[traced.headers["x-request-id"]] == (TRACE, request.span_id.hex())


async def test_the_embedded_triton_continues_the_trace(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with receiving_traces() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds; Triton's default is five seconds
        traced = msgspec.structs.replace(settings, triton_home=triton_home(tmp_path), model="six_columns", tracing=True)
        triton = EmbeddedTriton(traced)
        triton.start()
        try:
            async with started(create_app(traced)) as client:
                await client.post("/detect", content=SCENE, headers={"traceparent": f"00-{SPAN}{SPAN}-{SPAN}-00"})
                sampled = await client.post("/detect", content=SCENE, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
                assert sampled.status_code == 200, sampled.text
            # A Triton that is stopped may end without having exported everything.
            expected = {"InferRequest", "six_columns", "compute"}
            await eventually(lambda: expected <= {span.name for span in receiver.spans})
        finally:
            triton.stop()

    assert {span.trace_id.hex() for span in receiver.spans} == {TRACE}
    assert set(receiver.services) == {"nereid", "triton-inference-server"}
    request = receiver.named("POST /detect")
    inference, model = receiver.named("InferRequest"), receiver.named("six_columns")
    assert (inference.parent_span_id, model.parent_span_id) == (request.span_id, inference.span_id)
    assert attributes_of(model)["triton.request_id"] == sampled.headers["x-request-id"]
    assert [span.name for span in receiver.children(model)] == ["compute"]
