"""Tritons that tests share, and a gateway for tests that leave it as it is."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bench.harness.triton import Triton, embedded_triton
from bench.models.repository import write_models
from tests.fakes.models import write as write_small_models
from tests.faults import corpus, models
from tests.faults.exchange import Case, ask_all, encode
from tests.faults.serving import Gateway, serving


@pytest.fixture(scope="session")
def null_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    repository = tmp_path_factory.mktemp("models")
    write_models(repository)
    write_small_models(repository)
    with embedded_triton(repository, "null") as triton:
        yield triton


@pytest.fixture(scope="session")
async def gateway(null_triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway with the default settings that decodes every mode of every format.

    After the first 1,000 images its memory no longer grows by itself.
    """
    with serving(null_triton, tmp_path_factory.mktemp("gateway")) as gateway:
        images = [Case(name, encode(data, "/detect?timeout_ms=20000")) for name, data in corpus.valid_images().items()]
        answers = await ask_all(gateway.url, images)
        assert {label: answer.body for label, answer in answers if answer.status != 200} == {}
        await ask_all(gateway.url, images * (1000 // len(images)), clients=32)
        yield gateway


@pytest.fixture(scope="session")
def fault_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    models.write(folder)
    return folder


@pytest.fixture(scope="module")
def triton(fault_repository: Path) -> Iterator[Triton]:
    """An embedded Triton with these models; nobody restarts it."""
    with embedded_triton(fault_repository, "checksum") as triton:
        yield triton
