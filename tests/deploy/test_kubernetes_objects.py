"""The objects for Kubernetes as rendered: by its schemas, in their namespace, with everything that they refer to."""

import re
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest

from tests.deploy.kubernetes import COMBINATIONS, FOLDER, Cluster, Manifest, example, plain, selects, volume
from tests.deploy.needs import IMAGE
from tests.support import ROOT

MADE = ["plain", "example", "options"]
GUIDE = ROOT / "docs" / "how-to" / "kubernetes.md"


@pytest.fixture(params=[(made, *names) for made in MADE for names in COMBINATIONS], ids="-".join)
def cluster(request: pytest.FixtureRequest) -> Cluster:
    made, overlay, models = request.param
    return plain(overlay, models) if made == "plain" else example(overlay, models, has_options=made == "options")


@pytest.fixture(params=COMBINATIONS, ids="-".join)
def with_options(request: pytest.FixtureRequest) -> Cluster:
    return example(*request.param, has_options=True)


def test_manifests_are_valid(cluster: Cluster) -> None:
    for manifest in cluster.manifests:
        if not manifest["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_all_objects_are_in_the_namespace(cluster: Cluster) -> None:
    namespaced = [manifest for manifest in cluster.manifests if manifest["kind"] not in {"Namespace", "PersistentVolume"}]

    assert {manifest["metadata"].get("namespace") for manifest in namespaced} == {cluster.one("Namespace")["metadata"]["name"]}


def test_referenced_objects_exist(cluster: Cluster) -> None:
    """A secret is created by a command that the guide or a file has."""
    texts = [file.read_text(encoding="utf-8") for file in [GUIDE, *FOLDER.rglob("*.yaml")]]
    secrets = {
        ("Secret", name) for text in texts for name in re.findall(r"create secret (?:generic|tls|docker-registry) (\S+)", text)
    }
    objects = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in cluster.manifests}

    assert {*_of_pods(cluster), *_of_others(cluster)} - objects <= secrets


def _of_pods(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Return kind and name of what pods refer to."""
    for pod in cluster.pods():
        yield from (("Secret", secret["name"]) for secret in pod.get("imagePullSecrets", []))
        if "serviceAccountName" in pod:
            yield "ServiceAccount", pod["serviceAccountName"]
        for source in pod["volumes"]:
            if "secret" in source:
                yield "Secret", source["secret"]["secretName"]
            if "persistentVolumeClaim" in source:
                yield "PersistentVolumeClaim", source["persistentVolumeClaim"]["claimName"]
    for container in cluster.containers():
        for source in container["envFrom"]:
            yield from (("ConfigMap" if kind == "configMapRef" else "Secret", found["name"]) for kind, found in source.items())


def _of_others(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Return kind and name of what other objects refer to."""
    for ingress in cluster.all_of("Ingress"):
        yield from (("Secret", tls["secretName"]) for tls in ingress["spec"]["tls"])
        for rule in ingress["spec"]["rules"]:
            yield from (("Service", path["backend"]["service"]["name"]) for path in rule["http"]["paths"])
    for scaler in cluster.all_of("HorizontalPodAutoscaler"):
        yield scaler["spec"]["scaleTargetRef"]["kind"], scaler["spec"]["scaleTargetRef"]["name"]
    for claim in cluster.all_of("PersistentVolumeClaim"):
        if "volumeName" in claim["spec"]:
            yield "PersistentVolume", claim["spec"]["volumeName"]


def test_all_selectors_select_pods(cluster: Cluster) -> None:
    found = [selector for manifest in cluster.manifests for selector in _selectors(manifest)]
    services = [{"matchLabels": service["spec"]["selector"]} for service in cluster.all_of("Service")]

    assert len(found) > len(services) > 0
    for selector in [*found, *services]:
        assert any(selects(selector, labels) for labels in cluster.pod_labels())


def _selectors(value: object) -> Iterator[Manifest]:
    """Return all pod selectors in an object."""
    if isinstance(value, dict):
        for name, member in value.items():
            if name in {"podSelector", "selector", "labelSelector"} and "matchLabels" in member:
                yield member
            else:
                yield from _selectors(member)
    elif isinstance(value, list):
        for member in value:
            yield from _selectors(member)


def test_services_lead_to_ports_of_pods(cluster: Cluster) -> None:
    ports = {port["name"] for container in cluster.containers() for port in container["ports"]}
    offered = {
        (service["metadata"]["name"], port["name"]) for service in cluster.all_of("Service") for port in service["spec"]["ports"]
    }
    paths = [path for rule in cluster.one("Ingress")["spec"]["rules"] for path in rule["http"]["paths"]]

    assert {port["targetPort"] for service in cluster.all_of("Service") for port in service["spec"]["ports"]} <= ports
    assert {(path["backend"]["service"]["name"], path["backend"]["service"]["port"]["name"]) for path in paths} <= offered


def test_the_example_is_what_a_user_sets(with_options: Cluster) -> None:
    text = (FOLDER / "example" / "kustomization.yaml").read_text(encoding="utf-8")
    as_it_is = example("sidecar", "nfs", has_options=False)
    ingress = with_options.one("Ingress")
    components = {file.parent.name for file in FOLDER.glob("*/kustomization.yaml") if "kind: Component" in file.read_text()}

    assert components == set(re.findall(r"\.\./([\w-]+)", text)) - {"sidecar", "separate"}
    assert as_it_is.api["image"] == f"registry.example.org/{IMAGE}"
    assert re.fullmatch(r"registry\.example\.org/nereid@sha256:\w{64}", with_options.api["image"])
    assert all(pod["imagePullSecrets"] for pod in with_options.pods())
    assert ingress["spec"]["rules"][0]["host"] in ingress["spec"]["tls"][0]["hosts"]
    (keys,) = (mount for mount in with_options.api["volumeMounts"] if mount["name"] == "keys")
    assert Path(with_options.settings.api_keys_file).parent == Path(keys["mountPath"])
    for account in with_options.all_of("ServiceAccount"):
        assert account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"].startswith("arn:aws:iam::")


def test_engines_are_kept_and_built_by_one_pod_at_a_time(with_options: Cluster) -> None:
    (mount,) = (mount for mount in with_options.triton["volumeMounts"] if mount["name"] == "engines")
    source = volume(with_options.triton_pod, "engines")
    name = "nereid" if with_options.overlay == "sidecar" else "triton"

    assert source.keys() == {"name", "persistentVolumeClaim"}
    assert "readOnly" not in mount
    assert with_options.one("Deployment", name)["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_ingress_controllers_get_the_same_limits(with_options: Cluster) -> None:
    annotations = with_options.one("Ingress")["metadata"]["annotations"]
    community = {
        name.partition("/")[2]: value for name, value in annotations.items() if name.startswith("nginx.ingress.kubernetes.io/")
    }
    nginx = {name.partition("/")[2]: value for name, value in annotations.items() if name.startswith("nginx.org/")}
    nginx |= {"proxy-body-size": nginx["client-max-body-size"], "limit-rps": nginx["limit-req-rate"].removesuffix("r/s")}
    burst = int(community.pop("limit-burst-multiplier")) * int(community["limit-rps"])
    admitted = with_options.one("NetworkPolicy")["spec"]["ingress"][0]["from"][0]["namespaceSelector"]["matchLabels"]

    assert community.pop("load-balance") == "ewma"
    assert burst == int(nginx["limit-req-burst"])
    assert community == {name: nginx[name].removesuffix("s") for name in community}
    assert set(nginx) >= set(community) >= {name for name in nginx if name.startswith("proxy-")}
    assert admitted == {"kubernetes.io/metadata.name": "ingress-nginx"}
