"""A network has all cores while no other process runs one."""

import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from onnx import numpy_helper, parser

from app.embedded import cpu_session
from app.embedded.cpu_session import CpuSession
from app.host import cores
from tests.support import eventually

_RUN = """
import pathlib, signal, sys
from app.embedded.inference_lock import InferenceLock
lock = InferenceLock(pathlib.Path(sys.argv[1]))
lock.take()
print(flush=True)
signal.pause()
"""
_SIDE = 1024
_NETWORK = f"""<ir_version: 9, opset_import: ["": 17]> network (float[n, {_SIDE}] x) => (float[n, {_SIDE}] y) {{
    z = MatMul (x, w)
    y = MatMul (z, w)
}}"""


async def test_all_cores_help_while_no_other_process_runs_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was killed while it ran one does not count."""
    monkeypatch.setattr(cores, "available", lambda: 2.0)
    network = parser.parse_model(_NETWORK)
    weights = np.random.default_rng(0).normal(0, _SIDE**-0.5, (_SIDE, _SIDE)).astype(np.float32)
    network.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(network, tmp_path / "model.onnx")
    session, pixels = CpuSession(tmp_path / "model.onnx", 1), np.tile(weights, (4, 1))
    before = {thread.id for thread in psutil.Process().threads()}
    (alone,) = session.run(["y"], {"x": pixels})

    def helped() -> float:
        assert np.array_equal(session.run(["y"], {"x": pixels})[0], alone)
        return sum(float(thread.user_time) for thread in psutil.Process().threads() if thread.id not in before)

    await eventually(lambda: helped() > 0)
    locked = Path(cpu_session.__file__).with_name("__init__.py")
    other = await create_subprocess_exec(sys.executable, "-c", _RUN, locked, stdout=PIPE)
    try:
        assert other.stdout is not None
        assert await other.stdout.readline()
        until_then = helped()
        assert [helped() for _ in range(10)] == [until_then] * 10
    finally:
        other.kill()
        await other.wait()
    await eventually(lambda: helped() > until_then)
