"""The table of `nereid compare`, from the metrics of a running gateway."""

import re
from pathlib import Path

import pytest

from app.host.program import CommandError
from app.resilience.worker_table import WorkerTable
from app.routing.report import report
from app.telemetry.metrics import Metrics, render
from tests.fakes import http
from tests.fakes.http import scripted
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import free_port

PAIR = "door", "big:1", "tiny:2"
TABLE = """\
door: big:1 (25.0 ms) compared with tiny:2 (10.0 ms), 2 images
class  boxes  agreement  missing  additional  mean IoU   score
all        5      50.0%        2           1     0.800  +0.100
cat        4      75.0%        1           0     0.800  +0.100
dog        1       0.0%        1           1         -       -
images for big: 2 compared, 3 dropped, 0 failed"""


@pytest.fixture
def text(table: WorkerTable) -> bytes:
    metrics = Metrics(table, "1")
    for label, matched, missing, additional in (("cat", 3, 1, 0), ("dog", 0, 1, 1)):
        for result, number in (("matched", matched), ("missing", missing), ("additional", additional)):
            metrics.shadow_boxes.add(number, *PAIR, label, result)
    for _ in range(3):
        metrics.shadow_iou.observe(0.8, *PAIR, "cat")
        metrics.shadow_score.observe(0.5, *PAIR, "cat", "given")
        metrics.shadow_score.observe(0.6, *PAIR, "cat", "shadow")
    for given, shadow in ((0.005, 0.02), (0.015, 0.03)):
        metrics.shadow_seconds.observe(given, *PAIR, "given")
        metrics.shadow_seconds.observe(shadow, *PAIR, "shadow")
    metrics.shadow_images.add(2, "door", "big", "compared")
    metrics.shadow_images.add(3, "door", "big", "dropped")
    metrics.route_requests.add(1, "door", "tiny:2", "default", "200")
    metrics.shadow_images.add(9, "gate", "big", "failed")
    return render(metrics.collect(), "")[0]


def test_table_has_a_row_for_each_class_and_for_all(text: bytes) -> None:
    with http.answering(text) as url:
        assert report(url, [None], "door", None) == TABLE
        assert report(url, [None], "gate", None) == "images for big: 0 compared, 0 dropped, 9 failed"
        with pytest.raises(CommandError, match="no image of a route hall"):
            report(url, [None], "hall", None)


@pytest.mark.parametrize(("status", "is_socket"), [(401, False), (403, True)])
def test_key_comes_from_a_file(tmp_path: Path, status: int, *, is_socket: bool) -> None:
    file, path = tmp_path / "secret", tmp_path / "api.sock" if is_socket else None
    file.write_text("ops.secret\n", encoding="utf-8")
    with scripted(status, path=path) as server, pytest.raises(CommandError, match="--key-file"):
        report("http://127.0.0.1:1" if is_socket else server.url, [path], "door", file)

    assert re.search(rb"GET /metrics .*X-API-Key: ops.secret\r\n", server.asked[0], re.DOTALL)


def test_missing_gateway_or_key_is_told(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(CommandError, match=f"no gateway answers at {url}"):
        report(url, [None], "door", None)
    with pytest.raises(CommandError, match="secret: No such file or directory"):
        report(url, [None], "door", tmp_path / "secret")
