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
from app.host import extras
from app.settings.schema import PREFIX, Settings
from bench.harness.ports import find_free
from bench.harness.processes import environment_of, running
from tests.support import ROOT, SCENE, json

NEREID = [sys.executable, "-m", "app"]


def copy_without(name: str, folder: Path) -> None:
    """Copy the application without a feature, to where no module of an extra can be imported."""
    shutil.copytree(ROOT / "app", folder / "app", ignore=lambda path, _: [name] if path.endswith("features") else [])
    contract = folder / "app" / "feature.py"
    others = f"NAMES = {tuple(other for other in feature.NAMES if other != name)!r}"
    contract.write_text(re.sub("^NAMES.*", others, contract.read_text(encoding="utf-8"), flags=re.MULTILINE), encoding="utf-8")
    for module in chain(*feature.load(name).extras.values(), *extras.MODULES.values()):
        (folder / f"{module.partition('.')[0]}.py").write_text("raise ModuleNotFoundError", encoding="utf-8")


@pytest.mark.parametrize("name", feature.NAMES)
def test_nereid_works_without(name: str, served: Settings, tmp_path: Path) -> None:
    copy_without(name, tmp_path)
    (port,) = find_free(1)
    settings = {"PORT": port, "WORKERS": 1, "TRITON_HOME": served.triton_home, "MODEL_REPOSITORY": served.model_repository}
    environment = {PREFIX + key: str(value) for key, value in {**settings, "MODEL": "six_columns"}.items()}

    def run(argument: str) -> str:
        variables = environment_of(tmp_path) | environment
        return subprocess.run([*NEREID, argument], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False).stdout

    with running([*NEREID, "api"], environment, port, "/readyz", tmp_path / "log", tmp_path) as server:
        assert json(httpx.post(f"{server.url}/detect", content=SCENE))["num_detections"]
        assert "/detect" in json(httpx.get(f"{server.url}/docs/openapi.json"))["paths"]
        assert re.search(r"\d failures?, \d", run("doctor"))
    known, declared = run("settings"), feature.declarations()[name]
    assert f"`{PREFIX}PORT`" in known
    assert not [key for key in declared.settings.__struct_fields__ if f"`{PREFIX}{key.upper()}`" in known]
    assert {"doctor", *(each.name for each in declared.commands)} & set(run("--help").split()) == {"doctor"}


@pytest.mark.parametrize("name", feature.NAMES)
def test_few_modules_name_a_feature(name: str) -> None:
    declared, app = feature.declarations()[name], ROOT / "app"
    settings = [field for field in declared.settings.__struct_fields__ if field != name]
    words = re.compile("|".join([rf"features\.{name}", *settings, *declared.words]))
    naming = [str(path.relative_to(app)) for path in app.rglob("*.py") if words.search(path.read_text(encoding="utf-8"))]

    assert sorted(file for file in naming if not file.startswith(f"features/{name}/")) == sorted(declared.named_in)
    assert len(declared.named_in) <= 4
