"""A gateway serves the models of a Triton whose repository it cannot read: it needs nothing but gRPC."""

import sys
from pathlib import Path

import httpx
import pytest

from app.doctor.finding import Severity
from app.settings.schema import Settings
from tests.doctor.setups import run_command
from tests.faults.serving import running_gateway
from tests.processes import obeying_modes
from tests.support import IMAGES


@pytest.mark.parametrize("place", ["closed", "closed/models", "missing"])
async def test_gateway_works_without_warning_where_it_cannot_read_the_repository(
    served: Settings, tmp_path: Path, place: str
) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    repository, prefix = tmp_path / place, obeying_modes()
    given = {"model": "yolo11n", "model_repository": repository, "host": "127.0.0.1", "slow_request_ms": 0}
    async with running_gateway(served.triton_address, tmp_path, prefix, **given) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url) as client:
            found = await client.post("/detect", files={"image": (IMAGES / "chelsea.jpg").read_bytes()})
            unknown = await client.post("/predict/nowhere", files={"image": (IMAGES / "chelsea.jpg").read_bytes()})
            models, health = (await client.get("/models")).json(), (await client.get("/health")).json()
        log = (tmp_path / "gateway.log").read_text(encoding="utf-8")
        changed = {"triton_endpoints": served.triton_address, "port": gateway.port, **given}
        environ = {f"NEREID_{name.upper()}": str(value) for name, value in changed.items()}
        command = [*prefix, sys.executable, "-m", "app", "doctor", "--json"]
        exit_code, findings = run_command(*command, **environ)

    assert [one["class_name"] for one in found.json()["detections"]] == ["cat"]
    assert unknown.status_code == 404
    assert "yolo11n" in {model["name"] for model in models["models"] if model["state"] == "ready"}
    assert not [model for model in models["models"] if str(repository) in str(model)]
    assert (health["status"], health["model"]) == ("healthy", "yolo11n")
    assert not [line for line in log.splitlines() if "warning" in line or "error" in line]
    assert exit_code == 0
    assert findings["model_repository"].severity is Severity.OK
    assert str(repository) in findings["model_repository"].message
