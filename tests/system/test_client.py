"""The client's command on a gateway that is served, and `nereid detect`, which serves one itself."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from app.embedded.launch import shm_prefix
from app.settings.schema import Settings
from tests.fakes import models
from tests.fakes.triton import FakeTriton, serving
from tests.faults.serving import running_gateway
from tests.processes import run_nereid
from tests.support import triton_home

PICTURES = 40
ANSWERED = 15
IN_FLIGHT = 4
COMMAND = (sys.executable, "-m", "nereid_client.command", "detect")


class StallingTriton(FakeTriton):
    """Answers some inferences, and then none until `may_answer` is set again."""

    def __init__(self) -> None:
        super().__init__()
        self.stalls = asyncio.Event()

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if len(self.requests) == ANSWERED:
            self.may_answer.clear()
            self.stalls.set()
        return await super().ModelInfer(request, context)


async def test_a_run_that_is_interrupted_is_continued(tmp_path: Path) -> None:
    photos, out = tmp_path / "photos", tmp_path / "results.jsonl"
    photos.mkdir()
    for number in range(PICTURES):
        (photos / f"{number}.bmp").write_bytes(models.scene("BMP"))
    fake = StallingTriton().find_nothing()
    async with serving(fake), running_gateway(fake.url, tmp_path, workers=1) as gateway:
        arguments = (*COMMAND, photos, "--url", gateway.url, "--out", out, "--in-flight", str(IN_FLIGHT), "--timeout-ms", "20000")
        first = await asyncio.create_subprocess_exec(*arguments, stderr=subprocess.PIPE)
        await fake.stalls.wait()
        first.send_signal(signal.SIGINT)
        _, said = await first.communicate()
        found = read(out)
        left = PICTURES - len(found)
        assert 0 < left < PICTURES
        assert (first.returncode, said.decode()) == (
            130,
            f"pictures: {PICTURES}, new: {PICTURES}, with a result: {len(found)}; the next run sends the others\n",
        )
        fake.may_answer.set()
        second = await asyncio.create_subprocess_exec(*arguments, stderr=subprocess.PIPE)
        _, said = await second.communicate()

    assert (second.returncode, said.decode()) == (0, f"pictures: {PICTURES}, new: {left}, with a result: {PICTURES}\n")
    assert read(out)[: len(found)] == found
    assert Counter(line["file"] for line in read(out)) == dict.fromkeys((f"{number}.bmp" for number in range(PICTURES)), 1)


def test_detect_serves_as_long_as_it_takes(settings: Settings, tmp_path: Path) -> None:
    photos, home, repository = (tmp_path / name for name in ("photos", "home", "models"))
    for folder in (photos, home, repository):
        folder.mkdir()
    triton_home(home)
    (photos / "scene.png").write_bytes(models.scene("PNG"))
    shutil.copytree(Path(settings.model_repository) / "six_columns", repository / "six_columns")
    own = {"triton_home": home, "model_repository": repository, "model": "six_columns", "workers": 1}

    def run() -> tuple[int, list[str]]:
        done = run_nereid("detect", photos, "--out", tmp_path / "labels", "--save-conf", **own, api_keys_file=tmp_path / "none")
        assert done.stdout == ""
        return done.returncode, done.stderr.splitlines()

    starting = "nereid: starting a gateway; a first run may install Triton and download the model"
    assert run() == (0, [starting, "pictures: 1, new: 1, with a result: 1"])
    rows = [line.split() for line in (tmp_path / "labels" / "scene.txt").read_text().splitlines()]
    assert [row[0] for row in rows] == ["0", "1"]
    assert [len(row) for row in rows] == [6, 6]
    assert not list(Path("/dev/shm").glob(f"{shm_prefix(Settings(triton_home=str(home)))}*"))  # noqa: S108
    assert run() == (0, ["pictures: 1, new: 0, with a result: 1"])


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]
