"""The container images as files, which `docker load` and `podman load` take, and their bills of materials."""

import gzip
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
_BUILDING = ROOT / "deploy" / "container"
_SBOM = "usr/share/nereid/sbom.cdx.json"


def build(target: str, tag: str, to: Path, options: Sequence[str]) -> None:
    """Build an image, and write it and its SBOM.

    Args:
        target: The one in the Containerfile: `api` or `embedded`.
        tag: Name of the image that is built.
        to: Folder of the files.
        options: For the builder.
    """
    subprocess.run([_BUILDING / "build", target, *options], check=True)
    name = f"{tag.replace(':', '-').removesuffix(f'-{target}')}-{target}-image"
    with tempfile.TemporaryDirectory(dir=to) as folder:
        archive = Path(folder) / "image.tar"
        subprocess.run(_save(tag, archive), check=True)
        (to / f"{name}.cdx.json").write_bytes(_sbom(archive))
        with archive.open("rb") as image, gzip.open(to / f"{name}.tar.gz", "wb", compresslevel=1) as file:
            shutil.copyfileobj(image, file, 1 << 20)


def _save(tag: str, archive: Path) -> list[str]:
    builder = subprocess.check_output([_BUILDING / "builder"], text=True).strip()
    if builder == "buildah":
        return [builder, "push", "--quiet", tag, f"docker-archive:{archive}:{tag}"]
    return [builder, "save", "--output", str(archive), tag]


def _sbom(archive: Path) -> bytes:
    with tarfile.open(archive) as image:
        (described,) = json.load(_file(image, "manifest.json"))
        for layer in reversed(described["Layers"]):
            with tarfile.open(fileobj=_file(image, layer)) as files:
                if _SBOM in files.getnames():
                    return _file(files, _SBOM).read()
    raise FileNotFoundError(f"the image has no {_SBOM}")


def _file(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    file = archive.extractfile(name)
    if file is None:
        raise FileNotFoundError(name)
    return file
