"""The commands that pull, add, use, load and remove models, make keys and clear the cache."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from app.__main__ import main
from app.api.caller import keys
from app.host.program import CommandError, NoSuchModel
from app.zoo.recipe import DetectionRecipe
from app.zoo.registry import PublishedModel
from app.zoo.repository import Repository
from tests.commands.conftest import one_line
from tests.support import IMAGES
from tests.zoo import adding
from tests.zoo.exported import WIDE, exported, head_tensors


def test_pull_passes_its_options_on(repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "yolo11n", "--from", str(repository / "nowhere.onnx")]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"nereid: there is no file {repository}/nowhere.onnx"
    pulled: list[tuple[str, PublishedModel, dict[str, Any]]] = []

    def pull(name: str, entry: PublishedModel, into: Repository, _: object, **options: Any) -> str:  # noqa: ANN401
        assert into.path == repository
        pulled.append((name, entry, options))
        return "later"

    monkeypatch.setattr("app.zoo.pull.pull", pull)
    monkeypatch.setenv("NEREID_MODEL", "yolox_nano")
    assert main(["pull", "--from", "/mirror", "--sha256", "ab", "--floor", "0.001", "--multi-label"]) == 0
    ((name, entry, options),) = pulled
    recipe = entry.recipe
    assert isinstance(recipe, DetectionRecipe)
    assert (name, recipe.size, recipe.floor, recipe.multi_label) == ("yolox_nano", (416, 416), 0.001, True)
    assert options == {"source": Path("/mirror"), "sha256": "ab", "is_production": False}


def export(folder: Path, version: int) -> str:
    network = exported(head_tensors("yolo", WIDE), WIDE, names={0: "door", 1: "window", 2: "gate"}, version=version)
    path = folder / f"run-{version}.onnx"
    path.write_bytes(network.SerializeToString())
    return str(path)


def content(folder: Path) -> dict[str, bytes]:
    """Return the content without the numbers of last versions, which are never given again."""
    files = adding.content(Repository(folder))
    return {path: re.sub(rb"(?m)^last_version = .*$", b"", data) for path, data in files.items()}


class Control:
    """Takes the place of the embedded Triton: notes which models it is to load, with their versions."""

    is_running, failing = True, ""

    def __init__(self, repository: Path) -> None:
        self.repository, self.applied = repository, list[tuple[str, list[str]]]()

    def apply(self, _: object, model: str, *, loads: bool = True) -> str:
        versions = sorted(path.parent.name for path in (self.repository / model).glob("*/model.onnx") if loads)
        self.applied.append((model, versions))
        if self.failing in versions:
            raise CommandError(f"Triton cannot load {model}: out of luck")
        return "" if self.is_running else "later"


@pytest.fixture
def control(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Control:
    control = Control(repository)
    monkeypatch.setattr("app.embedded.control.apply", control.apply)
    return control


@pytest.mark.parametrize("is_running", [True, False])
def test_models_are_added_used_and_removed(
    repository: Path, control: Control, capsys: pytest.CaptureFixture[str], *, is_running: bool
) -> None:
    control.is_running = is_running
    add, later = "POST /predict/doors uses it", "" if is_running else " later"
    for arguments, says, *versions in (
        (["add", export(repository, 1), "--name", "doors", "--licence", "MIT"], add, "1 (default)"),
        (["add", export(repository, 2), "--name", "doors"], add, "1", "2 (default)"),
        (["use", "doors:1"], "doors is version 1", "1 (default)", "2"),
        (["remove", "doors:2"], "doors:2 is removed", "1 (default)"),
        (["remove", "doors"], "doors is removed"),
    ):
        assert main(arguments) == 0
        out, err = capsys.readouterr()
        assert (out, err.splitlines()[-1]) == ("", f"nereid: {says}{later}")
        assert control.applied[-1] == ("doors", [version[0] for version in versions])
        assert main(["models"]) == 0
        line = f"doors: 3 classes, 256 x 128, licence MIT, versions {', '.join(versions)}\n"
        assert capsys.readouterr() == (line if versions else "", "")
    assert set(content(repository)) == {"run-1.onnx", "run-2.onnx"}


@pytest.mark.parametrize(("arguments", "endpoints"), [("", ""), ("--production", ""), ("--untrusted", "a:1")])
def test_model_is_made_in_fp16_for_production(
    repository: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, endpoints: str
) -> None:
    monkeypatch.setenv("NEREID_TRITON_ENDPOINTS", endpoints)
    half, is_made = repository / "doors" / "1" / "model_fp16.onnx", bool(arguments)
    assert main(["add", export(repository, 1), "--name", "doors", *arguments.split()]) == 0
    assert half.is_file() == is_made
    half.unlink(missing_ok=True)
    assert main(["add", export(repository, 1), "--name", "doors", *arguments.split()]) == int(not is_made)
    assert half.is_file() == is_made


def test_default_model_is_removed_after_another_one_is_named(
    repository: Path, control: Control, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, how = "yolo11n-pose", "pose=NAME in NEREID_TASK_MODELS"
    for command in ("remove", "unload"):
        assert main([command, name]) == NoSuchModel.exit_code
    assert main(["add", export(repository, 1), "--name", name]) == 0
    capsys.readouterr()
    for arguments in (["remove", name], ["remove", f"{name}:1"], ["unload", name]):
        assert main(arguments) == 1
        assert one_line(capsys) == f"{name} is a default model of the settings; first choose another one: {how}"
    monkeypatch.setenv("NEREID_TASK_MODELS", "pose=NAME")
    for command in ("unload", "remove"):
        assert main([command, name]) == 0
        assert control.applied[-1] == (name, [])
    assert not (repository / name).exists()


@pytest.mark.parametrize(
    ("routes", "reference", "said"),
    [
        ('[people]\nto = "doors:1"\n', "doors:1", "NEREID_MODEL=people is a route to it; first"),
        ('[people]\nto = "doors:1"\n', "doors:2", ""),
        ('[people]\nto = "gates"\n', "doors", ""),
        ("[people", "doors", "NEREID_ROUTES_FILE: "),
    ],
)
def test_model_of_a_default_route_is_not_removed(  # noqa: PLR0913, PLR0917 - a table
    control: Control, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], routes: str, reference: str, said: str
) -> None:
    """Nor any while nobody knows what a route stands for."""
    for version in (1, 2, 3):
        assert main(["add", export(control.repository, version), "--name", "doors"]) == 0
    capsys.readouterr()
    (path := control.repository / "routes.toml").write_text(routes, encoding="utf-8")
    monkeypatch.setenv("NEREID_ROUTES_FILE", str(path))
    monkeypatch.setenv("NEREID_MODEL", "people")
    assert main(["remove", reference]) == int(bool(said))
    assert (said or f"{reference} is removed") in one_line(capsys)
    assert control.applied[-1] == ("doors", ["1", "2", "3"] if said else ["1", "3"] if ":" in reference else [])


@pytest.mark.parametrize("before", [(), ("add 1", "add 2", "use doors:1")])
def test_addition_that_triton_cannot_load_changes_nothing(
    repository: Path, control: Control, capsys: pytest.CaptureFixture[str], before: tuple[str, ...]
) -> None:
    for command, _, what in (text.partition(" ") for text in before):
        assert main([command, export(repository, int(what)), "--name", "doors"] if command == "add" else [command, what]) == 0
    source, last = export(repository, 3), sum("add" in text for text in before)
    control.failing = str(last + 1)
    unchanged, loaded = content(repository), control.applied[-1:] or [("doors", [])]
    capsys.readouterr()
    assert main(["add", source, "--name", "doors", "--licence", "MIT"]) == 1
    *_, undone, failed = capsys.readouterr().err.splitlines()
    assert undone == f"nereid: the models in {repository} are as before"
    assert failed == "nereid: Triton cannot load doors: out of luck"
    assert control.applied[-1:] == loaded
    assert content(repository) == unchanged
    control.failing = ""
    assert main(["add", source, "--name", "doors", "--licence", "MIT"]) == 0  # with another number: a Triton may have had that one
    assert control.applied[-1][1][-1] == str(last + 2)


def test_model_may_be_added_elsewhere_with_options(repository: Path, control: Control, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--head yolo --labels a,b,c --size 256x128 --channels BGR --scale 1 --mean 1,2,3 --std 4,5,6 --box-units pixels"
    more = f"--iou 0.5 --resize stretch --floor 0.001 --multi-label --samples {IMAGES} --out {(out := repository / 'out')}"
    assert main(["add", export(repository, 1), "--name", "doors", *options.split(), *more.split()]) == 0

    assert capsys.readouterr().err.splitlines()[-1] == f"nereid: copy {out}/doors to the model repository of a Triton"
    assert control.applied == []
    assert not (repository / "doors").exists()
    found = tomllib.loads((out / "doors" / "model.toml").read_text(encoding="utf-8"))
    assert found["labels"] == ["a", "b", "c"]
    recipe = {"task": "detection", "size": [256, 128], "channels": "BGR", "scale": 1.0, "mean": [1, 2, 3], "std": [4, 5, 6]}
    recipe |= {"resize": "stretch", "head": "yolo", "iou": 0.5, "box_units": "pixels", "sizes": "width_height"}
    recipe |= {"floor": 0.001, "multi_label": True}
    assert found["recipe"] == recipe | {"placement": "center", "interpolation": "bilinear", "shapes": []}


def test_key_prints_its_credential_and_its_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only on a terminal it tells what to do next: elsewhere, stderr may be appended to the file."""
    assert main(["key", "camera-1"]) == 0
    out, err = capsys.readouterr()
    (path := tmp_path / "keys.toml").write_text(err, encoding="utf-8")
    key = keys.ApiKeys(path).find(out.removesuffix("\n").encode())
    assert key is not None
    assert key.id == "camera-1"
    assert out.partition(".")[2].strip() not in err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["key", "camera-1"]) == 0
    another, err = capsys.readouterr()
    assert another != out
    first, second, *_ = err.splitlines()
    assert ("and set NEREID_API_KEYS_FILE to its path" in first, second) == (True, "[camera-1]")
