"""Lines that the published model reads alone and with others."""

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from app.imaging.fit import canvas_size, fit_for
from app.model.spec import from_triton_config
from app.text.outputs import decode_steps, read_text
from app.triton.config_file import read_config_file
from app.zoo.inference import open_session, run
from tests.support import REPOSITORY

FOLDER = REPOSITORY / "ocr_recognition"
TEXTS = ("Exit", "Platform 9", "No. 4603", "Harbour", "Ticket 17-0042", "OPEN 08:30")


@pytest.mark.system
@pytest.mark.skipif(not FOLDER.is_dir(), reason="the published network of ocr_recognition has not been pulled")
def test_the_text_of_a_line_does_not_depend_on_its_batch() -> None:
    spec = from_triton_config(read_config_file(FOLDER / "config.pbtxt"), "1")
    session, fit = open_session(FOLDER / "1" / "model.onnx"), fit_for(spec)

    def prepare(text: str) -> NDArray[np.uint8]:
        pixels = np.full((44, 22 * len(text) + 16, 3), 240, np.uint8)
        cv2.putText(pixels, text, (8, 32), cv2.FONT_HERSHEY_DUPLEX, 1.0, (20, 20, 20), 1, cv2.LINE_AA)
        transform = fit.fit(pixels.shape[1], pixels.shape[0])
        canvas = np.empty((*canvas_size(fit, transform)[::-1], 3), np.uint8)
        fit.draw(pixels, transform, canvas)
        return canvas

    def read(lines: list[NDArray[np.uint8]]) -> list[tuple[str, float]]:
        outputs = run(session, {spec.input_name: np.stack(lines)})
        rows = [{name: values[index : index + 1] for name, values in outputs.items()} for index in range(len(lines))]
        return [read_text(decode_steps(spec, row), spec.labels) for row in rows]

    lines = [prepare(text) for text in TEXTS]
    for width in {line.shape[1] for line in lines}:
        alike = [index for index, line in enumerate(lines) if line.shape[1] == width]
        together = read([lines[index] for index in alike])
        for index, (text, score) in zip(alike, together, strict=True):
            ((text_alone, score_alone),) = read([lines[index]])
            assert score == pytest.approx(score_alone, abs=1e-4)
            assert text == text_alone
            assert text.replace(" ", "") == TEXTS[index].replace(" ", "")
