"""Label Studio's encoding of masks, that of the package `rle-pack` of https://github.com/thi-ng/umbrella, over RGBA values.

Source: `encode_rle` and `decode_rle` in label_studio_sdk/converter/brush.py.
"""

from base64 import b64decode
from io import BytesIO
from itertools import cycle
from threading import Lock

import numpy as np
from PIL import Image

_CHANNELS = 4
# The bits of a value (5 bits, minus 1), and four sizes of runs (4 bits each, minus 1): 8; 3, 4, 8, 16.
_SIZES = "00111" + "0010001101111111"
_LONGEST = 1 << 16
# A run, and its size: the fourth.
_RUN = "1" + "11"
# Decoding takes about five bytes a pixel of the mask, which may be as large as the image.
_ONE_AT_A_TIME = Lock()


def encode(png: str, offset: tuple[int, int], width: int, height: int) -> list[int]:
    """Encode a mask as an image of this size: white in the mask, transparent elsewhere; return nothing if the mask is empty.

    Its PNG, in base64, begins at `offset`: column and row.
    """
    with _ONE_AT_A_TIME:
        pixels = np.asarray(Image.open(BytesIO(b64decode(png))).convert("L"))
        rows, columns = np.nonzero(np.diff(pixels > 0, axis=1, prepend=False, append=False))
    if not len(rows):
        return []
    x, y = offset
    edges = (y + rows) * width + x + columns
    lengths = np.diff(edges, prepend=0, append=width * height) * _CHANNELS
    bits = [f"{width * height * _CHANNELS:032b}", _SIZES]
    for length, value in zip(lengths.tolist(), cycle((0, 255))):
        bits += [f"{_RUN}{min(_LONGEST, length - start) - 1:016b}{value:08b}" for start in range(0, length, _LONGEST)]
    text = "".join(bits)
    nbytes = -(-len(text) // 8)
    return list(int(text.ljust(8 * nbytes, "0"), 2).to_bytes(nbytes))
