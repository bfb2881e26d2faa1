"""The wheel of pillow-simd, which has none on the index, for the Python of a Debian."""

import shutil
import tempfile
from pathlib import Path

import debian_root

ROOT = Path(__file__).parents[2]
_LOCK = ROOT / "requirements" / "api.txt"
_TOOLS = [ROOT / "requirements" / name for name in ("build.txt", "release.txt")]
_PACKAGES = ("gcc", "libc6-dev", "libjpeg-dev", "libwebp-dev", "python3-dev", "python3-venv", "zlib1g-dev")


def build(suite: str, cache: Path, to: Path) -> None:
    """Compile the wheel in a root that is removed again.

    Args:
        suite: Name of the release of Debian, whose Python and glibc the wheel is for.
        cache: Folder with a minimal root of each release.
        to: Folder of the wheel.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        root = debian_root.make(suite, cache, Path(folder) / "root")
        root.install(*_PACKAGES)
        debian_root.write_pip_settings(root.folder)
        (work := root.folder / "build").mkdir()
        for path in _TOOLS:
            shutil.copy(path, work)
        (work / "locked.txt").write_text(_locked(), encoding="ascii")
        root.succeed("python3", "-m", "venv", "/build/tools")
        pip, hashes = "/build/tools/bin/pip", "--require-hashes"
        root.succeed(pip, "install", hashes, *(f"--requirement=/build/{path.name}" for path in _TOOLS))
        options = ["--no-deps", "--no-build-isolation", hashes, "--requirement=/build/locked.txt", "--wheel-dir=/build/compiled"]
        root.succeed(pip, "wheel", *options)
        (compiled,) = work.glob("compiled/*.whl")
        # With the libraries in the wheel, what installs it needs none of Debian's packages.
        repair = f"PATH=/build/tools/bin:$PATH auditwheel repair --wheel-dir=/build/repaired /build/compiled/{compiled.name}"
        root.succeed("sh", "-c", repair)
        for wheel in work.glob("repaired/*.whl"):
            shutil.copy(wheel, to)


def _locked() -> str:
    """Return the line of pillow-simd in the lock, with its hashes."""
    first, _, rest = _LOCK.read_text(encoding="ascii").partition("\npillow-simd==")[2].partition("\n")
    hashes = [line.strip(" \\") for line in rest.split("    # via")[0].splitlines()]
    return f"pillow-simd=={first.partition(' ;')[0]} {' '.join(hashes)}\n"
