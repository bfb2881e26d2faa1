"""Tables of workers, as they are created, inherited and lost."""

import os
from collections.abc import Callable, Iterator

import pytest

from app.resilience import worker_table
from app.resilience.worker_table import WorkerTable

VARIABLE = "WORKER_TABLE_FD"

OpenTable = Callable[[], WorkerTable]


@pytest.fixture
def open_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenTable]:
    """Makes a further worker of one host: each call opens the same table anew, as another process would."""
    monkeypatch.setenv(VARIABLE, "")  # restored in the end, whatever `create` writes
    worker_table.create()
    tables: list[WorkerTable] = []

    def open_one() -> WorkerTable:
        tables.append(WorkerTable())
        for table in tables:
            table.refresh()
        return tables[-1]

    yield open_one
    for table in tables:
        table.close()
    os.close(int(os.environ[VARIABLE]))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerTable]:
    """The table of a host with a single worker."""
    monkeypatch.delenv(VARIABLE, raising=False)
    made = WorkerTable()
    yield made
    made.close()
