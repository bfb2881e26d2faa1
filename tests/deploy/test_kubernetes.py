"""The pods and the ingress for Kubernetes, against what the application needs; there is no cluster to run them in here."""

import re

import pytest

from app.host.ports import is_loopback
from app.settings.schema import DIALECTS, Settings
from tests.deploy.kubernetes import COMBINATIONS, Cluster, example, plain, selects, volume
from tests.deploy.needs import (
    EMBEDDED_TRITON_SECONDS,
    IMAGE,
    TRITON_SECONDS,
    memory_bytes,
    nbytes,
    shared_memory_bytes,
    stop_seconds,
)
from tests.deploy.paths import PATHS


@pytest.fixture(params=COMBINATIONS, ids="-".join)
def cluster(request: pytest.FixtureRequest) -> Cluster:
    return plain(*request.param)


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
    assert cluster.one("Namespace")["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    for pod in cluster.pods():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in cluster.containers():
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


def test_triton_gets_a_gpu_and_what_its_image_prepares(cluster: Cluster) -> None:
    """Nodes with GPUs accept only pods that tolerate it; the image's entrypoint must run Triton."""
    assert cluster.triton["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in cluster.triton_pod["tolerations"]
    assert "command" not in cluster.triton
    assert cluster.triton["args"][0] == "tritonserver"


def test_a_rollout_has_not_failed_while_engines_are_built(cluster: Cluster) -> None:
    startup = cluster.triton["startupProbe"]

    for deployment in cluster.all_of("Deployment"):
        assert deployment["spec"]["progressDeadlineSeconds"] > startup["periodSeconds"] * startup["failureThreshold"]


def test_gateway_and_triton_share_memory_or_do_not_try(cluster: Cluster) -> None:
    """In one pod both have the same /dev/shm; between pods tensors go inline."""
    assert cluster.settings.transport == ("auto" if cluster.overlay == "sidecar" else "inline")
    if cluster.overlay == "sidecar":
        mount = {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108
        assert mount in cluster.api["volumeMounts"]
        assert mount in cluster.triton["volumeMounts"]
        assert volume(cluster.pod(), "shared-memory")["emptyDir"]["medium"] == "Memory"


def test_requests_in_progress_may_end(cluster: Cluster) -> None:
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
    liveness = cluster.triton["livenessProbe"]["exec"]["command"][-1]
    own = f"http://127.0.0.1:{cluster.settings.port}/livez/triton"
    assert "http://127.0.0.1:8000/v2/health/live" in liveness
    assert (own in liveness) == (cluster.overlay == "sidecar")  # another gateway may find the same Triton well
    for probe in ("startupProbe", "readinessProbe"):
        assert "http://127.0.0.1:8000/v2/models/$NEREID_MODEL/ready" in cluster.triton[probe]["exec"]["command"][-1]
    assert cluster.variables(cluster.triton)["NEREID_MODEL"] == cluster.settings.model == Settings().model


def test_the_gateway_finds_triton(cluster: Cluster) -> None:
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
    rules = ingress["spec"]["rules"][0]["http"]["paths"]
    exact, paths = ([rule["path"] for rule in rules if rule["pathType"] == kind] for kind in ("Exact", "Prefix"))
    annotations = {name.removeprefix("nginx.org/"): value for name, value in ingress["metadata"]["annotations"].items()}

    def is_public(path: str) -> bool:
        return path in exact or any(f"{path}/".startswith(f"{prefix}/") for prefix in paths)

    for path in ("/models", "/routes", "/", "/v1/", "/page-assets/page.js", *(f"/{name}/anything" for name in DIALECTS)):
        assert is_public(path)
    for path, _ in PATHS:  # no prefix can express some of them
        assert is_public(path) or path in {"/health", "/v1/auth", "/{model:str}/{version:int}"}
    assert is_public("/search/docs")  # no prefix leaves it out
    for path in ("/metrics", "/docs", "/health", "/ready", "/v1/health", "/v1/metrics"):
        assert not is_public(path)
    assert annotations["limit-req-reject-code"] == "429"
    assert {"error", "timeout", "non_idempotent"} == set(annotations["proxy-next-upstream"].split())
    assert annotations["client-max-body-size"] == f"{cluster.settings.max_batch_size_mb:.0f}m"
    assert int(annotations["proxy-read-timeout"].removesuffix("s")) > cluster.settings.max_timeout_seconds


@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "NetworkPolicy"])
def test_each_pod_has_one_budget_and_policy_and_each_service_one_pod(cluster: Cluster, kind: str) -> None:
    """Besides the policy for names, which is for all pods."""
    selectors = {
        found["metadata"]["name"]: found["spec"]["selector" if kind == "PodDisruptionBudget" else "podSelector"]
        for found in cluster.all_of(kind)
    }
    names = selectors.pop("dns", None)

    for labels in cluster.pod_labels():
        assert sum(selects(selector, labels) for selector in selectors.values()) == 1
        assert names is None or selects(names, labels)
    assert len(selectors) == len(cluster.pod_labels())
    for service in cluster.all_of("Service"):
        assert sum(service["spec"]["selector"].items() <= labels.items() for labels in cluster.pod_labels()) == 1


def test_only_the_gateway_reaches_triton(cluster: Cluster) -> None:
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
    secret = cluster.triton["envFrom"][-1]
    repository = cluster.variables(cluster.triton)["MODEL_REPOSITORY"]
    source = volume(cluster.triton_pod, "models")

    assert "--model-repository=$(MODEL_REPOSITORY)" in cluster.triton["args"]
    if "emptyDir" in source:
        policies, own = cluster.all_of("NetworkPolicy"), example(cluster.overlay, "s3", has_options=True)
        assert own.variables(own.triton)["MODEL_REPOSITORY"].startswith("s3://")
        assert source == {"name": "models", "emptyDir": {}}
        assert secret["secretRef"]["name"] == "nereid-models"
        assert any({"ports": [{"port": 443}]} in policy["spec"]["egress"] for policy in policies)
    else:
        assert {"name": "models", "mountPath": repository, "readOnly": True} in cluster.triton["volumeMounts"]
        assert cluster.one("PersistentVolumeClaim", source["persistentVolumeClaim"]["claimName"])
