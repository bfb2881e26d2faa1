"""Served boxes are those of the detector's own pre- and post-processing."""

from io import BytesIO
from pathlib import Path

import httpx
import pytest
from PIL import Image

from tests.conftest import PICTURES, SHARED, json, picture
from tests.reference import QUERY, Reference, Tally, boxes


@pytest.mark.parametrize(("model", "least"), [("yolo11n", 0.98), ("yolox_nano", 0.97)])
@pytest.mark.parametrize(
    "pictures",
    [sorted(PICTURES.glob("*.jpg")), sorted((SHARED / "images").glob("*.jpg"))],
    ids=["sample", "coco"],
)
async def test_served_boxes_are_those_of_the_reference(
    client: httpx.AsyncClient, networks: dict[str, Path], model: str, least: float, pictures: list[Path]
) -> None:
    """Matched by class at IoU 0.9 and confidence 0.25, over all pictures together."""
    if model not in networks:
        pytest.skip(f"the published {model} is not here: there is no ../shared/models")
    if not pictures:
        pytest.skip("there are no pictures in ../shared/images")
    reference = Reference(model, networks[model])
    tally = Tally()
    for path in pictures:
        file = path.read_bytes()
        response = await client.post(f"/predict/{model}", params=QUERY, content=file)
        tally.add(reference.detect(file), boxes(json(response)))
    print(f"{model}: {tally}")  # noqa: T201

    assert tally.expected >= len(pictures) / 2
    assert tally.f1 >= least


async def test_large_photos_keep_their_boxes(client: httpx.AsyncClient, networks: dict[str, Path]) -> None:
    """Decoding a large JPEG at a fraction of its size moves nothing that matters."""
    reference, tally = Reference("yolo11n", networks["yolo11n"]), Tally()
    for name in ("astronaut", "chelsea", "coffee"):
        small = Image.open(BytesIO(picture(f"{name}.jpg")))
        large = BytesIO()
        small.resize((small.width * 6, small.height * 6), Image.Resampling.BICUBIC).save(large, "JPEG", quality=90)
        response = await client.post("/predict/yolo11n", params=QUERY, content=large.getvalue())
        tally.add(reference.detect(large.getvalue()), boxes(json(response)))

    assert tally.expected >= 3
    assert tally.f1 >= 0.95
