"""The model repository of a measurement."""

from pathlib import Path

from app.settings.schema import Settings
from bench.models.repository import read_labels, write_model, write_models


def test_the_fp32_variant_of_the_real_model_takes_floats(tmp_path: Path, settings: Settings) -> None:
    """The reference's yolo11n is the same network without its first nodes."""
    write_models(tmp_path, [Path(settings.model_repository) / "yolo11n"])
    text = (tmp_path / "yolo11n_fp32" / "config.pbtxt").read_text()

    assert 'name: "images" data_type: TYPE_FP32 dims: [ 3, 640, 640 ]' in text
    assert read_labels(tmp_path, "yolo11n_fp32").startswith("person\nbicycle\ncar\n")
    assert read_labels(tmp_path, "yolo11n") == read_labels(tmp_path, "yolo11n_fp32")


def test_without_the_real_model_there_are_only_fixtures(tmp_path: Path) -> None:
    write_models(tmp_path)

    assert not (tmp_path / "yolo11n").exists()
    assert (tmp_path / "null" / "config.pbtxt").is_file()
    assert (tmp_path / "null" / "1" / "model.py").is_file()
    assert read_labels(tmp_path, "null") == "nothing"


def test_a_model_is_linked_but_for_the_files_that_change(tmp_path: Path, settings: Settings) -> None:
    source = Path(settings.model_repository) / "yolo11n"
    config = source / "configs" / "embedded.pbtxt"
    write_model(source, tmp_path, {config: "changed"})
    linked, written = tmp_path / "yolo11n" / "config.pbtxt", tmp_path / "yolo11n" / "configs" / "embedded.pbtxt"

    assert linked.readlink() == source / "config.pbtxt"
    assert written.read_text() == "changed" != config.read_text()
