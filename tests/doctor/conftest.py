from pathlib import Path

import pytest

from app.settings.schema import Settings
from tests.support import free_port


@pytest.fixture
def without_triton(tmp_path: Path) -> Settings:
    return Settings(triton_endpoints=f"127.0.0.1:{free_port()}", model_repository=str(tmp_path), port=free_port())
