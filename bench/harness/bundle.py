"""A folder with all that `bench gpu` needs on a host that reaches no network; `bundle.sh` is the program that runs there."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from app.embedded.install import GPU_FOLDER, REQUIREMENTS, WHEEL
from app.host import program
from app.host.program import CommandError
from app.zoo.repository import Repository
from bench.harness.processes import ROOT
from bench.load.images import COCO_FOLDER, SAMPLE_FOLDER
from bench.models.repository import YOLO
from bench.report.records import COMMIT, read_commit

PART_BYTES = 64 << 20
"""Maximum size of a file in a bundle."""

_SPLIT = 'rm -f part-*; tar -c -C "$1" . | split -d -b "$2" - part-; sha256sum part-* >SHA256SUMS'
_MAX_BATCH = 32  # the embedded Triton's own, which is for the CPU, would leave a GPU idle
_GATEWAY = ("nereid-gateway[models,search]", "hdrhistogram", "psutil")


def pack(folder: Path, python: str) -> str:
    """Make a bundle for hosts whose Python has the version of `python`, which must have pip; return what it consists of."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="nereid-bench-") as scratch:
        source = (content := Path(scratch)) / "source"
        shutil.copytree(ROOT / "bench", source / "bench", ignore=shutil.ignore_patterns("__pycache__", "results"))
        shutil.copytree(SAMPLE_FOLDER, source / SAMPLE_FOLDER.relative_to(ROOT))
        if COCO_FOLDER.is_dir():
            shutil.copytree(COCO_FOLDER, content / COCO_FOLDER.relative_to(ROOT.parent))
        (source / COMMIT.name).write_text(read_commit() or "", encoding="ascii")
        _download(content, python)
        _pull(content / "models")
        subprocess.run(["/bin/sh", "-euc", _SPLIT, "sh", content, str(PART_BYTES)], cwd=folder, check=True)
    shutil.copyfile(Path(__file__).with_name("bundle.sh"), folder / "run")
    sizes = [file.stat().st_size for file in folder.glob("part-*")]
    return f"{folder}: {len(sizes)} parts, {sum(sizes) / 1e6:.0f} MB together; on the host: sh {folder.name}/run"


def _download(content: Path, python: str) -> None:
    """Get the wheels of the gateway, of the embedded Triton, and of the environment of its models without CUDA's libraries."""
    blocks = re.split(r"\n(?=\S)", REQUIREMENTS[GPU_FOLDER].read_text(encoding="utf-8"))
    (content / "gpu.txt").write_text("\n".join(block for block in blocks if not block.startswith("nvidia-")), encoding="utf-8")
    (content / "gateway.txt").write_text("\n".join(_GATEWAY), encoding="ascii")
    locked = re.findall(r"^\w[^\\\n]*==[^\\\n]*", (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8"), re.MULTILINE)
    (content / "locked.txt").write_text("\n".join(locked), encoding="utf-8")
    wheels = content / "wheels"
    with TemporaryDirectory() as copy:  # a build leaves files behind
        for name in ("LICENSE", "README.md", "pyproject.toml"):
            shutil.copyfile(ROOT / name, Path(copy, name))
        shutil.copytree(ROOT / "app", Path(copy, "app"))
        _pip(python, "wheel", "--no-deps", f"--wheel-dir={wheels}", copy)
    get = ("download", "--only-binary=:all:", f"--dest={wheels}", f"--find-links={wheels}")
    _pip(python, *get, f"--constraint={content / 'locked.txt'}", *_GATEWAY)
    _pip(python, *get, "--no-deps", WHEEL)
    _pip(python, *get, "--no-deps", "--require-hashes", f"--requirement={content / 'gpu.txt'}")


def _pip(python: str, *arguments: str) -> None:
    variables = {**os.environ, "PIP_QUIET": "2", "PIP_CONSTRAINT": ""}
    if subprocess.run([python, "-m", "pip", *arguments], env=variables, check=False).returncode:
        raise CommandError(f"pip {arguments[0]} failed; the reason is above")


def _pull(models: Path) -> None:
    repository = Repository(models)
    for name in (YOLO, f"{YOLO}_file"):
        variables = {**program.environment(), "NEREID_MODEL_REPOSITORY": str(models)}
        done = subprocess.run(program.command("app", "pull", "--production", "--", name), env=variables, check=False)
        if done.returncode or (found := repository.load(name)) is None:
            raise CommandError(f"{name} was not pulled")
        with repository.writing():
            serving = msgspec.structs.replace(found.embedded, max_batch=_MAX_BATCH)
            repository.write(name, msgspec.structs.replace(found, embedded=serving))
