"""The objects of deploy/kubernetes, as `kubectl kustomize` renders them."""

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from app.settings.schema import Settings
from tests.deploy.needs import DEPLOY, settings_of

Manifest = dict[str, Any]

FOLDER = DEPLOY / "kubernetes"
COMBINATIONS = [("sidecar", "nfs"), ("separate", "s3")]
"""Each overlay and each source of models."""


class Cluster(NamedTuple):
    """The objects of an overlay with components."""

    overlay: str
    manifests: list[Manifest]

    def all_of(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def one(self, kind: str, name: str = "nereid") -> Manifest:
        (named,) = (manifest for manifest in self.all_of(kind) if manifest["metadata"]["name"] == name)
        return named

    def pod(self, name: str = "nereid") -> Manifest:
        return dict(self.one("Deployment", name)["spec"]["template"]["spec"])

    def pods(self) -> list[Manifest]:
        return [deployment["spec"]["template"]["spec"] for deployment in self.all_of("Deployment")]

    def containers(self) -> list[Manifest]:
        return [container for pod in self.pods() for container in [*pod.get("initContainers", []), *pod["containers"]]]

    def selected_by(self, labels: dict[str, str]) -> list[str]:
        """Return the deployments whose pods have these labels."""
        every = {manifest["metadata"]["name"]: manifest["spec"]["template"] for manifest in self.all_of("Deployment")}
        return [name for name, template in every.items() if labels.items() <= template["metadata"]["labels"].items()]

    def variables(self, container: Manifest) -> dict[str, str]:
        """Return the environment variables that a container gets from ConfigMaps."""
        maps = [source["configMapRef"]["name"] for source in container["envFrom"] if "configMapRef" in source]
        return {name: value for each in maps for name, value in self.one("ConfigMap", each)["data"].items()}

    @property
    def api(self) -> Manifest:
        return dict(self.pod()["containers"][0])

    @property
    def triton_pod(self) -> Manifest:
        return self.pod("nereid" if self.overlay == "sidecar" else "triton")

    @property
    def triton(self) -> Manifest:
        (container,) = self.triton_pod["initContainers" if self.overlay == "sidecar" else "containers"]
        return dict(container)

    @property
    def settings(self) -> Settings:
        return settings_of(self.variables(self.api))


@cache
def plain(overlay: str, models: str) -> Cluster:
    """Render an overlay with a source of models, in a kustomization that has nothing else, not even a namespace."""
    kustomization = {"resources": [f"../{overlay}"], "components": [f"../models-{models}"]}
    return Cluster(overlay, _render(msgspec.yaml.encode(kustomization).decode()))


@cache
def example(overlay: str, models: str) -> Cluster:
    """Render a user's copy of the example, with everything in it that is commented out."""
    text = (FOLDER / "example" / "kustomization.yaml").read_text(encoding="utf-8")
    text = text.replace("../sidecar", f"../{overlay}", 1).replace("../models-nfs", f"../models-{models}", 1)
    return Cluster(overlay, _render(re.sub(r"(?m)^( +)# ", r"\1", text)))


def _render(kustomization: str) -> list[Manifest]:
    """Return the objects of a kustomization beside the shipped ones."""
    with TemporaryDirectory() as folder:
        shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
        own = Path(folder, "my-cluster")
        own.mkdir()
        (own / "kustomization.yaml").write_text(kustomization, encoding="utf-8")
        command = [str(Path(sys.executable).with_name("kubectl")), "kustomize", str(own)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [msgspec.yaml.decode(document) for document in done.stdout.split("\n---\n")]


def volume(pod: Manifest, name: str) -> Manifest:
    (named,) = (volume for volume in pod["volumes"] if volume["name"] == name)
    return dict(named)
