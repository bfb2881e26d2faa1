import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from app import arena, embedded, tensors
from app.config import Settings
from app.contract import Form
from app.main import create_app
from app.triton import Triton
from bench import candidates, load, models, processes, stages, versus
from bench.load import Outcome
from bench.processes import ContestantError
from tests.conftest import PICTURES, REPOSITORY, json, picture, started

SAMPLE = load.Sample("coffee", picture("coffee.jpg"), frozenset())
FIXTURES = sorted(path.parent.name for path in (processes.ROOT / "bench" / "models").glob("*/config.pbtxt"))
needs_reference = pytest.mark.skipif(
    not (processes.REFERENCE / "complete").is_file(),
    reason="the reference has no environment; ./just bench versus --install makes it",
)


@pytest.fixture(scope="module")
def served() -> Iterator[processes.Triton]:
    with processes.triton(with_real=False) as triton:
        yield triton


@pytest.fixture(scope="module")
async def triton(served: processes.Triton) -> AsyncIterator[Triton]:
    client = Triton(served.settings.triton_url)
    yield client
    await client.close()


@pytest.mark.parametrize("name", FIXTURES)
async def test_a_fixture_is_understood_and_finds_nothing(triton: Triton, name: str) -> None:
    """Nereid reads the config of every fixture, and its answer has no rows."""
    model = await triton.contract(name)
    tensor = tensors.of_file(b"not looked at", None) if model.form is Form.FILE else np.zeros(model.shape, model.dtype)
    answer = await triton.infer(model, tensor, 10, "test")

    assert model.frame == (640, 640)
    assert answer.outputs[model.outputs[0]].tolist() == [[0]]


async def test_the_simulated_gpu_answers_many_in_one_batch(served: processes.Triton, triton: Triton) -> None:
    """Requests at the same time share the wait; without batching each waits for itself."""
    spent = {}
    for name in ("sim_gpu_file", "sim_gpu_batch1_file"):
        model = await triton.contract(name)
        tensor = tensors.of_file(b"a picture", None)
        before = served.counters(name)
        await asyncio.gather(*(triton.infer(model, tensor, 10, "test") for _ in range(16)))
        spent[name] = served.counters(name).since(before)

    assert spent["sim_gpu_batch1_file"].executions == 16
    assert spent["sim_gpu_file"].inferences == 16
    assert spent["sim_gpu_file"].executions <= 8


async def test_nereid_serves_a_fixture(served: processes.Triton) -> None:
    """A picture through the whole of Nereid and the null model gives an empty answer."""
    async with started(create_app(msgspec.structs.replace(served.settings, log_level="error"))) as client:
        response = await client.post("/detect", content=picture("coffee.jpg"), headers={"Content-Type": "image/jpeg"})

    assert json(response)["num_detections"] == 0


@needs_reference
@pytest.mark.parametrize("name", ["reference", "reference_uint8", "broken"])
def test_a_contestant_answers(served: processes.Triton, tmp_path: Path, name: str) -> None:
    """Each contestant starts, takes the picture as Nereid does, and stops without leaving a process."""
    entrant = versus.Lineup(served, 1, tmp_path).entrant(name, "null")
    samples = [sample._replace(expected=frozenset()) for sample in versus.samples_of(PICTURES)]
    with processes.started(entrant, tmp_path) as server:
        outcome: Outcome = load.run(load.closed(f"{server.url}/detect", samples, clients=2, seconds=20, requests=6))
        memory = server.workers(1)
        assert server.cpu() > 0

    assert outcome.statuses == {"200": 6}
    assert memory[0].resident > 10 * 2**20
    assert embedded.is_free("127.0.0.1", entrant.port)


def test_a_server_that_ends_at_once_is_told_with_its_words(tmp_path: Path) -> None:
    """A contestant that cannot start is left out with the reason, not waited for."""
    command = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    with (
        pytest.raises(ContestantError, match="ended with code 1: no such thing"),
        processes.running(command, {}, processes.free_ports(1)[0], "/", tmp_path / "log"),
    ):
        pass


def test_the_twin_of_the_real_model_takes_floats(tmp_path: Path, settings: Settings) -> None:
    """The reference's yolo11n is the same network without its first nodes."""
    models.write(tmp_path, Path(settings.model_repository))
    text = (tmp_path / "yolo11n_fp32" / "config.pbtxt").read_text()

    assert 'name: "images" data_type: TYPE_FP32 dims: [ 3, 640, 640 ]' in text
    assert models.labels(tmp_path, "yolo11n_fp32").startswith("person,bicycle,car")
    assert models.labels(tmp_path, "yolo11n") == models.labels(REPOSITORY, "yolo11n")


@pytest.mark.parametrize("name", sorted(candidates.CANDIDATES.keys() - {"reference"}))
def test_a_candidate_of_stages_runs(served: processes.Triton, tmp_path: Path, name: str) -> None:
    """Every candidate gets through a picture, step by step; Nereid's up to the answer, and it leaves nothing behind."""
    (tmp_path / "picture").write_bytes(picture("coffee.jpg"))
    before = set(arena.SHM.glob("nereid-*"))
    (spent,) = stages.together(name, tmp_path, 0.05, 1, triton=served.settings.triton_url)

    assert spent.pictures > 0
    assert {"decode", "letterbox", "free"} <= spent.milliseconds.keys()
    assert ({"client", "framework", "encode"} <= spent.milliseconds.keys()) is name.startswith("nereid")
    assert set(arena.SHM.glob("nereid-*")) == before


@needs_reference
def test_the_reference_runs_as_a_candidate(served: processes.Triton, tmp_path: Path) -> None:
    """In its own environment, with the same steps."""
    (tmp_path / "picture").write_bytes(picture("coffee.jpg"))
    (spent,) = stages.together("reference", tmp_path, 0.05, 1, triton=served.settings.triton_url)

    assert {"client", "framework", "encode"} <= spent.milliseconds.keys()


@pytest.mark.parametrize("with_triton", [False, True])
def test_the_limit_of_http_answers(served: processes.Triton, tmp_path: Path, with_triton: bool) -> None:  # noqa: FBT001
    """With a Triton, each body reaches it."""
    port = processes.free_ports(1)[0]
    command = [sys.executable, "-m", "bench.contestants.http_only", str(port), "1"]
    before, arenas = served.counters("null_file"), set(arena.SHM.glob("nereid-*"))
    triton = served.settings.triton_url if with_triton else ""
    with processes.running(command, {"BENCH_TRITON": triton}, port, "/", tmp_path / "log") as server:
        outcome = load.run(load.closed(f"{server.url}/detect", [SAMPLE], clients=4, seconds=30, requests=20))

    assert outcome.statuses == {"200": 20}
    assert served.counters("null_file").since(before).inferences == (20 if with_triton else 0)
    assert set(arena.SHM.glob("nereid-*")) <= arenas


def test_the_ratios_are_of_the_same_round() -> None:
    """Noise that hits a whole round does not move the ratio."""

    def entry(name: str, rates: list[float]) -> versus.Entry:
        outcome = Outcome(seconds=1, requests=1, statuses={"200": 1}, latency="", stages={}, driver_cpu=0.1)
        numbers = dict.fromkeys(
            ("p50", "p99", "failed", "cpu_gateway", "cpu_triton", "cpu_stubs", "cpu_client", "client_share"), 1.0
        )
        rounds = [versus.Round(rate=rate, triton=None, outcome=outcome, **numbers) for rate in rates]
        return versus.Entry(name=name, model="null", note="", rounds=rounds, resident=[], unshared=[])

    contest = versus.Contest(
        title="",
        model="null",
        clients=1,
        workers=1,
        seconds=1,
        entries=[entry("reference", [100, 50]), entry("nereid_shm", [400, 200])],
        left_out={},
    )

    assert contest.bases() == ["reference"]
    assert contest.ratios("nereid_shm", "reference", "rate") == [4, 4]


def test_the_command_knows_its_measurements() -> None:
    """Versus, limit, stages and profile are there."""
    shown = subprocess.run([sys.executable, "-m", "bench", "--help"], capture_output=True, text=True, check=True).stdout

    assert all(name in shown for name in ("versus", "limit", "stages", "profile"))
