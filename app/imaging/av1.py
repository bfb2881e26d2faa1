"""Read the size of an AV1 frame, and check that it is a single one.

Source: AV1 Bitstream & Decoding Process Specification, 5.3 (units), 5.5 (sequence header).
"""

from app.errors import InvalidImage

_MAX_UNITS = 10_000
_SEQUENCE_HEADER, _FRAME_HEADER, _FRAME = 1, 3, 6
_MAX_SIZE_BYTES = 8


class _Bits:
    """Reads numbers of some bits each, and zeros behind the end."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._value = int.from_bytes(data)
        self._left = 8 * len(data)

    def read(self, count: int) -> int:
        self._left -= count
        return (self._value >> self._left if self._left >= 0 else 0) & ((1 << count) - 1)


def read_size(data: bytes | memoryview) -> tuple[int, int]:
    """Return width and height in pixels, as stored; zeros if there is not one sequence header and one frame.

    A frame may be smaller than its sequence header says, but decoders take no larger one.

    Raises:
        InvalidImage: The data is truncated or broken.
    """
    sizes = []
    frames = 0
    at = 0
    for _ in range(_MAX_UNITS):
        if at >= len(data):
            break
        kind, has_extension, has_size = data[at] >> 3 & 15, data[at] >> 2 & 1, data[at] >> 1 & 1
        at += 1 + has_extension
        size = len(data) - at
        if has_size:
            size, at = _read_leb128(data, at)
        if size < 0 or at + size > len(data):
            raise InvalidImage("the AVIF's frame is truncated")
        if kind == _SEQUENCE_HEADER:
            sizes.append(_read_sequence_header(data[at : at + min(size, 1000)]))
        frames += kind in {_FRAME_HEADER, _FRAME}
        at += size
    return sizes[0] if at >= len(data) and len(sizes) == frames == 1 else (0, 0)


def _read_leb128(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return a number, and the position behind it."""
    value = 0
    for index, byte in enumerate(data[at : at + _MAX_SIZE_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:  # noqa: PLR2004 - the highest bit says that more bytes follow
            return value, at + index + 1
    raise InvalidImage("the AVIF's frame is truncated")


def _read_sequence_header(data: bytes | memoryview) -> tuple[int, int]:
    bits = _Bits(data)
    bits.read(4)  # profile, still picture
    if bits.read(1):  # reduced header
        bits.read(5)  # level
    else:
        _skip_timing_and_operating_points(bits)
    width_bits, height_bits = bits.read(4) + 1, bits.read(4) + 1
    return bits.read(width_bits) + 1, bits.read(height_bits) + 1


def _skip_timing_and_operating_points(bits: _Bits) -> None:
    has_decoder_model = delay_bits = 0
    if bits.read(1):  # timing
        bits.read(64)
        if bits.read(1):  # equal intervals: a number of variable length
            zeros = 0
            while zeros < 32 and not bits.read(1):  # noqa: PLR2004 - that many mean the largest number
                zeros += 1
            bits.read(zeros if zeros < 32 else 0)  # noqa: PLR2004
        has_decoder_model = bits.read(1)
        if has_decoder_model:
            delay_bits = bits.read(5) + 1
            bits.read(32 + 5 + 5)
    has_delays = bits.read(1)
    for _ in range(bits.read(5) + 1):
        bits.read(12)
        if bits.read(5) > 7:  # noqa: PLR2004 - levels from 4.0 on have a tier
            bits.read(1)
        if has_decoder_model and bits.read(1):
            bits.read(2 * delay_bits + 1)
        if has_delays and bits.read(1):
            bits.read(4)
