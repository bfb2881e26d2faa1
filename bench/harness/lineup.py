"""The servers that are measured side by side, and how to start them."""

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import msgspec

from bench.harness.environments import REFERENCE
from bench.harness.errors import ContestantError
from bench.harness.ports import find_free
from bench.harness.processes import ROOT, Running, running
from bench.harness.triton import Triton, fixture_triton

NEREID = ("nereid_inline", "nereid_shm", "nereid_file")
"""Nereid's contestants: pixels in the gRPC message, pixels in shared memory, and the encoded file in shared memory."""
OTHERS = ("reference", "reference_uint8")
"""The other contestants, run in the reference's environment: FastAPI with a blocking gRPC client per worker, and the same with a
model of bytes."""
NAMES = (*OTHERS, *NEREID)
MINIMAL = ("http_only", "http_and_triton")
"""The minimal server, which reads bodies: it responds at once, or sends them to Triton's `null_file` first."""
DEFAULT = "nereid"
"""Nereid with default settings: shared memory if available."""
BEFORE = "@before"
"""Suffix of a contestant that runs from another checkout, or as the one-file program: `nereid_shm@before` is the counterpart
of `nereid_shm`."""

# As recommended by the guide for this kind of server.
_UVICORN = ("--loop=uvloop", "--http=httptools", "--limit-concurrency=512", "--backlog=8192", "--timeout-keep-alive=120")


class Contestant(msgspec.Struct, frozen=True, kw_only=True):
    """One server."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    port: int
    probe: str
    """A path that returns 200 when the server is ready."""
    model: str
    """Name of the model in Triton that it uses; empty for none."""
    workers: int
    checkout: Path = ROOT
    """The checkout of this project that it runs from."""


class Contestants:
    """Describes and starts contestants."""

    triton: Triton | None = None
    """The Triton that they use; None if none is beside them."""

    def __init__(self, workers: int, logs: Path) -> None:
        """Prepare for contestants with so many processes, whose output goes to the folder `logs`."""
        self.workers = workers
        self._logs = logs

    def contestant(self, name: str, model: str) -> Contestant:
        """Describe a contestant with a model, or with the variant that it needs; raise ContestantError if it cannot take part."""
        raise NotImplementedError

    def start(self, contestant: Contestant) -> AbstractContextManager[Running]:
        """Run a contestant until the block ends; raise ContestantError if it does not start."""
        log = self._logs / f"{contestant.port}.log"
        return running(contestant.command, contestant.environment, contestant.port, contestant.probe, log, contestant.checkout)


class Lineup(Contestants):
    """Describes and starts contestants for one Triton."""

    triton: Triton

    def __init__(
        self,
        triton: Triton,
        workers: int,
        logs: Path,
        settings: Mapping[str, str] = MappingProxyType({}),
        before: Path | None = None,
    ) -> None:
        """Prepare as for any contestants.

        Nereid gets `settings` as environment variables, and that of `@before` runs from the checkout or one file `before`.
        """
        super().__init__(workers, logs)
        self.triton = triton
        self._settings = settings
        self._before = before

    def contestant(self, name: str, model: str) -> Contestant:
        """Describe Nereid, or one of `OTHERS` and `MINIMAL`."""
        (port,) = find_free(1)
        if name in OTHERS:
            return self._uvicorn(name, model, port)
        if name in MINIMAL:
            return self._minimal(name, port)
        return self._nereid(name, model, port)

    def _minimal(self, name: str, port: int) -> Contestant:
        uses_triton = name == "http_and_triton"
        return Contestant(
            name=name,
            command=[sys.executable, "-m", "bench.contestants.minimal", str(port), str(self.workers)],
            environment={"BENCH_TRITON": self.triton.address} if uses_triton else {},
            port=port,
            probe="/",
            model="null_file" if uses_triton else "",
            workers=self.workers,
        )

    def _uvicorn(self, name: str, model: str, port: int) -> Contestant:
        takes_bytes = name == "reference_uint8"
        asked = model if takes_bytes else f"{model}_fp32"
        options = [f"--port={port}", f"--workers={self.workers}", *_UVICORN]
        return Contestant(
            name=name,
            command=[str(REFERENCE.python()), "-m", "uvicorn", "bench.contestants.reference:app", *options],
            environment={
                "BENCH_TRITON": self.triton.address,
                "BENCH_MODEL": asked,
                "BENCH_TENSOR": "UINT8" if takes_bytes else "FP32",
                "GRPC_ENABLE_FORK_SUPPORT": "1",
                "GRPC_POLL_STRATEGY": "epoll1",
            },
            port=port,
            probe="/health",
            model=asked,
            workers=self.workers,
        )

    def _nereid(self, name: str, model: str, port: int) -> Contestant:
        kind, is_before = name.removesuffix(BEFORE), name.endswith(BEFORE)
        asked = f"{model}_file" if kind == "nereid_file" else model
        if not (self.triton.repository / asked).is_dir():
            raise ContestantError(f"there is no {asked}, a model that takes the encoded file")
        other = self._before if is_before and self._before else ROOT
        is_file = other.is_file()
        transport = {"NEREID_TRANSPORT": kind.removeprefix("nereid_")} if kind in {"nereid_inline", "nereid_shm"} else {}
        return Contestant(
            name=name,
            command=[str(other), "api"] if is_file else [sys.executable, "-m", "app", "api"],
            environment={
                "NEREID_PORT": str(port),
                "NEREID_WORKERS": str(self.workers),
                "NEREID_TRITON_HOME": self.triton.settings.triton_home,
                "NEREID_MODEL": asked,
                **transport,
                **self._settings,
            },
            port=port,
            probe="/readyz",
            model=asked,
            workers=self.workers,
            checkout=ROOT if is_file else other,
        )


@contextmanager
def lineup_of(models: Collection[str], workers: int, before: Path | None = None, gpu: str = "") -> Iterator[Lineup]:
    """Run a Triton with these models until the block ends, on a GPU if that has a name, and yield a lineup for it."""
    with fixture_triton(models, gpu) as triton, TemporaryDirectory(prefix="nereid-bench-") as logs:
        yield Lineup(triton, workers, Path(logs), before=before)
