"""Class names are read in the forms in which exporters and people write them."""

import pytest

from app.model.names import parse_names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("red\r\ntraffic, light\n\nblue\n", ["red", "traffic, light", "blue"]),
        ("0  red\r\n1  green\r\n2  blue\r\n", ["red", "green", "blue"]),
        ("0 red\n3 green\n", ["red", "1", "2", "green"]),
        ("1: red\n2: green\n", ["red", "green"]),
        ("1 car\n2 bus\n3 car\n", ["car", "bus", "car"]),
        ("1 Euro\n2 Euro\n", ["1 Euro", "2 Euro"]),
        ('["red", "green"]', ["red", "green"]),
        ('{"1": "red", "2": "green"}', ["red", "green"]),
        ('[{"id": 1, "name": "red"}]', []),
        ('{"red": 0}', []),
        ("[\n{\nred\n", ["[", "{", "red"]),
        ("path: x\nnames:\n  0: red\n  1: 'light green'\nnc: 2\n", ["red", "light green"]),
        ("names:\n- red\n- green\nval: x\n", ["red", "green"]),
        ("nc: 2\nnames: ['red', green]  # colours\n", ["red", "green"]),
        ("names: [ 'red',  # 0\n  green, ]\nnc: 2\n", ["red", "green"]),
        ("", []),
    ],
)
def test_names_are_read_from_a_text(text: str, expected: list[str]) -> None:
    assert parse_names(text) == tuple(expected)
