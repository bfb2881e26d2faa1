"""References of models: a name, with a version where a request says which."""

import pytest

from app.model.reference import refer_to, split_reference


@pytest.mark.parametrize(
    ("name", "version", "reference", "parts"),
    [
        ("yolo11n", None, "yolo11n", ("yolo11n", "")),
        ("yolo11n", "", "yolo11n", ("yolo11n", "")),
        ("yolo11n", 2, "yolo11n:2", ("yolo11n", "2")),
        ("a.b-c_9", "10", "a.b-c_9:10", ("a.b-c_9", "10")),
    ],
)
def test_a_reference_has_a_version_only_if_one_is_asked_for(
    name: str, version: int | str | None, reference: str, parts: tuple[str, str]
) -> None:
    assert refer_to(name, version) == reference
    assert split_reference(reference) == parts
