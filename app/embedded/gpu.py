"""The GPU of this machine, for the embedded Triton: whether there is one, and whether its user wants the download that it needs."""

import shutil
import subprocess
import sys
from pathlib import Path

from app.embedded.install import DOWNLOAD, has_gpu_environment
from app.host.program import CommandError
from app.settings.schema import PREFIX, Settings
from app.telemetry.logging import say

_SECONDS = 30.0
"""For `nvidia-smi`, which loads the driver if nothing else uses it."""


def choose(settings: Settings) -> str:
    """Return the name of the GPU that shall run the models, empty for the CPU; on a terminal, ask before the first download."""
    if settings.gpu == "off":
        return ""
    try:
        name = find()
    except CommandError as error:
        if settings.gpu == "on":
            say(f"there is no GPU to use ({error}); models run on the CPU")
        return ""
    if settings.gpu == "on" or has_gpu_environment(Path(settings.triton_home)) or _asks_for(name):
        return name
    say(f"models run on the CPU, although there is {name}: --gpu uses it, {PREFIX}GPU=off says no more about it")
    return ""


def find() -> str:
    """Return the name of the first GPU; raise CommandError, with the reason, if NVIDIA's driver knows none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise CommandError("nvidia-smi is not installed")
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command line
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CommandError(f"nvidia-smi: {error}") from error
    first = next((line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()), "it names no GPU")
    if done.returncode or not done.stdout.strip():
        raise CommandError(f"nvidia-smi: {first}")
    return first


def _asks_for(name: str) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    say(f"shall models run on {name}? That downloads CUDA's libraries, {DOWNLOAD}, once. y or n:")
    return sys.stdin.readline().strip().lower() in {"y", "yes"}
