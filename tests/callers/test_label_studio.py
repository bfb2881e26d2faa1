"""Label Studio with the program in `clients/label-studio` as the ML backend of its projects."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from bench.harness.ports import find_free
from bench.harness.processes import running
from tests.callers.client import environment, run
from tests.callers.conftest import KEY, KEY_ID, SECRET
from tests.deploy.needs import load
from tests.processes import PATIENCE_SECONDS
from tests.support import IMAGES, ROOT, sample_image

NAME = "label-studio"
EXAMPLE = ROOT / "examples" / NAME
LABELS = {"person": "Person", "cat": "Cat", "car": "Vehicle", "truck": "Vehicle", "bus": "Vehicle", "motorcycle": "Vehicle"}
"""Of the classes, as labeling.xml says."""
LEGACY = "0123456789abcdef" * 2
PICTURES = ("chelsea.jpg", "coffee.jpg", "astronaut.jpg")
"""The second has no object with a label."""


class Pair(NamedTuple):
    studio: str
    gateway: str
    package: Path
    folder: Path

    def annotate(self, token: str) -> Any:  # noqa: ANN401
        pictures = [str(IMAGES / name) for name in PICTURES]
        example = json.loads((EXAMPLE / "backend.json").read_text(encoding="utf-8"))
        del example["project"]
        with self.backend(token) as url:
            backend = {**example, "url": url, "basic_auth_user": KEY_ID, "basic_auth_pass": SECRET}
            return run(NAME, "calls", "label", self.studio, token, json.dumps(backend), str(EXAMPLE / "labeling.xml"), *pictures)

    @contextmanager
    def backend(self, token: str) -> Iterator[str]:
        (port,) = find_free(1)
        environment = {
            "NEREID_URL": self.gateway,
            "LABEL_STUDIO_URL": self.studio,
            "LABEL_STUDIO_API_KEY": token,
            "PYTHONPATH": str(self.package),
        }
        command = [str(self.package / "bin" / "nereid-label-studio"), "--port", str(port)]
        with running(command, environment, port, "/health", self.folder / "backend.log") as backend:
            yield backend.url


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built and installed; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("package")
    source = shutil.copytree(ROOT / "clients" / NAME, folder / "source")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", f"--target={folder / 'installed'}"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, source], check=True)
    return folder / "installed"


@pytest.fixture(scope="module")
def pair(locked: str, package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both with the settings of the example; Label Studio has a database of its own, and calls nobody else."""
    folder = tmp_path_factory.mktemp(NAME)
    settings = load(EXAMPLE / "compose.yaml")["services"][NAME]["environment"]
    settings |= {
        "LABEL_STUDIO_BASE_DATA_DIR": str(folder),
        "LABEL_STUDIO_PASSWORD": SECRET,
        "LABEL_STUDIO_USER_TOKEN": LEGACY,
        "COLLECT_ANALYTICS": "false",
        "LATEST_VERSION_CHECK": "false",
        "SENTRY_DSN": "",
        # Instead of 1 and 3: how busy this machine is shall not matter.
        "ML_TIMEOUT_HEALTH": str(PATIENCE_SECONDS),
        "ML_TIMEOUT_SETUP": str(PATIENCE_SECONDS),
    }
    (port,) = find_free(1)
    # Django's migrations make millions of objects: the collector, which goes through them again and again, takes 80 % of the time.
    start = "import gc; gc.disable(); from label_studio.server import main; main()"
    address = ["--internal-host", "127.0.0.1", "--port", str(port)]
    command = [str(environment(NAME).python()), "-c", start, "start", "--no-browser", *address]
    with running(command, settings, port, "/health", folder / "studio.log", ready_seconds=PATIENCE_SECONDS) as studio:
        yield Pair(studio.url, locked, package, folder)


@pytest.mark.client(NAME)
@pytest.mark.parametrize("is_personal", [False, True], ids=["legacy", "personal"])
def test_predictions_of_uploaded_pictures(pair: Pair, *, is_personal: bool) -> None:
    """Three uploaded photos: predictions for an opened task, for all, and interactive; training; both kinds of tokens."""
    token = run(NAME, "calls", "allow_tokens", pair.studio, LEGACY, "off") if is_personal else LEGACY  # which are then refused
    project = pair.annotate(token)
    if is_personal:
        run(NAME, "calls", "allow_tokens", pair.studio, token, "on")
    expected = [boxes(pair.gateway, name) for name in PICTURES]

    assert (project["state"], project["model_version"]) == ("Connected", "yolo11n:1")
    assert project["versions"] == {"versions": ["yolo11n:1"]}
    assert all(image.startswith("/data/upload/") for image in project["images"])
    assert [bool(each) for each in expected] == [True, False, True]
    predictions = [[[box(region) for region in regions] for regions in task] for task in project["predictions"]]
    assert predictions == [[each] for each in expected]
    assert project["opened"] == 1
    assert [box(region) for region in project["interactive"]["data"]["result"]] == expected[0]


def boxes(gateway: str, picture: str) -> list[tuple[str, Any]]:
    """Return the labels of the objects in a picture, and their boxes: x y w h in percent of it, as `box` does."""
    key = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(
        f"{gateway}/detect?boxes=normalized&confidence=0.4", content=sample_image(picture), headers=key, timeout=PATIENCE_SECONDS
    )
    return [
        (label, pytest.approx([100 * x1, 100 * y1, 100 * (x2 - x1), 100 * (y2 - y1)], abs=0.01))
        for detection in answer.json()["detections"]
        if (label := LABELS.get(detection["class_name"]))
        for x1, y1, x2, y2 in [[detection[side] for side in ("x1", "y1", "x2", "y2")]]
    ]


def box(region: dict[str, Any]) -> tuple[str, list[float]]:
    value = region["value"]
    return value["rectanglelabels"][0], [value[side] for side in ("x", "y", "width", "height")]
