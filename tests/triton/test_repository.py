"""Which models of a repository the embedded Triton loads."""

from pathlib import Path

from app.triton.repository import loadable_models


def test_only_pulled_models_are_loadable(tmp_path: Path) -> None:
    for path in (
        "both/config.pbtxt",
        "both/configs/embedded.pbtxt",
        "both/1/model.onnx",
        "production/config.pbtxt",
        "production/2/model.py",
        "embedded/configs/embedded.pbtxt",
        "embedded/10/model.onnx",
        "not_pulled/config.pbtxt",
        "not_embedded/config.pbtxt",
        "not_embedded/1/model.py",
        "no_config/1/model.onnx",
        "no_number/config.pbtxt",
        "no_number/latest/model.onnx",
        "no_folder",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text('# of a test\nname: "m"', encoding="utf-8")
    (tmp_path / "not_pulled" / "1").mkdir()
    (tmp_path / "not_embedded" / "configs").mkdir()
    (tmp_path / "not_embedded" / "configs" / "embedded.pbtxt").write_text("# for another\n\n  # Triton\n", encoding="utf-8")

    assert loadable_models(tmp_path) == ["both", "embedded", "production"]
    assert loadable_models(tmp_path / "nowhere") == []
