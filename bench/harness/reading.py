"""Readers of text in pictures: the gateway's own steps with ONNX Runtime, a running gateway, and RapidOCR."""

import json
import subprocess
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.request import urlopen

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from app.imaging.patch import Patch
from app.model.spec import ModelSpec, from_triton_config
from app.pipeline.call import CallContext, Question, Result, TaskOptions, decode
from app.pipeline.preprocess import Workspace, fill_from_patch
from app.pipeline.results import Classifications, TextLine, TextRegions
from app.resilience.deadline import Deadline
from app.resilience.lease import Lease
from app.telemetry.timing import Timing
from app.triton.config_file import read_config_file
from app.triton.messages import InferResult
from app.triton.transport import Transport
from app.zoo.inference import open_session, run
from bench.harness.environments import RAPIDOCR
from bench.harness.errors import ContestantError
from bench.harness.processes import ROOT
from bench.models.repository import network_of

MODELS = ("ocr_detection", "ocr_direction", "ocr_recognition")
# As in the cascade `ocr`, and in RapidOCR.
_CONFIDENCE = 0.5
_SURE = 0.9


class ReadLine(NamedTuple):
    """A line of text in a picture."""

    corners: NDArray[np.float32]
    """(4, 2) x y, pixels of the picture."""
    text: str
    score: float


class Steps:
    """The gateway's code for text, without its queues, with pulled models in this process."""

    def __init__(self, repository: Path) -> None:
        """Load the models.

        Raises:
            ContestantError: They have not been pulled.
        """
        if not all((repository / name / "config.pbtxt").is_file() for name in MODELS):
            raise ContestantError("the models for text have not been pulled; run: ./just pull ocr")
        self._specs = [from_triton_config(read_config_file(repository / name / "config.pbtxt"), "1") for name in MODELS]
        self._sessions = [open_session(network_of(repository / name)) for name in MODELS]
        # Patches need only the transport, which allocates their tensors.
        self._workspace = Workspace(*cast("tuple[Any, Any, Any]", (None, None, None)), Transport("inline"))

    def read(self, picture: bytes) -> list[ReadLine]:
        """Return the lines of text in an encoded picture that are not blank, whatever their score."""
        with Image.open(BytesIO(picture)) as image:
            whole = Patch(np.asarray(image.convert("RGB")))
        regions = self._ask(0, whole, TaskOptions[TextRegions]("text_detection", MODELS[0], _CONFIDENCE))
        lines = []
        for corners in regions.corners:
            patch = Patch(whole.image, corners=corners)
            (turn, *_), (sureness, *_) = self._ask(1, patch, TaskOptions[Classifications]("classification", MODELS[1]))[:2]
            patch = patch._replace(half_turn=self._specs[1].class_name(int(turn)) == "180" and sureness > _SURE)
            line = self._ask(2, patch, TaskOptions[TextLine]("text_recognition", MODELS[2]))
            if line.text.strip():
                lines.append(ReadLine(corners, line.text, line.score))
        return lines

    def _ask(self, model: int, patch: Patch, question: Question[Result]) -> Result:
        spec: ModelSpec = self._specs[model]
        call = CallContext(Deadline.after(60), Timing(), "bench")
        buffer, transform = fill_from_patch(patch, spec, self._workspace, call, Lease())
        outputs = run(self._sessions[model], {spec.input_name: buffer.tensor[None]})
        return question.reader(spec).read(decode(spec, InferResult(outputs, "1"), transform), call.deadline)


def read_by_request(url: str, picture: bytes) -> list[ReadLine]:
    """Return the lines that a running gateway finds in an encoded picture, whatever their score."""
    with urlopen(f"{url}/ocr/predict?min_det_score={_CONFIDENCE}&min_rec_score=0", picture, timeout=60) as response:  # noqa: S310 - it is http
        regions = json.load(response)["regions"]
    found = [ReadLine(np.array(one["box"], np.float32).reshape(4, 2), one["text"], one["rec_score"]) for one in regions]
    return [line for line in found if line.text.strip()]


def read_with_rapidocr(folder: Path) -> list[list[ReadLine]]:
    """Return the lines that RapidOCR finds in the pictures of a folder, in the order of their names, whatever their score.

    Raises:
        ContestantError: Its environment is missing, or it failed.
    """
    program = ROOT / "bench" / "contestants" / "rapid_ocr.py"
    done = subprocess.run([RAPIDOCR.python(), program, folder], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise ContestantError("RapidOCR failed; the reason is above")
    found = msgspec.json.Decoder(list[dict[str, Any]]).decode_lines(done.stdout)
    return [[ReadLine(np.array(one["corners"], np.float32), one["text"], one["score"]) for one in lines] for lines in found]
