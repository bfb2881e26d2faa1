"""The file of cascades."""

from pathlib import Path

import pytest

from app.cascade import catalog
from app.cascade.catalog import CascadesError


def test_a_disk_that_fails_is_an_error_of_the_file(tmp_path: Path) -> None:
    """Otherwise it would end the task that follows the file, and no change would be seen any more."""
    with pytest.raises(CascadesError, match="name too long"):
        catalog.read(tmp_path / ("x" * 300) / catalog.FILE)
    assert catalog.read(tmp_path / catalog.FILE) == {}
