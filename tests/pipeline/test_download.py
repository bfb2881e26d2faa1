"""Fetching an image of a batch from a real https host without enough memory."""

from collections.abc import AsyncIterator, Iterator

import pytest

from app.errors import GatewayFull, ImageNotFetched
from app.pipeline.batch_request import Download
from app.resilience.admission import Admission
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY
from app.resilience.memory import Reservation
from tests.fakes.https import Host, response, serving
from tests.support import open_admission

IMAGE = bytes(300_000)
URL = "/large.bmp"


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with serving() as made:
        made.answers[URL] = response(IMAGE)
        yield made


@pytest.fixture
def admission() -> Iterator[Admission]:
    """An admission with twice the size of the image as memory for batches."""
    with open_admission(memory_bytes=4 * len(IMAGE)) as made:
        yield made


def prepare(host: Host, admission: Admission, url: str = URL) -> tuple[Download, Reservation]:
    fetcher, memory = host.fetcher(), admission.reserve_for_batch(ANYBODY, "an image of this size")
    return Download(fetcher, fetcher.parse(host.url(url)), memory, Deadline.after(30)), memory


def used(admission: Admission) -> tuple[int, int]:
    """Return the memory used by all images and by batches, bytes."""
    return admission.memory.used_bytes, admission.batch_memory.used_bytes


async def test_an_image_is_fetched_anew_once_there_is_memory(host: Host, admission: Admission) -> None:
    download, memory = prepare(host, admission)
    others = admission.memory.reserve(ANYBODY)
    others.add(3 * len(IMAGE) + len(IMAGE) // 2)
    with pytest.raises(GatewayFull, match="an image of this size"):
        await download.attempt()
    assert (len(host.requests), admission.batch_memory.used_bytes) == (1, 0)
    others.add(len(IMAGE) // 2)
    for _ in range(5):
        with pytest.raises(GatewayFull):
            await download.attempt()
    assert len(host.requests) == 1
    assert used(admission) == (4 * len(IMAGE), 0)
    others.release()

    assert await download.attempt() == IMAGE
    assert len(host.requests) == 2
    assert used(admission) == (len(IMAGE), len(IMAGE))
    memory.release()
    assert used(admission) == (0, 0)


async def test_an_image_that_cannot_be_fetched_keeps_no_memory(host: Host, admission: Admission) -> None:
    host.answers["/cut"] = response(IMAGE[:1000], "200 OK", f"Content-Length: {len(IMAGE)}")
    for url in ("/cut", "/missing"):
        download, _ = prepare(host, admission, url)
        with pytest.raises(ImageNotFetched):
            await download.attempt()
        assert used(admission) == (0, 0)
