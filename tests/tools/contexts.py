"""A plugin of pytest for `just mutants`: what a process executes that a test starts counts as executed by that test."""

import os

import pytest
from coverage.config import CoverageConfig

_CONFIG = "COVERAGE_PROCESS_CONFIG"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _CONFIG in os.environ:
        config = CoverageConfig.deserialize(os.environ[_CONFIG])
        config.context = item.nodeid
        os.environ[_CONFIG] = config.serialize()
