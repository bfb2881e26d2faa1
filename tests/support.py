"""What many tests need: paths, free ports, an application with its lifespan, and its answers and metrics."""

import asyncio
import gc
import json as stdlib_json
import os
import sys
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import CapturedCall, CapturingLogger

from app.api.application import Application
from app.api.context import BodyLimits
from app.api.dependencies import Deployment, LimitsInForce, WorkerResources
from app.imaging.header import PixelLimits
from app.imaging.transform import ImageTransform
from app.model.spec import ModelSpec
from app.pipeline.call import CallContext
from app.pipeline.limits import Limits
from app.pipeline.preprocess import Workspace, fill_input
from app.resilience.admission import Admission, Capacity
from app.resilience.deadline import Deadline
from app.resilience.decode_backlog import DecodeBacklog
from app.resilience.lease import Lease
from app.resilience.memory import MemoryBudget
from app.resilience.worker_table import WorkerTable
from app.settings.schema import Settings
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing
from app.triton.client import TritonClient
from app.triton.shared_memory import SHM
from app.triton.transport import InputBuffer, Transport
from bench.harness.ports import find_free
from tests.fakes import models

T = TypeVar("T")

OpenTable = Callable[[], WorkerTable]
"""Opens the table of workers of one host, as a further worker does."""

ROOT = Path(__file__).parents[1]
REPOSITORY = ROOT / "model_repository"
IMAGES = ROOT / "tests" / "images"
SHARED = ROOT.parent / "shared"
"""More test data; tests that need it are skipped where it does not exist."""
LIMITS = Limits(1, PixelLimits(10**7, 10**7), timeout_seconds=10, max_timeout_seconds=30)
"""Of a pipeline with one thread."""
TABLE_VARIABLE = "NEREID_INTERNAL_WORKER_TABLE_FD"
"""Environment variable by which processes inherit the table of workers."""
TABLE = WorkerTable()
"""Of a worker that is alone on its host."""
METRICS = Metrics(TABLE, "0")
"""Metrics that nobody looks at."""
DEPLOYMENT = Deployment(
    BodyLimits(2**20, total_seconds=30),
    BodyLimits(2**22, total_seconds=30),
    LimitsInForce(
        max_file_size_mb=1,
        max_batch_size_mb=4,
        max_megapixels=10,
        max_megapixels_non_jpeg=10,
        max_uploads=100,
        memory_mb=1024,
        timeout_seconds=10,
        max_timeout_seconds=30,
    ),
    triton_metrics_urls=(),
    slow_request_ms=0,
    trusted_proxies=(),
)
RESOURCES = WorkerResources(DEPLOYMENT)
"""What the outermost layer of an application needs."""
RESOURCES.metrics = METRICS
SCENE = models.scene("BMP")
"""An image in which the small models find a red and a blue rectangle."""
NEEDS_BYTES = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="the embedded Triton reads BYTES tensors only under numpy 1, which Python 3.13 has not"
)
"""Marks a test of a model that takes the encoded file."""


class Clock:
    """A clock that stands still; it replaces `monotonic` in some modules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        self.now = 1000.0
        """Seconds; a test may set it."""
        for module in modules:
            monkeypatch.setattr(f"{module}.monotonic", self)

    def __call__(self) -> float:
        return self.now


def triton_home(folder: Path) -> str:
    for name in ("server", "python"):
        (folder / name).symlink_to(ROOT / ".triton" / name)
    return str(folder)


def free_port() -> int:
    return find_free(1)[0]


@asynccontextmanager
async def lifespan_of(app: Application) -> AsyncIterator[None]:
    to_app: asyncio.Queue[Any] = asyncio.Queue()
    from_app: asyncio.Queue[Any] = asyncio.Queue()
    scope: Any = {"type": "lifespan", "asgi": {"version": "3.0"}}
    lifespan = asyncio.ensure_future(app(scope, to_app.get, from_app.put))
    await to_app.put({"type": "lifespan.startup"})
    assert (await from_app.get())["type"] == "lifespan.startup.complete"
    try:
        yield
    finally:
        await to_app.put({"type": "lifespan.shutdown"})
        await lifespan


def calling(app: Application) -> httpx.AsyncClient:
    """Make a client that calls an application directly, without its lifespan."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://nereid")


@asynccontextmanager
async def started(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    async with lifespan_of(app), calling(app) as client:
        yield client


class Reply(NamedTuple):
    """The response of an application to one request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def problem(self) -> dict[str, Any]:
        assert self.headers["content-type"].startswith("application/problem+json")
        return dict(stdlib_json.loads(self.body))


Receive = Callable[[], Awaitable[Any]]


def chunk(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def receiving(*messages: dict[str, Any]) -> Receive:
    """Make the `receive` of a client that sends these messages and then disconnects."""
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(left, {"type": "http.disconnect"})

    return receive


def staying(*messages: dict[str, Any]) -> Receive:
    """Make the `receive` of a client that sends these messages and then waits for its response."""
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        for message in left:
            return message
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    return receive


Headers = Mapping[str, str] | Sequence[tuple[str, str]]
"""Headers of a request; a sequence may contain a name more than once."""


async def call(app: Application, receive: Receive, path: str = "/", headers: Headers = ()) -> Reply:
    """POST to an application directly, as a server does, with control over what it receives."""
    sent: list[Any] = []

    async def send(message: Any) -> None:  # noqa: ANN401
        sent.append(message)

    path, _, query = path.partition("?")
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    scope: Any = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(b"host", b"nereid"), *((name.lower().encode(), value.encode()) for name, value in pairs)],
        "client": ("127.0.0.1", 1),
        "server": ("nereid", 80),
        "extensions": {},
    }
    await app(scope, receive, send)
    start, *rest = sent
    received = {name.decode(): value.decode() for name, value in start["headers"]}
    return Reply(start["status"], received, b"".join(message["body"] for message in rest))


def sample_image(name: str) -> bytes:
    return (IMAGES / name).read_bytes()


def json(response: httpx.Response, status: int = 200) -> Any:  # noqa: ANN401
    assert response.status_code == status, response.text
    return response.json()


async def finds(client: httpx.AsyncClient, model: str = "six_columns") -> bool:
    found = json(await client.post(f"/predict/{model}", content=SCENE))["detections"]
    return [detection["class_name"] for detection in found] == ["red", "blue"]


async def transport_in_use(client: httpx.AsyncClient) -> str:
    report: dict[str, Any] = (await client.get("/health")).json()
    return str(report["tritons"][0]["transport"])


async def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds; the test's own limit ends this."""
    while not holds():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until an answer is as it must be; the test's own limit ends this."""
    while not await holds():  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.01)


def workspace(transport: Transport) -> Workspace:
    return Workspace(PixelLimits(10**6, 10**6), MemoryBudget(TABLE, "memory", 2**40), DecodeBacklog(TABLE, 1), transport)


def fill(data: bytes, spec: ModelSpec, transport: Transport, lease: Lease) -> tuple[InputBuffer, ImageTransform]:
    return fill_input(data, 0, spec, workspace(transport), CallContext(Deadline.after(30), Timing(), ""), lease)


@contextmanager
def open_admission(**changes: Any) -> Iterator[Admission]:  # noqa: ANN401
    """Make the admission of a worker that is alone on its host, and has room for any test."""
    capacity = Capacity(
        max_uploads=100,
        upload_bytes=2**30,
        memory_bytes=2**30,
        max_requests=100,
        target_seconds=1e6,
        decode_threads=2,
        anonymous_bytes=2**30,
    )
    with closing(WorkerTable()) as table:
        yield Admission(table, capacity._replace(**changes))


@contextmanager
def in_cycles(kind: type[T]) -> Iterator[list[T]]:
    """Collect the objects of a kind that a `with` block leaves behind in reference cycles."""
    kept: list[T] = []
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield kept
        gc.collect()
        kept += [thing for thing in gc.garbage if isinstance(thing, kind)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@contextmanager
def peak_below(nbytes: float) -> Iterator[None]:
    """Demand that the memory of a `with` block stays below this."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < nbytes


def own_arenas() -> list[Path]:
    return sorted(SHM.glob(f"nereid-{os.getpid()}-*"))


async def regions(settings: Settings) -> list[str]:
    client = TritonClient(settings.triton_address)
    try:
        return sorted((await client.list_regions()).values())
    finally:
        await client.close()


def captured_log(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[CapturedCall]:
    logger = CapturingLogger()
    monkeypatch.setattr(module, "LOG", logger)
    return logger.calls


Samples = dict[str, float]
"""By name and labels, as the text format writes them: `name{label="value"}`."""


async def scrape(client: httpx.AsyncClient) -> Samples:
    answer = await client.get("/metrics")
    assert answer.status_code == 200, answer.text
    return read_samples(answer.text)


def read_samples(text: str) -> Samples:
    return {
        sample.name + _write_labels(sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _write_labels(labels: dict[str, str]) -> str:
    pairs = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    return f"{{{pairs}}}" if pairs else ""
