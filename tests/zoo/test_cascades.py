"""Cascades of a user's own: what `nereid add` refuses, and what it writes."""

from functools import partial
from pathlib import Path

import pytest

from app.cascade import catalog
from app.embedded import control
from app.host.program import CommandError
from app.settings.schema import Settings
from app.zoo import cascades
from app.zoo.repository import Repository
from tests.fakes import models

PLATES = """
title = "Number plates"
[steps.plate]
model = "six_columns"
confidence = 0.4
[steps.text]
model = "stretched_columns"
of = "plate"
margin = 0.1
classes = ["red"]
"""


@pytest.fixture
def writable(tmp_path: Path) -> Repository:
    """A repository with the small models, and no cascades."""
    models.write(tmp_path / "models")
    return Repository(tmp_path / "models")


def add(repository: Repository, text: str, name: str | None = None, **settings: str) -> None:
    path = repository.path.with_name("plates.toml")
    path.write_text(text)
    given = Settings(model_repository=str(repository.path), **settings)  # type: ignore[arg-type]
    cascades.add(path, name, repository, partial(control.read_spec, given))


def test_cascade_is_written_replaced_and_removed(writable: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    add(writable, PLATES)
    assert "POST /predict/plates asks plate (six_columns), text (stretched_columns of plate)" in capsys.readouterr().err
    add(writable, PLATES.replace("0.4", "0.6"), "doors")
    add(writable, PLATES.replace("0.4", "0.5"))

    found = catalog.read(writable.path / catalog.FILE)
    assert {name: one.steps["plate"].confidence for name, one in found.items()} == {"doors": 0.6, "plates": 0.5}
    assert found["plates"].steps["text"].classes == ("red",)
    assert cascades.put("doors", None, writable)
    assert not cascades.put("doors", None, writable)
    assert [*catalog.read(writable.path / catalog.FILE)] == ["plates"]
    assert {path.name for path in writable.path.glob(".*")} == {".lock"}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"six_columns"', f'"six_columns:{"9" * 5000}"', "[steps.plate] Expected `str` matching regex"),
        ("margin = 0.1", f"margin = {'[' * 100_000}", "plates.toml: maximum recursion depth exceeded"),
        (PLATES, "#" * (1 << 20) + "#", "plates.toml: longer than 1 MiB"),
        ('"six_columns"', '"six_rows"', "[steps.plate] model: neither"),
        ('"six_columns"', '"six_columns:3"', "a Triton elsewhere has six_columns:3"),
        ('"red"', '"rod"', "[steps.text] classes: six_columns has no class rod; did you mean red?"),
        ("margin = 0.1", 'crop = "corners"', "[steps.text] crop: six_columns is a detector, whose objects have no corners"),
        ('"six_columns"', '"sorter"', "[steps.plate] model: sorter is a classifier, which finds no objects"),
    ],
)
def test_error_names_the_table_and_key(writable: Repository, old: str, new: str, said: str) -> None:
    text = (writable.path / "six_columns" / "config.pbtxt").read_text()
    folder = writable.path / "sorter"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text.replace("six_columns", "sorter").replace("[2, 6]", "[2]"))
    with pytest.raises(CommandError) as refused:
        add(writable, PLATES.replace(old, new))

    assert said in str(refused.value)
    assert not (writable.path / catalog.FILE).exists()


def test_name_has_one_meaning_and_a_file_has_an_end(writable: Repository) -> None:
    for name, said in (("ocr", "a cascade of the program"), ("fragile", "is a model"), ("a b", "not a name")):
        with pytest.raises(CommandError, match=said):
            add(writable, PLATES, name)
    (path := writable.path / catalog.FILE).symlink_to("/dev/zero")
    with pytest.raises(CommandError, match="longer than 1 MiB"):
        catalog.read(path)
