"""A real Triton whose models have configs that hurt."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from app.embedded.server import EmbeddedTriton
from app.settings.schema import Settings
from tests.doctor import setups
from tests.support import free_port, triton_home


@pytest.fixture(scope="session")
def hurting(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings of a running Triton with the models of `setups`; `good` is the default model."""
    repository = tmp_path_factory.mktemp("hurting")
    setups.write(repository)
    own = msgspec.structs.replace(
        settings,
        model_repository=str(repository),
        triton_home=triton_home(tmp_path_factory.mktemp("triton")),
        model="good",
        port=free_port(),
    )
    server = EmbeddedTriton(own)
    server.start()
    yield own
    server.stop()


@pytest.fixture
def small(settings: Settings, triton: EmbeddedTriton) -> Settings:
    """Settings of the session's Triton; a small model without dynamic batching is the default one."""
    assert triton.poll() is None
    return msgspec.structs.replace(settings, model="six_columns", timeout_seconds=10, port=free_port())


@pytest.fixture
def without_triton(tmp_path: Path) -> Settings:
    return Settings(triton_endpoints=f"127.0.0.1:{free_port()}", model_repository=str(tmp_path), port=free_port())
