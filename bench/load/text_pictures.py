"""Pictures of rendered lines of text: Latin, digits and Chinese; rotated, blurred, on photos; strips, small ones and pages."""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from bench.load.images import SAMPLE_FOLDER, SEED

PACKAGES = "fonts-dejavu-core fonts-noto-cjk"
"""Debian's packages of the fonts."""
_FOLDER = Path("/usr/share/fonts")
_LATIN = [_FOLDER / "truetype" / "dejavu" / f"DejaVu{name}.ttf" for name in ("Sans", "Sans-Bold", "Serif", "SansMono")]
_CHINESE = [_FOLDER / "opentype" / "noto" / f"Noto{name}.ttc" for name in ("SansCJK-Regular", "SerifCJK-Regular")]
_WORDS = (  # noqa: SIM905 - a list of them would be as long as a page
    "harbour lantern meadow quartz jigsaw vexing kettle Bridge Window Garden River Station Platform Ticket Museum Library exit "
    "Open Closed Monday Friday yellow purple seventh wharf zephyr Oxford copper velvet puzzle mighty whisky GATE TOTAL"
).split()
_PHRASES = (  # noqa: SIM905 - as above
    "欢迎光临 请勿吸烟 紧急出口 北京火车站 今日天气晴朗 图书馆二楼 小心地滑 收费停车场 人民医院 新鲜水果 电话号码 营业时间 "
    "上海浦东机场 中华人民共和国 长江三峡 春夏秋冬 学习使人进步 安全第一 保持安静 谢谢合作 红茶绿茶 东南西北 文化广场 地铁一号线"
).split()
_COLOURS = [
    ((15, 15, 20), (250, 250, 245)),
    ((255, 255, 255), (30, 60, 110)),
    ((150, 20, 20), (255, 240, 200)),
    ((40, 40, 40), (190, 200, 190)),
]
"""Pairs of text and background."""
_PAGE_LINES = 5
_COUNTS = {"plain": 40, "rotated": 30, "blurred": 24, "photo": 30, "strip": 8, "small": 8, "page": 12}
"""Number of pictures of each kind; a page has five lines, the others one, together 200."""


class TextPicture(NamedTuple):
    """A picture, and what is written on it."""

    kind: str
    body: bytes
    """PNG."""
    lines: list[str]
    """The lines from top to bottom."""


def text_pictures() -> Iterator[TextPicture]:
    """Render 200 lines, with the same pixels wherever Pillow and the fonts are the same; raises OSError if a font is missing."""
    random = np.random.default_rng(SEED)
    for kind, count in _COUNTS.items():
        for index in range(count):
            if kind == "page":
                # At the largest size the page is larger than what detectors are given.
                image, lines = _page(random, int(random.integers(22, 40)) if index % 3 else 90)
            else:
                lines = [_text(random, index, 7 if kind == "strip" else int(random.integers(1, 5)))]
                image = _draw(random, kind, lines[0])
            file = BytesIO()
            image.save(file, "PNG")
            yield TextPicture(kind, file.getvalue(), lines)


def _text(random: np.random.Generator, index: int, words: int) -> str:
    """Make a line of some words: Latin, digits, Chinese, or all of them, in turn."""

    def digits() -> str:
        form = str(random.choice(["%03d-%04d", "%d.%02d", "%02d:%02d", "No. %d/%d", "+%d %06d"]))
        return form % tuple(random.integers(1, 99, 2).tolist())

    match index % 4:
        case 0:
            return " ".join(random.choice(_WORDS, words))
        case 1:
            return " ".join(digits() for _ in range(words))
        case 2:
            return "".join(random.choice(_PHRASES, words))
        case _:
            return f"{random.choice(_PHRASES)} {digits()} {random.choice(_WORDS)}"


def _draw(random: np.random.Generator, kind: str, text: str) -> Image.Image:
    """Draw a line."""
    match kind:
        case "rotated":  # by up to 30 degrees, or upside down, or vertical
            angle = float(random.choice([random.uniform(-30, 30), random.uniform(-8, 8), random.uniform(-30, 30), 180, 90]))
            image = _sheet(random, text, margin=40)
            return image.rotate(angle, Image.Resampling.BICUBIC, expand=True, fillcolor=image.getpixel((0, 0)))
        case "blurred":
            image = _sheet(random, text, size=int(random.integers(26, 56)))
            return image.filter(ImageFilter.GaussianBlur(float(random.uniform(0.8, 2.2))))
        case "photo":
            return _on_photo(random, text)
        case "small":
            return _sheet(random, text, size=14, margin=4)
        case _:
            return _sheet(random, text, margin=2 if kind == "strip" else None)


def _font(random: np.random.Generator, text: str, size: int) -> ImageFont.FreeTypeFont:
    fonts = _LATIN if text.isascii() else _CHINESE
    return ImageFont.truetype(str(fonts[int(random.integers(len(fonts)))]), size)


def _sheet(random: np.random.Generator, text: str, size: int | None = None, margin: int | None = None) -> Image.Image:
    """Draw a line on an even ground."""
    font = _font(random, text, size or int(random.integers(18, 56)))
    left, top, right, bottom = map(int, font.getbbox(text))
    edge = int(random.integers(10, 120)) if margin is None else margin
    ink, ground = _COLOURS[int(random.integers(len(_COLOURS)))]
    image = Image.new("RGB", (right - left + 2 * edge, bottom - top + 2 * edge), ground)
    ImageDraw.Draw(image).text((edge - left, edge - top), text, ink, font)
    return image


def _on_photo(random: np.random.Generator, text: str) -> Image.Image:
    """Draw a line with an outline on a photo without text of its own."""
    width, height = [(640, 480), (1024, 683), (2560, 1707)][int(random.integers(3))]
    with Image.open(SAMPLE_FOLDER / f"{random.choice(['chelsea', 'coffee'])}.jpg") as photo:
        image = photo.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    font = _font(random, text, width // 26)
    left, top, right, bottom = map(int, font.getbbox(text))
    layer = Image.new("RGBA", (right - left + 20, bottom - top + 20))
    ImageDraw.Draw(layer).text((10 - left, 10 - top), text, "white", font, stroke_width=2, stroke_fill="black")
    layer = layer.rotate(float(random.uniform(-10, 10)), Image.Resampling.BICUBIC, expand=True)
    layer.thumbnail((width, height))
    place = int(random.integers(0, width - layer.width + 1)), int(random.integers(0, height - layer.height + 1))
    image.paste(layer, place, layer)
    return image


def _page(random: np.random.Generator, size: int) -> tuple[Image.Image, list[str]]:
    """Draw lines below each other."""
    lines = [_text(random, int(random.integers(4)), 3) for _ in range(_PAGE_LINES)]
    drawn = [_font(random, line, size) for line in lines]
    width = max(int(font.getlength(line)) for line, font in zip(lines, drawn, strict=True)) + 2 * size
    image = Image.new("RGB", (width, 2 * size * (_PAGE_LINES + 1)), "white")
    for row, (line, font) in enumerate(zip(lines, drawn, strict=True)):
        ImageDraw.Draw(image).text((size, size + 2 * size * row), line, (20, 20, 20), font)
    return image, lines
