"""Tritons that tests share, a gateway for tests that leave it as it is, and a table of what the tests have measured."""

import fcntl
import os
from collections.abc import AsyncIterator, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Protocol

import pytest

from bench.harness.triton import Triton, embedded_triton
from bench.models.repository import write_models
from tests.fakes.models import write as write_small_models
from tests.faults import corpus, models
from tests.faults.exchange import Case, ask_all, encode
from tests.faults.serving import Gateway, serving


class RecordFigure(Protocol):
    """Records a figure: what it is, its value, and the limit, if there is one; a value above it fails the test."""

    def __call__(self, name: str, value: float, limit: float | None = None, /) -> None: ...


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    figures = [(name, *figure) for report in reports for name, figure in report.user_properties if report.when == "call"]
    if not figures:
        return
    terminalreporter.section("figures")
    width = max(len(name) for name, _, _ in figures)
    for name, value, limit in figures:
        terminalreporter.line(f"{name:{width}}  {value:>12,.6g}" + ("" if limit is None else f"  limit {limit:,.6g}"))


@pytest.fixture
def record_figure(request: pytest.FixtureRequest) -> RecordFigure:
    """Records a figure for the table at the end of the run, and checks its limit."""

    def record(name: str, value: float, limit: float | None = None, /) -> None:
        request.node.user_properties.append((name, (value, limit)))
        assert limit is None or value <= limit, f"{name}: {value:,.6g}"

    return record


@cache
def folder_of_run() -> int:
    return os.open(os.environ["TMPDIR"], os.O_RDONLY)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the test's time begins
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test with the fixture `alone` while the other process of this run has no test under way."""
    fcntl.flock(folder_of_run(), fcntl.LOCK_EX if "alone" in getattr(item, "fixturenames", ()) else fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        fcntl.flock(folder_of_run(), fcntl.LOCK_UN)


@pytest.fixture(scope="session")
def alone() -> None:
    """For what depends on the share of the CPU that a test gets."""


@pytest.fixture(scope="session")
def null_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """An embedded Triton with the models of `bench.models` and the small ones of `tests.fakes.models`."""
    repository = tmp_path_factory.mktemp("models")
    write_models(repository)
    write_small_models(repository)
    with embedded_triton(repository, "null") as triton:
        yield triton


@pytest.fixture(scope="session")
async def gateway(null_triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway with the default settings; after the first 1,000 images its memory no longer grows by itself."""
    with serving(null_triton, tmp_path_factory.mktemp("gateway")) as gateway:
        images = [Case(name, encode(data)) for name, data in corpus.valid_images().items()]
        await ask_all(gateway.url, images * (1 + 1000 // len(images)), clients=32)
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
