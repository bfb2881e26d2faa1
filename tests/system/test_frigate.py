"""Frigate's ZMQ detector at a real `serve`: when the worker that answers is killed, another one takes its place."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq

from tests.fakes import models
from tests.faults.fleet import Fleet, running_fleet
from tests.processes import wait_for
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import free_port

SIDE = models.SIDE


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def fleet(tmp_path: Path, port: int) -> Iterator[Fleet]:
    models.write(tmp_path / "all")
    (tmp_path / "models").mkdir()
    (tmp_path / "all" / "six_columns").rename(tmp_path / "models" / "six_columns")
    settings = {"model": "six_columns", "frigate_zmq": f"tcp://127.0.0.1:{port}"}
    with running_fleet(tmp_path / "models", tmp_path, settings=settings) as fleet:
        yield fleet


def objects(port: int) -> int:
    """Send one image as Frigate does; return the number of objects in the answer, and 0 without one within a second."""
    picture = np.full((1, SIDE, SIDE, 3), 255, np.uint8)
    picture[:, 30:90, 20:80] = (255, 0, 0)
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger, socket.rcvtimeo = 0, 1000
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart([json.dumps({"shape": picture.shape, "dtype": "uint8"}).encode(), picture.tobytes()])
        try:
            return int(np.frombuffer(socket.recv(), np.float32).reshape(20, 6).any(axis=1).sum())
        except zmq.Again:
            return 0


def listening(fleet: Fleet, port: int) -> list[psutil.Process]:
    return [
        worker
        for worker in fleet.workers()
        if any(one.laddr.port == port and one.status == psutil.CONN_LISTEN for one in worker.net_connections("tcp"))
    ]


def test_another_worker_answers_when_one_is_killed(fleet: Fleet, port: int) -> None:
    for _ in range(2):
        wait_for(lambda: objects(port) == 1)
        (worker,) = listening(fleet, port)
        worker.kill()
    wait_for(lambda: objects(port) == 1)
