"""Versions of a model in a real Triton: each request gets the one it asks for, also among many for others."""

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from itertools import cycle
from pathlib import Path

import httpx
import msgspec
import pytest

from app.embedded.launch import command
from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from tests.scrape import scrape
from tests.support import SCENE, eventually, json, started, triton_home

REQUESTS = 24
SCORES = {"1": [0.9, 0.8], "2": [0.6, 0.5]}


@pytest.fixture
async def one_by_one(settings: Settings, triton: EmbeddedTriton) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that makes one call at a time for each version, so that much is aggregated."""
    assert triton.poll() is None
    async with started(create_app(msgspec.structs.replace(settings, calls_in_flight=1, decode_threads=4))) as client:
        yield client


def answered(response: httpx.Response) -> str:
    """Return the version that has answered, by what it says and by what it has found."""
    document = json(response)
    version = str(document["model"]["version"])
    assert document["model"]["name"] == "two_versions"
    assert [found["confidence"] for found in document["detections"]] == SCORES[version]
    return version


@pytest.mark.parametrize(("query", "version"), [("", "2"), ("?version=1", "1"), ("?version=2", "2")])
async def test_a_request_gets_the_version_that_it_asks_for(client: httpx.AsyncClient, query: str, version: str) -> None:
    assert answered(await client.post(f"/predict/two_versions{query}", content=SCENE)) == version


async def test_the_version_may_be_in_the_body(client: httpx.AsyncClient) -> None:
    form = {"model": "two_versions", "version": "1"}

    assert answered(await client.post("/detect", files={"image": SCENE}, data=form)) == "1"


async def test_a_call_never_has_images_for_several_versions(one_by_one: httpx.AsyncClient) -> None:
    queries = [query for _, query in zip(range(REQUESTS), cycle(["", "?version=1", "?version=2"]), strict=False)]
    responses = await asyncio.gather(*(one_by_one.post(f"/predict/two_versions{query}", content=SCENE) for query in queries))

    assert [answered(response) for response in responses] == [query.partition("=")[2] or "2" for query in queries]
    assert any('batch;desc="1"' not in response.headers["server-timing"] for response in responses)


async def test_the_newest_version_is_one_model_with_or_without_its_number(one_by_one: httpx.AsyncClient) -> None:
    queries = ["?version=2", ""] * (REQUESTS // 2)
    responses = await asyncio.gather(*(one_by_one.post(f"/predict/two_versions{query}", content=SCENE) for query in queries))
    assert {answered(response) for response in responses} == {"2"}
    assert (await one_by_one.post("/predict/two_versions?version=1", content=SCENE)).status_code == 200
    samples = await scrape(one_by_one)

    assert json(await one_by_one.get("/health"))["limits"]["requests"].keys() == {"yolo11n", "two_versions"}
    assert samples['api_inference_batch_size_sum{model="two_versions"}'] == REQUESTS
    assert samples['api_inference_batch_size_count{model="two_versions"}'] < REQUESTS
    assert not [name for name in samples if "two_versions:2" in name]


@pytest.fixture
def loading_triton(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Settings for a Triton that looks for changes of its models each second; of `two_versions` it has the first one."""
    repository = tmp_path / "repository"
    shutil.copytree(Path(settings.model_repository) / "two_versions", repository / "two_versions")
    (repository / "two_versions" / "2").rename(tmp_path / "2")
    config = repository / "two_versions" / "config.pbtxt"
    config.write_text(config.read_text().replace("version_policy { all {} }", ""))

    def command_of_it(settings: Settings, links: Path) -> list[str]:
        line = [option.replace("control-mode=explicit", "control-mode=poll") for option in command(settings, links)]
        return [*(option for option in line if "load-model" not in option), "--repository-poll-secs=1"]

    monkeypatch.setattr("app.embedded.server.command", command_of_it)
    (tmp_path / "triton").mkdir()
    home = triton_home(tmp_path / "triton")
    own = msgspec.structs.replace(settings, triton_home=home, model_repository=str(repository), model="two_versions", workers=1)
    server = EmbeddedTriton(own)
    server.start()
    yield own
    server.stop()


@pytest.mark.system
async def test_no_answer_mixes_versions_while_a_new_one_is_loaded(loading_triton: Settings, tmp_path: Path) -> None:
    folder = Path(loading_triton.model_repository) / "two_versions"
    answers = Counter[tuple[str, tuple[str, ...], float]]()

    async def ask(client: httpx.AsyncClient) -> None:
        while not any(version == "2" for version, _, _ in answers) or answers.total() < REQUESTS:
            document = json(await client.post("/predict/two_versions", content=SCENE))
            found = document["detections"]
            answers[document["model"]["version"], tuple(one["class_name"] for one in found), found[0]["confidence"]] += 1

    async with started(create_app(loading_triton)) as client:
        asking = asyncio.gather(*(ask(client) for _ in range(4)))
        await eventually(lambda: answers.total() > 0)
        config = folder / "config.pbtxt"
        config.write_text(config.read_text().replace("red", "rouge").replace("blue", "bleu"))
        (tmp_path / "2").rename(folder / "2")
        await asking

    assert answers.keys() == {("1", ("red", "blue"), 0.9), ("2", ("rouge", "bleu"), 0.6)}


async def test_a_version_that_is_not_there_names_those_that_are(client: httpx.AsyncClient) -> None:
    for version in ("3", str(2**63 - 1)):
        problem = json(await client.post(f"/predict/two_versions?version={version}", content=b"no image"), 404)
        assert problem["code"] == "unknown_version"
        assert problem["detail"] == f"two_versions has no version {version}; versions that can be used: 1, 2"

    problem = json(await client.post("/predict/six_columns?version=2", content=SCENE), 404)
    assert problem["detail"].endswith("versions that can be used: 1")
    assert json(await client.post("/predict/absent?version=1", content=SCENE), 404)["code"] == "unknown_model"
