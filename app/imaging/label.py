"""Render the label of a box: a name and a score on a filled background.

OpenCV's wheels have fonts inside: Latin, Greek, Cyrillic, Chinese, Japanese, Korean and more. So the machine needs none.
"""

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
# Of a label and of its baseline, in heights of the text.
_LINE_HEIGHT, _BASELINE = 1.4, 1.08
_MAX_CHARACTERS = 40  # of a name
# OpenCV neither joins the letters of these scripts nor turns their order around.
_RIGHT_TO_LEFT = {"R", "AL"}
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
# OpenCV draws this for a character that its fonts do not have.
_REPLACEMENT = "?"
_TEST_SIZE = 16
_BLACK, _WHITE = (0, 0, 0), (255, 255, 255)
# Perceived brightness of red, green and blue (ITU-R BT.601), and where black text begins to be easier to read than white.
_BRIGHTNESS = 0.299, 0.587, 0.114
_BRIGHT = 140


def readable_name(name: str, class_id: int) -> str:
    """Return a name as it can be drawn: on one line, and not too long; `class ID` if its script cannot be drawn."""
    name = "".join(character if character.isprintable() else " " for character in name[: _MAX_CHARACTERS + 1])
    name = unicodedata.normalize("NFC", name).strip()
    if len(name) > _MAX_CHARACTERS:
        name = name[:_MAX_CHARACTERS] + _ELLIPSIS
    return name if name and _can_draw(name) else f"class {class_id}"


class Label(NamedTuple):
    """A text that has room, and how large it will be with its background, pixels."""

    text: str
    text_size: int
    width: int
    height: int


def fit(name: str, score: str, text_size: int, max_width: int, max_height: int) -> Label | None:
    """Choose how much of a name is shown.

    Args:
        name: From `readable_name`; its end is left out if there is no room for it.
        score: Shown in full.
        text_size: Height of a line of text, pixels.
        max_width: Of the label, pixels.
        max_height: Of the label, pixels.

    Returns:
        The label; None if not even the score has room.
    """
    height, margins = round(text_size * _LINE_HEIGHT), 2 * _margin(text_size)
    if height > max_height:
        return None
    text = f"{name} {score}"
    if (width := _width(text, text_size) + margins) > max_width:
        # The widths grow with the number of characters.
        texts = [score, *(f"{name[:length]}{_ELLIPSIS} {score}" for length in range(1, len(name)))]
        fitting = bisect_right(texts, max_width, key=lambda text: _width(text, text_size) + margins)
        if not fitting:
            return None
        text = texts[fitting - 1]
        width = _width(text, text_size) + margins
    return Label(text, text_size, width, height)


def render(label: Label, background: Colour) -> NDArray[np.uint8]:
    """Render a label in black or white, whichever is easier to read: UINT8 (height, width, 3) RGB."""
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
    """Return whether each character is drawn as it should be."""
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
    """Return the font, which is unpacked when the first picture is drawn. Any number of threads may use it."""
    return cv2.FontFace("sans")
