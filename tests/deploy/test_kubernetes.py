"""The manifests for Kubernetes, against its schemas and what the application needs; there is no cluster to run them in here."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from app.api.application import table_of
from app.api.dialects import dialect
from app.host.ports import is_loopback
from app.settings.schema import DIALECTS, Settings
from tests.deploy.needs import (
    DEPLOY,
    EMBEDDED_TRITON_SECONDS,
    IMAGE,
    TRITON_SECONDS,
    load,
    memory_bytes,
    nbytes,
    settings_of,
    shared_memory_bytes,
    stop_seconds,
)
from tests.deploy.test_prometheus import promtool
from tests.support import METRICS

Manifest = dict[str, Any]
Labels = dict[str, str]

FOLDER = DEPLOY / "kubernetes"
COMBINATIONS = list(itertools.product(["sidecar", "separate"], ["nfs", "s3"]))
ADAPTER = load(FOLDER / "prometheus-adapter.yaml")["rules"]["custom"]


class Cluster(NamedTuple):
    """The output of kustomize for an overlay and a component."""

    overlay: str
    manifests: list[Manifest]

    def all_of(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def one(self, kind: str, name: str = "nereid") -> Manifest:
        (found,) = (manifest for manifest in self.all_of(kind) if manifest["metadata"]["name"] == name)
        return found

    def pod(self, name: str = "nereid") -> Manifest:
        return dict(self.one("Deployment", name)["spec"]["template"]["spec"])

    def pod_labels(self) -> list[Labels]:
        return [deployment["spec"]["template"]["metadata"]["labels"] for deployment in self.all_of("Deployment")]

    def variables(self, container: Manifest) -> dict[str, str]:
        """Return the environment variables that a container gets from ConfigMaps."""
        maps = [source["configMapRef"]["name"] for source in container["envFrom"] if "configMapRef" in source]
        return {name: value for found in maps for name, value in self.one("ConfigMap", found)["data"].items()}

    @property
    def api(self) -> Manifest:
        (container,) = self.pod()["containers"]
        return dict(container)

    @property
    def triton(self) -> Manifest:
        (container,) = self.pod()["initContainers"] if self.overlay == "sidecar" else self.pod("triton")["containers"]
        return dict(container)

    @property
    def settings(self) -> Settings:
        return settings_of(self.variables(self.api))


def build(folder: Path) -> list[Manifest]:
    command = [str(Path(sys.executable).with_name("kubectl")), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [msgspec.yaml.decode(document) for document in done.stdout.split("\n---\n")]


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Cluster]:
    """Each overlay with each source of models, as a user would put them together."""
    made = {}
    for overlay, models in COMBINATIONS:
        folder = tmp_path_factory.mktemp("cluster").resolve()
        shipped = os.path.relpath(FOLDER.resolve(), folder)
        kustomization = {"resources": [f"{shipped}/{overlay}"], "components": [f"{shipped}/models-{models}"]}
        (folder / "kustomization.yaml").write_bytes(msgspec.yaml.encode(kustomization))
        made[overlay, models] = Cluster(overlay, build(folder))
    return made


@pytest.fixture(params=COMBINATIONS, ids="-".join)
def cluster(request: pytest.FixtureRequest, clusters: dict[tuple[str, str], Cluster]) -> Cluster:
    return clusters[request.param]


def containers(cluster: Cluster) -> list[Manifest]:
    pods = [cluster.pod(deployment["metadata"]["name"]) for deployment in cluster.all_of("Deployment")]
    return [container for pod in pods for container in [*pod.get("initContainers", []), *pod["containers"]]]


def volume(pod: Manifest, name: str) -> Manifest:
    (found,) = (volume for volume in pod["volumes"] if volume["name"] == name)
    return dict(found)


def selects(selector: Manifest, labels: Labels) -> bool:
    return bool(selector["matchLabels"].items() <= labels.items())


def test_manifests_are_valid(clusters: dict[tuple[str, str], Cluster], tmp_path: Path) -> None:
    """By the schemas of Kubernetes, without a member that they do not know."""
    manifests = {msgspec.json.encode(manifest) for cluster in clusters.values() for manifest in cluster.manifests}
    files = [tmp_path / f"{number}.json" for number in range(len(manifests))]
    for file, manifest in zip(files, manifests, strict=True):
        file.write_bytes(manifest)
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", *map(str, files)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)

    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" passed for resource ") == len(files)


def test_the_example_can_be_built() -> None:
    example = Cluster("sidecar", build(FOLDER / "example"))
    source = msgspec.yaml.decode((FOLDER / "example/kustomization.yaml").read_bytes())

    assert source["configMapGenerator"][0]["literals"] == [f"NEREID_MODEL={example.settings.model}"]
    assert example.api["image"] == f"registry.example.org/{IMAGE}"
    assert example.one("Ingress")["spec"]["rules"][0]["host"] in example.one("Ingress")["spec"]["tls"][0]["hosts"]


def test_image_and_processors_are_those_of_this_version(cluster: Cluster) -> None:
    """This version of Triton shares no memory unless it is told to."""
    release = re.fullmatch(r"nvcr\.io/nvidia/tritonserver:(\d\d\.\d\d)-py3", cluster.triton["image"])

    assert cluster.api["image"] == IMAGE
    assert release is not None
    assert release[1] >= "26.05"
    assert ("--allow-client-shm=true" in cluster.triton["args"]) == (cluster.overlay == "sidecar")
    assert cluster.pod()["enableServiceLinks"] is False  # NEREID_PORT of the Service `nereid` is no setting
    assert str(cluster.settings.workers) == cluster.api["resources"]["requests"]["cpu"]  # a worker sees all of the node's


def test_containers_can_do_no_more_than_they_need(cluster: Cluster) -> None:
    """The namespace enforces it, and the root file system is read-only."""
    assert cluster.one("Namespace")["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    for deployment in cluster.all_of("Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(cluster):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert nbytes(container["resources"]["limits"]["memory"]) == nbytes(container["resources"]["requests"]["memory"])


def test_memory_is_enough(cluster: Cluster) -> None:
    """Memory has to suffice for workers, images, bodies and shared memory, which counts towards the container that writes it."""
    limit = nbytes(cluster.api["resources"]["limits"]["memory"])
    needed = memory_bytes(cluster.settings, limit)
    if cluster.overlay == "sidecar":
        shared = nbytes(volume(cluster.pod(), "shared-memory")["emptyDir"]["sizeLimit"])
        assert shared >= shared_memory_bytes(cluster.settings)
        needed += shared

    assert needed <= limit


def test_gateway_and_triton_share_memory_or_do_not_try(cluster: Cluster) -> None:
    """In one pod both have the same /dev/shm; between pods tensors go inline."""
    assert cluster.settings.transport == ("auto" if cluster.overlay == "sidecar" else "inline")
    if cluster.overlay == "sidecar":
        mount = {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108
        assert mount in cluster.api["volumeMounts"]
        assert mount in cluster.triton["volumeMounts"]
        assert volume(cluster.pod(), "shared-memory")["emptyDir"]["medium"] == "Memory"


def test_requests_in_progress_may_end(cluster: Cluster) -> None:
    """Before the gateway is killed, and Triton is stopped after it, or waits for its own."""
    grace = cluster.pod()["terminationGracePeriodSeconds"]

    assert cluster.settings.drain_delay_seconds >= 5
    assert grace >= stop_seconds(cluster.settings)
    if cluster.overlay == "sidecar":
        assert cluster.triton["restartPolicy"] == "Always"
        assert grace >= stop_seconds(cluster.settings) + EMBEDDED_TRITON_SECONDS
    else:
        before = cluster.triton["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert cluster.pod("triton")["terminationGracePeriodSeconds"] > before + TRITON_SECONDS


def test_probes_ask_where_somebody_answers(cluster: Cluster) -> None:
    """The gateway of its port; Triton in its container, because it has HTTP on loopback only, and metrics on all addresses."""
    ports = {port["name"]: port["containerPort"] for port in cluster.api["ports"]}
    probes = {name: cluster.api[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}

    assert ports == {"http": cluster.settings.port}
    assert not is_loopback(cluster.settings.host)
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/livez",
        "readiness": "/readyz",
        "liveness": "/livez",
    }
    assert {probe["port"] for probe in probes.values()} == {"http"}
    assert {"--http-address=127.0.0.1", "--metrics-address=0.0.0.0"} <= set(cluster.triton["args"])
    for probe in ("startupProbe", "readinessProbe"):
        assert "http://127.0.0.1:8000/v2/models/$NEREID_MODEL/ready" in cluster.triton[probe]["exec"]["command"][-1]
    assert cluster.variables(cluster.triton)["NEREID_MODEL"] == cluster.settings.model == Settings().model


def test_the_gateway_finds_triton(cluster: Cluster) -> None:
    """In its pod, or each of them by the name of a headless Service; the port is then that of the pods."""
    host, _, port = cluster.settings.triton_address.removeprefix("dns:///").rpartition(":")
    if cluster.overlay == "sidecar":
        assert f"--grpc-address={host}" in cluster.triton["args"]
    else:
        assert cluster.settings.triton_address.startswith("dns:///")
        assert cluster.one("Service", host)["spec"]["clusterIP"] == "None"
        (service,) = cluster.one("Service", host)["spec"]["ports"]
        named = {port["name"]: port["containerPort"] for port in cluster.triton["ports"]}
        assert service["port"] == named[service["targetPort"]] == int(port)


def test_clients_see_the_public_paths_only(cluster: Cluster) -> None:
    ingress = cluster.one("Ingress")
    paths = [path["path"] for path in ingress["spec"]["rules"][0]["http"]["paths"]]
    annotations = {name.removeprefix("nginx.org/"): value for name, value in ingress["metadata"]["annotations"].items()}

    def is_public(path: str) -> bool:
        return path == "/" or any(f"{path}/".startswith(f"{prefix}/") for prefix in paths)

    for path in ("/models", "/", "/page-assets/page.js", *(f"/{name}/anything" for name in DIALECTS)):
        assert is_public(path)
    for path, _ in table_of(dialect.load(DIALECTS)).paths:  # no prefix can express some of them
        assert is_public(path) or path in {"/health", "/{model:str}/{version:int}"}
    for path in ("/metrics", "/docs", "/health", "/ready", "/v1/health", "/v1/metrics"):
        assert not is_public(path)
    assert annotations["limit-req-reject-code"] == "429"
    assert {"error", "timeout", "non_idempotent"} == set(annotations["proxy-next-upstream"].split())
    assert annotations["client-max-body-size"] == f"{cluster.settings.max_batch_size_mb:.0f}m"
    assert int(annotations["proxy-read-timeout"].removesuffix("s")) > cluster.settings.max_timeout_seconds


@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "NetworkPolicy"])
def test_each_pod_has_one_and_each_service_a_pod(cluster: Cluster, kind: str) -> None:
    selectors = [found["spec"]["selector" if kind == "PodDisruptionBudget" else "podSelector"] for found in cluster.all_of(kind)]

    for labels in cluster.pod_labels():
        assert sum(selects(selector, labels) for selector in selectors) == 1
    assert len(selectors) == len(cluster.pod_labels())
    for service in cluster.all_of("Service"):
        assert sum(service["spec"]["selector"].items() <= labels.items() for labels in cluster.pod_labels()) == 1


def test_nobody_but_the_gateway_reaches_triton(cluster: Cluster) -> None:
    """Its gRPC asks for no key: it listens on loopback, or a policy lets the gateway in."""
    if cluster.overlay == "sidecar":
        opened = {port["port"] for rule in cluster.one("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]}
        assert opened == {cluster.settings.port, 8002}
    else:
        (rule,) = (rule for rule in cluster.one("NetworkPolicy", "triton")["spec"]["ingress"] if rule["ports"] == [{"port": 8001}])
        (peer,) = rule["from"]
        (there,) = (rule for rule in cluster.one("NetworkPolicy")["spec"]["egress"] if rule["ports"] == [{"port": 8001}])
        assert selects(peer["podSelector"], cluster.one("Deployment")["spec"]["template"]["metadata"]["labels"])
        assert selects(there["to"][0]["podSelector"], cluster.one("Deployment", "triton")["spec"]["template"]["metadata"]["labels"])


def test_models_have_a_source(cluster: Cluster) -> None:
    """A claim that exists, or a bucket, which Triton may reach and has credentials for."""
    pod = cluster.pod("nereid" if cluster.overlay == "sidecar" else "triton")
    secret = cluster.triton["envFrom"][-1]
    repository = cluster.variables(cluster.triton)["MODEL_REPOSITORY"]
    source = volume(pod, "models")

    assert "--model-repository=$(MODEL_REPOSITORY)" in cluster.triton["args"]
    if repository.startswith("s3://"):
        policies = cluster.all_of("NetworkPolicy")
        assert source == {"name": "models", "emptyDir": {}}
        assert secret["secretRef"]["name"] == "nereid-models"
        assert any({"ports": [{"port": 443}]} in policy["spec"]["egress"] for policy in policies)
    else:
        assert {"name": "models", "mountPath": repository, "readOnly": True} in cluster.triton["volumeMounts"]
        assert cluster.one("PersistentVolumeClaim", source["persistentVolumeClaim"]["claimName"])


def test_autoscalers_have_their_metrics(cluster: Cluster) -> None:
    """By the names that prometheus-adapter gives them; a gateway with its Triton is scaled by both."""
    scalers = {scaler["metadata"]["name"]: scaler["spec"] for scaler in cluster.all_of("HorizontalPodAutoscaler")}
    asked = {name: [metric["pods"]["metric"]["name"] for metric in spec["metrics"]] for name, spec in scalers.items()}
    in_progress, pending = (rule["name"]["as"] for rule in ADAPTER)

    assert asked == (
        {"nereid": [in_progress, pending]} if cluster.overlay == "sidecar" else {"nereid": [in_progress], "triton": [pending]}
    )
    for name, spec in scalers.items():
        assert spec["scaleTargetRef"]["name"] == name
        assert "replicas" not in cluster.one("Deployment", name)["spec"]
        assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 20)


def test_prometheus_has_what_the_adapter_asks_for() -> None:
    """Metrics of the gateway, and of Triton those of the dashboard, which a test runs."""
    dashboard = (DEPLOY / "grafana" / "nereid.json").read_text(encoding="utf-8")
    known = {metric.name for metric in METRICS.collect()}
    used = {name for rule in ADAPTER for name in re.findall(r"\b(?:api|nv)_\w+", rule["seriesQuery"] + rule["metricsQuery"])}

    assert used
    assert all(name in (known if name.startswith("api_") else dashboard) for name in used)


def test_the_adapter_measures_the_model_that_has_most_to_do(tmp_path: Path) -> None:
    """One of three models is full, two are idle; Triton's queues are added up. Promtool runs the queries."""
    queries = [rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'pod=~"a|b"') for rule in ADAPTER]
    metrics = {
        "api_model_active_requests": {"full": 40, "idle": 0, "other": 0},
        "api_model_request_limit": {"full": 40, "idle": 200, "other": 8},
        "nv_inference_pending_request_count": {"full": 30, "idle": 0, "other": 2},
    }
    series = [
        {"series": f'{metric}{{pod="a", model="{model}"}}', "values": str(value)}
        for metric, models in metrics.items()
        for model, value in models.items()
    ]
    expected = [
        {"expr": query, "eval_time": "0m", "exp_samples": [{"labels": '{pod="a"}', "value": value}]}
        for query, value in zip(queries, (1, 32), strict=True)
    ]
    (tmp_path / "test.yml").write_bytes(msgspec.json.encode({"tests": [{"input_series": series, "promql_expr_test": expected}]}))

    assert "SUCCESS" in promtool("test", "rules", "test.yml", folder=tmp_path)


def test_prometheus_finds_the_pods(cluster: Cluster, tmp_path: Path) -> None:
    """By the names of their ports; Debian's promtool knows no discovery in Kubernetes, so that fixed targets take its place."""
    config = load(DEPLOY / "prometheus" / "prometheus.kubernetes.yml")
    ports = {port["name"] for container in containers(cluster) for port in container["ports"]}
    for job in config["scrape_configs"]:
        (discovery,) = job.pop("kubernetes_sd_configs")
        job["static_configs"] = [{"targets": ["127.0.0.1:1"]}]
        assert discovery["namespaces"]["names"] == [cluster.one("Namespace")["metadata"]["name"]]
        assert job["relabel_configs"][0]["regex"] in ports
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    (tmp_path / "prometheus.yml").write_bytes(msgspec.yaml.encode(config))

    assert "2 rule files found" in promtool("check", "config", "--lint-fatal", "prometheus.yml", folder=tmp_path)
