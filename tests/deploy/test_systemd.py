"""The units for systemd, as `systemd-analyze` sees them, and what the application needs; systemd itself does not run them here."""

import re
import subprocess
from pathlib import Path

import pytest

from app.settings.schema import Settings
from tests.deploy import compose
from tests.deploy.needs import (
    DEPLOY,
    EMBEDDED_TRITON_SECONDS,
    SUPERVISOR_SECONDS,
    TRITON_SECONDS,
    settings_of,
    sockets,
    stop_seconds,
    upstream,
)
from tests.deploy.units import COMPOSE, MODELS, NEREID, TRITON, UNITS, environment, triton_options
from tests.programs import require_program
from tests.prometheus import CONFIG, uncommented
from tests.test_model_repository import PRODUCTION, generated

EXPOSURE = 20
"""The most that `systemd-analyze security` may find, in tenths: up to 4 of 10 are OK to it."""


def settings(*, with_own_triton: bool) -> Settings:
    """Make the settings of the unit, with those that the shipped file of settings proposes, or without."""
    shipped = (DEPLOY / "systemd" / "nereid.env").read_text(encoding="utf-8")
    proposed = environment(re.sub("^#(?=NEREID_)", "", shipped, flags=re.MULTILINE))
    return settings_of({**environment(NEREID["Environment"][0]), **(proposed if with_own_triton else environment(shipped))})


def analyze(*arguments: str | Path) -> str:
    done = subprocess.run(
        [require_program("systemd-analyze", "systemd"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.system
@pytest.mark.parametrize(("unit", "drop_ins"), [*((unit, []) for unit in UNITS), ("tritonserver@.service", [MODELS])])
def test_the_unit_is_valid(unit: str, drop_ins: list[str], tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n", encoding="ascii")
    program.chmod(0o755)
    (tmp_path / f"{unit}.d").mkdir()
    for name, copy in {unit: unit, **{name: f"{unit}.d/{name}" for name in drop_ins}}.items():
        text = (DEPLOY / "systemd" / name).read_text(encoding="utf-8")
        (tmp_path / copy).write_text(re.sub(r"^(ExecSt\w+=)\S+", rf"\1{program}", text, flags=re.MULTILINE), encoding="utf-8")
    (tmp_path / "docker.service").write_text(f"[Service]\nExecStart={program}\n", encoding="ascii")

    assert analyze("verify", "--man=no", tmp_path / unit) == ""


@pytest.mark.system
@pytest.mark.parametrize("unit", UNITS)
def test_the_unit_can_do_little(unit: str) -> None:
    shown = analyze("security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", DEPLOY / "systemd" / unit)

    assert "OK" in shown


@pytest.mark.parametrize("with_own_triton", [False, True])
def test_settings_are_valid(*, with_own_triton: bool) -> None:
    configured = settings(with_own_triton=with_own_triton)

    assert configured.triton_endpoints == ("127.0.0.1:8001" if with_own_triton else "")


def test_requests_in_progress_may_end() -> None:
    needed = stop_seconds(settings(with_own_triton=False)) + SUPERVISOR_SECONDS + EMBEDDED_TRITON_SECONDS

    assert int(NEREID["TimeoutStopSec"][0]) >= needed
    assert int(TRITON["TimeoutStopSec"][0]) > TRITON_SECONDS
    assert TRITON["Before"] == ["nereid.service"]  # so it is stopped after Nereid
    assert NEREID["KillMode"] == TRITON["KillMode"] == ["mixed"]


def test_containers_have_the_time_that_they_need_to_stop() -> None:
    """NGINX stops first, then the gateway, then Triton."""
    services = compose.read("compose.yaml")["services"]
    periods = [int(services[name]["stop_grace_period"].removesuffix("s")) for name in ("nginx", "api-1", "triton")]

    assert int(COMPOSE["TimeoutStopSec"][0]) > sum(periods)


def test_tritons_of_several_gpus_do_not_meet() -> None:
    ports = [[options[f"{name}-port"] for name in ("http", "grpc", "metrics")] for options in map(triton_options, range(4))]

    assert ports[0] == ["8000", "8001", "8002"]
    assert len({port for of_one in ports for port in of_one}) == 12
    assert "CUDA_VISIBLE_DEVICES=%i" in " ".join(TRITON["Environment"])
    assert "%i" in TRITON["CacheDirectory"][0]


def test_gateway_and_prometheus_name_the_tritons() -> None:
    proposed, shipped = settings(with_own_triton=True), (DEPLOY / "systemd" / "nereid.env").read_text(encoding="utf-8")
    endpoints = [f"127.0.0.1:{triton_options(gpu)['grpc-port']}" for gpu in range(2)]
    metrics = [f"127.0.0.1:{triton_options(gpu)['metrics-port']}" for gpu in range(2)]
    urls = [f"http://{address}/metrics" for address in metrics]
    job = uncommented(CONFIG.read_bytes())["scrape_configs"][1]

    assert (proposed.triton_endpoints, proposed.triton_metrics_url) == (endpoints[0], urls[0])
    assert f"{','.join(endpoints)} and {','.join(urls)}" in shipped
    assert job["static_configs"] == [{"targets": metrics[:1]}]
    assert f'"{metrics[1]}"' in CONFIG.read_text(encoding="utf-8")
    assert "relabel_configs" not in job


def test_a_service_that_hangs_is_started_again() -> None:
    """The first process of the one file is not the one that tells systemd."""
    assert (NEREID["Type"], NEREID["NotifyAccess"], NEREID["WatchdogSignal"]) == (["notify"], ["all"], ["SIGKILL"])
    assert int(NEREID["WatchdogSec"][0]) == 30
    assert NEREID["Restart"] == ["on-failure"]


def test_nginx_finds_the_sockets() -> None:
    configured = settings(with_own_triton=False)

    assert upstream("upstream.conf") == sockets(configured)
    assert configured.socket == f"/run/{NEREID['RuntimeDirectory'][0]}"
    assert int(NEREID["RuntimeDirectoryMode"][0], 8) & 0o010
    assert int(configured.socket_mode, 8) & 0o020


def test_triton_shares_models_memory_and_engines() -> None:
    repository = Path(NEREID["WorkingDirectory"][0], settings(with_own_triton=True).model_repository)

    assert TRITON["User"] == NEREID["User"]
    kept, seen = TRITON["BindPaths"][0].split(":")

    assert triton_options(0)["model-repository"] == str(repository)
    assert kept == f"/var/cache/{TRITON['CacheDirectory'][0]}"
    assert f'"{seen}"' in generated("yolo11n", PRODUCTION)
