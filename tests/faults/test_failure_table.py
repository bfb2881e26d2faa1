"""Each cause in the table of `docs/how-to/failures.md` is brought about, and what everybody sees is compared with its row."""

import asyncio
import re
import signal
import ssl
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from itertools import product
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import msgspec
import pytest
import trustme

from app.api.caller import keys
from app.embedded.server import EmbeddedTriton
from bench.harness.processes import ROOT, environment_of
from bench.harness.triton import Triton, embedded_triton
from tests.faults import models
from tests.faults.exchange import NO_ANSWER, Answer, Line, ask, encode
from tests.faults.meanwhile import every, meanwhile
from tests.faults.serving import Gateway, serving_apart, stopped
from tests.faults.test_resources import NEEDS_MOUNTS, on_a_full_disk

pytestmark = NEEDS_MOUNTS

_CALLERS = 4
_STEADY_SECONDS = 1.0
"""How long everything must be as the row says."""
_PATIENCE = 4
"""The times in the table are those of an idle machine."""
_ALWAYS_LOGGED = {"request", "circuit closed"}
_NAME, _HOST = "triton.example.org", "127.0.0.1"
_SPOILT = ("empty", "missing", "wrong")

Answers = list[tuple[float, str]]
"""When each came, as `monotonic` counts, and its status and code."""
Settings = Mapping[str, object]


class Row(NamedTuple):
    cause: str
    callers: list[set[str]]
    """Status and code of answers: those that may come until everything is known, if others do, and those that come then."""
    readyz: str
    health: list[str]
    metrics: list[str]
    log: list[set[str]]
    """Warnings and errors: those that there must be, and others that there may be."""
    doctor: set[str]
    known: float
    """Seconds."""
    well: float

    @classmethod
    def read(cls, line: str) -> "Row":
        name, callers, *cells, known, well = (cell.strip() for cell in line.strip("| ").split("|"))
        readyz, health, metrics, log, doctor = cells
        phases = [set(_spans(phase)) for phase in callers.split("then")]
        events = [set(_spans(part)) for part in log.split("perhaps")]
        found = set(_spans(doctor))
        return cls(name, phases, readyz.strip("`"), _spans(health), _spans(metrics), events, found, float(known), float(well))


def _spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


class Scene(NamedTuple):
    """A gateway, its Triton, and the way from one to the other."""

    folder: Path
    triton: Triton
    line: Line
    gateway: Gateway
    environment: Mapping[str, str]
    stack: ExitStack
    """Ends with the scene."""

    async def ask(self, path: str, body: bytes = b"", method: str = "GET", **headers: str) -> Answer:
        credential = self.folder / "credential"
        if credential.exists():
            headers["X_API_Key"] = credential.read_text(encoding="utf-8")
        try:
            return await ask(self.gateway.url, encode(body, path, method, **headers))
        except ConnectionError:
            return Answer(NO_ANSWER, {}, b"")

    async def call(self, answers: Answers) -> None:
        """Ask again and again, over new connections, so that each worker is asked."""
        image = models.solid(10, 20, 30)
        while True:
            answer = await self.ask("/detect", image, "POST", Content_Type="image/png")
            answers.append((monotonic(), f"{answer.status or 'none'} {answer.code}".strip()))
            await asyncio.sleep(0.1)

    async def differences(self, row: Row, answers: Answers, lines: int) -> list[str]:
        """Return in what a row differs from what is seen now; `lines` of the log are older."""
        recent = {text for at, text in answers if at > monotonic() - _STEADY_SECONDS}
        readyz = str((await self.ask("/readyz")).status)
        health = (await self.ask("/health")).body.decode()
        metrics = (await self.ask("/metrics")).body.decode()
        return [
            *(f"callers get {text}" for text in recent - row.callers[-1] or {"nothing"} - {"nothing" for _ in recent}),
            *([f"/readyz says {readyz}"] if readyz != row.readyz else []),
            *(f"/health does not say {text}" for text in row.health if text not in health),
            *(f"/metrics do not say {text}" for text in row.metrics if not re.search(to_pattern(text), metrics, re.MULTILINE)),
            *(f"the log does not say {text}" for text in row.log[0] - self.logged(lines)),
        ]

    def logged(self, lines: int) -> set[str]:
        return {line["event"] for line in self.gateway.log_lines()[lines:]}

    async def examine(self, *, sees_mounts: bool = True) -> set[str]:
        """Return what `doctor` finds, each with its code, where the gateway's mounts are seen or not."""
        enter = ["nsenter", "-t", str(self.gateway.process.pid), "--mount", f"--wd={ROOT}"] if sees_mounts else []
        command = [*enter, sys.executable, "-m", "app", "doctor", "--json"]
        environment = {**environment_of(ROOT), **self.environment}
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE)
        report = msgspec.json.decode((await process.communicate())[0])
        return {finding["code"] for finding in report["findings"] if finding["severity"] != "ok"}


def to_pattern(text: str) -> str:
    """Return the pattern of a metric, whatever its labels are: `name 1`, or `name >0`."""
    name, value = text.split()
    return rf"^{name}(\{{.*\}})? {'(?!0.0$)' if value == '>0' else rf'{float(value)}$'}"


During = Callable[..., AbstractAsyncContextManager[None]]


class Cause(NamedTuple):
    variants: Sequence[During]
    """Ways in which it comes about; each lasts as long as a block."""
    settings: Callable[[Path], Settings]
    wrapper: Callable[[Path], Sequence[str]]


CAUSES: dict[str, Cause] = {}
"""By the first cell of their row."""


def cause(
    name: str,
    *variants: Sequence[object],
    settings: Callable[[Path], Settings] = lambda _: {},
    wrapper: Callable[[Path], Sequence[str]] = lambda _: [],
) -> Callable[[Callable[..., AsyncIterator[None]]], Callable[..., AsyncIterator[None]]]:
    """Register a function that brings about a cause and ends it; it gets the scene, and each of the variants if there are any."""

    def register(function: Callable[..., AsyncIterator[None]]) -> Callable[..., AsyncIterator[None]]:
        during = asynccontextmanager(function)
        CAUSES[name] = Cause([lambda scene, v=v: during(scene, *v) for v in variants or [()]], settings, wrapper)
        return function

    return register


@cause("Triton does not listen")
async def _(scene: Scene) -> AsyncIterator[None]:
    scene.line.cut()
    yield
    await scene.line.open(_HOST)


@cause("Triton hangs")
async def _(scene: Scene) -> AsyncIterator[None]:
    async with stopped(scene.triton.process):
        yield


@cause("the model hangs", ["hang"])
@cause("the model answers after the deadline", ["slow"])
@cause("the model fails", ["fail"])
@cause("the answers of the model are wrong", ["wrong"])
async def _(scene: Scene, name: str) -> AsyncIterator[None]:
    async with models.faulty(scene.triton.repository, name):
        yield


@contextmanager
def successor(triton: Triton) -> Iterator[EmbeddedTriton]:
    """Make a Triton that takes the place of another one once that was killed; stop it in the end."""

    class Successor(EmbeddedTriton):
        def claim(self) -> None:
            triton.server.stop()
            super().claim()

    server = Successor(triton.settings)
    try:
        yield server
    finally:
        server.stop()


async def end(scene: Scene, model: str = "faulty") -> EmbeddedTriton:
    """End Triton; return the one that can take its place, where a model must be ready."""
    settings = msgspec.structs.replace(scene.triton.settings, model=model)
    server = scene.stack.enter_context(successor(scene.triton._replace(settings=settings)))
    scene.triton.process.kill()
    return server


@cause("Triton is killed, and started again")
async def _(scene: Scene) -> AsyncIterator[None]:
    server = await end(scene)
    yield
    await asyncio.to_thread(server.start)


@cause("the process of the model has died")
async def _(scene: Scene) -> AsyncIterator[None]:
    (process,) = [child for child in scene.triton.process.children() if any("/faulty/" in part for part in child.cmdline())]
    process.kill()
    yield
    server = await end(scene)
    await asyncio.to_thread(server.start)


@cause("Triton comes back without the model")
async def _(scene: Scene) -> AsyncIterator[None]:
    folder, elsewhere = scene.triton.repository / "faulty", scene.folder / "faulty"
    server = await end(scene, "checksum")
    folder.rename(elsewhere)
    await asyncio.to_thread(server.start)
    yield
    elsewhere.rename(folder)
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)


@cause("Triton comes back with another model of this name")
async def _(scene: Scene) -> AsyncIterator[None]:
    config = scene.triton.repository / "faulty" / "config.pbtxt"
    server = await end(scene)
    config.write_text(config.read_text(encoding="utf-8").replace("64, 64", "32, 32"), encoding="utf-8")
    await asyncio.to_thread(server.start)
    yield


@cause("a proxy on the way to Triton resets connections")
async def _(scene: Scene) -> AsyncIterator[None]:
    async with meanwhile(every(1, scene.line.reset)):
        yield


def with_names(folder: Path) -> Sequence[str]:
    resolve_to(_HOST, folder)
    return ["unshare", "--mount", "sh", "-c", f'mount --bind {folder}/hosts /etc/hosts && exec "$@"', "sh"]


def resolve_to(address: str, folder: Path) -> None:
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address and f'{address} {_NAME}'}\n", encoding="utf-8")


@cause("the name of Triton has no address any more", wrapper=with_names)
async def _(scene: Scene) -> AsyncIterator[None]:
    resolve_to("", scene.folder)
    scene.line.reset()
    yield
    resolve_to(_HOST, scene.folder)


@cause("the name of Triton has another address", wrapper=with_names)
async def _(scene: Scene) -> AsyncIterator[None]:
    scene.line.cut()
    await scene.line.open("127.0.0.2")
    resolve_to("127.0.0.2", scene.folder)
    yield


@cause("shared memory is full at the start", wrapper=lambda folder: on_a_full_disk(Path("/dev/shm"), log=folder / "dd.log"))  # noqa: S108
@cause("the disk of the log is full", wrapper=lambda _: ["sh", "-c", 'exec "$@" > /dev/full', "sh"])
async def _(_: Scene) -> AsyncIterator[None]:
    yield


def with_files(folder: Path) -> Settings:
    credential, table = keys.create("camera")
    (folder / "credential").write_text(credential, encoding="utf-8")
    (folder / "keys.toml").write_text(table.replace('["detect"]', '["detect", "health"]'), encoding="utf-8")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    authority.issue_cert(_HOST).private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    return {"api_keys_file": folder / "keys.toml", "triton_tls_folder": folder}


@cause("the file of keys is empty, missing or wrong", *product(["keys.toml"], _SPOILT), settings=with_files)
@cause("the certificates for Triton are empty, missing or wrong", *product(["ca.crt"], _SPOILT), settings=with_files)
async def _(scene: Scene, name: str, how: str) -> AsyncIterator[None]:
    file = scene.folder / name
    content = file.read_bytes()
    file.write_bytes({"empty": b"", "missing": b"", "wrong": b"\xff["}[how])
    if how == "missing":
        file.unlink()
    scene.gateway.process.send_signal(signal.SIGHUP)
    yield
    file.write_bytes(content)
    scene.gateway.process.send_signal(signal.SIGHUP)


@cause("a worker is killed", [signal.SIGKILL])
@cause("a worker hangs", [signal.SIGSTOP])
async def _(scene: Scene, how: signal.Signals) -> AsyncIterator[None]:
    scene.gateway.workers()[0].send_signal(how)
    yield


@asynccontextmanager
async def staged(wanted: Cause, folder: Path) -> AsyncIterator[Scene]:
    models.write(folder / "models")
    settings = {"model": "faulty", "timeout_seconds": 2, "log_level": "warning", **wanted.settings(folder)}
    wrapper = wanted.wrapper(folder)
    tls = None
    if "triton_tls_folder" in settings:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(folder / "server.pem")
        tls.set_alpn_protocols(["h2"])
    with embedded_triton(folder / "models", "faulty") as triton, ExitStack() as stack:
        line = Line(triton.settings.triton_address, tls)
        await line.open(_HOST)
        stack.callback(line.cut)
        settings["triton_endpoints"] = f"{_NAME if wrapper and 'hosts' in wrapper[-2] else _HOST}:{line.port}"
        async with serving_apart(triton, folder, wrapper=wrapper, settings=settings) as gateway:
            environment = {f"NEREID_{name.upper()}": str(value) for name, value in settings.items()}
            yield Scene(folder, triton, line, gateway, environment, stack)


async def until_same(scene: Scene, row: Row, answers: Answers, lines: int, seconds: float) -> None:
    """Wait until all has been as a row says for a while, on a busy machine longer than those seconds."""
    started = same_since = monotonic()
    while monotonic() < same_since + _STEADY_SECONDS:
        if differences := await scene.differences(row, answers, lines):
            same_since = monotonic()
            assert same_since < started + _PATIENCE * seconds + 30, differences
        await asyncio.sleep(0.1)


_TABLE = (ROOT / "docs" / "how-to" / "failures.md").read_text(encoding="utf-8").partition("| cause |")[2]
ROWS = [Row.read(line) for line in _TABLE.partition("\n\n")[0].splitlines()[2:]]
_WELL_HEALTH = ['{"status":"healthy"', '"refused_files":[]']
_WELL = Row("", [{"200"}], "200", _WELL_HEALTH, ["triton_up 1", "api_circuit_open 0"], [set()], set(), 0, 0)


@pytest.mark.parametrize("row", ROWS, ids=[row.cause.replace(" ", "-") for row in ROWS])
async def test_cause_is_seen_as_its_row_says(row: Row, tmp_path: Path) -> None:
    wanted = CAUSES[row.cause]
    answers: Answers = []
    async with staged(wanted, tmp_path) as scene, meanwhile(*(scene.call(answers) for _ in range(_CALLERS))):
        await until_same(scene, _WELL, answers, 0, row.well)
        usual = await scene.examine(sees_mounts=row.known > 0)  # otherwise the cause was there from the start
        for during in wanted.variants:
            answers.clear()
            lines = len(scene.gateway.log_lines())
            async with during(scene):
                await until_same(scene, row, answers, lines, row.known)
                told = Counter(text for _, text in answers)
                found, logged = await scene.examine() - usual, scene.logged(lines)
            await until_same(scene, _WELL, answers, lines, row.well)

            # On a busy machine a deadline may pass at any time, for as many as ask at once.
            assert {text for text, count in told.items() if count > _CALLERS} <= {"200"}.union(*row.callers)
            assert not [text for text in told if text.startswith("500")]
            assert logged <= set.union(*row.log, _ALWAYS_LOGGED)
            assert found == row.doctor


def test_every_cause_has_a_row() -> None:
    assert {row.cause for row in ROWS} == CAUSES.keys()
