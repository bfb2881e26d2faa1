"""Labels: names in many scripts, their truncation, and their contrast with the background."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.imaging.drawing import colour_of
from app.imaging.label import Colour, fit, readable_name, render

RED: Colour = (230, 25, 75)


@pytest.mark.parametrize(
    "name", ["person", "traffic light", "行人", "自転車", "자전거", "Пешеход", "ποδήλατο", "Fußgänger à vélo", "a?b"]
)
def test_a_name_is_drawn_in_its_own_script(name: str) -> None:
    assert readable_name(name, 3) == name


@pytest.mark.parametrize("name", ["", " \n", "\N{CAT FACE}", "คน", "אופניים", "العربية", "\ud800"])
def test_a_name_that_cannot_be_drawn_is_replaced_by_the_class_id(name: str) -> None:
    assert readable_name(name, 3) == "class 3"


@pytest.mark.parametrize(
    ("name", "shown"),
    [("stop\nsign", "stop sign"), ("\x00\x1b[31mcar", "[31mcar"), ("e\u0301te\u0301", "\xe9t\xe9"), ("x" * 1000, "x" * 40 + "…")],
)
def test_a_name_is_one_short_line(name: str, shown: str) -> None:
    assert readable_name(name, 3) == shown


@pytest.mark.parametrize(
    ("max_width", "text"), [(200, "fire hydrant 0.87"), (100, "fire hydr… 0.87"), (50, "f… 0.87"), (40, "0.87"), (20, None)]
)
def test_a_name_is_cut_before_its_score(max_width: int, text: str | None) -> None:
    label = fit("fire hydrant", "0.87", 12, max_width, 100)

    assert (label and label.text) == text


@given(st.text(max_size=50), st.integers(6, 80), st.integers(1, 500), st.integers(1, 200))
def test_a_label_fits(name: str, text_size: int, max_width: int, max_height: int) -> None:
    label = fit(readable_name(name, 1), "0.50", text_size, max_width, max_height)

    if label is not None:
        assert label.width <= max_width
        assert label.height <= max_height
        assert render(label, RED).shape == (label.height, label.width, 3)


@pytest.mark.parametrize("text_size", [12, 40])
def test_text_lies_inside_its_label(text_size: int) -> None:
    label = fit("Ågypq 行", "0.87", text_size, 1000, 1000)

    assert label is not None
    pixels = render(label, RED)
    for border in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (border == RED).all()
    assert (pixels != RED).any()


@pytest.mark.parametrize("class_id", range(16))
def test_text_stands_out_from_its_background(class_id: int) -> None:
    """The contrast ratio is at least 3 : 1, as WCAG 2.2 requires for bold text and graphics (1.4.3, 1.4.11)."""

    def luminance(colour: Colour) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in np.array(colour) / 255]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    background = colour_of(class_id)
    label = fit("person", "0.87", 30, 1000, 1000)
    assert label is not None
    pixels = render(label, background)
    text = 0 if (pixels == 0).all(axis=2).any() else 255
    assert (pixels == text).all(axis=2).any()
    lighter, darker = sorted((luminance(background), luminance((text, text, text))), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) >= 3
