"""The stack for Docker Swarm: what Swarm takes, what `compose.yaml` says, what the application needs; no engine runs it."""

import os
import re
import subprocess
from typing import Any

import pytest

from app.settings.schema import Settings
from tests.deploy.needs import (
    DEPLOY,
    defaults,
    load,
    memory_bytes,
    nbytes,
    settings_of,
    shared_memory_bytes,
    stop_seconds,
)
from tests.deploy.test_prometheus import promtool
from tests.nginx import SHIPPED
from tests.programs import require_program

FILE = DEPLOY / "stack.yaml"
STACK: dict[str, Any] = load(FILE)
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
COMPOSE: dict[str, dict[str, Any]] = load(DEPLOY / "compose.yaml")["services"]
OTHER = {"api": "api-1"}
"""Names in Compose that differ."""
API, TRITON = SERVICES["api"], SERVICES["triton"]
SETTINGS = settings_of({name: defaults(value) for name, value in API["environment"].items()})

TAKEN = {
    *("cap_add", "cap_drop", "command", "configs", "deploy", "dns", "dns_search", "entrypoint", "environment", "extra_hosts"),
    *("healthcheck", "hostname", "image", "init", "labels", "logging", "networks", "ports", "read_only", "secrets", "stop_signal"),
    *("stop_grace_period", "sysctls", "ulimits", "user", "volumes", "working_dir"),
}
"""What Swarm takes of a service: docker/cli, cli/compose/convert/service.go. It ignores others, some of them silently."""
SAME = (
    *("command", "user", "read_only", "cap_drop", "logging", "healthcheck", "stop_signal", "stop_grace_period", "ulimits"),
    "sysctls",
)
DIFFERENT = {("nginx", "command"), ("nginx", "healthcheck"), ("nginx", "tmpfs"), ("prometheus", "command")}

each_service = pytest.mark.parametrize("name", SERVICES)


def essence(service: dict[str, Any]) -> dict[str, Any]:
    """Return what must be the same in both files, although Swarm writes some of it in another way."""
    sizes = dict(str(options).rpartition("size=")[::2] for options in service.get("tmpfs", []))
    mounts = [mount for mount in service.get("volumes", []) if isinstance(mount, dict) and mount["type"] == "tmpfs"]
    return {name: service.get(name) for name in SAME} | {
        "image": defaults(service["image"]),
        "limits": service["deploy"]["resources"]["limits"],
        "tmpfs": {path.partition(":")[0]: nbytes(size) for path, size in sizes.items()}
        | {mount["target"]: mount["tmpfs"]["size"] for mount in mounts},
    }


@pytest.mark.system
def test_docker_accepts_the_file_and_ignores_nothing() -> None:
    """Its command line checks a stack, and names what it does not support, before it looks for an engine."""
    nowhere = "unix:///nowhere/docker.sock"
    command = [require_program("docker", "docker-cli"), "stack", "deploy", "--detach", f"--compose-file={FILE}", "nereid"]
    environment = os.environ | {"DOCKER_HOST": nowhere}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)

    assert nowhere in done.stdout
    assert "Ignoring" not in done.stdout


@each_service
def test_swarm_ignores_no_option_of_the_file(name: str) -> None:
    """Addresses of a service in a network, and of the machine for a port, are ignored without a word, too."""
    service = SERVICES[name]

    assert set(service) <= TAKEN
    assert isinstance(service["networks"], list)
    assert all(set(port) == {"target", "published", "mode"} for port in service.get("ports", []))
    assert "max_replicas_per_node" not in service["deploy"]["placement"]
    assert essence(service)["tmpfs"].keys() <= {"/tmp"}  # noqa: S108 - the only folder that is everybody's in the images


@each_service
def test_values_are_those_of_compose(name: str) -> None:
    here, there = essence(SERVICES[name]), essence(COMPOSE[OTHER.get(name, name)])

    assert {key for key in here if here[key] != there[key]} == {key for service, key in DIFFERENT if service == name}


def test_settings_are_those_of_compose() -> None:
    here, there = API["environment"], COMPOSE[OTHER["api"]]["environment"]
    different = {name.removeprefix("NEREID_").lower() for name in here.keys() | there.keys() if here.get(name) != there.get(name)}

    assert different == {"triton_endpoints", "triton_metrics_url", "trusted_proxies", "api_keys_file", "drain_delay_seconds"}
    assert COMPOSE["triton"]["environment"].items() <= TRITON["environment"].items()


def test_a_gateway_has_what_it_needs() -> None:
    limit = nbytes(API["deploy"]["resources"]["limits"]["memory"])

    assert memory_bytes(SETTINGS, limit) + shared_memory_bytes(SETTINGS) <= limit
    assert stop_seconds(SETTINGS) <= int(API["stop_grace_period"].removesuffix("s"))
    assert API["deploy"]["update_config"]["order"] == "start-first"
    assert TRITON["deploy"]["update_config"]["order"] == "stop-first"


def test_gateway_and_triton_share_the_memory_of_their_node() -> None:
    """Both are on the nodes with GPUs, as the same user, because others cannot open the files."""
    shared = [mount for mount in API["volumes"] if mount["target"] == "/dev/shm"]  # noqa: S108

    assert shared == [{"type": "bind", "source": "/dev/shm", "target": "/dev/shm"}]  # noqa: S108
    assert shared[0] in TRITON["volumes"]
    assert API["user"] == TRITON["user"]
    assert API["deploy"]["placement"] == TRITON["deploy"]["placement"]


def test_only_nginx_reaches_the_instances_and_is_believed() -> None:
    (network,) = STACK["networks"]["api"]["ipam"]["config"]
    inside = {name for name, service in SERVICES.items() if "api" in service["networks"]}

    assert inside == {"nginx", "api", "prometheus"}
    assert SETTINGS.trusted_proxies == network["subnet"]
    assert [STACK["networks"][name]["internal"] for name in ("api", "triton")] == [True, True]
    assert "triton" not in SERVICES["nginx"]["networks"]


def test_a_password_or_a_key_is_needed_at_each_port() -> None:
    published = {name: [port["published"] for port in service["ports"]] for name, service in SERVICES.items() if "ports" in service}
    secrets = {one["source"] for service in SERVICES.values() for one in service.get("secrets", [])}

    assert published == {"nginx": [80, 443], "grafana": [3000]}
    assert SETTINGS.api_keys_file == "/run/secrets/keys.toml"
    assert SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana.password"  # noqa: S105 - a path
    assert secrets == set(STACK["secrets"])


def test_files_exist_and_get_a_new_name_with_each_revision() -> None:
    """Swarm refuses another content under the name of a config or a secret."""
    used = {one["source"] for service in SERVICES.values() for one in service.get("configs", [])}

    assert used == set(STACK["configs"])
    assert all((DEPLOY / one["file"]).is_file() for one in STACK["configs"].values())
    for one in (*STACK["configs"].values(), *STACK["secrets"].values()):
        assert one["name"].endswith("-${REVISION:-1}")


def test_nginx_asks_for_the_instances() -> None:
    """All else is as for Compose. An instance that ends is forgotten before it refuses connections."""
    listed = [(SHIPPED / f"upstream.{name}.conf").read_text(encoding="utf-8") for name in ("swarm", "compose")]
    here, there = (re.sub(r"#.*|(resolver|server) .*", "", text).split() for text in listed)
    (valid,) = re.findall(r"resolver 127\.0\.0\.11 valid=(\d+)s ", listed[0])

    assert here == there
    assert re.findall(r"^    server (.*);$", listed[0], re.MULTILINE) == [f"tasks.api:{Settings().port} max_fails=0 resolve"]
    assert int(valid) < SETTINGS.drain_delay_seconds


@pytest.mark.system
def test_prometheus_finds_all_tasks() -> None:
    shown = promtool("check", "config", "--lint-fatal", "--syntax-only", "prometheus.swarm.yml")
    jobs = {job["job_name"]: job["dns_sd_configs"][0] for job in load(DEPLOY / "prometheus/prometheus.swarm.yml")["scrape_configs"]}

    assert "SUCCESS" in shown
    assert {name: (job["names"], job["port"]) for name, job in jobs.items()} == {
        "nereid": (["tasks.api"], SETTINGS.port),
        "triton": (["tasks.triton"], 8002),
    }
    assert SETTINGS.triton_endpoints == "dns:///tasks.triton:8001"
