"""The published networks for text, as `pull ocr` composes them, find and read what was drawn."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from app.imaging.fit import canvas_size, fit_for
from app.model.spec import ModelSpec, from_triton_config
from app.text.outputs import decode_steps, read_text
from app.triton.config_file import read_config_file
from app.zoo import registry
from app.zoo.inference import open_session, run
from app.zoo.pull import pull
from app.zoo.repository import Repository

TEXT = "Nereid reads 36 lines"


@pytest.fixture(scope="module")
def repository(text_networks: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Repository:
    repository = Repository(tmp_path_factory.mktemp("text"))
    for name, network in text_networks.items():
        pull(name, registry.load()[name], repository, source=network)
    return repository


def spec_of(name: str, repository: Repository) -> ModelSpec:
    return from_triton_config(read_config_file(repository.path / name / "config.pbtxt"), "1")


def ask(name: str, repository: Repository, pixels: NDArray[np.uint8]) -> dict[str, NDArray[np.generic]]:
    """Return the outputs of a model for an image, which is fitted as the gateway does it."""
    spec = spec_of(name, repository)
    fit = fit_for(spec)
    transform = fit.fit(pixels.shape[1], pixels.shape[0])
    canvas = np.empty(spec.shape_of(canvas_size(fit, transform)), np.uint8)
    fit.draw(pixels, transform, canvas)
    return run(open_session(repository.path / name / "1/model.onnx"), {"image": canvas[None]})


def drawn(text: str = TEXT) -> NDArray[np.uint8]:
    """Draw a line of text, (60, width, 3), dark on yellow: with channels in another order, it is dark on blue."""
    font = ImageFont.load_default(36)
    picture = Image.new("RGB", (int(font.getlength(text)) + 24, 60), (250, 230, 120))
    ImageDraw.Draw(picture).text((12, 8), text, fill=(20, 20, 90), font=font)
    return np.asarray(picture)


@pytest.mark.parametrize("text", ["36", TEXT, f"{TEXT}, {TEXT.lower()} and 1,249.50 EUR"])
def test_line_is_read(repository: Repository, text: str) -> None:
    """With a character wrong, the labels would be shifted. The widths are those of three buckets."""
    spec = spec_of("ocr_recognition", repository)
    found, score = read_text(decode_steps(spec, ask(spec.name, repository, drawn(text))), spec.labels)

    assert (found, score > 0.9) == (text, True)
    assert (len(spec.labels), spec.labels[0], spec.labels[-1], "\u3000" in spec.labels) == (18_710, "", " ", True)


def test_line_that_is_upside_down(repository: Repository) -> None:
    upright, turned = (ask("ocr_direction", repository, pixels)["probabilities"][0] for pixels in (drawn(), drawn()[::-1, ::-1]))

    assert spec_of("ocr_direction", repository).labels == ("0", "180")
    assert upright[0] > 0.9
    assert turned[1] > 0.9
