"""Config files of models, and which models of a repository can be loaded."""

from pathlib import Path

import pytest

from app.triton.config_file import ConfigFileError, read_config_file, unloadable_models
from app.triton.repository import loadable_models


def write(folder: Path, files: dict[str, str]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "message"), [(b"max_batch_size: many", ""), (b"input {", ""), (b"\xff", ""), (None, "No such file or directory")]
)
def test_config_that_is_not_valid_is_an_error_of_one_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "config.pbtxt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigFileError) as caught:
        read_config_file(path)

    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("is_embedded", "invalid"), [(True, ["broken", "own"]), (False, ["broken"])])
def test_models_that_no_triton_can_load_are_named(tmp_path: Path, *, is_embedded: bool, invalid: list[str]) -> None:
    files = {"sound/config.pbtxt": "", "broken/config.pbtxt": "input {", "own/configs/embedded.pbtxt": "input {"}
    networks = "sound/1/model.onnx", "exported/best.onnx", "version/1/model.onnx", ".add-unfinished/model.onnx", "file.onnx"
    write(tmp_path, files | dict.fromkeys((*networks, "own/config.pbtxt", "nothing/notes.txt"), ""))
    found = unloadable_models(tmp_path, is_embedded=is_embedded)

    states = dict.fromkeys(invalid, "invalid") | dict.fromkeys(("exported", "version"), "no_config")
    assert {name: one.state for name, one in found.items()} == states
    for name, (_, reason) in found.items():
        assert reason.startswith(f"{tmp_path}/{name}")
        assert (f"`nereid add {tmp_path}/{name}`" in reason) is (name == "exported")
        assert "\n" not in reason
    assert unloadable_models(tmp_path / "nowhere", is_embedded=is_embedded) == {}


def test_models_with_a_config_and_a_version_are_loadable(tmp_path: Path) -> None:
    files = """
        both/config.pbtxt both/configs/embedded.pbtxt both/1/model.onnx elsewhere/config.pbtxt elsewhere/2/model.py
        embedded/configs/embedded.pbtxt embedded/10/model.onnx comments/config.pbtxt comments/1/model.py no_folder
        no_version/config.pbtxt no_config/1/model.onnx no_number/config.pbtxt no_number/latest/model.onnx
    """
    write(tmp_path, dict.fromkeys(files.split(), '# of a test\nname: "m"'))
    write(tmp_path, {"comments/configs/embedded.pbtxt": "# for another\n\n  # Triton\n"})
    (tmp_path / "no_version" / "1").mkdir()

    assert loadable_models(tmp_path) == ["both", "elsewhere", "embedded"]
    assert loadable_models(tmp_path / "nowhere") == []
