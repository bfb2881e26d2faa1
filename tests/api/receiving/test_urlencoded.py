"""Forms of names and values, and images that are declared as such."""

import sys
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.receiving.urlencoded import is_form, split
from app.errors import GatewayError, MalformedRequest
from tests.imaging.samples import FORMATS, NOISE, encode

NAMES = ("image", "file")


@pytest.mark.parametrize("image_format", FORMATS)
def test_an_image_is_no_form(image_format: str) -> None:
    assert not is_form(encode(NOISE, image_format))


@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
def test_an_image_that_curl_has_spoilt_is_told(image_format: str) -> None:
    """`curl --data @image.jpg` drops zero bytes and line breaks."""
    data = encode(NOISE, image_format).translate(None, b"\0\r\n")

    with pytest.raises(MalformedRequest, match=r"as `curl --data` does it; use curl --data-binary @image\.jpg"):
        is_form(data)


def test_fields_are_split() -> None:
    """Escapes are decoded, but a plus sign in base64 stays one."""
    data = b"a=1+2%26&image=ab%2Bc%2fd%3D%3d+&b=&file=data%3Aimage/png%3Bbase64%2C%0D%0AQUJD&c"

    assert split(data, NAMES, 16) == (
        ["ab+c/d==+", "data:image/png;base64,\r\nQUJD"],
        [("a", "1 2&"), ("b", ""), ("c", "")],
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"&".join([b"a=1"] * 17), "the form has too many fields; the maximum is 16"),
        (b"image=QUJD&x=" + b"y" * (1 << 16), "the form has more than 64 KiB beside its image"),
        (b"x" * (1 << 20), "the body is neither an image nor a form; to send a file, use curl"),
    ],
)
def test_too_large_form_is_malformed(data: bytes, message: str) -> None:
    with pytest.raises(MalformedRequest, match=message):
        split(data, NAMES, 16)


@pytest.mark.parametrize("before", range(4))
def test_escapes_are_undone_slice_by_slice(before: int) -> None:
    """Wherever one is cut, the text is the same; no call copies more than a slice, and other threads run in between."""
    copied: list[int] = []

    def note(_: object, event: str, function: Any) -> None:  # noqa: ANN401
        if event == "c_call" and function.__name__ == "replace":
            copied.append(len(function.__self__))

    sys.setprofile(note)
    try:
        images, _ = split(b"image=" + b"x" * before + b"%2B" * (1 << 20) + b"%", NAMES, 16)
    finally:
        sys.setprofile(None)

    assert images == ["x" * before + "+" * (1 << 20) + "%"]
    assert len(copied) > 3
    assert max(copied) <= 1 << 20


@pytest.mark.parametrize("data", [b"image=" + b"%41" * (1 << 20), b"a=" + b"%41" * (1 << 20), b"a=b&" * (1 << 20)])
def test_escapes_cost_little_memory(data: bytes) -> None:
    tracemalloc.start()
    with suppress(MalformedRequest):
        split(data, NAMES, 16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 4 * len(data)


@given(st.text(st.characters(max_codepoint=127)))
def test_any_text_is_split_or_a_gateway_error(text: str) -> None:
    try:
        images, others = split(text.encode(), NAMES, 16)
    except GatewayError:
        return

    assert len(images) + len(others) <= 16
