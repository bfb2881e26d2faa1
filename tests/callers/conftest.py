"""The gateway that the clients call, and the table of what was done with which version."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
from PIL import Image, ImageDraw, ImageFont

from app.settings.schema import DIALECTS
from app.zoo import registry
from tests.api.conftest import write_keys
from tests.callers import client as table
from tests.callers.client import pins
from tests.faults.fleet import running_fleet
from tests.imaging.samples import encode
from tests.processes import PATIENCE_SECONDS, one_process_at_a_time
from tests.support import ROOT, sample_image

MODEL = "yolo11n"
KEY_ID, SECRET = "camera-1", "the-secret-of-a-test"
KEY = f"{KEY_ID}.{SECRET}"
VERSIONS = {"tritonclient": version("tritonclient")}
"""Of what is installed here."""
LINES = ["Nereid reads", "two lines 2026"]
PORTRAIT = sample_image("astronaut.jpg")


_page = Image.new("RGB", (640, 240), "white")
for _number, _line in enumerate(LINES):
    ImageDraw.Draw(_page).text((40, 40 + 90 * _number), _line, "black", ImageFont.load_default(48))
PAGE = encode(_page, "PNG")
"""Has these lines of text."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the table into the documentation, if all tests pass")


@pytest.fixture(autouse=True)
def row(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Note the client, its version and the first line of the test's docstring, which says what is done with it.

    A test of another program records its own property `version`.
    """
    (name,) = request.node.get_closest_marker("client").args
    record_property("client", name)
    record_property("done", request.function.__doc__.partition("\n")[0])
    if known := (pins() | VERSIONS).get(name):
        record_property("version", known)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    reports = [(report.outcome, dict(report.user_properties)) for name in ("passed", "failed") for report in stats.get(name, [])]
    found = {table.Row(result=outcome, **properties) for outcome, properties in reports if "client" in properties}
    rows = sorted(found, key=lambda row: (row.client.lower(), row.done))
    if rows:
        terminalreporter.section("clients")
        terminalreporter.line(table.render(rows))
    if config.getoption("record", default=False) and rows and not stats.keys() & {"failed", "error", "skipped"}:
        table.write(rows, datetime.now(UTC).date())


@contextmanager
def serving(folder: Path, repository: Path, *others: Path, **settings: object) -> Iterator[str]:
    """Run `serve` in an empty folder with yolo11n, models in other folders and all dialects until the block ends; yield its URL."""
    if not (repository / MODEL).is_dir():
        pytest.skip(f"the published network of {MODEL} is not there")
    shutil.copytree(repository / MODEL, folder / "models" / MODEL)
    for other in others:
        shutil.copytree(other, folder / "models" / other.name)
    # Its timeout is that long because the machine also runs the clients.
    given = {"dialects": ",".join(DIALECTS), "model": MODEL, "timeout_seconds": 20, **settings}
    with running_fleet(folder / "models", folder, instances=0, settings=given) as fleet:
        yield fleet.url


@pytest.fixture(scope="session")
def gateway(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("gateway"), repository) as url:
        yield url


@pytest.fixture(scope="session")
def locked(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = write_keys(tmp_path_factory.mktemp("keys"), (KEY_ID, SECRET, "detect"))
    with serving(tmp_path_factory.mktemp("locked"), repository, api_keys_file=keys) as url:
        yield url


@pytest.fixture(scope="session")
def sight_models() -> list[Path]:
    """The folders of the models for text and faces, pulled once for each state of the registry."""
    digest = hashlib.sha256(registry.PUBLISHED.read_bytes()).hexdigest()[:16]
    with one_process_at_a_time(ROOT / ".clients") as folder:
        if not (made := folder / f"models-{digest}").is_dir():
            with TemporaryDirectory(dir=folder) as unfinished:
                settings = {"NEREID_MODEL_REPOSITORY": f"{unfinished}/models", "NEREID_TRITON_HOME": str(ROOT / ".triton")}
                for name in ("ocr", "faces"):
                    command = [sys.executable, "-m", "app", "pull", name]
                    subprocess.run(command, env=os.environ | settings, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
                Path(unfinished, "models").rename(made)
    return sorted(model.parent for model in made.glob("*/config.pbtxt"))


@pytest.fixture(scope="session")
def sight_url(repository: Path, sight_models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a gateway without keys that has models for text and faces, and in which faces are on."""
    folder = tmp_path_factory.mktemp("sight")
    with serving(folder, repository, *sight_models, faces="true", timeout_seconds=60) as url:
        yield url


@pytest.fixture
def sight(sight_url: str) -> Iterator[httpx.Client]:
    """Calls that gateway as itself."""
    with httpx.Client(base_url=sight_url, timeout=PATIENCE_SECONDS) as client:
        yield client


@pytest.fixture
def own(gateway: str) -> Iterator[httpx.Client]:
    """Calls the gateway as itself: what its own answer says, the clients must find."""
    with httpx.Client(base_url=gateway, timeout=PATIENCE_SECONDS) as client:
        yield client
