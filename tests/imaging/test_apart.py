"""AVIF and HEIC, which are decoded in processes of their own."""

import os
import signal
import struct
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import cv2
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from app.errors import GatewayFull, InvalidImage
from app.imaging.apart import Decoders
from app.imaging.heif import find_size
from tests.imaging.samples import AVIF, HEIC, NOISE, PIXELS, encode, with_property


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    made = Decoders()
    yield made
    made.close()


def program() -> psutil.Process:
    return max(psutil.Process().children(), key=lambda child: child.create_time())


def check_blocks(pixels: NDArray[np.uint8]) -> None:
    """Demand upright pixels in RGB, of the size of the image, not of its tile."""
    np.testing.assert_allclose(pixels.astype(int), PIXELS, atol=3)


@pytest.mark.parametrize(("turns", "axis"), [(1, 0), (2, 1), (3, None)])
def test_rotation_and_mirroring_of_an_avif_are_applied(decoders: Decoders, turns: int, axis: int | None) -> None:
    """First the rotation, then the mirroring, also behind a large profile. Source: ISO/IEC 23008-12, 6.5.10 and 6.5.12."""
    at = AVIF.index(b"irot") + 4
    turned = AVIF[:at] + bytes([turns]) + AVIF[at + 1 :]
    kind, content = (b"colr", b"prof" + bytes(70_000)) if axis is None else (b"imir", bytes([axis]))

    pixels = decoders.decode(with_property(turned, 5, kind, content), "AVIF")

    expected = np.rot90(decoders.decode(AVIF, "AVIF"), turns + 1)  # it is stored a quarter turn off
    np.testing.assert_array_equal(pixels, expected if axis is None else np.flip(expected, axis))


def test_rotation_of_another_item_is_not_applied(decoders: Decoders) -> None:
    end = AVIF.index(b"ipma") - 4 + int.from_bytes(AVIF[AVIF.index(b"ipma") - 4 : AVIF.index(b"ipma")])
    stored = decoders.decode(AVIF[: end - 1] + AVIF[end - 2 : end - 1] + AVIF[end:], "AVIF")  # its last property is named twice

    np.testing.assert_array_equal(stored, np.rot90(decoders.decode(AVIF, "AVIF")))


CORNER = (16, 1, 8, 1, 0, 2, -24, 2)
MIDDLE = (8, 1, 8, 1, 0, 1, 0, 1)
INVALID = (16, 1, 40, 1, 0, 1, 4, 1)
"""Size, and distance of the centres, as fractions; the corner is the upper quarter of the image as it is stored, 16 x 32 pixels."""


def test_image_is_cropped_to_its_aperture(decoders: Decoders) -> None:
    """Before it is turned. As Chromium shows it, an AVIF is cropped only to an aperture in its corner."""
    for data, name, properties, middle in ((AVIF, "AVIF", 5, False), (HEIC, "HEIC", 3, True)):
        whole = decoders.decode(data, name)
        corner, other, invalid = (
            decoders.decode(with_property(data, properties, b"clap", struct.pack(">8l", *aperture)), name)
            for aperture in (CORNER, MIDDLE, INVALID)
        )
        np.testing.assert_allclose(corner.astype(int), whole[:, 24:], atol=3)
        np.testing.assert_array_equal(other, whole[4:12, 12:20] if middle else whole)
        np.testing.assert_array_equal(invalid, whole)


def test_large_frame_behind_a_small_size_is_invalid(decoders: Decoders) -> None:
    """It would take 150 MB; the limit is 16 MiB more than for the small size. Other files are decoded as before."""
    large = cv2.imencode(".avif", np.zeros((3000, 4000, 3), np.uint8), [cv2.IMWRITE_AVIF_SPEED, 10])[1].tobytes()
    assert decoders.decode(large, "AVIF").shape == (3000, 4000, 3)
    with pytest.raises(InvalidImage, match="more memory or time"):
        decoders.decode(large.replace(struct.pack(">LL", 4000, 3000), struct.pack(">LL", 64, 48)), "AVIF")
    heic = HEIC.replace(struct.pack(">LL", *find_size(HEIC)), struct.pack(">LL", 16, 16))  # in another box, there is another size
    with pytest.raises(InvalidImage):
        decoders.decode(heic, "HEIC")
    check_blocks(decoders.decode(AVIF, "AVIF"))


def test_files_are_decoded_at_once(decoders: Decoders) -> None:
    files = [(HEIC, "HEIC"), (AVIF, "AVIF"), (encode(NOISE, "AVIF"), "AVIF"), (AVIF[:200], "AVIF")] * 10

    def shape(file: tuple[bytes, str]) -> tuple[int, ...] | None:
        try:
            return decoders.decode(*file).shape
        except InvalidImage:
            return None

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(shape, files)) == [(16, 32, 3), (16, 32, 3), (48, 64, 3), None] * 10


def test_program_ignores_signals_to_its_group_and_is_replaced_when_it_dies() -> None:
    """A graceful stop still needs it; a Ctrl-C reaches all processes of the terminal."""
    decoders = Decoders()
    check_blocks(decoders.decode(AVIF, "AVIF"))
    first = program()
    first.send_signal(signal.SIGINT)
    first.terminate()
    check_blocks(decoders.decode(HEIC, "HEIC"))
    assert program() == first

    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    check_blocks(decoders.decode(AVIF, "AVIF"))
    assert program() != first
    decoders.close()
    assert not psutil.pid_exists(first.pid)


def test_program_that_cannot_start_makes_the_gateway_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=BlockingIOError))
    decoders = Decoders()
    with pytest.raises(GatewayFull, match="cannot run another process"):
        decoders.decode(AVIF, "AVIF")
    decoders.close()
