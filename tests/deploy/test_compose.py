"""The files for Docker Compose, against its schema and what the application needs; there is no engine to run them here."""

import ipaddress
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.host import ports
from app.settings.schema import Settings
from tests.deploy.compose import change, mounts, read
from tests.deploy.needs import (
    DEPLOY,
    EMBEDDED_TRITON_SECONDS,
    IMAGE,
    SUPERVISOR_SECONDS,
    TRITON_SECONDS,
    defaults,
    load,
    memory_bytes,
    nbytes,
    settings_of,
    shared_memory_bytes,
    sockets,
    stop_seconds,
    upstream,
)
from tests.deploy.test_prometheus import promtool
from tests.support import ROOT

FILES = [
    "compose.yaml",
    "compose.cpu.yaml",
    "compose.gpus.yaml",
    "compose.outside.yaml",
    "compose.models.yaml",
    "compose.search.yaml",
]
ALONE = FILES[:2]
"""Those that are not overlays of the first one."""
PROJECTS = {name: read(name) if name in ALONE else read("compose.yaml", name) for name in FILES}
EXAMPLES = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/how-to/several-gpus.md").read_text(encoding="utf-8"), re.DOTALL)
PROJECTS |= {f"example-{i}": change(PROJECTS["compose.gpus.yaml"], msgspec.yaml.decode(text)) for i, text in enumerate(EXAMPLES)}
SERVICES: dict[str, dict[str, Any]] = {name: project["services"] for name, project in PROJECTS.items()}
GPU, CPU, GPUS, OUTSIDE, *_ = SERVICES.values()
INSTANCES = [name for name, service in GPU.items() if service.get("command") == ["api"]]

each_service = pytest.mark.parametrize(
    "service", [pytest.param(service, id=f"{file}-{name}") for file in SERVICES for name, service in SERVICES[file].items()]
)


def settings(service: dict[str, Any]) -> Settings:
    return settings_of({name: defaults(value) for name, value in service["environment"].items()})


def limits(service: dict[str, Any]) -> dict[str, str]:
    return dict(service["deploy"]["resources"]["limits"])


def seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


def test_the_files_are_valid(tmp_path: Path) -> None:
    merged = [tmp_path / f"{name}.json" for name in PROJECTS if name not in ALONE]
    for path in merged:
        path.write_bytes(msgspec.json.encode(PROJECTS[path.stem]))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, *FILES, "stack.yaml", *merged], cwd=DEPLOY, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


@each_service
def test_a_service_can_do_no_more_than_it_needs(service: dict[str, Any]) -> None:
    assert service["cap_drop"] == ["ALL"]
    assert set(service.get("cap_add", [])) <= {"CHOWN"}
    assert "no-new-privileges:true" in service["security_opt"]
    assert service.get("read_only") or service["image"].endswith("-embedded")
    assert set(limits(service)) - {"pids"} == {"cpus", "memory"}
    assert "pids_limit" not in service  # Compose refuses it beside these limits
    assert "max-size" in service["logging"]["options"]


@pytest.mark.parametrize("services", SERVICES.values(), ids=SERVICES)
def test_only_nginx_is_published(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    local = f"127.0.0.1:{Settings().port}:4604"

    assert published.pop("nginx") == ["80:80", "443:443", local]
    assert published == ({"grafana": ["127.0.0.1:3000:3000"]} if "grafana" in services else {})
    assert not any(service.get("network_mode") == "host" for service in services.values())


@pytest.mark.parametrize("file", FILES)
def test_mounted_files_exist(file: str) -> None:
    """An engine creates a folder in place of a missing file."""
    sources = [source for service in SERVICES[file].values() for source in mounts(service).values()]
    missing = [path for path in sources if path.startswith(".") and not (DEPLOY / path).exists()]

    assert missing == []


@pytest.mark.parametrize("name", PROJECTS)
def test_volumes_belong_to_those_who_write(name: str) -> None:
    services, owned = PROJECTS[name]["services"], mounts(PROJECTS[name]["services"]["owners"])
    users = {volume: folder.split("/")[1] for folder, volume in owned.items()}
    writing = [
        (service["user"].split(":")[0], users[volume], service["depends_on"]["owners"]["condition"])
        for service in services.values()
        for target, volume in mounts(service).items()
        if volume in users and target not in owned
    ]

    assert len(writing) == len(users)
    assert all(user == owner for user, owner, _ in writing)
    assert {condition for *_, condition in writing} == {"service_completed_successfully"}
    assert set(users) <= set(PROJECTS[name]["volumes"])
    assert all(f"{user}:{user} /{user}/" in " ".join(services["owners"]["entrypoint"]) for user in users.values())


@pytest.mark.parametrize("gateway", [*(GPU[name] for name in INSTANCES), CPU["nereid"]], ids=[*INSTANCES, "cpu"])
def test_a_gateway_has_what_it_needs(gateway: dict[str, Any]) -> None:
    configured, limit = settings(gateway), nbytes(limits(gateway)["memory"])
    stop = stop_seconds(configured)
    if gateway["command"] == ["serve"]:
        stop += SUPERVISOR_SECONDS + EMBEDDED_TRITON_SECONDS

    assert gateway["image"].removesuffix("-embedded") == IMAGE
    assert configured.workers
    assert max(1, configured.instances) * configured.workers <= float(limits(gateway)["cpus"])
    assert memory_bytes(configured, limit) + shared_memory_bytes(configured) <= limit
    assert seconds(gateway["stop_grace_period"]) >= stop


def test_nginx_and_triton_wait_for_requests_too() -> None:
    """They have to outlast the gateway's requests."""
    for services, gateway in ((GPU, GPU[INSTANCES[0]]), (CPU, CPU["nereid"])):
        configured = settings(gateway)
        assert seconds(services["nginx"]["stop_grace_period"]) >= configured.body_seconds + configured.max_timeout_seconds
    assert seconds(GPU["triton"]["stop_grace_period"]) > TRITON_SECONDS


def test_gateway_and_triton_share_memory() -> None:
    """They run as the same user: others cannot open the files."""
    owner = GPU["shared-memory"]
    sharing = [GPU[name] for name in (*INSTANCES, "triton")]

    assert owner["ipc"] == "shareable"
    assert {service["ipc"] for service in sharing} == {"service:shared-memory"}
    assert len({service["user"] for service in sharing}) == 1
    assert nbytes(owner["shm_size"]) >= sum(shared_memory_bytes(settings(GPU[name])) for name in INSTANCES)
    assert "--allow-client-shm=true" in GPU["triton"]["command"]
    assert nbytes(CPU["nereid"]["shm_size"]) > shared_memory_bytes(settings(CPU["nereid"]))


def test_an_update_of_the_gateway_replaces_nothing_that_triton_depends_on() -> None:
    """Otherwise the owner of the shared memory would be replaced, and with it Triton and all instances at once."""
    assert not {GPU[name]["image"] for name in ("shared-memory", "owners", "triton")} & {GPU[name]["image"] for name in INSTANCES}


def test_triton_is_asked_for_the_gateways_model() -> None:
    variable = GPU[INSTANCES[0]]["environment"]["NEREID_MODEL"]

    assert CPU["nereid"]["environment"]["NEREID_MODEL"] == variable
    assert f"/v2/models/{variable}/ready" in GPU["triton"]["healthcheck"]["test"][-1]
    assert defaults(variable) == Settings().model


def test_the_addresses_of_instances_stay() -> None:
    """NGINX resolves them only once, no other container may get them, and the gateway trusts only NGINX's address."""
    (network,) = load(DEPLOY / "compose.yaml")["networks"]["api"]["ipam"]["config"]
    fixed = {name: service["networks"]["api"]["ipv4_address"] for name, service in GPU.items() if name in (*INSTANCES, "nginx")}
    addresses = [ipaddress.ip_address(address) for address in fixed.values()]

    assert GPU["nginx"]["extra_hosts"] == {name: fixed[name] for name in INSTANCES}
    assert all(address in ipaddress.ip_network(network["subnet"]) for address in addresses)
    assert not any(address in ipaddress.ip_network(network["ip_range"]) for address in addresses)
    assert len(set(addresses)) == len(addresses)
    assert {GPU[name]["environment"]["NEREID_TRUSTED_PROXIES"] for name in INSTANCES} == {fixed["nginx"]}


def test_the_ports_are_those_that_somebody_listens_on() -> None:
    api = [f"{name}:{settings(GPU[name]).port}" for name in INSTANCES]
    scraped = {
        job["job_name"]: job["static_configs"] for job in load(DEPLOY / "prometheus/prometheus.compose.yml")["scrape_configs"]
    }

    assert upstream("upstream.compose.conf") == api
    assert scraped == {"nereid": [{"targets": api}], "triton": [{"targets": ["triton:8002"]}]}
    assert settings(GPU[INSTANCES[0]]).triton_address == "triton:8001"
    assert not any(ports.is_loopback(settings(GPU[name]).host) for name in INSTANCES)


def test_each_gpu_has_a_triton() -> None:
    tritons = {name: service for name, service in GPUS.items() if service["image"] == GPU["triton"]["image"]}
    configured = [settings(GPUS[name]) for name in INSTANCES]
    job = load(DEPLOY / "prometheus/prometheus.compose.yml")["scrape_configs"][1]
    (pattern,) = job["file_sd_configs"][0]["files"]
    folder = DEPLOY / mounts(GPUS["prometheus"])[str(Path(pattern).parent)]
    scraped = [*job["static_configs"], *(target for path in folder.glob(Path(pattern).name) for target in load(path))]

    assert {one.triton_endpoints for one in configured} == {",".join(f"{name}:8001" for name in tritons)}
    assert {one.triton_metrics_url for one in configured} == {",".join(f"http://{name}:8002/metrics" for name in tritons)}
    assert scraped == [{"targets": [f"{name}:8002"]} for name in tritons]
    assert [one["environment"]["CUDA_VISIBLE_DEVICES"] for one in tritons.values()] == ["0", "1"]
    assert len({mounts(one)["/var/cache/nereid"] for one in tritons.values()}) == 2
    assert GPUS["triton-2"].items() >= {name: GPU["triton"][name] for name in ("command", "user", "ipc", "networks")}.items()


def test_nginx_has_the_sockets_of_the_instances() -> None:
    configured = settings(CPU["nereid"])

    assert upstream("upstream.conf") == sockets(configured)
    assert f"sockets:{configured.socket}" in CPU["nereid"]["volumes"]
    assert f"sockets:{configured.socket}" in CPU["nginx"]["volumes"]
    assert int(configured.socket_mode, 8) & 0o002


def test_a_client_cannot_reach_what_is_behind_nginx() -> None:
    networks = load(DEPLOY / "compose.yaml")["networks"]
    assert [networks[name]["internal"] for name in ("api", "triton")] == [True, True]
    assert "triton" not in GPU["nginx"]["networks"]


def test_only_the_gateway_can_reach_others_if_it_shall() -> None:
    """Its own protection is the one against requests to private addresses; NGINX and Triton stay where they are."""
    networks = PROJECTS["compose.outside.yaml"]["networks"]
    leads_out = {name for name, network in networks.items() if not (network or {}).get("internal")}
    can_reach = {name for name, service in OUTSIDE.items() if leads_out & set(service.get("networks", []))}

    assert can_reach == {*INSTANCES, "nginx", "prometheus", "grafana"}
    assert {name for name in can_reach if "outside" in OUTSIDE[name]["networks"]} == set(INSTANCES)


@pytest.mark.system
def test_prometheus_takes_its_configuration() -> None:
    assert "2 rule files found" in promtool("check", "config", "--lint-fatal", "prometheus.compose.yml")


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    source = load(DEPLOY / "grafana/provisioning/datasources/prometheus.yml")["datasources"][0]
    folder = load(DEPLOY / "grafana/provisioning/dashboards/nereid.yml")["providers"][0]["options"]["path"]
    interval = load(DEPLOY / "prometheus/prometheus.compose.yml")["global"]["scrape_interval"]

    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == interval
    assert f"./grafana/nereid.json:{folder}/nereid.json:ro" in GPU["grafana"]["volumes"]
