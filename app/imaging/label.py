"""Render the label of a box: a name and a score on a filled background, in fonts that OpenCV's wheels contain."""

import unicodedata
from bisect import bisect_right
from functools import cache, lru_cache
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

Colour = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""

_WEIGHT = 500
# Height of a label, and position of its baseline, in multiples of the text size.
_LINE_HEIGHT, _BASELINE = 1.4, 1.08
_MAX_CHARACTERS = 40  # in a name
# OpenCV neither joins the letters of these scripts nor reverses their order.
_RIGHT_TO_LEFT = {"R", "AL"}
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
# OpenCV draws this for a character that its fonts do not contain.
_REPLACEMENT = "?"
_TEST_SIZE = 16
_BLACK, _WHITE = (0, 0, 0), (255, 255, 255)
# Perceived brightness of red, green and blue (ITU-R BT.601), and above which brightness black text is easier to read.
_BRIGHTNESS = 0.299, 0.587, 0.114
_BRIGHT = 140


def readable_name(name: str, class_id: int) -> str:
    """Return a name on one line, truncated if it is too long; `class ID` if it is empty or its script cannot be drawn."""
    name = "".join(character if character.isprintable() else " " for character in name[: _MAX_CHARACTERS + 1])
    name = unicodedata.normalize("NFC", name).strip()
    if len(name) > _MAX_CHARACTERS:
        name = name[:_MAX_CHARACTERS] + _ELLIPSIS
    return name if name and _can_draw(name) else f"class {class_id}"


class Label(NamedTuple):
    """A text, and the size of the label with its background, in pixels."""

    text: str
    text_size: int
    width: int
    height: int


def fit(name: str, score: str, text_size: int, max_width: int, max_height: int) -> Label | None:
    """Make a label, sizes in pixels, of a name from `readable_name`, perhaps truncated, and a score; None without room for it."""
    height, margins = round(text_size * _LINE_HEIGHT), 2 * _margin(text_size)
    if height > max_height:
        return None
    text = f"{name} {score}"
    if (width := _width(text, text_size) + margins) > max_width:
        # Ascending by width, as the binary search requires.
        texts = [score, *(f"{name[:length]}{_ELLIPSIS} {score}" for length in range(1, len(name)))]
        fitting = bisect_right(texts, max_width, key=lambda text: _width(text, text_size) + margins)
        if not fitting:
            return None
        text = texts[fitting - 1]
        width = _width(text, text_size) + margins
    return Label(text, text_size, width, height)


def render(label: Label, background: Colour) -> NDArray[np.uint8]:
    """Return a label as UINT8 (height, width, 3) RGB, with its text in black or white, whichever is easier to read."""
    pixels = np.full((label.height, label.width, 3), background, np.uint8)
    colour = _BLACK if np.dot(background, _BRIGHTNESS) > _BRIGHT else _WHITE
    start = _margin(label.text_size), round(label.text_size * _BASELINE)
    cv2.putText(pixels, label.text, start, colour, _face(), label.text_size, _WEIGHT)
    return pixels


def _margin(text_size: int) -> int:
    return max(2, text_size // 4)


def _width(text: str, text_size: int) -> int:
    return int(cv2.getTextSize((0, 0), text, (0, 0), _face(), text_size, _WEIGHT)[2])


@lru_cache(4096)
def _can_draw(text: str) -> bool:
    missing = _draw_character(_REPLACEMENT)
    return not any(
        unicodedata.bidirectional(character) in _RIGHT_TO_LEFT or np.array_equal(_draw_character(character), missing)
        for character in text
        if character != _REPLACEMENT
    )


def _draw_character(character: str) -> NDArray[np.uint8]:
    drawn = np.zeros((2 * _TEST_SIZE, 2 * _TEST_SIZE), np.uint8)
    cv2.putText(drawn, character, (0, _TEST_SIZE), 255, _face(), _TEST_SIZE, _WEIGHT)
    return drawn


@cache
def _face() -> cv2.FontFace:
    # Loaded at first use; thread-safe.
    return cv2.FontFace("sans")
