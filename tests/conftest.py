"""What holds for every test, and one real embedded Triton with the project's models and those of `tests/fakes/models.py`."""

import hashlib
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import hypothesis
import msgspec
import pytest
import structlog

from app.embedded.install import install
from app.embedded.launch import shm_prefix
from app.embedded.server import EmbeddedTriton
from app.imaging.apart import DECODERS
from app.main import create_app
from app.resilience import last_valid, worker_table
from app.resilience.worker_table import WorkerTable
from app.settings.schema import Settings
from app.triton.client import TritonClient
from app.triton.shared_memory import Arena
from app.zoo import registry
from app.zoo.download import download
from app.zoo.pull import pull
from app.zoo.registry import PublishedModel
from app.zoo.repository import Repository
from tests import leftovers
from tests.fakes import models, other_tasks
from tests.fakes.triton import FakeTriton, serving
from tests.leftovers import Run
from tests.postgres import Postgres16, Server, shared_server
from tests.processes import PATIENCE_SECONDS, leave, one_process_at_a_time, share
from tests.support import ROOT, SHARED, TABLE, TABLE_VARIABLE, OpenTable, started, triton_home

# A re-export of the published network, which cannot be downloaded everywhere.
SHARED_YOLOX = SHARED / "models" / "yolox_nano.onnx"
SHARED_YOLOX_SHA256 = "695e750a5d5754bb5a8d5325643b59282191a7e7a564e435a415fd3c578eab14"

# Why a test may be skipped under CI, where everything that can be installed is; any other skip is a failure there.
SKIPS_UNDER_CI = (
    "nvidia-dali-cuda120 is not installed",  # its wheel does not exist for every Python and machine
    "this machine has no IPv6",
    "under numpy 1, which Python 3.13 has not",  # what Triton lacks there
    "docker is too old",  # for Swarm; Debian's is new enough since 13
    "there is no /dev/net/tun",  # not every kernel has it
    "../shared",  # data beside the repository
    "the environment of tensorrt_rtx",  # its wheels do not exist for every machine
    "there are no trained models",  # their training needs PyTorch
    "the published network of",  # some can only be downloaded with it
)

# The group of the tests in a folder that are not marked otherwise. Those of other folders belong to `./just test`.
GROUPS = {
    "bench": "system",
    "callers": "clients",
    "deploy": "texts",
    "docs": "texts",
    "faults": "faults",
    "system": "system",
}
MARKS = {"system", "faults", "packages", "soak", "clients", "texts"}

_TESTS = Path(__file__).parent
_RUN = pytest.StashKey[Run]()

# The same examples in each run: what has passed passes again. Fuzzing beyond them is one of the longer runs.
hypothesis.settings.register_profile("tests", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(leftovers)  # hooks of a conftest do not see the fixtures of the session
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and what they start, ignore it
    if not hasattr(config, "workerinput"):
        config.stash[_RUN] = Run()
        os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # of the reference; the embedded Triton has it anyway


def group_of(path: Path) -> str:
    return GROUPS.get(path.relative_to(_TESTS).parts[0], "")


@cache
def groups_in(path: Path) -> set[str]:
    """Return the groups of the tests of a file as its text names them: it is not imported."""
    text = path.read_text(encoding="utf-8")
    mark = rf"\bmark\.({'|'.join(MARKS)})\b"
    if of_all := re.search(rf"^pytestmark = .*{mark}", text, re.MULTILINE):
        return {of_all[1]}
    return {group_of(path), *re.findall(mark, text)}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files that have no test of the group that is run; those that the command line names are imported anyway."""
    group = config.option.markexpr
    if group == config.getini("addopts")[-1]:
        group = ""
    elif group not in MARKS:
        return None
    if collection_path.is_dir():
        return None if any(group in groups_in(path) for path in collection_path.rglob("test_*.py")) else True
    return None if not collection_path.match("test_*.py") or group in groups_in(collection_path) else True


@pytest.hookimpl(tryfirst=True)  # before `-m` looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marks = MARKS & {mark.name for mark in item.iter_markers()}
        if not marks <= groups_in(item.path):
            raise pytest.UsageError(f"{item.nodeid} has a mark that its file does not show, or that differs from its `pytestmark`")
        if not marks and (group := group_of(item.path)):
            item.add_marker(group)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        _, _, reason = report.longrepr  # type: ignore[misc, str-unpack]  # of a skipped test: file, line and reason
        if not any(allowed in reason for allowed in SKIPS_UNDER_CI):
            report.outcome = "failed"
            report.longrepr = f"{reason}; under CI that is a failure"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    leave()  # before a process of the run tells that it has ended
    yield
    DECODERS.close()
    run = session.config.stash.get(_RUN, None)
    if run is None:
        return
    if leftovers := run.leftovers():
        print(*(f"LEFT BEHIND {name}" for name in leftovers), sep="\n")  # noqa: T201 - after the summary
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if session.exitstatus == pytest.ExitCode.OK:
        run.remove_folder()
    else:
        print(f"temporary files are in {run.folder}")  # noqa: T201


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget which files were valid, as another host, and the Tritons of the test, whose number in the shared table is limited."""
    monkeypatch.setenv("NEREID_INTERNAL_LAST_VALID_FD", "")  # restored in the end, whatever `create` writes
    yield
    TABLE.keep_aliases(())
    last_valid.refused.clear()
    if last_valid.own.cache_info().currsize:
        os.close(last_valid.own())
        last_valid.own.cache_clear()


@pytest.fixture
def restored_logging() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "common"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def networks() -> dict[str, Path]:
    """The published networks by model, as far as they are available; downloaded once, so that later runs need no network."""
    entries = registry.load()
    found = fetched({name: entries[name] for name in ("yolo11n", "efficientnet_lite0")})
    if SHARED_YOLOX.is_file():
        found["yolox_nano"] = download(entries["yolox_nano"], SHARED, source=SHARED_YOLOX, sha256=SHARED_YOLOX_SHA256)
    return found


def fetched(entries: Mapping[str, PublishedModel]) -> dict[str, Path]:
    found = {}
    with one_process_at_a_time(ROOT / ".triton" / "networks") as folder:
        for name, entry in entries.items():
            found[name] = folder / entry.file_name
            if not found[name].is_file():
                with TemporaryDirectory(dir=folder) as unfinished:
                    network = download(entry, Path(unfinished))
                    for beside in map(Path, entry.others):
                        network.with_name(beside.name).rename(folder / beside.name)
                    network.rename(found[name])
    return found


@pytest.fixture(scope="session")
def text_networks() -> dict[str, Path]:
    return fetched(registry.select(registry.load(), "ocr"))


@pytest.fixture(scope="session")
def repository(run_folder: Path, networks: dict[str, Path]) -> Path:
    """A model repository for the run: the project's models, as far as they are available, and the small ones."""
    folder, unfinished = run_folder / "repository", run_folder / "unfinished"
    with one_process_at_a_time(run_folder):
        if folder.exists():
            return folder
        shutil.rmtree(unfinished, ignore_errors=True)
        install(ROOT / ".triton")
        entries = registry.load()
        for name, network in networks.items():
            digest = hashlib.sha256(network.read_bytes()).hexdigest()
            pull(name, entries[name], Repository(unfinished), source=network, sha256=digest)
        models.write(unfinished)
        other_tasks.write_classifiers(unfinished)
        other_tasks.write_readers(unfinished)
        return unfinished.rename(folder)


@pytest.fixture(scope="session")
def settings(repository: Path, run_folder: Path) -> Settings:
    """Settings for the run's Triton, apart from a server that may be running here."""
    with one_process_at_a_time(run_folder):
        home = run_folder / "triton"
        if not home.exists():
            home.mkdir()
            triton_home(home)
    return Settings(model_repository=str(repository), triton_home=str(home), timeout_seconds=30, log_level="error")


@contextmanager
def served_models(settings: Settings) -> Iterator[str]:
    server = EmbeddedTriton(settings)
    server.start()
    yield settings.triton_address
    server.stop()
    assert not list(Path("/dev/shm").glob(f"{shm_prefix(settings)}*"))  # noqa: S108
    assert list(settings.triton_folder.iterdir()) == []


@pytest.fixture(scope="session")
def served(settings: Settings, run_folder: Path) -> Settings:
    """Settings for the run's Triton, once it runs; tests only ask it: those of other processes do, too."""
    share(run_folder / "one-triton", partial(served_models, settings))
    return settings


@pytest.fixture(scope="session")
async def client(served: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with started(create_app(served)) as client:
        yield client


@pytest.fixture(scope="session")
async def faces(served: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application with a small detector, and with faces."""
    async with started(create_app(msgspec.structs.replace(served, model="six_columns", faces=True))) as client:
        yield client


@pytest.fixture(scope="session")
def postgres(run_folder: Path) -> Server:
    """The run's PostgreSQL, with a migrated database from which those of tests are copied."""
    return shared_server(run_folder / "postgres")


@pytest.fixture(scope="session")
def postgres16(run_folder: Path) -> Server:
    """The same of the oldest version that may be used."""
    return shared_server(run_folder / "postgres16", Postgres16)


@pytest.fixture
async def database(postgres: Server) -> AsyncIterator[str]:
    """The URL of a database of its own, empty and migrated."""
    async with postgres.fresh() as url:
        yield url


@pytest.fixture(autouse=True, scope="session")
def patient_clients_and_usual_priority() -> Iterator[None]:
    """Real time ends neither the start of a Triton nor a question to it, however busy the machine is, unless a test says so.

    Commands that run in this process must not lower its priority, which the servers of later tests would inherit.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.triton.client._QUERY_SECONDS", 20.0)
        patch.setattr("app.triton.blocking_client._QUERY_SECONDS", PATIENCE_SECONDS)
        patch.setattr("app.embedded.server._READY_SECONDS", PATIENCE_SECONDS)
        patch.setattr("app.__main__._ADD_NICENESS", 0)
        yield


@pytest.fixture
async def fake_triton() -> AsyncIterator[tuple[FakeTriton, TritonClient]]:
    fake = FakeTriton()
    async with serving(fake) as port:
        client = TritonClient(f"127.0.0.1:{port}")
        yield fake, client
        await client.close()


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Arena]]:
    made: list[Arena] = []
    create = Arena.__init__

    def create_and_note(arena: Arena, nbytes: int) -> None:
        create(arena, nbytes)
        made.append(arena)

    monkeypatch.setattr(Arena, "__init__", create_and_note)
    yield made
    made.clear()


@pytest.fixture
def open_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenTable]:
    """Makes a further worker of one host: each call opens the same table anew, as another process would."""
    monkeypatch.setenv(TABLE_VARIABLE, "")  # restored in the end, whatever `create` writes
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
    os.close(int(os.environ[TABLE_VARIABLE]))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerTable]:
    """The table of a host with a single worker."""
    monkeypatch.delenv(TABLE_VARIABLE, raising=False)
    made = WorkerTable()
    yield made
    made.close()
