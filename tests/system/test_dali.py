"""The production variant of a model that takes files, with DALI and the network as an ensemble; here on the CPU.

DALI's wheels have 1 GB, installed, and are part of no environment here. The tests run where they are in that of the embedded
Triton: `.triton/python/bin/python -m pip install nvidia-dali-cuda120`. There, as in NVIDIA's container, they are in a folder of
their own, which PYTHONPATH names.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.embedded.install import install
from app.imaging.fit import Letterbox
from app.settings.schema import Settings
from app.triton.client import TritonClient
from app.triton.messages import bytes_element_size, write_bytes_element
from app.triton.specs import SpecCache
from tests.imaging import samples
from tests.imaging.samples import FORMATS, PIXELS, encode, exif_of, store
from tests.support import IMAGES, REPOSITORY, ROOT, json, sample_image, triton_home
from tests.system.test_files import IMAGE_SETS, check_boxes
from tests.test_model_repository import PRODUCTION, generated

ENSEMBLE, LETTERBOX, NETWORK = "yolo11n_file", "letterbox_640", "yolo11n"
SIDE = 640
OTHER_LETTERBOX = "letterbox_other"
OTHER_PARAMETERS = ('"center"', '"top_left"'), ('"true"', '"false"'), ('"114"', '"7"')
CUT_SHORT = sample_image("coffee.jpg")[:5000]
UNKNOWN = {"GIF", "AVIF"}
"""Formats of the gateway that DALI does not know."""
LETTERBOXES = {
    LETTERBOX: Letterbox((SIDE, SIDE), "center", enlarge=True, pad=114),
    OTHER_LETTERBOX: Letterbox((SIDE, SIDE), "top_left", enlarge=False, pad=7),
}
# Most of these sizes end in a half after scaling, or in a whole number that single precision misses.
ROUNDED = (1280, 721), (1280, 723), (721, 1280), (256, 101), (513, 640), (1152, 641), (999, 333)
PHOTOS = {path.name: path.read_bytes for path in sorted(IMAGES.glob("*.jpg"))}
BLANKS = {f"blank of {size}": partial(encode, Image.new("RGB", size, "white"), "PNG") for size in ROUNDED}
FORMS = {
    f"{image_format} of {size}": partial(encode, Image.fromarray(PIXELS).resize(size, Image.Resampling.BICUBIC), image_format)
    for image_format, size in product(sorted({*FORMATS} - UNKNOWN), [(31, 16), (1000, 10), (701, 1300)])
}
TURNED = {
    f"orientation {number}": partial(encode, Image.fromarray(store(PIXELS, number)), "JPEG", exif=exif_of(number))
    for number in range(1, 9)
}
FILES: dict[str, Callable[[], bytes]] = {**PHOTOS, **BLANKS, **FORMS, **TURNED}


@pytest.fixture(scope="module")
def own(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings of a Triton with the production configs, changed as little as a machine without a GPU needs."""
    install(ROOT / ".triton")
    python = ROOT / ".triton" / "python" / "bin" / "python"
    if subprocess.run([python, "-c", "import nvidia.dali"], capture_output=True, check=False).returncode:
        pytest.skip("nvidia-dali-cuda120 is not installed in .triton/python")
    repository = tmp_path_factory.mktemp("dali") / "repository"
    shutil.copytree(Path(settings.model_repository, NETWORK), repository / NETWORK)
    shutil.copytree(REPOSITORY / LETTERBOX, repository / LETTERBOX, ignore=shutil.ignore_patterns("configs"))
    (repository / ENSEMBLE / "1").mkdir(parents=True)
    (repository / ENSEMBLE / "1" / "model.onnx").touch()
    (repository / ENSEMBLE / "config.pbtxt").write_text(generated(ENSEMBLE, PRODUCTION), encoding="utf-8")
    change(repository / ENSEMBLE / "config.pbtxt", ("max_batch_size: 64", "max_batch_size: 2"))  # that of the embedded network
    change(repository / LETTERBOX / "config.pbtxt", ("KIND_GPU", "KIND_CPU"))
    shutil.copytree(repository / LETTERBOX, repository / OTHER_LETTERBOX)
    change(repository / OTHER_LETTERBOX / "config.pbtxt", (LETTERBOX, OTHER_LETTERBOX), *OTHER_PARAMETERS)
    home = tmp_path_factory.mktemp("triton")
    move_dali(Path(triton_home(home), "python"), home / "dali")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(home / "dali"))
        yield msgspec.structs.replace(settings, model_repository=str(repository), triton_home=str(home), shapes="square")


def move_dali(environment: Path, folder: Path) -> None:
    """Replace the link to an environment by one without DALI, which goes into a folder."""
    linked = environment.resolve()
    environment.unlink()
    (packages,) = linked.glob("lib/python*/site-packages")
    for path in [folder, environment / packages.relative_to(linked)]:
        path.mkdir(parents=True)
    for path in [linked / "bin", linked / "pyvenv.cfg", *packages.iterdir()]:
        (folder / "nvidia" if path.name == "nvidia" else environment / path.relative_to(linked)).symlink_to(path)


def change(config: Path, *replacements: tuple[str, str]) -> None:
    """Replace texts in a config, each of which must be there."""
    text = config.read_text(encoding="utf-8")
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    config.write_text(text, encoding="utf-8")


def file_tensor(file: bytes) -> NDArray[np.uint8]:
    tensor = np.empty(bytes_element_size(file), np.uint8)
    write_bytes_element(file, tensor)
    return tensor


async def draw(client: TritonClient, files: list[bytes], model: str = LETTERBOX) -> dict[str, NDArray[Any]]:
    """Run only the first step of the ensemble, which draws the files."""
    spec = await SpecCache(client).get(ENSEMBLE)
    only = msgspec.structs.replace(spec, name=model, output_names=("image",))
    answer = await client.infer(only, list(map(file_tensor, files)), timeout_seconds=30)
    results = answer.split(only, len(files))
    return {name: np.concatenate([result.outputs[name] for result in results]) for name in results[0].outputs}


@pytest.mark.parametrize(("name", "model"), [*product([*PHOTOS, *BLANKS], LETTERBOXES), *product([*FORMS, *TURNED], [LETTERBOX])])
async def test_file_is_drawn_as_by_the_gateway(own_client: TritonClient, name: str, model: str) -> None:
    file = FILES[name]()
    outputs = await draw(own_client, [file], model)
    expected = np.empty((SIDE, SIDE, 3), np.uint8)
    samples.draw(file, LETTERBOXES[model], expected)
    difference = np.abs(outputs["image"][0].astype(int) - expected)

    assert outputs["decoded"].tolist() == [[1]]
    assert difference.max() <= (0 if name in BLANKS else 2)
    assert difference.mean() <= 0.2  # few differ by more than rounding


async def test_broken_file_of_a_batch_harms_no_other(own_client: TritonClient) -> None:
    """DALI fails for the batch as a whole; here each file has its own answer. Afterwards all is as before."""
    files = [sample_image("chelsea.jpg"), CUT_SHORT, sample_image("astronaut.jpg"), b"text"]
    before = await draw(own_client, [files[0], files[2]])
    outputs = await draw(own_client, files)
    after = await draw(own_client, [files[0], files[2]])

    assert outputs["decoded"].tolist() == [[1], [0], [1], [0]]
    np.testing.assert_array_equal(outputs["image"][[0, 2]], before["image"])
    np.testing.assert_array_equal(after["image"], before["image"])


@IMAGE_SETS
async def test_boxes_are_those_of_the_network_that_takes_pixels(gateway: httpx.AsyncClient, images: list[Path]) -> None:
    await check_boxes(gateway, NETWORK, ENSEMBLE, images)


@pytest.mark.parametrize("file", [CUT_SHORT, *(encode(Image.fromarray(PIXELS), name) for name in sorted(UNKNOWN))])
async def test_image_that_cannot_be_decoded_is_the_callers_fault(gateway: httpx.AsyncClient, file: bytes) -> None:
    status, code = (422, "invalid_image") if file is CUT_SHORT else (415, "unsupported_format")
    assert json(await gateway.post(f"/predict/{ENSEMBLE}", content=file), status)["code"] == code
