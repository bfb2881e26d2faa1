"""What was measured, on what, as one JSON file per session, and the meters beside the load driver."""

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil
from hdrh.histogram import HdrHistogram

from bench.load import LONGEST, Outcome

PACKAGES = ("nereid", "granian", "litestar", "msgspec", "numpy", "pillow", "pillow-simd", "simplejpeg", "tritonclient", "uvloop")
PERCENTILES = (50, 90, 95, 99)


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured."""

    system: str
    processor: str
    cores: int
    memory_gb: float
    python: str


class TritonUse(msgspec.Struct, frozen=True):
    """What one model did in Triton in the meantime."""

    inferences: int
    executions: int
    queue_ms: float
    """Mean wait of a request."""
    compute_ms: float
    """Mean time in the model of the batch that a request was part of, with input and output."""
    batches: dict[str, int]
    """Executions by batch size."""

    @property
    def mean_batch(self) -> float:
        """Inferences per execution."""
        return self.inferences / self.executions if self.executions else 0.0


class Run(msgspec.Struct, kw_only=True):
    """One contestant under one load."""

    contestant: str
    mode: str
    model: str
    clients: int | None = None
    rate: float | None = None
    """Requests per second that were asked for, if that was fixed."""
    outcome: Outcome
    triton: TritonUse | None = None
    triton_note: str = ""
    """Why there is nothing about Triton."""
    cpu_ms: dict[str, float] = {}
    """CPU time per request, of `gateway`, `triton`, `stubs` and `client`: those that run on this machine."""
    figures: dict[str, float] = {}
    """The numbers of all the above that a reader wants, for programs that know no HDR histograms."""

    def __post_init__(self) -> None:
        self.figures = self.figures or figures(self)

    @property
    def load(self) -> str:
        """Say what was asked of the server."""
        if self.rate is not None:
            return f"{self.rate:g}/s"
        return f"{self.clients} client{'' if self.clients == 1 else 's'}"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What must be equal for two runs to be compared."""
        return self.contestant, self.mode, self.model, self.load


class Record(msgspec.Struct, kw_only=True):
    """One session of the bench."""

    when: str
    commit: str | None
    machine: Machine
    versions: dict[str, str]
    settings: dict[str, Any]
    runs: list[Run]


class Meters:
    """CPU times of the server's processes and Triton's own counters, from the moment it is made."""

    def __init__(self, url: str, triton: str, model: str) -> None:
        self._url, self._triton, self._model = url, triton, model
        self._before = _processor_seconds(url, triton)
        self._counters = _counters(triton, model)

    def read(self, outcome: Outcome) -> tuple[dict[str, float], TritonUse | None, str]:
        """Give CPU milliseconds per request by kind of process, and what Triton did or why that is not known."""
        after = _processor_seconds(self._url, self._triton)
        cpu = {
            kind: sum(seconds - self._before.get(kind, {}).get(pid, 0.0) for pid, seconds in pids.items())
            for kind, pids in after.items()
        }
        cpu["client"] = outcome.driver_cpu * outcome.seconds
        per_request = {kind: seconds * 1e3 / outcome.requests for kind, seconds in cpu.items() if outcome.requests}
        before, now = self._counters, _counters(self._triton, self._model)
        if isinstance(before, str) or isinstance(now, str):
            return per_request, None, before if isinstance(before, str) else str(now)
        return per_request, _difference(before, now), ""


def figures(run: Run) -> dict[str, float]:
    """Name the numbers of a run; milliseconds unless the name says otherwise."""
    outcome = run.outcome
    numbers = {"requests/s": outcome.rate, "mean": outcome.mean}
    numbers |= {f"p{percent}": outcome.percentile(percent) for percent in PERCENTILES}
    numbers |= {"max": outcome.max, "errors %": outcome.failed * 100}
    numbers |= {f"cpu {kind}": value for kind, value in run.cpu_ms.items()}
    if run.triton:
        numbers |= {"mean batch": run.triton.mean_batch, "queue": run.triton.queue_ms}
    numbers |= {f"stage {name}": value for name, value in outcome.stages.items()}
    return {name: round(value, 4) for name, value in numbers.items()}


def record(runs: Sequence[Run], settings: Mapping[str, Any]) -> Record:
    """Put runs on file with the machine and the versions they were made on."""
    return Record(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_commit(),
        machine=machine(),
        versions=_versions(),
        settings=dict(settings),
        runs=list(runs),
    )


def save(path: Path, content: Record) -> None:
    """Write a record as JSON for people and programs."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def load(path: Path) -> Record:
    """Read a record.

    Raises:
        ValueError: The file is none.

    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no record of the bench: {error}") from error


def merged(encoded: Iterable[str]) -> HdrHistogram:
    """Add histograms up."""
    total = HdrHistogram(1, LONGEST, 3)
    for text in encoded:
        total.decode_and_add(text)
    return total


def machine() -> Machine:
    """Describe this machine."""
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        cores=len(psutil.Process().cpu_affinity() or []) or psutil.cpu_count() or 1,
        memory_gb=round(psutil.virtual_memory().total / 2**30, 1),
        python=platform.python_version(),
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns, the first to the left and the others to the right; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def number(value: float) -> str:
    """Write a number with three digits that matter."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"  # noqa: PLR2004


def _processor_seconds(url: str, triton: str) -> dict[str, dict[int, float]]:
    """Sum user and system time by kind and process: who listens on the ports, and Triton's children."""
    gateways, tritons = _listeners(url), _listeners(triton)
    stubs = {child.pid: child for process in tritons.values() for child in _children(process)}
    kinds = {"gateway": gateways, "triton": tritons, "stubs": stubs}
    return {kind: {pid: _seconds(process) for pid, process in found.items()} for kind, found in kinds.items() if found}


def _listeners(url: str) -> dict[int, psutil.Process]:
    port = urlsplit(url).port or 80
    found = {}
    for process in psutil.process_iter():
        try:
            if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in process.net_connections("tcp")):
                found[process.pid] = process
        except psutil.Error:
            continue
    return found


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _counters(triton: str, model: str) -> dict[str, Any] | str:
    """Ask Triton for the sums of a model; if it does not answer, say why."""
    try:
        answer = httpx.get(f"{triton}/v2/models/{model}/stats", timeout=5, trust_env=False)
        if answer.is_error:
            return f"Triton at {triton}: {answer.status_code} {answer.text.strip()[:100]}"
        return dict(answer.json()["model_stats"][0])
    except (httpx.HTTPError, LookupError, ValueError) as error:
        return f"Triton at {triton}: {error}"


def _difference(before: dict[str, Any], after: dict[str, Any]) -> TritonUse:
    def grown(*path: str) -> int:
        first, second = before, after
        for name in path:
            first, second = first.get(name, {}), second.get(name, {})
        return int(second or 0) - int(first or 0)  # type: ignore[arg-type]

    def batches(counters: dict[str, Any]) -> dict[str, int]:
        return {str(entry["batch_size"]): int(entry["compute_infer"]["count"]) for entry in counters.get("batch_stats", [])}

    earlier = batches(before)
    executions = grown("execution_count")
    waits = grown("inference_stats", "queue", "count")
    stats = "inference_stats"
    compute = sum(grown(stats, part, "ns") for part in ("compute_input", "compute_infer", "compute_output"))
    asked = grown(stats, "success", "count")
    return TritonUse(
        inferences=grown("inference_count"),
        executions=executions,
        queue_ms=grown(stats, "queue", "ns") / waits / 1e6 if waits else 0.0,
        compute_ms=compute / asked / 1e6 if asked else 0.0,
        batches={size: count - earlier.get(size, 0) for size, count in batches(after).items() if count > earlier.get(size, 0)},
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """Name the commit, with a `+` if files differ from it."""
    git = shutil.which("git")
    if git is None:
        return None
    folder = Path(__file__).parent
    said = subprocess.run(
        [git, "describe", "--always", "--exclude=*", "--dirty=+"], cwd=folder, capture_output=True, text=True, check=False
    )
    return said.stdout.strip() or None
