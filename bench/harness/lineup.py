"""The servers for contests, and how to start them."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType

import msgspec

from bench.harness.environments import REFERENCE
from bench.harness.errors import ContestantError
from bench.harness.ports import find_free
from bench.harness.processes import ROOT, Running, running
from bench.harness.triton import Triton
from bench.models.repository import network_of, read_labels
from bench.report.contests import Comparison

NEREID = ("nereid_inline", "nereid_shm", "nereid_file")
"""Nereid's contestants: pixels in the gRPC message, pixels in shared memory, and the encoded file in shared memory."""
OTHERS = ("reference", "reference_uint8", "in_process")
"""The other contestants, run in the reference's environment: FastAPI with a blocking gRPC client per worker, the same with a model
of bytes, and FastAPI with an ONNX Runtime session in its one worker."""
NAMES = (*OTHERS, *NEREID)
BATCH1 = "batch1"
"""Nereid in front of a model that takes one image at a time."""
DEFAULT = "nereid"
"""Nereid with default settings: shared memory if available."""
BEFORE = "@before"
"""Suffix of a contestant that runs from another checkout, or as the one-file program: `nereid_shm@before` is the counterpart
of `nereid_shm`."""

_BASES = ("reference", "reference_uint8", "in_process", BATCH1)


class Contestant(msgspec.Struct, frozen=True, kw_only=True):
    """One server in a contest."""

    name: str
    command: list[str]
    environment: dict[str, str]
    port: int
    probe: str
    """A path that returns 200 when the server is ready."""
    model: str
    """Name of the model it uses."""
    uses_triton: bool
    """Whether that model runs in Triton."""
    workers: int
    checkout: Path = ROOT
    """The checkout of this project that it runs from."""


class Lineup:
    """Describes and starts contestants for one Triton."""

    def __init__(
        self,
        triton: Triton,
        workers: int,
        logs: Path,
        *,
        settings: Mapping[str, str] = MappingProxyType({}),
        before: Path | None = None,
    ) -> None:
        """Prepare for contestants.

        Args:
            triton: The Triton that runs their models.
            workers: Number of processes of each.
            logs: The folder for their output.
            settings: More environment variables for Nereid.
            before: The checkout that `@before` contestants run from, or the one-file program.
        """
        self.triton = triton
        self.workers = workers
        self._logs = logs
        self._settings = settings
        self._before = before

    def contestant(self, name: str, model: str) -> Contestant:
        """Describe a contestant with a model, or with the variant of the model that it needs.

        Raises:
            ContestantError: It cannot take part; the message has the reason.
        """
        (port,) = find_free(1)
        if name in OTHERS:
            return self._uvicorn(name, model, port)
        return self._nereid(name, model, port)

    def start(self, contestant: Contestant) -> AbstractContextManager[Running]:
        """Run a contestant until the block ends.

        Raises:
            ContestantError: As for `running`.
        """
        log = self._logs / f"{contestant.port}.log"
        return running(contestant.command, contestant.environment, contestant.port, contestant.probe, log, contestant.checkout)

    def _uvicorn(self, name: str, model: str, port: int) -> Contestant:
        is_local, takes_bytes = name == "in_process", name == "reference_uint8"
        asked = model if is_local or takes_bytes else f"{model}_fp32"
        workers = 1 if is_local else self.workers
        # As recommended by the guide for this kind of server.
        options = {
            "port": port,
            "workers": workers,
            "loop": "uvloop",
            "http": "httptools",
            "limit-concurrency": 512,
            "backlog": 8192,
            "timeout-keep-alive": 120,
        }
        module = f"bench.contestants.{name.removesuffix('_uint8')}"
        flags = [f"--{option}={value}" for option, value in options.items()]
        return Contestant(
            name=name,
            command=[str(REFERENCE.python()), "-m", "uvicorn", f"{module}:app", *flags],
            environment={
                "BENCH_TRITON": self.triton.address,
                "BENCH_MODEL": str(network_of(self.triton.repository / model)) if is_local else asked,
                "BENCH_LABELS": read_labels(self.triton.repository, asked),
                "BENCH_TENSOR": "UINT8" if takes_bytes else "FP32",
                "GRPC_ENABLE_FORK_SUPPORT": "1",
                "GRPC_POLL_STRATEGY": "epoll1",
            },
            port=port,
            probe="/health",
            model=asked,
            uses_triton=not is_local,
            workers=workers,
        )

    def _nereid(self, name: str, model: str, port: int) -> Contestant:
        kind, is_before = name.removesuffix(BEFORE), name.endswith(BEFORE)
        if is_before and self._before is None:
            raise ContestantError("there is no other checkout; name one with --before")
        takes_file = kind == "nereid_file" or (kind == BATCH1 and model.startswith("sim_gpu"))
        asked = f"{model}_file" if takes_file else model
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
            uses_triton=True,
            workers=self.workers,
            checkout=ROOT if is_file else other,
        )


def add_counterparts(names: Sequence[str]) -> list[str]:
    """Add the counterpart from the other checkout after each of Nereid's contestants."""
    return [contestant for name in names for contestant in ((name, f"{name}{BEFORE}") if name in NEREID else (name,))]


def comparisons(names: Sequence[str]) -> list[Comparison]:
    """Return the comparisons: every contestant with the bases before it, and Nereid's contestants with their counterparts."""
    bases = [name for name in names if name in _BASES]
    found = [
        Comparison(base, [(name, base) for name in names if name not in bases[: place + 1]]) for place, base in enumerate(bases)
    ]
    pairs = [(name, f"{name}{BEFORE}") for name in names if f"{name}{BEFORE}" in names]
    found.append(Comparison(f"their {BEFORE} counterparts", pairs))
    return [comparison for comparison in found if comparison.pairs]
