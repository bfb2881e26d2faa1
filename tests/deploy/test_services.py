"""The services of Compose and Swarm: who reaches whom, what each can do, and what both files have in common."""

import ipaddress
import re
from typing import Any

import pytest

from app.settings.schema import Settings
from tests.deploy.needs import DEPLOY, GPU, INSTANCES, PROJECTS, SERVICES, Service, defaults, load, mounts, settings_of

STACK: dict[str, Any] = load(DEPLOY / "stack.yaml")
SWARM: dict[str, Service] = STACK["services"]
SAME = ("command", "user", "read_only", "cap_drop", "logging", "healthcheck", "stop_signal", "stop_grace_period", "ulimits")
DIFFERENT = {("nginx", "command"), ("nginx", "healthcheck"), ("prometheus", "command")}
DIFFERENT_SETTINGS = {"triton_endpoints", "triton_metrics_url", "trusted_proxies", "api_keys_file", "drain_delay_seconds"}


@pytest.mark.parametrize("name", PROJECTS)
def test_services_can_do_no_more_than_they_need(name: str) -> None:
    """An engine creates a folder in place of a mounted file that is missing. Volumes are prepared for those who write."""
    services, owned = SERVICES[name], mounts(SERVICES[name]["owners"])
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert set(service.get("cap_add", [])) <= {"CHOWN"}
        assert "no-new-privileges:true" in service["security_opt"]
        assert service.get("read_only") or service["image"].endswith("-embedded")
        assert set(service["deploy"]["resources"]["limits"]) - {"pids"} == {"cpus", "memory"}
        assert service.get("network_mode") != "host"
        for path in mounts(service).values():
            assert not path.startswith(".") or (DEPLOY / path).exists() or name.startswith("example")
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published.pop("nginx") == ["80:80", "443:443", f"127.0.0.1:{Settings().port}:4604"]
    assert published in ({}, {"grafana": ["127.0.0.1:3000:3000"]})

    users = {volume: folder.split("/")[1] for folder, volume in owned.items()}
    writing = {
        volume: service["user"].split(":")[0]
        for service in services.values()
        for target, volume in mounts(service).items()
        if volume in users and target not in owned
    }
    assert writing == users != {}


def test_instances_are_reached_and_believed_through_nginx_alone() -> None:
    """NGINX resolves the addresses only once, and no other container may get them."""
    (network,) = PROJECTS["compose.yaml"]["networks"]["api"]["ipam"]["config"]
    fixed = {name: GPU[name]["networks"]["api"]["ipv4_address"] for name in (*INSTANCES, "nginx")}
    addresses = {ipaddress.ip_address(address) for address in fixed.values()}
    assert GPU["nginx"]["extra_hosts"] == {name: fixed[name] for name in INSTANCES}
    assert all(address in ipaddress.ip_network(network["subnet"]) for address in addresses)
    assert not any(address in ipaddress.ip_network(network["ip_range"]) for address in addresses)
    assert len(addresses) == len(fixed)
    assert {settings_of(GPU[name]["environment"]).trusted_proxies for name in INSTANCES} == {fixed["nginx"]}
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
    return {**same, "image": defaults(service["image"]), "limits": service["deploy"]["resources"]["limits"]}


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
