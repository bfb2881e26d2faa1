"""A stand-in for CVAT's server, which has one task with pictures, as far as `cvat-cli task auto-annotate` asks it."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from zipfile import ZipFile

from tests.fakes.http import serving


class Task(NamedTuple):
    """Task 1 of a server."""

    url: str
    annotations: list[dict[str, Any]]
    """What was uploaded, one for each upload: `shapes`, `tags` and so on."""


@contextmanager
def cvat(pictures: Sequence[Path], labels: list[dict[str, Any]]) -> Iterator[Task]:
    """Serve a task with these pictures and labels until the block ends."""
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

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path.rstrip("/")
            if path == "/api/tasks/1/data":
                self.answer(chunk.getvalue(), "application/zip")
            elif path in answers:
                self.answer(json.dumps(answers[path]).encode())
            else:
                self.send_error(404)

        def do_PATCH(self) -> None:
            assert self.path == "/api/tasks/1/annotations/?action=create"
            uploads.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer(b"{}")

        def answer(self, body: bytes, content_type: str = "application/vnd.cvat+json") -> None:
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with serving(Handler) as url:
        yield Task(url, uploads)
