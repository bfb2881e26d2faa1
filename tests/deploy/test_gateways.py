"""Each shipped way to run a gateway, by one table: its settings fit each other, and it has the memory and time that they need.

And the services of Compose and Swarm: who reaches whom, what each can do, and what both files have in common.
"""

import ipaddress
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from app.host import cores, ports
from app.settings.schema import Settings
from app.triton.shared_memory import MAX_WORKER_BYTES
from tests.deploy.needs import (
    COMPOSE,
    CPU,
    DEPLOY,
    GPU,
    GPUS,
    INSTANCES,
    NEREID,
    PROJECTS,
    SERVICES,
    TRITON,
    Service,
    defaults,
    environment,
    load,
    mounts,
    nbytes,
    options_of,
    settings_of,
    triton_command,
    upstream,
)
from tests.deploy.test_kubernetes import plain, volume
from tests.prometheus import CONFIG, uncommented
from tests.support import ROOT
from tests.test_model_repository import PRODUCTION, generated

WORKER_BYTES = 200 << 20
"""Resident memory of a worker without its shared memory; 180 MiB is the most that was measured."""
SUPERVISOR_SECONDS, EMBEDDED_TRITON_SECONDS, TRITON_SECONDS = 5, 10, 30
"""How much longer than an instance `serve` waits, then for its Triton, and how long any Triton gives the requests in progress."""
STACK: dict[str, Any] = load(DEPLOY / "stack.yaml")
SWARM: dict[str, Service] = STACK["services"]
SAME = ("command", "user", "read_only", "cap_drop", "logging", "healthcheck", "stop_signal", "stop_grace_period", "ulimits")
DIFFERENT = {("nginx", "command"), ("nginx", "healthcheck"), ("prometheus", "command"), ("triton", "image")}
_TRITON_SETTINGS, _SEARCH_SETTINGS = {"triton_endpoints", "triton_metrics_url"}, {"search", "database_url"}
DIFFERENT_SETTINGS = {"trusted_proxies", "api_keys_file", "drain_delay_seconds", *_TRITON_SETTINGS, *_SEARCH_SETTINGS}
LIMITS = {"cpus": "cpus", "memory": "mem_limit", "pids": "pids_limit"}
SETTINGS_OF_UNIT = (DEPLOY / "systemd" / "nereid.env").read_text(encoding="utf-8")


class Gateway(NamedTuple):
    settings: Settings
    memory: float = math.inf
    """Bytes that it may have, with what it writes of shared memory."""
    shared: float = math.inf
    """Bytes of shared memory that are there for it."""
    cores: float = math.inf
    stop: float = 0
    """Seconds that it has to end."""
    after: float = 0
    """Seconds of them that others need who end after the instances."""


def limits_of(service: Service) -> dict[str, str]:
    """Return what a service may have; Swarm has other names for that."""
    limits = service.get("deploy", {}).get("resources", {}).get("limits", {})
    return {name: str(limits.get(name, service.get(key))) for name, key in LIMITS.items()}


def in_containers(service: Service, shared: float) -> Gateway:
    cores, memory, _ = limits_of(service).values()
    return Gateway(settings_of(service["environment"]), nbytes(memory), shared, float(cores), seconds_of(service))


def in_kubernetes(overlay: str, models: str) -> Gateway:
    cluster = plain(overlay, models)
    pod, resources, is_beside = cluster.pod(), cluster.api["resources"], overlay == "sidecar"
    shared = nbytes(volume(pod, "shared-memory")["emptyDir"]["sizeLimit"]) if is_beside else 0
    memory, processors = nbytes(resources["limits"]["memory"]), float(resources["requests"]["cpu"])
    after = EMBEDDED_TRITON_SECONDS if is_beside else 0
    return Gateway(cluster.settings, memory, shared, processors, pod["terminationGracePeriodSeconds"], after)


def of_unit(*, has_triton: bool) -> Gateway:
    """Return the unit with the settings that the shipped file proposes, or without."""
    proposed = re.sub("^#(?=NEREID_)", "", SETTINGS_OF_UNIT, flags=re.MULTILINE) if has_triton else SETTINGS_OF_UNIT
    configured = settings_of(environment(NEREID["Environment"][0]) | environment(proposed))
    after = SUPERVISOR_SECONDS + EMBEDDED_TRITON_SECONDS
    return Gateway(configured, stop=int(NEREID["TimeoutStopSec"][0]), after=after)


def seconds_of(service: Service) -> int:
    return int(service["stop_grace_period"].removesuffix("s"))


GATEWAYS: dict[str, Callable[[], Gateway]] = {
    "swarm": partial(in_containers, SWARM["api"], math.inf),
    "unit": partial(of_unit, has_triton=False),
    "unit with Triton": partial(of_unit, has_triton=True),
    "pod with Triton": partial(in_kubernetes, "sidecar", "nfs"),
    "pod": partial(in_kubernetes, "separate", "s3"),
}
options = dict(option.split("=") for option in PROJECTS["compose.yaml"]["volumes"]["shared-memory"]["driver_opts"]["o"].split(","))
for name, services in SERVICES.items():
    size = nbytes(options["size"]) / len(INSTANCES)
    GATEWAYS |= {f"{name} {one}": partial(in_containers, services[one], size) for one in INSTANCES}


@pytest.mark.parametrize("name", GATEWAYS)
def test_gateway_has_the_memory_and_the_time_that_its_settings_need(name: str) -> None:
    gateway = GATEWAYS[name]()
    settings = gateway.settings
    workers = max(1, settings.instances) * cores.workers(settings.workers, settings.instances)
    budget = settings.memory_mb << 20 or gateway.memory // 8
    shared = 0 if settings.transport == "inline" else workers * MAX_WORKER_BYTES

    assert settings.workers or gateway.cores == math.inf  # otherwise, workers are those of the testing machine
    assert workers <= gateway.cores
    assert shared <= gateway.shared
    assert workers * WORKER_BYTES + 2 * (0 if gateway.memory == math.inf else budget) + shared <= gateway.memory
    assert settings.drain_delay_seconds + settings.drain_seconds + gateway.after <= gateway.stop
    assert settings.model == Settings().model
    assert settings.socket or not ports.is_loopback(settings.host)


def test_proxies_outlast_requests_and_a_unit_that_hangs_is_started_again() -> None:
    slowest = Settings().body_seconds + Settings().max_timeout_seconds
    pod = plain("separate", "s3").pod("triton")
    before = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    watched = {"Type": ["notify"], "NotifyAccess": ["all"], "WatchdogSec": ["30"], "WatchdogSignal": ["SIGKILL"]}

    assert min(seconds_of(services["nginx"]) for services in (GPU, SWARM)) >= slowest
    assert min(seconds_of(GPU["triton"]), seconds_of(SWARM["triton"]), int(TRITON["TimeoutStopSec"][0])) > TRITON_SECONDS
    assert pod["terminationGracePeriodSeconds"] > before + TRITON_SECONDS
    assert int(COMPOSE["TimeoutStopSec"][0]) > sum(seconds_of(GPU[name]) for name in ("nginx", "api-1", "triton"))
    assert TRITON["Before"] == ["nereid.service"]  # so it is stopped after Nereid
    assert NEREID.items() >= (watched | {"Restart": ["on-failure"], "KillMode": ["mixed"]}).items()


def test_triton_and_gateway_share_memory_as_the_same_user() -> None:
    """Others cannot open the files."""
    for services in (CPU, GPU, GPUS, SERVICES["compose.models.yaml"]):
        tritons = [service for name, service in services.items() if name.startswith("triton")]
        sharing = [*tritons, *(services[name] for name in INSTANCES)]
        assert {(mounts(service)["/dev/shm"], service["user"]) for service in sharing} == {("shared-memory", "10001:10001")}  # noqa: S108
        assert all("--allow-client-shm=true" in triton["command"] for triton in tritons if services is not CPU)
    mount = {"type": "bind", "source": "/dev/shm", "target": "/dev/shm"}  # noqa: S108 - in containers
    assert all(mount in SWARM[name]["volumes"] and SWARM[name]["user"] == "10001:10001" for name in ("api", "triton"))
    assert SWARM["api"]["deploy"]["placement"] == SWARM["triton"]["deploy"]["placement"]
    assert TRITON["User"] == NEREID["User"]
    cluster, mounted = plain("sidecar", "nfs"), {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108
    assert all(mounted in container["volumeMounts"] for container in (cluster.api, cluster.triton))
    assert ("--allow-client-shm=true" in cluster.triton["args"], cluster.settings.transport) == (True, "auto")


def test_gateway_nginx_and_prometheus_have_the_addresses_of_each_other() -> None:
    """And each of several Tritons has its own ports and GPU."""
    folder = DEPLOY / "prometheus"
    jobs = {one: load(folder / f"prometheus.{one}.yml")["scrape_configs"] for one in ("compose", "swarm")}
    api = [f"{name}:{settings_of(GPU[name]['environment']).port}" for name in INSTANCES]
    tritons = [name for name in GPUS if name.startswith("triton")]
    files = [ROOT / path for target, path in mounts(GPUS["prometheus"]).items() if target.startswith("/etc/nereid/tritons/")]
    assert upstream("upstream.compose.conf") == jobs["compose"][0]["static_configs"][0]["targets"] == api
    assert [target for path in files for target in load(path)] == [{"targets": [f"{name}:8002"]} for name in tritons]
    for name in INSTANCES:
        configured = settings_of(GPUS[name]["environment"])
        assert configured.triton_endpoints == ",".join(f"{triton}:8001" for triton in tritons)
        assert configured.triton_metrics_url == ",".join(f"http://{triton}:8002/metrics" for triton in tritons)
    assert [GPUS[name]["environment"]["CUDA_VISIBLE_DEVICES"] for name in tritons] == ["0", "1"]

    found = {job["job_name"]: (job["dns_sd_configs"][0]["names"], job["dns_sd_configs"][0]["port"]) for job in jobs["swarm"]}
    swarm = settings_of(SWARM["api"]["environment"])
    assert found == {"nereid": (["tasks.api"], swarm.port), "triton": (["tasks.triton"], 8002)}
    assert swarm.triton_endpoints == "dns:///tasks.triton:8001"
    assert upstream("upstream.swarm.conf") == [f"tasks.api:{swarm.port}"]

    unit, options = of_unit(has_triton=True).settings, [options_of(triton_command(gpu)) for gpu in range(4)]
    endpoint, metrics = f"127.0.0.1:{options[0]['grpc-port']}", f"127.0.0.1:{options[0]['metrics-port']}"
    job = uncommented(CONFIG.read_bytes())["scrape_configs"][1]
    assert len({each[f"{kind}-port"] for each in options for kind in ("http", "grpc", "metrics")}) == 12
    assert (unit.triton_endpoints, unit.triton_metrics_url) == (endpoint, f"http://{metrics}/metrics")
    assert job["static_configs"] == [{"targets": [metrics]}]
    assert options[0]["model-repository"] == str(Path(NEREID["WorkingDirectory"][0], unit.model_repository))
    assert '"/var/cache/nereid"' in generated("yolo11n", PRODUCTION)
    assert TRITON["BindPaths"] == ["/var/cache/nereid-%i:/var/cache/nereid"]


def test_nginx_opens_the_sockets_of_the_instances() -> None:
    unit = GATEWAYS["unit"]().settings

    assert upstream("upstream.conf") == [f"unix:{unit.socket}/nereid-{number + 1}.sock" for number in range(unit.instances)]
    assert unit.socket == f"/run/{NEREID['RuntimeDirectory'][0]}"
    assert int(NEREID["RuntimeDirectoryMode"][0], 8) & 0o010
    assert int(unit.socket_mode, 8) & 0o020


@pytest.mark.parametrize("name", PROJECTS)
def test_services_can_do_no_more_than_they_need(name: str) -> None:
    """An engine creates a folder in place of a mounted file that is missing. Volumes are prepared for those who write."""
    services, owned = SERVICES[name], mounts(SERVICES[name]["owners"])
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert set(service.get("cap_add", [])) <= {"CHOWN"}
        assert "no-new-privileges:true" in service["security_opt"]
        assert (service["read_only"], "mem_limit" in service) == (True, True)
        assert service.get("network_mode") != "host"
        for path in mounts(service).values():
            assert not path.startswith(".") or (ROOT / path).exists() or name.startswith("example")
    published = {name: [*map(defaults, service["ports"])] for name, service in services.items() if "ports" in service}
    assert published.pop("nginx") == ["80:80", "443:443", f"127.0.0.1:{Settings().port}:4604"]
    assert published == {"grafana": ["127.0.0.1:3000:3000"]}

    users = {volume: folder.split("/")[1] for folder, volume in owned.items()}
    writing = {
        volume: service["user"].split(":")[0]
        for service in services.values()
        for target, volume in mounts(service).items()
        if volume in users and target not in owned
    }
    assert writing == users != {}


def test_instances_are_reached_and_believed_through_nginx_alone() -> None:
    """NGINX resolves the addresses only once, so that no other container may get them."""
    (network,) = PROJECTS["compose.yaml"]["networks"]["api"]["ipam"]["config"]
    fixed = {name: CPU[name]["networks"]["api"]["ipv4_address"] for name in (*INSTANCES, "nginx")}
    addresses = {ipaddress.ip_address(defaults(address)) for address in fixed.values()}
    assert not any(address in ipaddress.ip_network(defaults(network["ip_range"])) for address in addresses)
    assert {CPU[name]["environment"]["NEREID_TRUSTED_PROXIES"] for name in INSTANCES} == {fixed["nginx"]}
    (network,) = STACK["networks"]["api"]["ipam"]["config"]
    assert settings_of(SWARM["api"]["environment"]).trusted_proxies == network["subnet"]
    for project, gateways in ((PROJECTS["compose.yaml"], INSTANCES), (STACK, ["api"])):
        inside = {name for name, service in project["services"].items() if "api" in service.get("networks", ())}
        assert inside == {"nginx", "prometheus", *gateways}
        assert [project["networks"][name]["internal"] for name in ("api", "triton")] == [True, True]
        assert "triton" not in project["services"]["nginx"]["networks"]


def test_only_the_gateway_reaches_others_if_it_shall() -> None:
    project = PROJECTS["compose.outside.yaml"]
    outward = {name for name, network in project["networks"].items() if not (network or {}).get("internal")}
    services = {name: outward & set(service.get("networks", [])) for name, service in project["services"].items()}

    assert {name for name, networks in services.items() if networks} == {*INSTANCES, "nginx", "prometheus", "grafana"}
    assert {name for name, networks in services.items() if "outside" in networks} == set(INSTANCES)


def essence(service: Service) -> dict[str, Any]:
    """Return what must be the same in both files."""
    same = {name: service.get(name) for name in SAME}
    return {**same, "image": defaults(service["image"]), "limits": limits_of(service)}


def test_swarm_has_the_values_of_compose() -> None:
    different = {
        (name, key)
        for name, service in SWARM.items()
        for key, value in essence(service).items()
        if value != essence(GPU["api-1" if name == "api" else name])[key]
    }
    here, there = SWARM["api"]["environment"], GPU["api-1"]["environment"]
    settings = {name.removeprefix("NEREID_").lower() for name in here.keys() | there.keys() if here.get(name) != there.get(name)}

    assert (different, settings) == (DIFFERENT, DIFFERENT_SETTINGS)
    assert f"FROM {SWARM['triton']['image']} AS" in (DEPLOY / "container" / "nvidia.Containerfile").read_text(encoding="ascii")


def test_swarm_needs_keys_and_forgets_an_instance_before_it_refuses_connections() -> None:
    """Swarm refuses another content of a file under the same name."""
    published = {name: [port["published"] for port in service["ports"]] for name, service in SWARM.items() if "ports" in service}
    settings = settings_of(SWARM["api"]["environment"])
    listed = (DEPLOY / "nginx" / "upstream.swarm.conf").read_text(encoding="utf-8")
    (valid,) = re.findall(r"resolver 127\.0\.0\.11 valid=(\d+)s ", listed)
    orders = {name: SWARM[name]["deploy"]["update_config"]["order"] for name in ("api", "triton")}

    assert published == {"nginx": [80, 443], "grafana": [3000]}
    assert settings.api_keys_file == "/run/secrets/keys.toml"
    assert "GF_SECURITY_ADMIN_PASSWORD__FILE" in SWARM["grafana"]["environment"]
    assert all(one["name"].endswith("-${REVISION:-1}") for kind in ("configs", "secrets") for one in STACK[kind].values())
    assert orders == {"api": "start-first", "triton": "stop-first"}
    assert int(valid) < settings.drain_delay_seconds
