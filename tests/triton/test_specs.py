"""The cache reads specs again every few seconds, and no request waits for that."""

import asyncio
import gc
from collections.abc import Collection
from typing import Any

import grpc
import pytest

from app.errors import GatewayError, ModelNotReady, TritonUnavailable, UnknownModel, UnknownVersion, UnsupportedModel
from app.triton.client import TritonClient
from app.triton.specs import SpecCache
from tests.fakes.clock import Clock
from tests.fakes.triton import CONFIG, FakeTriton, config_with
from tests.support import eventually

Fake = tuple[FakeTriton, TritonClient]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.triton.specs")


async def test_a_spec_is_read_from_the_config_of_the_model(fake_triton: Fake) -> None:
    fake, client = fake_triton
    fake.model_versions = ["2", "10"]
    spec = await SpecCache(client).get("tiny")

    assert (spec.name, spec.version, spec.input_size, spec.output_names) == ("tiny", "10", (32, 32), ("output0",))


async def test_many_requests_read_a_spec_once(fake_triton: Fake) -> None:
    fake, client = fake_triton
    cache = SpecCache(client)
    read = await asyncio.gather(*(cache.get("tiny") for _ in range(50)))
    await cache.get("tiny")

    assert fake.config_reads == 1
    assert all(spec is read[0] for spec in read)


async def test_each_version_has_its_own_spec(fake_triton: Fake) -> None:
    fake, client = fake_triton
    fake.model_versions = ["1", "2"]
    cache = SpecCache(client)
    newest, first, second = [await cache.get(reference) for reference in ("tiny", "tiny:1", "tiny:2")]

    assert [(spec.name, spec.version, spec.reference) for spec in (newest, first, second)] == [
        ("tiny", "2", "tiny"),
        ("tiny", "1", "tiny:1"),
        ("tiny", "2", "tiny:2"),
    ]
    assert [cache.known(spec) is spec for spec in (newest, first, second)] == [True] * 3
    cache.forget("tiny:1")
    assert (cache.has("tiny"), cache.has("tiny:1"), cache.has("tiny:2")) == (True, False, True)


async def test_the_config_may_name_the_default_version(fake_triton: Fake, clock: Clock) -> None:
    fake, client = fake_triton
    fake.config, fake.model_versions = config_with(default_version="1"), ["1", "2", "3"]
    cache = SpecCache(client)
    default, first, third = [await cache.get(reference) for reference in ("tiny", "tiny:1", "tiny:3")]

    assert default is first
    assert [(spec.is_pinned, spec.reference) for spec in (default, third)] == [(True, "tiny:1"), (True, "tiny:3")]
    fake.config = config_with(default_version="2")
    clock.now += 6
    assert version_of(cache) == "1"
    await eventually(lambda: version_of(cache) == "2")


async def test_a_default_version_that_is_not_loaded_is_unknown(fake_triton: Fake) -> None:
    fake, client = fake_triton
    fake.config, fake.model_versions = config_with(default_version="2"), ["1", "3"]
    cache = SpecCache(client)
    with pytest.raises(UnknownVersion, match=r"2.*1, 3$"):
        await cache.get("tiny")

    assert (await cache.get("tiny:1")).reference == "tiny:1"


async def test_a_version_that_has_gone_is_unknown(fake_triton: Fake, clock: Clock) -> None:
    fake, client = fake_triton
    fake.model_versions = ["1", "2"]
    cache = SpecCache(client)
    await cache.get("tiny:1")
    cache.forget("tiny:1")
    fake.model_versions = ["2"]
    with pytest.raises(UnknownVersion):
        await cache.get("tiny:1")
    assert cache.has_had("tiny")
    fake.query_refusal = grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"
    clock.now += 1

    for reference in ("tiny", "tiny:1", "tiny:9"):
        with pytest.raises(ModelNotReady, match="not loaded any more"):
            await cache.get(reference)


async def test_a_spec_is_read_again_after_a_while(fake_triton: Fake, clock: Clock) -> None:
    fake, client = fake_triton
    cache = SpecCache(client)
    await cache.get("tiny")
    fake.model_versions = ["2"]
    clock.now += 5
    assert (await cache.get("tiny")).version == "1"
    assert not refreshing(cache)
    clock.now += 1
    assert (await cache.get("tiny")).version == "1"

    await eventually(lambda: version_of(cache) == "2")
    assert fake.config_reads == 2
    clock.now += 5
    assert version_of(cache) == "2"
    assert not refreshing(cache)


async def test_unchanged_spec_that_was_read_again_stays_the_same_object(fake_triton: Fake, clock: Clock) -> None:
    """Only images with the same spec object share a batch."""
    fake, client = fake_triton
    cache = SpecCache(client)
    first = await cache.get("tiny")
    clock.now += 6
    assert cache.cached("tiny") is first
    await eventually(lambda: fake.config_reads == 2 and not refreshing(cache))

    assert cache.cached("tiny") is first


def version_of(cache: SpecCache) -> str | None:
    spec = cache.cached("tiny")
    return None if spec is None else spec.version


def refreshing(cache: SpecCache) -> Collection[object]:
    """Return the tasks that read a spec again."""
    return cache._refreshing  # noqa: SLF001 - other tests' caches have such tasks, too


async def test_requests_do_not_wait_for_a_refresh(fake_triton: Fake, clock: Clock) -> None:
    fake, client = fake_triton
    cache = SpecCache(client)
    first = await cache.get("tiny")
    clock.now += 61
    fake.may_tell.clear()
    assert all([await cache.get("tiny") is first for _ in range(20)])
    await eventually(lambda: fake.config_reads == 2)
    assert all([await cache.get("tiny") is first for _ in range(20)])
    assert len(refreshing(cache)) == 1
    fake.model_versions = ["2"]
    fake.may_tell.set()

    await eventually(lambda: version_of(cache) == "2")
    assert fake.config_reads == 2
    await eventually(lambda: not refreshing(cache))


@pytest.mark.parametrize(
    "refusal",
    [
        (grpc.StatusCode.UNAVAILABLE, "failed to connect"),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed"),
        (grpc.StatusCode.UNAVAILABLE, "Server is stopping"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"),
    ],
)
async def test_a_spec_stays_in_use_while_triton_is_not_available(
    fake_triton: Fake, clock: Clock, refusal: tuple[grpc.StatusCode, str]
) -> None:
    fake, client = fake_triton
    cache = SpecCache(client)
    first = await cache.get("tiny")
    fake.query_refusal, fake.model_versions = refusal, ["2"]
    for reads in (2, 3):
        clock.now += 61
        assert await cache.get("tiny") is first
        await eventually(lambda reads=reads: fake.config_reads == reads and not refreshing(cache))  # type: ignore[misc]
        assert await cache.get("tiny") is first
    assert fake.config_reads == 3
    fake.query_refusal = None
    clock.now += 61

    assert await cache.get("tiny") is first
    await eventually(lambda: version_of(cache) == "2")


@pytest.mark.parametrize(
    ("config", "refusal", "expected"),
    [
        (CONFIG, (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"), ModelNotReady),
        (CONFIG, (grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions"), ModelNotReady),
        ({**CONFIG, "output": []}, None, UnsupportedModel),
    ],
)
async def test_a_model_that_has_gone_is_forgotten_by_the_refresh(
    fake_triton: Fake,
    clock: Clock,
    config: dict[str, Any],
    refusal: tuple[grpc.StatusCode, str] | None,
    expected: type[GatewayError],
) -> None:
    fake, client = fake_triton
    cache = SpecCache(client)
    first = await cache.get("tiny")
    fake.config, fake.query_refusal = config, refusal
    clock.now += 61
    assert await cache.get("tiny") is first

    await eventually(lambda: cache.cached("tiny") is None)
    for _ in range(2):
        with pytest.raises(expected):
            await cache.get("tiny")
    assert fake.config_reads == 4
    fake.config, fake.query_refusal = CONFIG, None
    assert (await cache.get("tiny")).name == "tiny"


async def test_a_model_that_triton_never_had_is_unknown(fake_triton: Fake) -> None:
    """A model that Triton had is not ready: it was unloaded, or Triton is being stopped."""
    fake, client = fake_triton
    cache = SpecCache(client)
    await cache.get("a")
    cache.forget("a")
    fake.query_refusal = grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"
    for _ in range(2):
        with pytest.raises(UnknownModel):
            await cache.get("b")
        with pytest.raises(ModelNotReady, match="not loaded any more"):
            await cache.get("a")

    fake.query_refusal, fake.model_refusal = None, fake.query_refusal
    fake.index.clear()
    with pytest.raises(UnknownModel):  # it was removed
        await cache.get("a")


@pytest.mark.parametrize(
    "text", ["Request for unknown model: 'b' has no available versions", "Request for unknown model: 'b' is not found"]
)
async def test_a_model_that_triton_could_not_load_is_not_ready(fake_triton: Fake, text: str) -> None:
    fake, client = fake_triton
    cache = SpecCache(client)
    fake.model_refusal = grpc.StatusCode.NOT_FOUND, text
    for model in ("b", "c"):
        with pytest.raises(ModelNotReady, match="could not load"):
            await cache.get(model)
    with pytest.raises(UnknownModel):
        await cache.get("d")


async def test_a_failed_refresh_is_not_reported(fake_triton: Fake, clock: Clock) -> None:
    """The event loop must not report an unretrieved exception."""
    fake, client = fake_triton
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    cache = SpecCache(client)
    for status, text in ((grpc.StatusCode.UNAVAILABLE, "failed to connect"), (grpc.StatusCode.NOT_FOUND, "is not found")):
        fake.query_refusal = None
        await cache.get("tiny")
        fake.query_refusal = status, text
        clock.now += 61
        assert cache.cached("tiny")
        await eventually(lambda: not refreshing(cache))
    gc.collect()
    asyncio.get_running_loop().set_exception_handler(None)

    assert cache.cached("tiny") is None
    assert reports == []


async def test_a_forgotten_spec_is_read_again(fake_triton: Fake) -> None:
    fake, client = fake_triton
    cache = SpecCache(client)
    await asyncio.gather(cache.get("a"), cache.get("b"))
    cache.forget("a")
    cache.forget("c")
    assert cache.cached("a") is None
    assert cache.cached("b") is not None
    await asyncio.gather(*(cache.get("a") for _ in range(50)))

    assert fake.config_reads == 3


async def test_a_model_that_is_not_there_is_asked_for_once_a_second(fake_triton: Fake, clock: Clock) -> None:
    fake, client = fake_triton
    cache = SpecCache(client)
    fake.model_refusal = grpc.StatusCode.NOT_FOUND, "Request for unknown model"
    for reads in (1, 2):
        for _ in range(20):
            with pytest.raises(UnknownModel):
                await cache.get("nobody")
        assert fake.config_reads == reads
        clock.now += 1
    fake.model_refusal = None
    for _ in range(20):
        with pytest.raises(UnknownVersion):
            await cache.get("tiny:9")
    assert fake.config_reads == 3
    assert (await cache.get("nobody")).name == "nobody"


async def test_memory_of_absent_models_is_bounded(fake_triton: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.triton.specs._MAX_ABSENT", 3)
    fake, client = fake_triton
    cache = SpecCache(client)
    fake.model_refusal = grpc.StatusCode.NOT_FOUND, "Request for unknown model"
    for name in ("k", "l", "m", "n", "k"):
        with pytest.raises(UnknownModel):
            await cache.get(name)

    assert fake.config_reads == 5


async def test_a_failure_is_not_kept(fake_triton: Fake, clock: Clock) -> None:
    fake, client = fake_triton
    cache = SpecCache(client)
    for status, text, expected in (
        (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found", UnknownModel),
        (grpc.StatusCode.UNAVAILABLE, "failed to connect", TritonUnavailable),
    ):
        fake.query_refusal = status, text
        with pytest.raises(expected):
            await cache.get("tiny")
        clock.now += 1
    fake.query_refusal = None

    assert (await cache.get("tiny")).name == "tiny"


async def test_a_model_without_an_adapter_is_unsupported(fake_triton: Fake) -> None:
    fake, client = fake_triton
    fake.config = {**CONFIG, "output": [{"name": "text", "data_type": "TYPE_STRING", "dims": [1]}]}

    with pytest.raises(UnsupportedModel, match="the tensors of tiny match no supported head"):
        await SpecCache(client).get("tiny")
