"""Served boxes are those of the detector's own pre- and post-processing."""

from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from app.imaging import jpeg
from tests.reference_detector import QUERY, MatchCounts, ReferenceDetector, boxes
from tests.support import json
from tests.system.test_files import IMAGE_SETS


@pytest.mark.parametrize(("model", "least"), [("yolo11n", 0.98), ("yolox_nano", 0.97)])
@IMAGE_SETS
async def test_served_boxes_are_those_of_the_reference(
    client: httpx.AsyncClient, networks: dict[str, Path], model: str, least: float, images: list[Path]
) -> None:
    """Matched by class at IoU 0.9 and confidence 0.25, over all images together."""
    if model not in networks:
        pytest.skip(f"the published {model} is not available: there is no ../shared/models")
    if not images:
        pytest.skip("there are no images in ../shared/images")
    reference = ReferenceDetector(model, networks[model])
    tally = MatchCounts()
    for path in images:
        file = path.read_bytes()
        response = await client.post(f"/predict/{model}", params=QUERY, content=file)
        tally.add(reference.detect(file), boxes(json(response)))
    print(f"{model}: {tally}")  # noqa: T201

    assert tally.expected >= len(images) / 2
    assert tally.f1 >= least


@IMAGE_SETS
async def test_large_photos_keep_their_boxes(
    client: httpx.AsyncClient, networks: dict[str, Path], images: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding a photo of 6000 pixels at half its size moves few boxes further than IoU 0.9."""
    if not images:
        pytest.skip("there are no images in ../shared/images")
    reference, tally = ReferenceDetector("yolo11n", networks["yolo11n"]), MatchCounts(overlap=0.9)
    decoded: list[int] = []

    decode = jpeg.decode

    def noted(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        pixels = decode(*arguments, **options)
        decoded.append(0 if pixels is None else max(pixels.shape))
        return pixels

    monkeypatch.setattr(jpeg, "decode", noted)
    for path in images[:24]:
        small = Image.open(path).convert("RGB")
        scale = 6000 / max(small.size)
        large = BytesIO()
        small.resize((round(small.width * scale), round(small.height * scale)), Image.Resampling.BICUBIC).save(large, "JPEG")
        response = await client.post("/predict/yolo11n", params=QUERY, content=large.getvalue())
        tally.add(reference.detect(large.getvalue()), boxes(json(response)))
    print(f"large photos: {tally}")  # noqa: T201

    assert set(decoded) == {3000}
    assert tally.expected >= 3
    assert tally.f1 >= 0.95
