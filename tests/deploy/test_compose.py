"""The project of `compose.yaml` as Compose brings it up: what it serves, and what is lost while its parts die or are replaced."""

import json
import os
import resource
import shutil
import signal
import ssl
from asyncio import to_thread
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from bench.harness.ports import find_free
from tests.deploy.conftest import check
from tests.deploy.docker import Docker
from tests.deploy.needs import load
from tests.faults import models
from tests.faults.exchange import NO_ANSWER
from tests.faults.meanwhile import traffic, until
from tests.processes import require_program, wait_for
from tests.support import ROOT, sample_image
from tests.support import json as json_of

pytestmark = [pytest.mark.packages, pytest.mark.timeout(1800)]

STAND_INS = Path(__file__).parent / "stand_ins"
SERVICES: dict[str, dict[str, Any]] = load(ROOT / "compose.yaml")["services"]
RUNNING = sorted(SERVICES.keys() - {"owners", "grafana"})
"""`owners` ends by itself, and Debian has no Grafana."""
INSTANCES = ("api-1", "api-2")


class Project(NamedTuple):
    docker: Docker
    folder: Path
    urls: tuple[str, str]
    """The public one, and that for the same machine."""

    def compose(self, *arguments: str) -> str:
        files = [f"--file={self.folder / name}" for name in ("compose.yaml", "changes.json")]
        return self.docker.succeed("docker-compose", "--project-name=nereid", *files, *arguments)

    def container(self, service: str) -> str:
        return self.docker("ps", "--all", "--quiet", f"--filter=label=com.docker.compose.service={service}")

    def state(self, service: str) -> dict[str, Any]:
        return dict(self.docker.inspect(self.container(service))["State"])

    def is_healthy(self, service: str, killed: int = 0) -> bool:
        """Return whether a service is healthy; one that was killed counts as healthy until it has another process."""
        state = self.state(service)
        return state["Pid"] not in {0, killed} and state["Health"]["Status"] == "healthy"

    def kill(self, service: str) -> int:
        """Kill the first process of a service, and return its ID; Docker does not start again what `docker kill` has killed."""
        pid = int(self.state(service)["Pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    def trust(self) -> ssl.SSLContext:
        """Return what trusts the certificate that the project has made."""
        return ssl.create_default_context(cadata=self.docker("exec", self.container("nginx"), "cat", "/etc/nereid/tls/tls.crt"))

    def write(self, repository: Path, https: int, http: int, local: int) -> None:
        """Write what a clone has, with the models and a file of variables."""
        shutil.copy(ROOT / "compose.yaml", self.folder)
        shutil.copytree(ROOT / "deploy", self.folder / "deploy")
        shutil.copytree(repository / "yolo11n", self.folder / "model_repository" / "yolo11n")
        models.write(self.folder / "model_repository")
        variables = {
            "NEREID_HTTPS_PORT": https,
            "NEREID_HTTP_PORT": http,
            "NEREID_LOCAL_PORT": local,
            "NEREID_SUBNET": f"10.46.{os.getpid() % 200 + 4}",  # other than that of tests beside these
            "NEREID_SEARCH": "on",
            "COMPOSE_PROFILES": "prometheus,search",
        }
        (self.folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()), encoding="ascii")
        # No container may open more files than this machine lets root; and a busy machine needs time.
        nofile = min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        changes = {name: {"ulimits": {"nofile": nofile}} for name, service in SERVICES.items() if "ulimits" in service}
        for service in INSTANCES:
            changes[service]["environment"] = {"NEREID_TIMEOUT_SECONDS": 20}
        (self.folder / "changes.json").write_text(json.dumps({"services": changes}), encoding="ascii")


@pytest.fixture(scope="module")
def project(
    docker: Docker, images: dict[str, str], repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Project]:
    """The project without Grafana, with Debian's programs in the place of what comes from a registry; nothing may be left of it."""
    assert {service["image"] for service in SERVICES.values()} >= set(images.values())
    require_program("docker-compose", "docker-compose")
    for service in ("nginx", "prometheus", "database"):
        tag = f"--tag={SERVICES[service]['image']}"
        docker("build", "--network=host", f"--target={service}", tag, f"--file={STAND_INS}/Containerfile", STAND_INS)
    https, http, local = find_free(3)
    folder = tmp_path_factory.mktemp("project")
    project = Project(docker, folder, (f"https://127.0.0.1:{https}", f"http://127.0.0.1:{local}"))
    project.write(repository, https, http, local)
    try:
        project.compose("up", "--detach")
        wait_for(lambda: all(map(project.is_healthy, RUNNING)))
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout=90")
    kinds = (("ps", "--all"), ("volume", "ls"), ("network", "ls", "--filter=type=custom"))
    assert [docker(*kind, "--quiet") for kind in kinds] == [""] * len(kinds)


def test_project_finds_the_right_objects_through_nginx(project: Project, right: dict[str, object]) -> None:
    public, local = project.urls
    with httpx.Client(base_url=public, verify=project.trust(), timeout=60) as client:
        found = {name: json_of(client.post("/detect", content=sample_image(name)))["detections"] for name in right}

    assert found == right
    check(local, right)


def test_tensors_travel_in_shared_memory_and_search_has_its_database(project: Project) -> None:
    def report() -> tuple[str, str]:
        found = httpx.get(f"{project.urls[1]}/health").json()
        return found["tritons"][0]["transport"], found["search"]["status"]

    wait_for(lambda: report() == ("shm", "healthy"))  # a test before this one may have killed them


def test_prometheus_scrapes_each_instance(project: Project) -> None:
    query = ["wget", "-qO-", "http://127.0.0.1:9090/api/v1/query?query=up"]

    def scraped() -> dict[str, str]:
        found = json.loads(project.docker("exec", project.container("prometheus"), *query))["data"]["result"]
        return {one["metric"]["instance"]: one["value"][1] for one in found}

    wait_for(lambda: scraped() == dict.fromkeys(INSTANCES, "1"))


@pytest.mark.parametrize("service", RUNNING)
def test_service_cannot_write_to_its_root(project: Project, service: str) -> None:
    done = project.docker.run("docker", "exec", "--user=0", project.container(service), "touch", "/written")

    assert "Read-only file system" in done.stderr


@pytest.mark.parametrize("service", RUNNING)
async def test_killed_service_is_started_again_and_nothing_else_is_lost(project: Project, service: str) -> None:
    """While Triton loads its models, callers are told to ask again. Nothing is in front of NGINX."""
    expected = {"nginx": {200, NO_ANSWER}, "triton": {200, 503}}.get(service, {200})
    async with traffic(project.urls[1], clients=4) as counted:
        await counted.until(50)
        killed = project.kill(service)
        await until(lambda: project.is_healthy(service, killed))
        before = counted.statuses.copy()
        await counted.until(counted.requests + 50)

    assert set(counted.statuses) <= expected
    assert set(counted.final) <= expected - {503}
    assert set(counted.statuses - before) == {200}


async def replace_one_by_one(project: Project, *command: str) -> None:
    """Run a command of Compose for each instance, under load, of which nothing may be lost."""
    async with traffic(project.urls[1], clients=4) as counted:
        await counted.until(50)
        for service in INSTANCES:
            await to_thread(project.compose, *command, service)
            await until(partial(project.is_healthy, service))
            await counted.until(counted.requests + 50)

    assert set(counted.statuses) == {200}


async def test_instances_are_restarted_one_by_one_without_a_loss(project: Project) -> None:
    await replace_one_by_one(project, "restart")


async def test_instances_are_updated_one_by_one_without_a_loss(project: Project, images: dict[str, str], tmp_path: Path) -> None:
    """By the steps of docs/how-to/update.md."""
    (tmp_path / "Dockerfile").write_text(f"FROM {images['api']}\nLABEL update=yes\n", encoding="ascii")
    project.docker("build", f"--tag={images['api']}", tmp_path)
    await replace_one_by_one(project, "up", "--detach", "--no-deps")

    used = {project.docker.inspect(project.container(service))["Image"] for service in INSTANCES}
    assert used == {project.docker.inspect(images["api"])["Id"]}
