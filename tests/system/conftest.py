"""All tests of this folder are `system`."""

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # before `-m` looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.system)
