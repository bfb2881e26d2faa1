"""What the settings and the operator's cascades put in place of the models and cascades of the program."""

import pytest

from tests.api.sight.conftest import OpenGateway
from tests.support import SCENE, json

READS = '[ocr.steps.text]\nmodel = "ocr_recognition"\nof = "lines"\ncrop = "corners"\n'
LINES = '[ocr.steps.lines]\nmodel = "ocr_detection"\n'
FACES = '[faces.steps.faces]\nmodel = "faces_detection"\n[faces.steps.descriptions]\nmodel = "bytes_to_logits"\nof = "faces"\n'
BROKEN = LINES.replace("ocr_detection", "missing_model") + READS + '[embedding.steps.image]\nmodel = "six_columns"\n'
OCR = "/ocr/predict"


async def test_default_models_of_the_settings_are_those_of_the_cascades(open_gateway: OpenGateway) -> None:
    """What is not there shows which one is asked."""
    for missing in ("text_detection=other_lines,embedding=other_vectors", "text_recognition=other_lines"):
        async with open_gateway(task_models=missing) as client:
            answer = json(await client.post("/analyze?include_embedding=true", content=SCENE))
            assert "other_lines" in answer["errors"]["ocr"]["detail"]
            assert "other_lines" in json(await client.post(OCR, content=SCENE), 404)["detail"]
            if "embedding" in missing:
                alone = json(await client.post("/embed/image", content=SCENE), 404)
                assert "other_vectors" in alone["detail"]
                assert answer["errors"]["embedding"] == {"code": "unknown_model", "detail": alone["detail"]}


async def test_part_of_an_analysis_fails_alone(open_gateway: OpenGateway) -> None:
    async with open_gateway(BROKEN) as client:
        answer = json(await client.post("/analyze?include_embedding=true&include_face_embeddings=true", content=SCENE))
        alone = json(await client.post(OCR, content=SCENE), 404)
        batch = json(await client.post("/analyze/batch?enable_ocr=true", files=[("images", SCENE)]))

    assert (answer["status"], answer["num_detections"], answer["num_faces"]) == ("partial", 2, 2)
    assert (answer["ocr"], answer["global_embedding"]) == (None, None)
    wrong = {"code": "wrong_task", "detail": "six_columns gives no vectors"}
    assert answer["errors"] == {"ocr": {"code": "unknown_model", "detail": alone["detail"]}, "embedding": wrong}
    assert (batch["status"], batch["results"][0]["status"], batch["results"][0]["num_detections"]) == ("success", "partial", 2)
    assert batch["results"][0]["errors"].keys() == {"ocr"}


@pytest.mark.parametrize(
    ("cascade", "path", "status", "code", "said"),
    [
        (LINES.replace("ocr_detection", "oriented") + READS, OCR, 400, "wrong_task", "oriented finds no lines of text"),
        (LINES + READS.replace("ocr_recognition", "embedding"), OCR, 400, "wrong_task", "embedding reads no lines of text"),
        (LINES + READS.partition("of =")[0], OCR, 502, "unsupported_model", "what lines finds"),
        (
            f'[ocr.steps.pages]\nmodel = "six_columns"\n{LINES}of = "pages"\n{READS}',
            *(OCR, 502, "unsupported_model", "not about the whole image"),
        ),
        (FACES, "/faces/recognize", 400, "wrong_task", "bytes_to_logits gives no vectors"),
        (FACES, "/faces/verify", 400, "wrong_task", "bytes_to_logits gives no vectors"),
    ],
)
async def test_error_names_what_a_route_cannot_use_of_a_cascade(  # noqa: PLR0913, PLR0917 - the cases
    open_gateway: OpenGateway, cascade: str, path: str, status: int, code: str, said: str
) -> None:
    files = dict.fromkeys(("image1", "image2") if path.endswith("verify") else ("image",), SCENE)
    async with open_gateway(cascade) as client:
        problem = json(await client.post(path, files=files), status)
    assert problem["code"] == code
    assert said in problem["detail"]
