"""Starting and stopping what is measured, and what its processes cost: CPU seconds and memory, by /proc."""

import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import psutil

from app import bundle, config, embedded
from app.config import PREFIX, Settings
from bench import models
from bench.results import TritonUse

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / ".reference"
REQUIREMENTS = ROOT / "requirements" / "reference.txt"

_READY_SECONDS = 30.0
_STOP_SECONDS = 10.0
_LOOPBACK = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ContestantError(Exception):
    """A contestant cannot be measured; the message is one line for the person at the terminal."""


class Entrant(msgspec.Struct, frozen=True, kw_only=True):
    """One server in a contest."""

    name: str
    command: list[str]
    environment: dict[str, str]
    port: int
    probe: str
    """Path that answers 200 when it is ready."""
    model: str
    """In Triton; empty where Triton is not asked."""
    workers: int
    note: str


class Memory(NamedTuple):
    """Of one worker, bytes."""

    resident: int
    """With what it shares."""
    own: int
    """What would be free if it ended."""


class Running:
    """One server and the processes it has started."""

    def __init__(self, url: str, process: psutil.Process) -> None:
        self.url = url
        self._process = process

    def cpu(self) -> float:
        """CPU seconds that the server and its children have used."""
        return cpu(self._process)

    def workers(self, count: int) -> list[Memory]:
        """Tell the memory of the workers: its `count` largest processes."""
        found = []
        for process in _family(self._process):
            with suppress(psutil.Error):
                memory = process.memory_full_info()
                found.append(Memory(memory.rss, memory.uss))
        return sorted(found, reverse=True)[:count]

    def largest(self) -> int:
        """Id of the busiest of its processes: a worker, once there was load."""
        return int(max(_family(self._process), key=_seconds).pid)


class Counters(NamedTuple):
    """What a model in Triton has done."""

    inferences: int
    executions: int
    queue_ns: int
    compute_ns: int
    batches: dict[str, int]

    def since(self, before: "Counters") -> TritonUse:
        """Tell what it did after `before`."""
        inferences, executions = self.inferences - before.inferences, self.executions - before.executions
        return TritonUse(
            inferences=inferences,
            executions=executions,
            queue_ms=(self.queue_ns - before.queue_ns) / max(inferences, 1) / 1e6,
            compute_ms=(self.compute_ns - before.compute_ns) / max(executions, 1) / 1e6,
            batches={size: count - before.batches.get(size, 0) for size, count in self.batches.items()},
        )


class Triton(NamedTuple):
    """The embedded Triton while a measurement runs."""

    settings: Settings
    repository: Path
    process: psutil.Process

    def server_cpu(self) -> float:
        """CPU seconds of the server itself."""
        return _seconds(self.process)

    def stubs_cpu(self) -> float:
        """CPU seconds of the Python processes that run its models."""
        return cpu(self.process) - _seconds(self.process)

    def counters(self, model: str) -> Counters:
        """Ask what a model has done since it was loaded."""
        url = f"http://127.0.0.1:{self.settings.triton_http_port}/v2/models/{model}/stats"
        with _LOOPBACK.open(url, timeout=5) as answer:
            stats = json.load(answer)["model_stats"][0]
        spent = stats["inference_stats"]
        batches = stats["batch_stats"]
        steps = ("compute_input", "compute_infer", "compute_output")
        return Counters(
            stats["inference_count"],
            stats["execution_count"],
            spent["queue"]["ns"],
            sum(batch[step]["ns"] for batch in batches for step in steps),
            {str(batch["batch_size"]): batch["compute_infer"]["count"] for batch in batches},
        )


def cpu(process: psutil.Process) -> float:
    """CPU seconds that a process and its children have used."""
    return sum(_seconds(member) for member in _family(process))


def free_ports(count: int) -> list[int]:
    """Find ports nobody listens on, below those that the kernel gives to outgoing connections."""
    ports: set[int] = set()
    while len(ports) < count:
        port = 10_000 + secrets.randbelow(20_000)
        if embedded.is_free("127.0.0.1", port):
            ports.add(port)
    return list(ports)


@contextmanager
def triton(*, with_real: bool) -> Iterator[Triton]:
    """Run one embedded Triton with the fixtures and, if asked, `yolo11n` in both layouts.

    Raises:
        ContestantError: `yolo11n` has not been pulled.
        EmbeddedError: It does not start.
    """
    base = config.load()
    real = Path(base.model_repository)
    if with_real and "yolo11n" not in embedded.loadable(real):
        raise ContestantError("yolo11n has not been pulled; run: ./just pull")
    bundle.install(Path(base.triton_home))
    with TemporaryDirectory(prefix="nereid-bench-") as folder:
        home, repository = Path(folder, "triton"), Path(folder, "models")
        home.mkdir()
        for part in ("server", "python"):
            (home / part).symlink_to(Path(base.triton_home, part).resolve())
        models.write(repository, real if with_real else None)
        http, grpc, metrics = free_ports(3)
        settings = msgspec.structs.replace(
            base,
            model="null",
            model_repository=str(repository),
            triton_home=str(home),
            triton_http_port=http,
            triton_grpc_port=grpc,
            triton_metrics_port=metrics,
        )
        server = embedded.Server(settings)
        before = {child.pid for child in psutil.Process().children()}
        try:
            server.start()
            (process,) = (child for child in psutil.Process().children() if child.pid not in before)
            yield Triton(settings, repository, process)
        finally:
            server.stop()


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], port: int, probe: str, log: Path) -> Iterator[Running]:
    """Run a server until the block ends.

    Args:
        command: Its command line.
        environment: Added to ours; variables of Nereid in ours are left out.
        port: It listens on, on loopback.
        probe: Path that answers 200 when it is ready.
        log: Gets what it prints.

    Raises:
        ContestantError: It ended or did not become ready; the message has the end of its log.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is for us; we stop it
            preexec_fn=embedded.die_with_parent,  # noqa: PLW1509 - no threads here
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(child, f"{url}{probe}", log)
        yield Running(url, psutil.Process(child.pid))
    finally:
        _stop(child)


def started(entrant: Entrant, logs: Path) -> AbstractContextManager[Running]:
    """Run an entrant until the block ends.

    Raises:
        ContestantError: As `running` says.
    """
    return running(entrant.command, entrant.environment, entrant.port, entrant.probe, logs / f"{entrant.port}.log")


def reference_python() -> Path:
    """Give the Python of the reference's environment.

    Raises:
        ContestantError: It has not been made, or from other requirements.
    """
    mark = REFERENCE / "complete"
    if not mark.is_file() or mark.read_text(encoding="utf-8") != _tag():
        raise ContestantError("the reference has no environment yet; run: ./just bench versus --install")
    return REFERENCE / "bin" / "python"


def install_reference() -> None:
    """Make the reference's environment, unless it is there, the way this machine's pip is configured.

    Raises:
        ContestantError: pip failed; it has said why.
    """
    with suppress(ContestantError):
        reference_python()
        return
    pip = [str(REFERENCE / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(REFERENCE)],
        [*pip, "--require-hashes", "--only-binary=:all:", "-r", str(REQUIREMENTS)],
    ):
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise ContestantError("the reference's environment could not be made; the reason is above")
    (REFERENCE / "complete").write_text(_tag(), encoding="utf-8")


def _tag() -> str:
    return hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()


def _family(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _seconds(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _wait(child: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    until = time.monotonic() + _READY_SECONDS
    while time.monotonic() < until and child.poll() is None:
        with suppress(OSError), _LOOPBACK.open(url, timeout=1):
            return
        time.sleep(0.1)
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
    state = "was not ready in time" if child.poll() is None else f"ended with code {child.poll()}"
    raise ContestantError(f"{state}: {' | '.join(last) or 'it printed nothing'}")


def _stop(child: "subprocess.Popen[bytes]") -> None:
    """End a server and all that it has started."""
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
