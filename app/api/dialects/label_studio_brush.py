"""Label Studio's encoding of masks, that of the package `rle-pack` of https://github.com/thi-ng/umbrella, over RGBA values.

Source: `encode_rle` and `decode_rle` in label_studio_sdk/converter/brush.py.
"""

import cv2
import numpy as np

_CHANNELS = 4
_OPAQUE = 255
# The header: the number of values (32 bits), the bits of a value (5 bits, minus 1), and four sizes of runs (4 bits each, minus 1).
_WORD_BITS = 8
_RUN_BITS = (3, 4, 8, 16)
_LONGEST = 1 << 16
# A run of the fourth size: 1, 3 (2 bits), its length minus 1 (16 bits) and its value (8 bits).
_RECORD = 0b111 << 24
_RECORD_BITS = 27


def encode_mask(png: bytes, offset: tuple[int, int], width: int, height: int) -> list[int]:
    """Encode a mask, whose PNG begins at `offset`, as an image of this size: white in the mask, transparent elsewhere."""
    pixels = np.asarray(cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_GRAYSCALE))
    rows = np.zeros((pixels.shape[0], pixels.shape[1] + 2), np.int8)
    rows[:, 1:-1] = pixels > 0
    edges = np.diff(rows, axis=1)
    x, y = offset
    starts, ends = ((y + row) * width + x + column for row, column in (np.nonzero(edges == 1), np.nonzero(edges == -1)))
    lengths = np.diff(np.column_stack([starts, ends]).ravel(), prepend=0, append=width * height) * _CHANNELS
    values = np.resize(np.array([0, _OPAQUE], np.uint32), len(lengths))
    counts = -(-lengths // _LONGEST)  # of the records of each run
    records = np.full(counts.sum(), _LONGEST - 1, np.uint32)
    is_used = counts > 0
    records[np.cumsum(counts)[is_used] - 1] = (lengths[is_used] - 1) % _LONGEST
    records = (records << _WORD_BITS) | np.repeat(values, counts) | _RECORD
    head = f"{width * height * _CHANNELS:032b}{_WORD_BITS - 1:05b}" + "".join(f"{bits - 1:04b}" for bits in _RUN_BITS)
    bits = np.unpackbits(records.astype(">u4").view(np.uint8).reshape(-1, 4), axis=1)[:, -_RECORD_BITS:]
    encoded: list[int] = np.packbits(np.concatenate([np.array([*map(int, head)], np.uint8), bits.ravel()])).tolist()
    return encoded
