"""What kubectl renders for Kubernetes: valid, complete, and as the application needs them. No cluster runs them here."""

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import kubernetes_validate
import msgspec
import pytest

from app.settings.schema import DIALECTS, Settings
from tests.deploy.needs import DEPLOY, IMAGE, PATHS, load, nbytes, settings_of
from tests.support import METRICS
from tests.tools import kubernetes_rules

Manifest = dict[str, Any]

FOLDER = DEPLOY / "kubernetes"
COMBINATIONS = [("sidecar", "nfs"), ("separate", "s3")]
"""Each overlay and each source of models."""
RULES = load(FOLDER / "prometheus-adapter.yaml")["rules"]
ADAPTER = [*RULES["custom"], *RULES["external"]]
JOBS = load(DEPLOY / "prometheus" / "prometheus.kubernetes.yml")["scrape_configs"]


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


@pytest.fixture(params=COMBINATIONS, ids="-".join)
def cluster(request: pytest.FixtureRequest) -> Cluster:
    return plain(*request.param)


@pytest.mark.parametrize("names", COMBINATIONS, ids="-".join)
def test_objects_are_valid_and_services_find_pods(names: tuple[str, str]) -> None:
    cluster = example(*names)
    for manifest in cluster.manifests:
        if not manifest["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    namespaced = [manifest for manifest in cluster.manifests if manifest["kind"] not in {"Namespace", "PersistentVolume"}]
    assert {manifest["metadata"].get("namespace") for manifest in namespaced} == {"nereid"}

    ports = {port["name"] for container in cluster.containers() for port in container["ports"]}
    offered = set()
    for service in cluster.all_of("Service"):
        assert len(cluster.selected_by(service["spec"]["selector"])) == 1
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
        offered |= {(service["metadata"]["name"], port["name"]) for port in service["spec"]["ports"]}
    backends = [path["backend"]["service"] for path in cluster.one("Ingress")["spec"]["rules"][0]["http"]["paths"]]
    assert {(backend["name"], backend["port"]["name"]) for backend in backends} <= offered


def test_containers_can_do_no_more_than_they_need(cluster: Cluster) -> None:
    assert cluster.one("Namespace")["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    for pod in cluster.pods():
        assert pod["automountServiceAccountToken"] is False
        assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 10001)
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in cluster.containers():
        expected = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == expected
        assert nbytes(container["resources"]["limits"]["memory"]) == nbytes(container["resources"]["requests"]["memory"])


def test_images_are_those_of_this_version_with_a_gpu_and_models(cluster: Cluster) -> None:
    startup, triton, source = cluster.triton["startupProbe"], cluster.triton, volume(cluster.triton_pod, "models")
    repository = cluster.variables(triton)["MODEL_REPOSITORY"]

    assert cluster.api["image"] == IMAGE
    assert triton["image"] >= "nvcr.io/nvidia/tritonserver:26.05-py3"  # the first one with the option for shared memory
    assert cluster.pod()["enableServiceLinks"] is False  # NEREID_PORT of the Service `nereid` is no setting
    assert cluster.settings.drain_delay_seconds >= 5  # until proxies have forgotten it
    for deployment in cluster.all_of("Deployment"):  # while engines are built, a rollout has not failed
        assert deployment["spec"]["progressDeadlineSeconds"] > startup["periodSeconds"] * startup["failureThreshold"]
    assert "--model-repository=$(MODEL_REPOSITORY)" in triton["args"]
    assert "emptyDir" in source or {"name": "models", "mountPath": repository, "readOnly": True} in triton["volumeMounts"]
    assert triton["resources"]["limits"].items() >= {"nvidia.com/gpu": 1}.items()
    assert ("command" in triton, triton["args"][0]) == (False, "tritonserver")


def test_probes_ask_where_somebody_answers(cluster: Cluster) -> None:
    """The gateway at its port; Triton in its container, because it has HTTP on loopback only."""
    probes = {name: cluster.api[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    commands = {name: cluster.triton[f"{name}Probe"]["exec"]["command"][-1] for name in probes}
    gateway = f"http://127.0.0.1:{cluster.settings.port}/livez/triton"

    assert [port["containerPort"] for port in cluster.api["ports"]] == [cluster.settings.port]
    assert [(probe["path"], probe["port"]) for probe in probes.values()] == [
        (f"/{path}", "http") for path in ("livez", "readyz", "livez")
    ]
    assert {"--http-address=127.0.0.1", "--metrics-address=0.0.0.0"} <= set(cluster.triton["args"])
    assert "http://127.0.0.1:8000/v2/health/live" in commands["liveness"]
    assert (gateway in commands["liveness"]) == (cluster.overlay == "sidecar")  # another gateway may find the same Triton well
    assert all("http://127.0.0.1:8000/v2/models/$NEREID_MODEL/ready" in commands[name] for name in ("startup", "readiness"))
    assert cluster.variables(cluster.triton)["NEREID_MODEL"] == cluster.settings.model


def test_only_the_gateway_reaches_triton(cluster: Cluster) -> None:
    """Its gRPC asks for no key: it listens on loopback, or a policy lets the gateway in."""
    host, _, port = cluster.settings.triton_address.removeprefix("dns:///").rpartition(":")
    own = [one["spec"]["podSelector"]["matchLabels"] for one in cluster.all_of("NetworkPolicy") if one["metadata"]["name"] != "dns"]
    assert sorted(map(cluster.selected_by, own)) == sorted([one["metadata"]["name"]] for one in cluster.all_of("Deployment"))
    if cluster.overlay == "sidecar":
        opened = {port["port"] for rule in cluster.one("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]}
        assert opened == {cluster.settings.port, 8002}
        assert f"--grpc-address={host}" in cluster.triton["args"]
        assert cluster.triton["restartPolicy"] == "Always"
    else:
        (rule,) = (rule for rule in cluster.one("NetworkPolicy", "triton")["spec"]["ingress"] if rule["ports"] == [{"port": 8001}])
        assert cluster.selected_by(rule["from"][0]["podSelector"]["matchLabels"]) == ["nereid"]
        service = cluster.one("Service", host)["spec"]
        assert (service["clusterIP"], service["ports"][0]["port"], cluster.settings.transport) == ("None", int(port), "inline")


def test_ingress_has_the_public_paths_only_and_the_limits_of_the_gateway() -> None:
    ingress, settings = example("sidecar", "nfs").one("Ingress"), Settings()
    paths = ingress["spec"]["rules"][0]["http"]["paths"]
    exact, prefixes = ([rule["path"] for rule in paths if rule["pathType"] == kind] for kind in ("Exact", "Prefix"))

    def is_public(path: str) -> bool:
        return path in exact or any(f"{path}/".startswith(f"{prefix}/") for prefix in prefixes)

    for path in ("/models", "/routes", "/", "/v1/", "/page-assets/page.js", *(f"/{name}/anything" for name in DIALECTS)):
        assert is_public(path)
    assert {path for path, _ in PATHS if not is_public(path)} <= {"/health", "/v1/auth", "/{model:str}/{version:int}"}
    assert not any(map(is_public, ("/metrics", "/docs", "/health", "/ready", "/v1/health", "/v1/metrics")))
    given = ingress["metadata"]["annotations"]
    for prefix, size in (("nginx.ingress.kubernetes.io/", "proxy-body-size"), ("nginx.org/", "client-max-body-size")):
        assert given[prefix + size] == f"{settings.max_batch_size_mb:.0f}m"
        assert int(given[f"{prefix}proxy-read-timeout"].removesuffix("s")) > settings.max_timeout_seconds
        assert set(given[f"{prefix}proxy-next-upstream"].split()) == {"error", "timeout", "non_idempotent"}


def test_autoscalers_ask_for_what_the_adapter_computes_of_existing_metrics(cluster: Cluster) -> None:
    scalers = {scaler["metadata"]["name"]: scaler["spec"] for scaler in cluster.all_of("HorizontalPodAutoscaler")}
    asked = {name: metric[metric["type"].lower()]["metric"]["name"] for name, spec in scalers.items() for metric in spec["metrics"]}
    in_progress, waiting = (rule["name"]["as"] for rule in ADAPTER)
    used = {name for rule in ADAPTER for name in re.findall(r"\bapi_\w+", rule["seriesQuery"] + rule["metricsQuery"])}

    assert asked == {"nereid": in_progress} | ({} if cluster.overlay == "sidecar" else {"triton": waiting})
    assert not any("replicas" in cluster.one("Deployment", name)["spec"] for name in scalers)
    assert set() < used <= {metric.name for metric in METRICS.collect()}


def test_operator_scrapes_as_prometheus_does_by_the_same_rules() -> None:
    """After a change of the rules: `python -m tests.tools.kubernetes_rules`."""
    cluster = example("sidecar", "nfs")
    (monitor,), (rule,) = (cluster.all_of(kind) for kind in ("PodMonitor", "PrometheusRule"))
    endpoints = {endpoint["port"]: endpoint["relabelings"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}

    assert {job["relabel_configs"][0]["regex"]: job["job_name"] for job in JOBS} == {
        port: one["replacement"] for port, rules in endpoints.items() for one in rules if one.get("targetLabel") == "job"
    }
    assert kubernetes_rules.FILE.read_text(encoding="utf-8") == kubernetes_rules.render()
    assert rule["spec"]["groups"] == [group for source in kubernetes_rules.SOURCES for group in load(source)["groups"]]
