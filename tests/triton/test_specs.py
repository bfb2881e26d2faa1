"""Specs are read from Triton once a minute, however many requests ask for them."""

import asyncio

import grpc
import pytest

from app.errors import TritonUnavailable, UnknownModel, UnsupportedModel
from app.triton import specs
from app.triton.client import TritonClient
from app.triton.specs import SpecCache
from tests.fakes.triton import CONFIG, FakeTriton

Fake = tuple[FakeTriton, TritonClient]


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(specs, "monotonic", made)
    return made


async def test_a_spec_is_read_from_the_config_of_the_model(fake_triton: Fake) -> None:
    """The spec has the newest version that is loaded."""
    fake, client = fake_triton
    fake.model_versions = ["2", "10"]
    spec = await SpecCache(client).get("tiny")

    assert (spec.name, spec.version, spec.input_size, spec.output_names) == ("tiny", "10", (32, 32), ("output0",))


async def test_many_requests_read_a_spec_once(fake_triton: Fake) -> None:
    """Those that come while it is read wait for it; those that come later find it."""
    fake, client = fake_triton
    cache = SpecCache(client)
    read = await asyncio.gather(*(cache.get("tiny") for _ in range(50)))
    await cache.get("tiny")

    assert fake.config_reads == 1
    assert all(spec is read[0] for spec in read)


async def test_each_model_has_its_own_spec(fake_triton: Fake) -> None:
    """Requests for different models do not wait for each other's spec, nor get it."""
    fake, client = fake_triton
    cache = SpecCache(client)
    first, second = await asyncio.gather(cache.get("a"), cache.get("b"))

    assert (first.name, second.name, fake.config_reads) == ("a", "b", 2)


async def test_a_spec_is_known_once_it_was_read(fake_triton: Fake) -> None:
    """`cached` never asks Triton."""
    fake, client = fake_triton
    cache = SpecCache(client)
    assert cache.cached("tiny") is None
    assert fake.config_reads == 0
    spec = await cache.get("tiny")

    assert cache.cached("tiny") is spec


async def test_a_spec_is_read_again_after_a_minute(fake_triton: Fake, clock: Clock) -> None:
    """A model may change while Triton is restarted without our knowledge."""
    fake, client = fake_triton
    cache = SpecCache(client)
    await cache.get("tiny")
    clock.now += 59
    assert (await cache.get("tiny")).version == "1"
    fake.model_versions = ["2"]
    clock.now += 1
    assert cache.cached("tiny") is None

    assert (await cache.get("tiny")).version == "2"
    assert fake.config_reads == 2


async def test_a_forgotten_spec_is_read_again(fake_triton: Fake) -> None:
    """Once, and only that one; forgetting an unknown one does nothing."""
    fake, client = fake_triton
    cache = SpecCache(client)
    await asyncio.gather(cache.get("a"), cache.get("b"))
    cache.forget("a")
    cache.forget("c")
    assert cache.cached("a") is None
    assert cache.cached("b") is not None
    await asyncio.gather(*(cache.get("a") for _ in range(50)))

    assert fake.config_reads == 3


async def test_a_failure_is_not_kept(fake_triton: Fake) -> None:
    """The next request asks again."""
    fake, client = fake_triton
    cache = SpecCache(client)
    for status, text, expected in (
        (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found", UnknownModel),
        (grpc.StatusCode.UNAVAILABLE, "failed to connect", TritonUnavailable),
    ):
        fake.query_refusal = status, text
        with pytest.raises(expected):
            await cache.get("tiny")
    fake.query_refusal = None

    assert (await cache.get("tiny")).name == "tiny"


async def test_all_who_wait_for_a_spec_hear_of_the_failure(fake_triton: Fake) -> None:
    """Triton is asked once for all of them."""
    fake, client = fake_triton
    fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"
    cache = SpecCache(client)
    failures = await asyncio.gather(*(cache.get("tiny") for _ in range(20)), return_exceptions=True)

    assert {type(failure) for failure in failures} == {TritonUnavailable}
    assert fake.config_reads == 1


async def test_a_model_without_an_adapter_is_unsupported(fake_triton: Fake) -> None:
    """The message names its tensors."""
    fake, client = fake_triton
    fake.config = {**CONFIG, "output": [{"name": "text", "data_type": "TYPE_STRING", "dims": [1]}]}

    with pytest.raises(UnsupportedModel, match="no adapter fits tiny"):
        await SpecCache(client).get("tiny")


async def test_a_request_that_gives_up_does_not_stop_the_others(fake_triton: Fake) -> None:
    """The spec is read on, for those who still wait for it."""
    fake, client = fake_triton
    cache = SpecCache(client)
    leaving, staying = (asyncio.ensure_future(cache.get("tiny")) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()

    assert (await staying).name == "tiny"
    assert leaving.cancelled()
    assert fake.config_reads == 1
