"""What the settings and the operator's cascades put in place of the models and cascades of the program."""

from pathlib import Path

import msgspec
import pytest

from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from tests.support import SCENE, json, started

READS = '[ocr.steps.text]\nmodel = "ocr_recognition"\nof = "lines"\ncrop = "corners"\n'
LINES = '[ocr.steps.lines]\nmodel = "ocr_detection"\n'
FACES = '[faces.steps.faces]\nmodel = "faces_detection"\n[faces.steps.descriptions]\nmodel = "bytes_to_logits"\nof = "faces"\n'


async def test_default_models_of_the_settings_are_those_of_the_cascades(settings: Settings, triton: EmbeddedTriton) -> None:
    """What is not there shows which one is asked."""
    assert triton.poll() is None
    others = "embedding=other_vectors,text_detection=other_lines,text_recognition=other_reader"
    async with started(create_app(msgspec.structs.replace(settings, model="six_columns", task_models=others))) as client:
        answer = json(await client.post("/analyze?include_embedding=true", content=SCENE))
        alone = json(await client.post("/embed/image", content=SCENE), 404)
    assert "other_lines" in answer["errors"]["ocr"]["detail"]
    assert answer["errors"]["embedding"] == {"code": "unknown_model", "detail": alone["detail"]}
    assert "other_vectors" in alone["detail"]

    others = "text_recognition=other_reader"
    async with started(create_app(msgspec.structs.replace(settings, task_models=others))) as client:
        assert "other_reader" in json(await client.post("/ocr/predict", content=SCENE), 404)["detail"]


@pytest.mark.parametrize(
    ("cascade", "path", "status", "code", "said"),
    [
        (LINES.replace("ocr_detection", "oriented") + READS, "/ocr/predict", 400, "wrong_task", "oriented finds no lines of text"),
        (
            LINES + READS.replace("ocr_recognition", "embedding"),
            "/ocr/predict",
            400,
            "wrong_task",
            "embedding reads no lines of text",
        ),
        (
            LINES + READS.replace('of = "lines"\ncrop = "corners"\n', ""),
            "/ocr/predict",
            502,
            "unsupported_model",
            "what lines finds",
        ),
        (
            '[ocr.steps.pages]\nmodel = "six_columns"\n' + LINES + 'of = "pages"\n' + READS,
            "/ocr/predict",
            502,
            "unsupported_model",
            "not about the whole image",
        ),
        (FACES, "/faces/recognize", 400, "wrong_task", "bytes_to_logits gives no vectors"),
        (FACES, "/faces/verify", 400, "wrong_task", "bytes_to_logits gives no vectors"),
    ],
)
async def test_an_error_names_what_a_route_cannot_use_of_a_cascade(  # noqa: PLR0913, PLR0917 - the cases
    settings: Settings, triton: EmbeddedTriton, tmp_path: Path, cascade: str, path: str, status: int, code: str, said: str
) -> None:
    assert triton.poll() is None
    (tmp_path / "cascades.toml").write_text(cascade)
    own = msgspec.structs.replace(settings, faces=True, model_repository=str(tmp_path))
    files = dict.fromkeys(("image1", "image2") if path.endswith("verify") else ("image",), SCENE)
    async with started(create_app(own)) as client:
        problem = json(await client.post(path, files=files), status)
    assert problem["code"] == code
    assert said in problem["detail"]
