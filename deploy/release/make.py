"""Make what a release has: wheels, pillow-simd for Debian 12 and 13, the one file, images with their SBOM, notes, checksums."""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import container_images
import debian_root
import pillow_simd

ROOT = Path(__file__).parents[2]
_PARTS = ("wheels", "simd", "binary", "images", "notes")
_SOURCES = {".": "app", "clients/python": "src", "clients/label-studio": "src"}
"""The projects with a wheel, and the folder with the code of each."""
_BUILDS_WHEELS = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation")
_SUMS = "SHA256SUMS"


def main() -> None:
    """Make all parts, or those that the command line names."""
    options = _arguments()
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    heading, notes = _section(version)
    for reason in _refusals(version, heading):
        if not options.dry_run:
            sys.exit(reason)
        print(f"a dry run goes on; a release would not: {reason}", file=sys.stderr)
    to: Path = options.to.resolve()
    if not options.parts and to.is_dir() and any(to.iterdir()):
        sys.exit(f"{options.to} has other files, which would become part of the release; first: rm -r {options.to}")
    to.mkdir(parents=True, exist_ok=True)
    for part in options.parts or _PARTS:
        print(f"making {part}", file=sys.stderr)
        match part:
            case "wheels":
                _wheels(to)
            case "simd":
                _simd(options.work, to)
            case "binary":
                _binary(to)
            case "images":
                _images(version, to, options)
            case _:
                _notes(version, notes, to, options.source)
    (to / _SUMS).write_text("".join(_sums(to)), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./just release", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(_PARTS)}; all of them by default")
    parser.add_argument("--dry-run", action="store_true", help="go on without a tag, without a date, and with uncommitted changes")
    parser.add_argument("--to", type=Path, default=Path("dist"), metavar="FOLDER", help="where the files go; by default dist")
    parser.add_argument("--work", type=Path, default=Path("build/release"), metavar="FOLDER", help="where minimal Debians are kept")
    parser.add_argument("--source", metavar="URL", help="address of the code, for links in the notes and labels of the images")
    parser.add_argument("--builder-option", action="append", default=[], metavar="OPTION", help="for what builds the images")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(_PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(_PARTS)}")
    return options


def _section(version: str) -> tuple[str, str]:
    """Return what follows the version in its heading in the changelog, and the text below; both are empty if there is none."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    matched = re.search(rf"^## {re.escape(version)}\b(.*)\n((?s:.*?))(?=^## |\Z)", changelog, re.MULTILINE)
    return (matched[1], matched[2].strip() + "\n") if matched else ("", "")


def _refusals(version: str, heading: str) -> Iterator[str]:
    """Tell why this is no release, and what to do about it."""
    if f"v{version}" not in _git("tag", "--points-at", "HEAD").split():
        yield f"HEAD has no tag v{version}; after the last commit of the release: git tag v{version}"
    if changed := _git("status", "--porcelain"):
        yield f"there are changes that are not committed; commit or remove them:\n{changed.rstrip()}"
    if not re.fullmatch(r", \d{4}-\d\d-\d\d", heading):
        yield f"CHANGELOG.md has no date of {version}; its heading must be: ## {version}, YYYY-MM-DD"


def _git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True)


def _wheels(to: Path) -> None:
    for project, code in _SOURCES.items():
        with tempfile.TemporaryDirectory() as folder:  # setuptools writes beside its sources, and packs what is left there
            for name in ("LICENSE", "README.md", "pyproject.toml"):
                shutil.copy(ROOT / project / name, folder)
            shutil.copytree(ROOT / project / code, Path(folder) / code, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            subprocess.run([sys.executable, "-m", "pip", "wheel", *_BUILDS_WHEELS, f"--wheel-dir={to}", folder], check=True)


def _simd(work: Path, to: Path) -> None:
    if os.geteuid() or not shutil.which("debootstrap"):
        sys.exit(f"pillow-simd is compiled by root, with debootstrap; name other parts to leave it out: {' '.join(_PARTS)}")
    for suite in debian_root.SUITES:
        pillow_simd.build(suite, work, to)


def _binary(to: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        options = ["--noconfirm", "--log-level=ERROR", f"--distpath={to}", f"--workpath={work}"]
        program = Path(sys.executable).with_name("pyinstaller")
        subprocess.run([program, *options, ROOT / "deploy" / "binary" / "nereid.spec"], cwd=ROOT, check=True)


def _images(version: str, to: Path, options: argparse.Namespace) -> None:
    source = [f"--build-arg=SOURCE={options.source}"] if options.source else []
    for target, tag in (("embedded", f"nereid:{version}-embedded"), ("api", f"nereid:{version}")):
        container_images.build(target, tag, to, [*source, *options.builder_option])


def _notes(version: str, notes: str, to: Path, source: str | None) -> None:
    """Write the notes, whose links to files of the repository lead to those of this version if its address is known."""
    if source:
        notes = re.sub(r"\]\((?!https:|#)", f"]({source}/blob/v{version}/", notes)
    (to / "notes.md").write_text(notes, encoding="utf-8")


def _sums(folder: Path) -> Iterator[str]:
    """Return the lines of `sha256sum` for the files in a folder."""
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name != _SUMS):
        with path.open("rb") as file:
            yield f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n"


if __name__ == "__main__":
    main()
