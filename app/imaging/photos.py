"""The photos that are built in, and any image as a model sees it."""

import numpy as np
from numpy.typing import NDArray

from app.host.program import ROOT
from app.imaging.decode import decode
from app.imaging.fit import canvas_size, fit_for
from app.imaging.header import PixelLimits, read_header
from app.model.spec import ModelSpec

PHOTOS = ROOT / "app" / "api" / "documentation" / "page" / "files"
"""Folder with those that the page for browsers shows."""
_LIMITS = PixelLimits(50_000_000, 50_000_000)


def draw_on_canvas(data: bytes, spec: ModelSpec) -> NDArray[np.uint8]:
    """Fit an encoded image to a model's input, UINT8 (height, width, 3); raise GatewayError if it cannot be decoded."""
    header, fit = read_header(data, _LIMITS), fit_for(spec)
    transform = fit.fit(header.width, header.height)
    canvas = np.empty((*canvas_size(fit, transform)[::-1], 3), np.uint8)
    fit.draw(decode(header, transform.min_decode_size, transform.area(canvas)), transform, canvas)
    return canvas
