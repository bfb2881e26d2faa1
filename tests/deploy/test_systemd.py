"""The units for systemd, as `systemd-analyze` sees them, and what the application needs; systemd itself does not run them here."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from app.settings.schema import Settings
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
from tests.programs import require_program
from tests.test_model_repository import PRODUCTION, generated

UNITS = ["nereid.service", "tritonserver.service"]
EXPOSURE = 20
"""The most that `systemd-analyze security` may find, in tenths: up to 4 of 10 are OK to it."""


def read(unit: str) -> dict[str, list[str]]:
    text = (DEPLOY / "systemd" / unit).read_text(encoding="utf-8").replace("\\\n", " ")
    options: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        options.setdefault(name, []).append(value)
    return options


NEREID, TRITON = read("nereid.service"), read("tritonserver.service")


def environment(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in shlex.split(text, comments=True))


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


@pytest.mark.parametrize("unit", UNITS)
def test_the_unit_is_valid(unit: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n", encoding="ascii")
    program.chmod(0o755)
    text = (DEPLOY / "systemd" / unit).read_text(encoding="utf-8")
    (tmp_path / unit).write_text(re.sub(r"(?<=^ExecStart=)\S+", str(program), text, flags=re.MULTILINE), encoding="utf-8")

    assert analyze("verify", "--man=no", tmp_path / unit) == ""


@pytest.mark.parametrize("unit", UNITS)
def test_the_unit_can_do_little(unit: str) -> None:
    shown = analyze("security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", DEPLOY / "systemd" / unit)

    assert "OK" in shown


@pytest.mark.parametrize("with_own_triton", [False, True])
def test_settings_are_valid(*, with_own_triton: bool) -> None:
    """With either Triton; that of the other unit listens where the proposed settings say."""
    configured = settings(with_own_triton=with_own_triton)

    assert configured.triton_endpoints == ("127.0.0.1:8001" if with_own_triton else "")


def test_requests_in_progress_may_end() -> None:
    needed = stop_seconds(settings(with_own_triton=False)) + SUPERVISOR_SECONDS + EMBEDDED_TRITON_SECONDS

    assert int(NEREID["TimeoutStopSec"][0]) >= needed
    assert int(TRITON["TimeoutStopSec"][0]) > TRITON_SECONDS
    assert "tritonserver.service" in NEREID["After"][0]  # so it is stopped after Nereid
    assert NEREID["KillMode"] == TRITON["KillMode"] == ["mixed"]


def test_a_service_that_hangs_is_started_again() -> None:
    """The first process of the one file is not the one that tells systemd. One that is stopped obeys no other signal."""
    assert (NEREID["Type"], NEREID["NotifyAccess"], NEREID["WatchdogSignal"]) == (["notify"], ["all"], ["SIGKILL"])
    assert int(NEREID["WatchdogSec"][0]) == 30
    assert NEREID["Restart"] == ["on-failure"]


def test_nginx_finds_the_sockets() -> None:
    """As many as it knows, in the folder that systemd makes for its group."""
    configured = settings(with_own_triton=False)

    assert upstream("upstream.conf") == sockets(configured)
    assert configured.socket == f"/run/{NEREID['RuntimeDirectory'][0]}"
    assert int(NEREID["RuntimeDirectoryMode"][0], 8) & 0o010
    assert int(configured.socket_mode, 8) & 0o020


def test_triton_shares_models_memory_and_engines() -> None:
    """It runs as the same user, reads Nereid's models, and may write where their configs let TensorRT keep engines."""
    repository = Path(NEREID["WorkingDirectory"][0], settings(with_own_triton=True).model_repository)

    assert TRITON["User"] == NEREID["User"]
    assert f"--model-repository={repository}" in TRITON["ExecStart"][0]
    assert f'"/var/cache/{TRITON["CacheDirectory"][0]}"' in generated("yolo11n", PRODUCTION)
