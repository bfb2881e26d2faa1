"""The cache reads specs again every few seconds, and no request waits for that."""

import asyncio
import gc
from typing import Any

import grpc
import pytest

from app.errors import GatewayError, ModelNotReady, UnknownVersion, UnsupportedModel
from app.triton.client import TritonClient
from app.triton.specs import SpecCache
from tests.fakes.clock import Clock
from tests.fakes.triton import CONFIG, FakeTriton, config_with
from tests.support import eventually

Fake = tuple[FakeTriton, TritonClient]
Refusal = tuple[grpc.StatusCode, str] | None
Error = type[GatewayError]
NOT_FOUND = grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"
NOT_LOADED = grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions"
DOWN = grpc.StatusCode.UNAVAILABLE, "failed to connect"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.triton.specs")


@pytest.fixture
def cache(fake_triton: Fake) -> SpecCache:
    return SpecCache(fake_triton[1])


async def refreshed(cache: SpecCache) -> None:
    await eventually(lambda: not cache._refreshing)  # noqa: SLF001 - other tests' caches have such tasks, too


@pytest.mark.parametrize(
    ("default", "references"),
    [("", ["tiny", "tiny:2", "tiny:10"]), ("2", ["tiny:2", "tiny:2", "tiny:10"])],
    ids=["newest", "named"],
)
async def test_each_version_has_its_own_spec(fake_triton: Fake, cache: SpecCache, default: str, references: list[str]) -> None:
    """The default version is the newest one, or that which the config names. Many requests read each once."""
    fake, _ = fake_triton
    fake.model_versions = ["2", "10", "9", "dev"]
    fake.config = config_with(default_version=default) if default else CONFIG
    models = ["tiny", "tiny:2", "tiny:10"]
    specs = [(await asyncio.gather(*(cache.get(model) for _ in range(20))))[-1] for model in models]

    assert [spec.reference for spec in specs] == references
    assert [spec.version for spec in specs] == [default or "10", "2", "10"]
    assert fake.config_reads == len(set(references)) + bool(default)
    cache.forget("tiny:2")
    assert [cache.has(model) for model in models] == [not default, False, True]
    fake.model_versions = ["10", "9"]
    with pytest.raises(UnknownVersion, match=r"^tiny has no version 2; versions that can be used: 9, 10$"):
        await cache.get("tiny:2")


async def test_spec_is_read_again_after_a_while_and_no_request_waits(fake_triton: Fake, cache: SpecCache, clock: Clock) -> None:
    fake, _ = fake_triton
    first = await cache.get("tiny")
    for seconds, reads in ((5, 1), (1, 2)):
        clock.now += seconds
        assert cache.cached("tiny") is first
        await refreshed(cache)
        assert fake.config_reads == reads
    assert cache.cached("tiny") is first  # only images with the same spec object share a batch
    fake.model_versions = ["2"]
    for refusal in (DOWN, (grpc.StatusCode.DEADLINE_EXCEEDED, "")):
        fake.query_refusal = refusal
        clock.now += 6
        assert await cache.get("tiny") is first
        await refreshed(cache)
        assert await cache.get("tiny") is first
    fake.query_refusal = None
    fake.may_tell.clear()
    clock.now += 6
    assert all([await cache.get("tiny") is first for _ in range(20)])
    await eventually(lambda: fake.config_reads == 5)
    assert all([await cache.get("tiny") is first for _ in range(20)])
    fake.may_tell.set()
    await refreshed(cache)

    assert (await cache.get("tiny")).version == "2"
    assert fake.config_reads == 5


@pytest.mark.parametrize(
    ("config", "refusal", "expected", "message"),
    [
        (CONFIG, NOT_FOUND, ModelNotReady, "not loaded any more"),
        (CONFIG, NOT_LOADED, ModelNotReady, "the model is not loaded"),
        ({**CONFIG, "output": []}, None, UnsupportedModel, "the tensors of tiny match no supported head"),
    ],
)
async def test_model_that_has_gone_is_forgotten_by_the_refresh(  # noqa: PLR0913, PLR0917 - a table
    fake_triton: Fake, cache: SpecCache, clock: Clock, config: dict[str, Any], refusal: Refusal, expected: Error, message: str
) -> None:
    """No exception is left unretrieved, which the event loop would report."""
    fake, _ = fake_triton
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    first = await cache.get("tiny")
    fake.config, fake.query_refusal = config, refusal
    clock.now += 61
    assert await cache.get("tiny") is first
    await refreshed(cache)
    with pytest.raises(expected, match=message):
        await cache.get("tiny")
    gc.collect()
    asyncio.get_running_loop().set_exception_handler(None)
    assert reports == []
    fake.config, fake.query_refusal = CONFIG, None
    clock.now += 1
    assert (await cache.get("tiny")).name == "tiny"
