"""Decode files, inside the embedded Triton, for a network that takes pixels; the gateway never imports this."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.errors import GatewayError
from app.imaging.decode import decode
from app.imaging.fit import fit_for
from app.imaging.header import MAX_SIDE, PixelLimits, read_header
from app.model.spec import DECODED, from_triton_config

# The gateway has already checked the headers against its own limits.
_LIMITS = PixelLimits(MAX_SIDE**2, MAX_SIDE**2)


class FileInput:
    """Draws files on canvases according to the parameters in a model's config."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Read the parameters in the config of a model that takes files, as Triton's JSON; raise UnsupportedModel."""
        spec = from_triton_config(config, "")
        self._fit, self._size, self._pad = fit_for(spec), spec.input_size, spec.pad

    def draw(self, files: Sequence[bytes]) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.int32]]]:
        """Decode files to canvases UINT8 (n, height, width, 3) RGB, and the output `DECODED` INT32 (n, 1), 0 for failures."""
        width, height = self._size
        canvases = np.empty((len(files), height, width, 3), np.uint8)
        decoded = [[self._draw(file, canvas)] for file, canvas in zip(files, canvases, strict=True)]
        return canvases, {DECODED: np.array(decoded, np.int32)}

    def _draw(self, file: bytes, canvas: NDArray[np.uint8]) -> bool:
        try:
            header = read_header(file, _LIMITS)
            transform = self._fit.fit(header.width, header.height)
            self._fit.draw(decode(header, transform.min_decode_size, transform.area(canvas)), transform, canvas)
        except GatewayError:
            canvas[:] = self._pad
            return False
        return True
