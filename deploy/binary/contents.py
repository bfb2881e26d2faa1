"""The contents of the one-file program."""

import re
import subprocess
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution, packages_distributions
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app.api.documentation.docs import ASSETS
from app.embedded.launch import BACKEND, MODULES
from app.host.packages import has_pillow_simd

ROOT = Path(__file__).parents[2]
# Extras of its own that an extra names are looked at anyway.
_OWN = "nereid-gateway"

_NEVER_IMPORTED = {
    "faker",  # a dependency of litestar, for generated examples
    "polyfactory",  # like faker
    "pbr",  # a dependency of hdrhistogram, only for its installation
    "pip",  # run by another Python
    "setuptools",
    "distutils",
    "pydoc_data",
    "tkinter",
}
_GLIBC = {f"{name}.so.{version}" for name, version in (("libc", 6), ("libm", 6), ("libdl", 2), ("libpthread", 0), ("librt", 1))}
_GLIBC |= {"ld-linux-x86-64.so.2", "libutil.so.1", "libresolv.so.2"}
_CODE = {"BINARY", "EXTENSION"}
_OPENCV_LIBRARIES = "opencv_python_headless.libs/"
# AVIF, by `cv2.imdecode`; TIFF support is part of OpenCV itself.
_CODECS = ("libavif-", "libaom-")
_STUB = """
#include <stdio.h>
#include <stdlib.h>
static void missing(void) { fputs("nereid: OpenCV is without video and linear algebra here\\n", stderr); abort(); }
"""


def unwanted_modules() -> set[str]:
    """Return the installed modules that the program does not need at run time, according to pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = [*project["project"]["optional-dependencies"].values(), project["dependency-groups"]["bench"]]
    needed = _closure([*project["project"]["dependencies"], *chain.from_iterable(groups)])
    installed = packages_distributions().items()
    return {module for module, names in installed if not needed & set(map(canonicalize_name, names))} | _NEVER_IMPORTED


def _closure(requirements: Iterable[str]) -> set[str]:
    """Return the names of the distributions that satisfy these requirements, including transitive ones."""
    found = {_OWN}
    left = [Requirement(text) for text in requirements]
    while left:
        requirement = left.pop()
        extras = requirement.extras or {""}
        name = canonicalize_name(requirement.name)
        if name == "pillow" and has_pillow_simd():  # which has the same files
            name = canonicalize_name("pillow-simd")
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        for text in distribution(name).requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                needed.marker = None
                left.append(needed)
    return found


Files = list[tuple[str, str, str]]
"""Files in PyInstaller's format: path in the file, source path or target of a link, and kind."""


def without_video(files: Files, folder: Path) -> Files:
    """Replace most libraries that OpenCV is linked to by empty ones; the program only resizes, draws, and decodes AVIF and TIFF.

    Video and linear algebra are 30 MB of the file. They cannot be omitted, because the loader would then reject OpenCV.

    Args:
        files: The files that PyInstaller found.
        folder: Folder for the empty libraries.
    """
    (opencv,) = (source for _, source, _ in files if Path(source).name.startswith("cv2.abi3"))
    needed = _needed(opencv)
    wanted = _symbols(opencv, "*UND*")
    kept: Files = []
    for target, source, kind in files:
        name = Path(target).name
        if not target.startswith(_OPENCV_LIBRARIES) or name.startswith(_CODECS):
            kept.append((target, source, kind))
        elif name in needed:
            kept.append((target, _empty_library(source, wanted, folder / name), kind))
    targets = {target for target, _, _ in kept}
    return [file for file in kept if file[2] != "SYMLINK" or file[1] in targets]


def _empty_library(source: str, wanted: dict[str, str], target: Path) -> str:
    """Compile a library with the wanted symbols of another one; calling any of them aborts the program."""
    symbols = {name: version for name, version in _symbols(source).items() if name in wanted}
    versions = sorted(set(symbols.values()) - {""})
    code, script = target.with_suffix(".c"), target.with_suffix(".map")
    code.write_text(_STUB + "".join(f"void {name}(void) {{ missing(); }}\n" for name in symbols), encoding="ascii")
    nodes = {version: [name for name, own in symbols.items() if own == version] for version in versions}
    script.write_text("".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in nodes.items()), "ascii")
    versioned = [f"-Wl,--version-script={script}"] if versions else []
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-fno-builtin", "-w", "-s", f"-Wl,-soname,{target.name}", *versioned, "-o", target, code],
        check=True,
    )
    return str(target)


def _symbols(library: str, section: str | None = None) -> dict[str, str]:
    """Return the dynamic symbols of a library with their versions: all of them, or those in a section."""
    found = {}
    for line in _objdump("-T", library).splitlines():
        matched = re.match(r"[0-9a-f]{16} .{7} (\S+)\s+[0-9a-f]{16}(.*) (\S+)$", line)
        if matched and (matched[1] == section if section else matched[1] != "*UND*"):
            version = matched[2].strip(" ()")
            found[matched[3]] = "" if version == "Base" else version
    return found


def with_all_libraries(files: Files) -> Files:
    """Add the libraries that PyInstaller expects on each machine, but that a minimal one does not have."""
    found = [*files]
    names = {Path(target).name for target, _, _ in found} | _GLIBC
    for _, source, kind in found:  # it grows
        for name in _needed(source) - names if kind in _CODE else ():
            names.add(name)
            found.append((name, _library(name), "BINARY"))
    return found


def _needed(library: str) -> set[str]:
    return set(re.findall(r"NEEDED +(\S+)", _objdump("-p", library)))


def _library(name: str) -> str:
    """Return the path where the loader finds a library."""
    cached = subprocess.run(["/sbin/ldconfig", "-p"], stdout=subprocess.PIPE, text=True, check=True).stdout
    (first, *_) = re.findall(rf"\s{re.escape(name)} \(libc6,x86-64.*\) => (\S+)", cached)
    return str(first)


def without_debug_information(files: Files, folder: Path) -> Files:
    """Strip the files that are several times larger with debug information; `strip` damages others, which are already patched."""
    smaller: Files = []
    for target, source, kind in files:
        if kind not in _CODE or ".debug_info" not in _objdump("-h", source):
            smaller.append((target, source, kind))
            continue
        stripped = folder / target.replace("/", "-")
        subprocess.run(["strip", "--strip-debug", "-o", stripped, source], check=True)
        smaller.append((target, str(stripped), kind))
    return smaller


def needed_glibc(files: Files) -> str:
    """Return the minimum version of glibc for all of these libraries."""
    libraries = [source for _, source, kind in files if kind in _CODE]
    versions: set[str] = {version for library in libraries for version in re.findall(r" GLIBC_([0-9.]+)", _objdump("-p", library))}
    return max(versions, key=lambda version: [int(part) for part in version.split(".")])


def _objdump(option: str, file: str) -> str:
    return subprocess.run(["objdump", option, file], stdout=subprocess.PIPE, text=True, check=True).stdout


def data_files() -> list[tuple[str, str]]:
    """Return the data files, and their folders in the file."""
    offapi = Path(str(distribution("offapi").locate_file("offapi")))
    files = {offapi / name: "offapi" for name in ASSETS}
    for pattern in (
        "app/api/documentation/page/files/*",
        "app/cascade/built_in.toml",
        "app/embedded/requirements*.txt",
        f"app/embedded/{BACKEND.name}",
        *(f"app/{module}" for module in MODULES),
        "app/search/postgres/migrations/*.sql",
        "app/zoo/published/*",
        "tests/images/*.jpg",
    ):
        files |= {path: str(path.parent.relative_to(ROOT)) for path in ROOT.glob(pattern)}
    return [(str(path), folder) for path, folder in files.items()]
