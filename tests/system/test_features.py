"""Each feature can be taken away: without its folder, name and packages, Nereid starts, detects and explains itself."""

import re
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import httpx
import pytest

from app import feature
from app.settings.schema import PREFIX, Settings
from bench.harness.ports import find_free
from bench.harness.processes import environment_of, running
from tests.support import ROOT, SCENE, json

APP = ROOT / "app"


@pytest.fixture
def without(name: str, tmp_path: Path) -> Path:
    """A checkout without a feature, in which nothing that the feature needs can be imported."""
    shutil.copytree(APP, tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "app" / "features" / name)
    contract = tmp_path / "app" / "feature.py"
    text, changes = re.subn(rf'"{name}",? ?', "", contract.read_text(encoding="utf-8"))
    contract.write_text(text, encoding="utf-8")
    assert changes == 1
    for module in chain.from_iterable(feature.load(name).extras.values()):
        (tmp_path / f"{module.partition('.')[0]}.py").write_text("raise ImportError", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", feature.NAMES)
def test_nereid_works_without(name: str, without: Path, served: Settings) -> None:
    declared, (port,) = feature.declarations()[name], find_free(1)
    settings = {"PORT": port, "WORKERS": 1, "TRITON_HOME": served.triton_home, "MODEL_REPOSITORY": served.model_repository}
    environment = {PREFIX + key: str(value) for key, value in {**settings, "MODEL": "six_columns"}.items()}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "app", *arguments]
        variables = environment_of(without) | environment
        done = subprocess.run(command, cwd=without, env=variables, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        return done.stdout

    with running([sys.executable, "-m", "app", "api"], environment, port, "/readyz", without / "log", without) as server:
        assert json(httpx.post(f"{server.url}/detect", content=SCENE))["num_detections"]
        assert "/detect" in json(httpx.get(f"{server.url}/docs/openapi.json"))["paths"]
        assert httpx.get(f"{server.url}/{name}").status_code == 404
        assert "gateway: " in run("doctor")
    assert "doctor" in run("--help")
    assert not {each.name for each in declared.commands} & set(run("--help").split())
    assert not [key for key in declared.settings.__struct_fields__ if f"`{PREFIX}{key.upper()}`" in run("settings")]


@pytest.mark.parametrize("name", feature.NAMES)
def test_few_modules_name_a_feature(name: str) -> None:
    declared = feature.declarations()[name]
    settings = [field for field in declared.settings.__struct_fields__ if field != name]
    words = re.compile("|".join([rf"features\.{name}", *settings, *declared.words]))
    naming = [str(path.relative_to(APP)) for path in APP.rglob("*.py") if words.search(path.read_text(encoding="utf-8"))]

    assert sorted(file for file in naming if not file.startswith(f"features/{name}/")) == sorted(declared.named_in)
    assert len(declared.named_in) <= 4
