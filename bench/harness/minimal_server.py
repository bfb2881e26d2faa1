"""The server that does the least: it reads bodies, and answers at once or forwards them to Triton."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path

from app.host.ports import find_free
from app.settings.schema import Settings
from bench.harness.processes import Running, running


def minimal_server(logs: Path, workers: int, triton: Settings | None = None) -> AbstractContextManager[Running]:
    """Run it until the block ends.

    Args:
        logs: The folder for what it prints.
        workers: Number of processes.
        triton: The Triton that each body is forwarded to, whose model is `null_file`; None for none.

    Raises:
        ContestantError: As `running` says.
    """
    (port,) = find_free(1)
    command = [sys.executable, "-m", "bench.contestants.http_only", str(port), str(workers)]
    variables = {} if triton is None else {"BENCH_TRITON": triton.triton_address, "BENCH_TRITON_KEY": str(triton.control_key_path)}
    return running(command, variables, port, "/", logs / "http_only.log")
