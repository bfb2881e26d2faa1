"""The GPU of this machine, for the embedded Triton: whether there is one, and whether its user wants the download that it needs."""

import os
import select
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from app.embedded.folder import Device
from app.embedded.install import DOWNLOAD, has_gpu_environment
from app.host.program import CommandError
from app.settings.schema import PREFIX, Settings
from app.telemetry.logging import say

_ANSWER_SECONDS = 60.0
_DRIVER_SECONDS = 30.0
"""The driver is loaded if nothing else uses it."""


def choose(settings: Settings) -> Device:
    """Return what shall run the models of the embedded Triton, and say why it is the CPU; ask before the first download."""
    if settings.gpu == "off":
        return Device("", f"{PREFIX}GPU is off")
    is_used = settings.gpu == "on" or has_gpu_environment(Path(settings.triton_home))
    try:
        name = find()
    except CommandError as error:
        if is_used:
            say(f"there is no GPU to use ({error}); models run on the CPU")
        return Device("", f"there is no GPU to use ({error})")
    if is_used or _asks_for(name):
        return Device(name)
    say(f"models run on the CPU, although there is {name}: {PREFIX}GPU=on uses it, {PREFIX}GPU=off ends this message")
    return Device("", f"{PREFIX}GPU=on would use {name}")


def find() -> str:
    """Return the name of the GPU that CUDA takes first; raise CommandError, with the reason, if NVIDIA's driver knows none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise CommandError("nvidia-smi is not installed")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    command = [program, "--query-gpu=name", "--format=csv,noheader", *([f"--id={visible}"] if visible else [])]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command line
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CommandError(f"nvidia-smi: {error}") from error
    first = next((line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()), "it names no GPU")
    if done.returncode or not done.stdout.strip():
        raise CommandError(f"nvidia-smi: {first}")
    return first


def _asks_for(name: str) -> bool:
    is_foreground = False
    with suppress(OSError):  # standard input is no terminal
        is_foreground = sys.stderr.isatty() and os.tcgetpgrp(0) == os.getpgrp()  # the kernel stops others that read from it
    if not is_foreground:
        return False
    say(f"shall models run on {name}? That downloads CUDA's libraries, {DOWNLOAD}, once. y or n:")
    is_answered = bool(select.select([sys.stdin], [], [], _ANSWER_SECONDS)[0])
    return is_answered and sys.stdin.readline().strip().lower() in {"y", "yes"}
