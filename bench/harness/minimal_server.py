"""The minimal server: it reads bodies, and responds at once or forwards them to Triton."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path

from app.settings.schema import Settings
from bench.harness.ports import find_free
from bench.harness.processes import Running, running


def minimal_server(logs: Path, workers: int, triton: Settings | None = None) -> AbstractContextManager[Running]:
    """Run the server until the block ends.

    Args:
        logs: The folder for its output.
        workers: Number of processes.
        triton: Settings of the Triton with the model `null_file` that gets each body; None to respond at once.

    Raises:
        ContestantError: As for `running`.
    """
    (port,) = find_free(1)
    command = [sys.executable, "-m", "bench.contestants.http_only", str(port), str(workers)]
    variables = {} if triton is None else {"BENCH_TRITON": triton.triton_address}
    return running(command, variables, port, "/", logs / "http_only.log")
