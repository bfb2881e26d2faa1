"""`nereid detect`, which serves a gateway itself."""

import shutil
from pathlib import Path

from app.embedded.launch import shm_prefix
from app.settings.schema import Settings
from tests.fakes import models
from tests.processes import run_nereid
from tests.support import triton_home


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
