"""Pictures of which the gateway must find the same, whichever client sends them."""

from io import BytesIO

from PIL import Image, ImageDraw, ImageFont

from tests.support import sample_image

LINES = ["Nereid reads", "two lines 2026"]
PORTRAIT = sample_image("astronaut.jpg")


def _page() -> bytes:
    image = Image.new("RGB", (640, 240), "white")
    for number, line in enumerate(LINES):
        ImageDraw.Draw(image).text((40, 40 + 90 * number), line, "black", ImageFont.load_default(48))
    image.save(file := BytesIO(), "PNG")
    return file.getvalue()


PAGE = _page()
"""Has these lines of text."""
