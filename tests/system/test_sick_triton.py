"""Real Tritons whose answers become wrong on the way to the gateway: they are found and left, whatever the model finds."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import grpc
import httpx
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as messages

from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.model.spec import OUTPUT_DTYPES
from app.pipeline import examiner
from app.settings.schema import Settings
from app.triton.client import MODEL_INFER, OPTIONS
from app.zoo.add import Request, add
from app.zoo.recognize import read_options
from app.zoo.repository import Repository
from bench.harness.triton import Triton, embedded_triton
from tests.fakes import models
from tests.support import SCENE, started, triton_home
from tests.zoo.exported import exported, head_tensors

Sickness = Literal["errors", "zeros", "shuffled", "scaled"]
SICKNESSES: tuple[Sickness, ...] = ("errors", "zeros", "shuffled", "scaled")
_ERROR = "failed to perform CUDA copy: an illegal memory access was encountered"


class SickTriton(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Passes all calls on; tests set the attributes."""

    def __init__(self) -> None:
        self.url = ""
        """`host:port`, once it is served."""
        self.sickness: Sickness | None = None
        self.models: set[str] = set()
        """Those that are sick; all if empty."""
        self.good_calls = 0
        """Inferences that are answered as they should before it becomes sick."""
        self.inferences: Counter[str] = Counter()
        """Of each model, without those of the golden picture."""
        self.questions: Counter[str] = Counter()
        """Those of the golden picture."""
        self.up: Any = None

    def service(self, details: Any) -> Any:  # noqa: ANN401
        """Return the handler of any call."""

        async def call(request: bytes, context: Any) -> bytes:  # noqa: ANN401
            metadata = [pair for pair in context.invocation_metadata() if not pair[0].startswith(("user-agent", "grpc-"))]
            asked = messages.ModelInferRequest.FromString(request) if details.method == MODEL_INFER else None
            if asked is not None and asked.id == "golden":
                self.questions[asked.model_name] += 1
            elif asked is not None and asked.id not in {"probe", "unit"}:
                self.inferences[asked.model_name] += 1
                self.good_calls -= 1
            is_sick = asked is not None and self.good_calls < 0 and (not self.models or asked.model_name in self.models)
            if is_sick and self.sickness == "errors":
                await context.abort(grpc.StatusCode.INTERNAL, _ERROR)
            answer = b""
            try:
                answer = await self.up.unary_unary(details.method)(request, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())
            return _spoil(answer, self.sickness) if is_sick and self.sickness else answer

        return grpc.unary_unary_rpc_method_handler(call)


@asynccontextmanager
async def sick(address: str) -> AsyncIterator[SickTriton]:
    """Serve a proxy of the Triton at an address, in this event loop."""
    proxy = SickTriton()
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as proxy.up:
        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((proxy,))
        proxy.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield proxy
        finally:
            await server.stop(None)


def _spoil(answer: bytes, sickness: Sickness) -> bytes:
    message = messages.ModelInferResponse.FromString(answer)
    for index, output in enumerate(message.outputs):
        tensor = np.frombuffer(message.raw_output_contents[index], OUTPUT_DTYPES[output.datatype])
        message.raw_output_contents[index] = _change(tensor, sickness, is_box=not output.name.startswith("det_scores")).tobytes()
    return bytes(message.SerializeToString())


def _change(tensor: NDArray[Any], sickness: Sickness, *, is_box: bool) -> NDArray[Any]:
    if sickness == "zeros":
        return np.zeros_like(tensor)
    if not is_box or tensor.dtype.kind != "f":
        return tensor
    return np.roll(tensor, 1 + tensor.size // 2) if sickness == "shuffled" else tensor * tensor.dtype.type(1.5)


SIZE = (256, 128)
NAMES = {0: "door", 1: "window", 2: "gate"}
SETTINGS: dict[str, Any] = {"model": "doors", "timeout_seconds": 20}


def add_models(folder: Path) -> None:
    """Add `doors`, which finds objects in every image, `empty`, which finds none, and `classes`; `by_hand` has no values."""
    tensors = head_tensors("yolo", SIZE)
    networks = {
        "doors": exported(tensors, SIZE, names=NAMES),
        "empty": exported({name: tensor * 0.01 for name, tensor in tensors.items()}, SIZE, names=NAMES),
        "classes": exported({"logits": np.array([1.0, 3.0, 2.0])}, SIZE, names=NAMES),
    }
    for name, network in networks.items():
        (file := folder / f"{name}.onnx").write_bytes(network.SerializeToString())
        options = read_options({"head": "yolo"} if name != "classes" else {})
        add(Request(str(file), name, "MIT", None, options), Repository(folder / "models"), lambda _: "")
    models.write(folder / "written")
    (folder / "written" / "six_columns").rename(folder / "models" / "by_hand")
    config = folder / "models" / "by_hand" / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8").replace('"six_columns"', '"by_hand"'), encoding="utf-8")


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    add_models(folder := tmp_path_factory.mktemp("sick"))
    with embedded_triton(folder / "models", "doors") as triton:
        yield triton


@pytest.fixture
async def proxy(triton: Triton) -> AsyncIterator[SickTriton]:
    async with sick(triton.address) as proxy:
        yield proxy


async def ask(client: httpx.AsyncClient, model: str) -> tuple[int, Any]:
    """Return the status, and what was found without what differs from answer to answer."""
    response = await client.post(f"/predict/{model}", content=SCENE, headers={"Content-Type": "image/bmp"})
    answer = response.json()
    return response.status_code, answer.get("detections", answer.get("classifications", answer.get("detail")))


async def until(client: httpx.AsyncClient, model: str, status: int) -> Any:  # noqa: ANN401
    while (answer := await ask(client, model))[0] != status:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return answer[1]


@pytest.fixture(autouse=True)
def every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examiner, "EVERY_SECONDS", 1.0)


@pytest.mark.parametrize("sickness", SICKNESSES)
@pytest.mark.parametrize("model", ["doors", "empty", "classes", "by_hand"])
async def test_the_only_triton_becomes_sick(triton: Triton, proxy: SickTriton, model: str, sickness: Sickness) -> None:
    proxy.models = {model}
    settings = Settings(**SETTINGS, triton_endpoints=proxy.url, model_repository=str(triton.repository))
    async with started(create_app(settings)) as client:
        right = await until(client, model, 200)
        while not _was_asked(proxy, model):
            await ask(client, model)
        proxy.sickness = sickness
        assert await until(client, model, 503) == "Triton answers wrongly with this model, and has not recovered yet"
        health = (await client.get("/health")).json()
        shown = re.compile(rf'^api_triton_wrong{{model="{model}(:1)?",.*}} 1\.0$', re.MULTILINE)
        while not shown.search((await client.get("/metrics")).text):
            await ask(client, model)

        assert (await client.get("/readyz")).status_code == (503 if model == "doors" else 200)
        assert (await client.get("/livez/triton")).status_code == (503 if model == "doors" else 200)
        assert (health["status"] == "unhealthy") == (model == "doors")
        assert [name.partition(":")[0] for name in health["tritons"][0]["wrong"]] == [model]
        for other in {"doors", "empty", "classes", "by_hand"} - {model}:
            assert (await ask(client, other))[0] == 200
        proxy.sickness = None
        assert await until(client, model, 200) == right
        assert (await client.get("/readyz")).status_code == 200


async def test_a_model_on_demand_is_asked_only_while_it_is_loaded(tmp_path: Path) -> None:
    add_models(tmp_path)
    (tmp_path / "home").mkdir()
    own = Settings(
        **SETTINGS, loaded_models=2, model_repository=str(tmp_path / "models"), triton_home=triton_home(tmp_path / "home")
    )
    server = EmbeddedTriton(own)
    await asyncio.to_thread(server.start)
    try:
        async with sick(own.triton_address) as proxy:
            proxy.models = {"empty"}
            settings = msgspec.structs.replace(own, triton_endpoints=proxy.url, triton_loads_models=True)
            async with started(create_app(settings)) as client:
                await until(client, "empty", 200)
                while not _was_asked(proxy, "empty"):
                    await ask(client, "empty")
                proxy.sickness = "zeros"
                await until(client, "empty", 503)
                await until(client, "classes", 200)
                questions = proxy.questions.copy()
                while proxy.questions["classes"] < questions["classes"] + 3:
                    await ask(client, "classes")
                assert proxy.questions["empty"] <= questions["empty"] + 1
                proxy.sickness = None
                await until(client, "empty", 200)
    finally:
        await asyncio.to_thread(server.stop)


def _was_asked(proxy: SickTriton, model: str) -> bool:
    """Return whether what a model finds in the golden picture is known, for which the first two questions may be needed."""
    return proxy.questions[model] > 2
