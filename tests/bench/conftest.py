"""A Triton whose models can be loaded again."""

from collections.abc import Iterator

import msgspec
import pytest

from app.settings.schema import Settings
from bench.harness.triton import embedded_triton
from bench.models.repository import write_fixture


@pytest.fixture(scope="session")
def reloadable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings for a Triton elsewhere that runs `wait_20`."""
    repository = tmp_path_factory.mktemp("reloadable")
    write_fixture("wait_20", repository)
    with embedded_triton(repository, "wait_20") as triton:
        yield msgspec.structs.replace(triton.settings, triton_endpoints=triton.settings.triton_address)
