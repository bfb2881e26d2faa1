"""CVAT's command line with the function for it, and a stand-in for its server, which has one task with pictures."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from zipfile import ZipFile

import grpc
import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.api.conftest import write_keys
from tests.api.test_tasks import IMAGE, triton_for
from tests.callers.client import run
from tests.fakes.http import Handler, serving
from tests.fakes.triton import serving as serving_triton
from tests.faults.serving import running_gateway
from tests.processes import PATIENCE_SECONDS
from tests.support import IMAGES, ROOT


class Task(NamedTuple):
    url: str
    annotations: list[dict[str, Any]]
    """What was uploaded, one for each upload: `shapes`, `tags` and so on."""


@contextmanager
def cvat(pictures: Sequence[Path], labels: list[dict[str, Any]]) -> Iterator[Task]:
    chunk = BytesIO()
    with ZipFile(chunk, "w") as file:
        for picture in pictures:
            file.write(picture, picture.name)
    about = {"name": "CVAT", "description": "", "version": "2.80.0", "logo_url": "", "subtitle": ""}
    task = {
        "id": 1,
        "size": len(pictures),
        "data_chunk_size": len(pictures),
        "data_original_chunk_type": "imageset",
        "updated_date": "2026-01-01T00:00:00Z",
        "organization": None,
        "jobs": {"count": 1, "completed": 0, "validation": 0, "url": ""},
        "labels": {"url": ""},
    }
    frames = [{"name": picture.name, "width": 1, "height": 1, "related_files": 0} for picture in pictures]
    answers: dict[str, Any] = {
        "/api/server/about": about,
        "/api/tasks/1": task,
        "/api/labels": {"count": len(labels), "next": None, "previous": None, "results": labels},
        "/api/tasks/1/data/meta": {"frames": frames, "deleted_frames": [], "chunks_updated_date": "2026-01-01T00:00:00Z"},
    }
    uploads: list[dict[str, Any]] = []

    class Server(Handler):
        def do_GET(self) -> None:  # noqa: N802
            path = urlsplit(self.path).path.rstrip("/")
            if path == "/api/tasks/1/data":
                self.answer(chunk.getvalue(), content_type="application/zip")
            else:
                self.answer(json.dumps(answers[path]).encode(), content_type="application/vnd.cvat+json")

        def do_PATCH(self) -> None:  # noqa: N802
            assert self.path == "/api/tasks/1/annotations/?action=create"
            uploads.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer(b"{}", content_type="application/vnd.cvat+json")

    with serving(Server) as url:
        yield Task(url, uploads)


Annotate = Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]
FULL = (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")
SECRET = "0123456789abcdef" * 2
PHOTOS = [IMAGES / "coffee.jpg", IMAGES / "chelsea.jpg"]


def label(id_: int, name: str, kind: str, sublabels: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"id": id_, "name": name, "type": kind, "attributes": [], "sublabels": sublabels}


@pytest.fixture
def annotate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Annotate:
    """Return a function that annotates a task of these pictures; it returns how cvat-cli ended, and the uploaded shapes."""
    monkeypatch.setenv("CVAT_ACCESS_TOKEN", "a token")
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))

    def annotate(
        url: str, pictures: Sequence[Path], labels: list[dict[str, Any]], *options: str
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        with cvat(pictures, labels) as task:
            command = ["--server-host", task.url, "task", "auto-annotate", "1", "--allow-unmatched-labels"]
            function = ["--function-file", str(ROOT / "examples" / "cvat" / "nereid_function.py"), "-p", f"url=str:{url}"]
            ended: dict[str, Any] = run("cvat-cli", "calls", "annotate", *command, *function, *options)
        return ended, [shape for upload in task.annotations for shape in upload["shapes"]]

    return annotate


@pytest.mark.client("cvat-cli")
def test_the_function_annotates_a_task(gateway: str, own: httpx.Client, annotate: Annotate, tmp_path: Path) -> None:
    """The function of `examples/cvat`, with a stand-in of CVAT: two photos, an unknown model, a bad picture, no gateway."""
    found = [
        (frame, one["class_name"], [one[name] for name in ("x1", "y1", "x2", "y2")])
        for frame, photo in enumerate(PHOTOS)
        for one in own.post("/detect?boxes=pixel&confidence=0.6", content=photo.read_bytes()).json()["detections"]
    ]
    labels = {"cat": label(105, "cat", "rectangle"), "cup": label(107, "cup", "any"), "unicorn": label(109, "unicorn", "any")}
    narrow = tmp_path / "narrow.png"
    Image.new("RGB", (2000, 2)).save(narrow)
    ended, shapes = annotate(gateway, PHOTOS, [*labels.values()], "--conf-threshold", "0.6")
    expected = [(frame, labels[name]["id"], "rectangle", pytest.approx(box, abs=3)) for frame, name, box in found if name in labels]

    assert ended == {"status": 0}
    assert {name for _, name, _ in found} > {"cat", "cup"}
    assert [(one["frame"], one["label_id"], one["type"], one["points"]) for one in shapes] == expected
    for url, pictures, options, reason in (
        (gateway, PHOTOS, ["-p", "model=str:yolo99"], "there is no model 'yolo99'"),
        (gateway, [narrow], [], own.post("/detect", content=narrow.read_bytes()).json()["detail"]),
        ("http://127.0.0.1:9", PHOTOS, [], "Connection refused"),
    ):
        ended, shapes = annotate(url, pictures, [*labels.values()], *options)
        assert reason in ended["error"]
        assert not shapes


@pytest.mark.client("cvat-cli")
async def test_the_function_has_the_shapes_of_each_task(
    annotate: Annotate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function with masks, keypoints, oriented boxes, a key and a full gateway: polygons, skeletons, turned rectangles."""
    picture = tmp_path / "white.png"
    picture.write_bytes(IMAGE)
    keys = write_keys(tmp_path, ("camera", SECRET, "detect"))
    points = [label(11, "nose", "points"), label(12, "tail", "points")]
    key = {"X-API-Key": f"camera.{SECRET}"}
    found: dict[str, list[dict[str, Any]]] = {}
    own: dict[str, list[dict[str, Any]]] = {}
    for task, kind in {"segment": "polygon", "pose": "skeleton", "obb": "rectangle"}.items():
        fake, folder = triton_for(task), tmp_path / task
        folder.mkdir()
        labels = [label(id_, name, kind, points if kind == "skeleton" else ()) for id_, name in ((5, "dog"), (6, "cat"))]
        async with (
            serving_triton(fake),
            running_gateway(fake.url, folder, workers=1, api_keys_file=keys) as server,
            httpx.AsyncClient(base_url=server.url, headers=key, timeout=PATIENCE_SECONDS) as client,
        ):
            fake.next_refusals = [FULL]
            with monkeypatch.context() as patch:
                patch.setenv("NEREID_KEY", f"camera.{SECRET}")  # only here: it is no setting of a gateway
                ended, found[task] = await asyncio.to_thread(annotate, server.url, [picture], labels)
            own[task] = (await client.post(f"/{task}?boxes=pixel", content=IMAGE)).json()["detections"]
        # The function waited, and asked again.
        assert (ended, fake.next_refusals) == ({"status": 0}, [])

    masks = [(one["label_id"], one["type"], one["group"], one["points"]) for one in found["segment"]]
    assert masks == [(5, "polygon", 1, part) for part in own["segment"][0]["mask"]]
    assert len(masks) == 2
    for shape, one in zip(found["pose"], own["pose"], strict=True):
        elements = [(element["label_id"], element["points"], element["outside"]) for element in shape["elements"]]
        assert shape["type"] == "skeleton"
        assert elements == [
            (id_, [point["x"], point["y"]], point["confidence"] < 0.5)
            for id_, point in zip((11, 12), one["keypoints"], strict=True)
        ]
    for shape, one in zip(found["obb"], own["obb"], strict=True):
        assert shape["type"] == "rectangle"
        np.testing.assert_allclose(turned(shape["points"], shape["rotation"]), one["corners"], atol=0.02)


def turned(box: list[float], degrees: float) -> NDArray[np.float64]:
    """Return the corners (4, 2) of a rectangle, turned clockwise about its centre as CVAT draws it."""
    x1, y1, x2, y2 = box
    corners = np.array([(x1, y1), (x2, y1), (x2, y2), (x1, y2)])
    cosine, sine = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    centre = corners.mean(axis=0)
    found: NDArray[np.float64] = (corners - centre) @ np.array([(cosine, sine), (-sine, cosine)]) + centre
    return found
