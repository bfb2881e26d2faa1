"""`serve --gpu`: on a machine without a GPU, with a driver that does not load, and with a stand-in for CUDA.

The stand-in runs on the CPU what it is asked to run by CUDA. Everything else is real.
"""

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.embedded.install import CPU_FOLDER, GPU_FOLDER, REQUIREMENTS, install, tag_of
from tests.faults.fleet import running_fleet
from tests.processes import run_nereid, wait_for
from tests.support import ROOT, SCENE, json, triton_home
from tests.system.test_model_versions import export

pytestmark = pytest.mark.system

NAME = "NVIDIA Test"
_WITHOUT_DRIVER = """
import onnxruntime
onnxruntime.get_available_providers = lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
"""
_WITH_DRIVER = (
    (ROOT / "bench" / "models" / "simulated_cuda.py").read_text(encoding="utf-8")
    + """
class Told(_Session):
    def __init__(self, file, *more, **options):
        print("CUDA gets", file, flush=True)
        super().__init__(file, *more, **options)

onnxruntime.InferenceSession = Told
"""
)


def machine(folder: Path, stand_in: str = "") -> dict[str, str]:
    """Make a home of Triton, and a PATH with a driver that names a GPU, if there is a stand-in for its environment."""
    (folder / "bin").mkdir()
    (folder / "home").mkdir()
    install(ROOT / ".triton")
    triton_home(folder / "home")
    if stand_in:
        (driver := folder / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\necho '{NAME}'\n", encoding="ascii")
        driver.chmod(0o755)
        environment = folder / "home" / GPU_FOLDER
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        on_cpu, packages = (next(home.glob("lib/python3*/site-packages")) for home in (ROOT / ".triton" / CPU_FOLDER, environment))
        (packages / "stand_in.py").write_text(stand_in, encoding="utf-8")
        (packages / "z.pth").write_text(f"{on_cpu}\nimport stand_in\n", encoding="utf-8")
        (environment / "complete").write_text(tag_of(environment), encoding="utf-8")
    others = [path for path in os.environ["PATH"].split(":") if not Path(path, "nvidia-smi").exists()]
    return {"PATH": ":".join([str(folder / "bin"), *others]), "NEREID_GPU": "on"}


@pytest.mark.parametrize(
    ("stand_in", "said"),
    [
        ("", "nereid: there is no GPU to use (nvidia-smi is not installed); models run on the CPU\n"),
        (
            _WITHOUT_DRIVER,
            f"nereid: Triton does not start with {NAME}: doors could not be loaded: Internal: OSError: libcuda.so.1",
        ),
        (_WITH_DRIVER, ""),
    ],
    ids=["no GPU", "no driver", "GPU"],
)
def test_models_run_on_the_gpu_in_fp16_or_else_on_the_cpu_for_a_reason(tmp_path: Path, stand_in: str, said: str) -> None:
    environment, repository = machine(tmp_path, stand_in), tmp_path / "repository"
    assert not run_nereid("add", export(1, tmp_path), "--name", "doors", "--out", repository).returncode
    (repository / "doors" / "1" / "model_fp16.onnx").write_bytes((repository / "doors" / "1" / "model.onnx").read_bytes())
    settings = {"model": "doors", "triton_home": tmp_path / "home"}
    wrapper = ["env", *(f"{name}={value}" for name, value in environment.items())]
    names, provider = (["the CPU"], "CPUExecutionProvider") if said else ([NAME], "CUDAExecutionProvider")
    with running_fleet(repository, tmp_path, instances=0, settings=settings, wrapper=wrapper) as fleet:

        def ask() -> dict[str, Any]:
            return json(httpx.post(f"{fleet.url}/detect", content=SCENE, timeout=30))  # type: ignore[no-any-return]

        answer, health, log = ask(), json(httpx.get(f"{fleet.url}/health")), (tmp_path / "home" / "triton.log").read_text()
        given = {**settings, "model_repository": repository, "gpu": "on"}
        models, doctor = (run_nereid(name, **given).stdout for name in ("models", "doctor"))
        if not said:  # Triton starts again, and the driver is gone
            (stand_in_file,) = (tmp_path / "home").glob(f"{GPU_FOLDER}/lib/python3*/site-packages/stand_in.py")
            stand_in_file.write_text(_WITHOUT_DRIVER, encoding="utf-8")
            triton = fleet.triton()
            assert triton is not None
            triton.kill()
            wait_for(lambda: fleet.says("models run on the CPU") > 0)
            wait_for(lambda: httpx.post(f"{fleet.url}/detect", content=SCENE, timeout=30).is_success)
            assert ask()["model"]["device"] == "cpu"
            said = f"Triton does not start with {NAME}: Internal: OSError: libcuda.so.1"

    assert answer["detections"][0]["class_name"] == "version 1"
    assert ("CUDA gets" in log, "model_fp16.onnx" in log) == (provider != "CPUExecutionProvider",) * 2
    assert (answer["model"]["device"], health["gpu"]["in_use"]) == (("cpu", False) if names == ["the CPU"] else ("gpu", True))
    assert said in fleet.log.read_text(encoding="utf-8")
    assert health["gpu"]["provider"] == provider
    assert [gpu["id"] for gpu in health["gpu"]["devices"]] == [name for name in names if name == NAME]
    assert f" on {names[0]} ({provider})\n" in models
    assert f"models run on {names[0]}, by {provider}" in doctor
    assert (tmp_path / "home" / GPU_FOLDER).exists() == bool(stand_in)


@pytest.mark.parametrize(("answer", "chosen"), [("y\n", NAME), ("\n", "")])
def test_download_for_a_gpu_needs_a_yes_on_the_terminal(tmp_path: Path, answer: str, chosen: str) -> None:
    environment = {**os.environ, **machine(tmp_path, _WITH_DRIVER), "NEREID_GPU": "auto"}
    (tmp_path / "home" / GPU_FOLDER / "complete").unlink()
    asking = "from app.embedded.gpu import choose; from app.feature import read_settings; print(choose(read_settings()).gpu)"
    outer, inner = pty.openpty()
    os.write(outer, answer.encode())
    command = ["setsid", "--ctty", "--wait", sys.executable, "-c", asking]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=inner, stdout=subprocess.PIPE, stderr=inner, check=True)
    os.close(inner)
    said = os.read(outer, 1000).decode()
    os.close(outer)

    assert done.stdout.decode().strip() == chosen
    assert f"shall models run on {NAME}? That downloads CUDA's libraries, 1.6 GB, once." in said


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_locked_environment_for_a_gpu_can_be_installed(python: str, tmp_path: Path) -> None:
    """A dry run: that the package index has all wheels."""
    options = [
        "--dry-run",
        "--require-hashes",
        "--only-binary",
        ":all:",
        "--python-version",
        python,
        "--target",
        str(tmp_path / "none"),
    ]
    done = subprocess.run(
        ["uv", "pip", "install", *options, "-r", str(REQUIREMENTS[GPU_FOLDER])], capture_output=True, text=True, check=False
    )

    assert "onnxruntime-gpu==" in done.stderr, done.stderr
    assert "nvidia-cudnn-cu13==" in done.stderr
    assert " + onnxruntime==" not in done.stderr
