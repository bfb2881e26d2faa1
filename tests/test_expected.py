"""Suggestions for misspelt names."""

import pytest

from app.expected import suggestion


@pytest.mark.parametrize(
    ("name", "meant"), [("yolo11", "yolo11n"), ("yolo", ""), ("", ""), ("yolo11n" * 1000, ""), ("N_yolox_nano", "yolox_nano")]
)
def test_the_most_similar_name_is_suggested(name: str, meant: str) -> None:
    question = suggestion(name, ["yolox_nano", "yolo11n"], 0.75, prefix="N_")

    assert question == (f"; did you mean N_{meant}?" if meant else "")
