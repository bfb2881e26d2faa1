"""Another version of the service is started while clients ask: by the steps of `docs/how-to/update.md`, behind NGINX."""

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.harness.processes import environment_of
from bench.harness.triton import link_installation
from tests.faults.meanwhile import traffic
from tests.nginx import proxying
from tests.processes import has_ended, require_program, wait_for
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import ROOT

_UNIT = ROOT / "deploy" / "systemd" / "nereid.service"
_STEPS = re.compile(r"## One machine, without a gap\n.*?```sh\n(.*?)```", re.DOTALL)
_INSTANCES = 3

# Runs units as far as the steps need it. They are stopped by a signal to their main process, as with KillMode=mixed.
_SYSTEMCTL = """#!{python}
import os, re, subprocess, sys
from pathlib import Path
import psutil
from tests.processes import has_ended, wait_for

folder, (verb, *units) = Path("{folder}"), sys.argv[1:]
for unit in units:
    pid_file = folder / (unit + ".pid")
    if verb in ("stop", "restart"):
        process = psutil.Process(int(pid_file.read_text()))
        process.terminate()
        wait_for(lambda: has_ended(process))
    if verb in ("start", "restart"):
        (text,) = [path.read_text() for path in folder.glob("*/systemd/system/" + unit + ".service")]
        given = dict(pair.split("=") for line in re.findall("^Environment=(.*)$", text, re.M) for pair in line.split())
        with (folder / (unit + ".log")).open("ab") as log:
            command = [sys.executable, "-m", "app", "serve"]
            started = subprocess.Popen(
                command, cwd=folder, env={{**os.environ, **given}}, stdout=log, stderr=log, start_new_session=True
            )
        pid_file.write_text(str(started.pid))
"""


@pytest.fixture
def environment(fault_repository: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of commands of a machine on which the unit is installed; its services end with the test."""
    home, programs = tmp_path / "triton", tmp_path / "bin"
    for name in ("triton", ".triton-next", "bin", "run/systemd/system", "etc/systemd/system"):
        (tmp_path / name).mkdir(parents=True)
    for each in (home, tmp_path / ".triton-next"):
        link_installation(each)
    unit = _UNIT.read_text(encoding="utf-8").replace("/run/", f"{tmp_path}/run/")
    (tmp_path / "etc" / "systemd" / "system" / "nereid.service").write_text(unit, encoding="utf-8")
    systemctl = programs / "systemctl"
    systemctl.write_text(_SYSTEMCTL.format(python=sys.executable, folder=tmp_path), encoding="utf-8")
    systemctl.chmod(0o755)
    settings = {
        "workers": 1,
        "timeout_seconds": 20,
        "triton_home": home,
        "model": "checksum",
        "model_repository": fault_repository,
        "log_level": "warning",
    }
    yield {
        **environment_of(ROOT),
        "PATH": f"{programs}:{os.environ['PATH']}",
        **{f"NEREID_{name.upper()}": str(value) for name, value in settings.items()},
    }
    for pid_file in tmp_path.glob("*.pid"):
        main = int(pid_file.read_text(encoding="ascii"))
        if psutil.pid_exists(main):
            family = [psutil.Process(main), *psutil.Process(main).children(recursive=True)]
            family[0].terminate()
            wait_for(lambda family=family: all(map(has_ended, family)))  # type: ignore[misc]


async def run(script: str, environment: dict[str, str]) -> None:
    process = await asyncio.create_subprocess_exec("bash", "-c", script, env=environment)
    assert await process.wait() == 0


async def test_update_by_the_written_steps_loses_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    require_program("curl", "curl")
    (script,) = _STEPS.findall((ROOT / "docs" / "how-to" / "update.md").read_text(encoding="utf-8"))
    steps = "set -e\n" + re.sub(r"/(etc|run)/", rf"{tmp_path}/\1/", script)
    wait_until_ready = re.findall(r"^ *for number.*?^ *done$", steps, re.DOTALL | re.MULTILINE)[0]
    sockets = [f"{tmp_path}/run/nereid/nereid-{number + 1}.sock" for number in range(_INSTANCES)]
    await run(f"systemctl start nereid\n{wait_until_ready}", environment)
    before = (tmp_path / "nereid.pid").read_text(encoding="ascii")
    with proxying([f"unix:{socket}" for socket in sockets], tmp_path / "run") as proxy:
        async with traffic(proxy.local_url) as counted:
            await counted.until(100)
            async with asyncio.timeout(900):
                await run(steps, environment)
            await counted.until(counted.requests + 100)
        asked = {line["upstream"] for line in proxy.log_lines()}

    assert set(counted.statuses) == {200}
    assert (tmp_path / "nereid.pid").read_text(encoding="ascii") != before
    assert any("/nereid-next/" in upstream for upstream in asked)
