"""The container images, built at most once in a session, their programs without a container engine, and a Triton for their user.

Buildah makes the images; a program runs in namespaces of its own.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from PIL import Image

from app import __version__
from app.host.processes import kill_group
from app.settings.schema import TRITON_SOCKET, Settings
from tests.imaging.samples import AVIF, FORMATS, HEIC, encode
from tests.processes import require_program
from tests.support import IMAGES, ROOT, sample_image
from tests.support import json as json_of

SOURCE = "https://example.com/nereid"
"""Address of the code in the label of the images."""
USER = 10001
"""User and group of the images."""
READY_SECONDS = 300
"""How long a start may take; the first one of an image with Triton pulls the model."""

# As an engine does: only these can be written, beside volumes. Devices and shared memory are this machine's.
_ENTER = """
set -e
mount --bind "$ROOTFS" "$ROOTFS"
mount -t proc proc "$ROOTFS/proc"
mount --rbind /dev "$ROOTFS/dev"
for volume in $VOLUMES; do mount --bind "${volume%%:*}" "$ROOTFS${volume#*:}"; done
[ -z "$SHM_SIZE" ] || mount -t tmpfs -o "size=$SHM_SIZE,mode=1777" shm "$ROOTFS/dev/shm"
[ -z "$READ_ONLY" ] || mount -o remount,bind,ro "$ROOTFS"
exec setpriv --no-new-privs chroot --userspec="$OWNER" --groups= "$ROOTFS" env -C "$FOLDER" "$@"
"""


class Built(NamedTuple):
    """A container image with its file system unpacked."""

    root: Path
    config: dict[str, Any]
    """As Docker's format has it."""

    @property
    def health_check(self) -> list[str]:
        return [str(part) for part in self.config["Healthcheck"]["Test"][1:]]


class Container(NamedTuple):
    """A file system, who may write where, and the settings in its environment; nothing of it runs yet."""

    image: Built
    volumes: Mapping[Path, str]
    """By what they contain: where it is to be."""
    settings: Mapping[str, object]
    is_read_only: bool = True
    shm_size: str = ""
    """Of shared memory of its own; this machine's if empty."""

    def start(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":  # noqa: ANN401
        """Run a program as the image's user, as process 1 of its own namespace."""
        config = self.image.config
        environ = dict(variable.split("=", 1) for variable in config["Env"])
        environ["NEREID_TIMEOUT_SECONDS"] = "30"  # on a busy machine
        environ |= {f"NEREID_{name.upper()}": str(value) for name, value in self.settings.items()}
        entering = {
            "ROOTFS": str(self.image.root),
            "VOLUMES": " ".join(f"{source}:{target}" for source, target in self.volumes.items()),
            "SHM_SIZE": self.shm_size,
            "READ_ONLY": "yes" if self.is_read_only else "",
            "OWNER": config["User"],
            "FOLDER": config["WorkingDir"],
        }
        unset = [f"--unset={name}" for name in entering]
        return subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _ENTER, "sh", *unset, *command],
            env=environ | entering,
            start_new_session=True,
            **options,
        )

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output, _ = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, output)

    @contextmanager
    def running(self, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
        with log.open("wb") as output:
            command = [*self.image.config["Entrypoint"], *self.image.config["Cmd"]]
            process = self.start(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            kill_group(process)


def stop(process: "subprocess.Popen[bytes]", seconds: float = 60) -> int:
    """Send the stop signal to a container's process 1, as an engine does, and return the exit code."""
    (first,) = psutil.Process(process.pid).children()
    first.terminate()
    return process.wait(seconds)


def temporary_folder(path: Path) -> dict[Path, str]:
    """Create a folder that anybody may write to, as the volume for /tmp."""
    path.mkdir()
    path.chmod(0o1777)
    return {path: "/tmp"}  # noqa: S108 - in a container


def pip_volumes(folder: Path) -> dict[Path, str]:
    """Return the files by which pip elsewhere reaches the index that this machine's pip uses, one in a folder, by their paths."""
    lines, volumes = ["[global]"], {}
    for option in ("index-url", "cert"):
        asked = [sys.executable, "-m", "pip", "config", "get", f"global.{option}"]
        value = os.environ.get(f"PIP_{option.upper().replace('-', '_')}")
        value = value or subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        if value and option == "cert":
            volumes[Path(value)] = "/run/ca.crt"
            value = "/run/ca.crt"
        if value:
            lines.append(f"{option} = {value}")
    settings = folder / "pip.conf"
    settings.write_text("\n".join(lines), encoding="utf-8")
    return {settings: "/etc/pip.conf", **volumes}


def check(url: str, right: Mapping[str, object]) -> None:
    """Check what every package must do: find the right objects by picture, read each format, and have the files of its pages."""
    for name, objects in right.items():
        assert json_of(httpx.post(f"{url}/detect", content=sample_image(name), timeout=60))["detections"] == objects != []
    picture = Image.open(IMAGES / "coffee.jpg").convert("RGB")
    for file in [*(encode(picture, image_format) for image_format in FORMATS), AVIF, HEIC]:
        assert httpx.post(f"{url}/detect", content=file, timeout=60).status_code == 200
    for path in ("docs-assets/swagger_style.css", "page-assets/page.js"):
        assert httpx.get(f"{url}/{path}").status_code == 200


class Builder:
    """Buildah with a storage of its own, which is removed on `close`."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid():
            pytest.skip("only root can make a file system with debootstrap")
        for program in ("buildah", "debootstrap"):
            require_program(program, program)
        self._folder = folder
        storage = folder / "storage.conf"
        storage.write_text(f'[storage]\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n', encoding="utf-8")
        self._environ = {
            **os.environ,
            "BUILDER": "buildah",
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_STORAGE_CONF": str(storage),
        }
        driver = self.run("buildah", "info", "--format={{.store.GraphDriverName}}").strip()
        with storage.open("a", encoding="utf-8") as file:
            file.write(f'driver = "{driver}"\n')
        # Both images begin with the same layers. Where there is no overlay, a layer is a copy of all below it.
        self._environ["BUILDAH_LAYERS"] = str(driver == "overlay").lower()

    def run(self, *command: str | Path) -> str:
        done = subprocess.run(command, env=self._environ, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    def build(self, target: str, *options: str) -> str:
        """Build an image on the base that debootstrap made, with this machine's settings of pip; return its name."""
        volumes = [f"--volume={source}:{name}:ro" for source, name in pip_volumes(self._folder).items()]
        base = "--build-arg=BASE=localhost/debian:trixie-slim"
        self.run(ROOT / "deploy" / "container" / "build", target, base, *volumes, *options)
        return f"localhost/nereid:{__version__}" + ("" if target == "api" else f"-{target}")

    def unpack(self, name: str) -> Built:
        container = self.run("buildah", "from", name).strip()
        root = Path(self.run("buildah", "mount", container).strip())
        inspected = json.loads(self.run("buildah", "inspect", "--type", "image", name))
        return Built(root, inspected["Docker"]["config"])

    def close(self) -> None:
        self.run("buildah", "rm", "--all")
        self.run("buildah", "rmi", "--all", "--force")
        shutil.rmtree(self._folder)


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    made = Builder(tmp_path_factory.mktemp("storage"))
    try:
        made.run(ROOT / "deploy" / "container" / "base")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def api(builder: Builder) -> Built:
    return builder.unpack(builder.build("api", f"--build-arg=SOURCE={SOURCE}"))


@pytest.fixture(scope="session")
def embedded(builder: Builder) -> Built:
    # With the same source, because both images share the layers with the labels, whichever is built first.
    return builder.unpack(builder.build("embedded", f"--build-arg=SOURCE={SOURCE}"))


@pytest.fixture
def triton_of_containers(served: Settings) -> Iterator[str]:
    """The address of the session's Triton, whose folder belongs to the user of the containers meanwhile."""
    paths: tuple[Path, ...] = (served.triton_folder, served.triton_folder / TRITON_SOCKET)
    for path in paths:
        os.chown(path, USER, USER)
    yield served.triton_address
    for path in paths:
        os.chown(path, os.getuid(), os.getgid())


@pytest.fixture(scope="session")
async def right(client: httpx.AsyncClient) -> dict[str, object]:
    """What the application finds in pictures, outside of any package."""
    names = ("astronaut.jpg", "chelsea.jpg", "coffee.jpg")
    return {name: json_of(await client.post("/detect", content=sample_image(name)))["detections"] for name in names}
