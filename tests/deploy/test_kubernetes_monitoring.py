"""What scales pods in Kubernetes, and how Prometheus and its operator find them and what to compute; promtool runs the queries."""

import re
from pathlib import Path

import msgspec
import pytest

from app.zoo.description import Description
from tests.deploy.kubernetes import COMBINATIONS, FOLDER, Cluster, example, plain
from tests.deploy.needs import DEPLOY, load
from tests.deploy.test_prometheus import promtool
from tests.support import METRICS
from tests.tools import kubernetes_rules

RULES = load(FOLDER / "prometheus-adapter.yaml")["rules"]
ADAPTER = [*RULES["custom"], *RULES["external"]]


@pytest.fixture(params=COMBINATIONS, ids="-".join)
def cluster(request: pytest.FixtureRequest) -> Cluster:
    return plain(*request.param)


def test_autoscalers_have_their_metrics(cluster: Cluster) -> None:
    scalers = {scaler["metadata"]["name"]: scaler["spec"] for scaler in cluster.all_of("HorizontalPodAutoscaler")}
    asked = {
        name: [metric[metric["type"].lower()]["metric"]["name"] for metric in spec["metrics"]] for name, spec in scalers.items()
    }
    in_progress, waiting = (rule["name"]["as"] for rule in ADAPTER)

    assert asked == {"nereid": [in_progress]} | ({} if cluster.overlay == "sidecar" else {"triton": [waiting]})
    for name, spec in scalers.items():
        assert spec["scaleTargetRef"]["name"] == name
        assert "replicas" not in cluster.one("Deployment", name)["spec"]
        assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 20)


def test_prometheus_has_what_the_adapter_asks_for() -> None:
    known = {metric.name for metric in METRICS.collect()}
    used = {name for rule in ADAPTER for name in re.findall(r"\bapi_\w+", rule["seriesQuery"] + rule["metricsQuery"])}

    assert used
    assert used <= known


@pytest.mark.system
def test_the_adapter_measures_the_model_that_has_most_to_do(tmp_path: Path) -> None:
    queries = [rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'pod=~"a|b"') for rule in ADAPTER]
    metrics = {
        "api_model_active_requests": {"full": 40, "idle": 0, "other": 0},
        "api_model_request_limit": {"full": 40, "idle": 200, "other": 8},
        "api_inference_waiting_images": {"full": 30, "idle": 0, "other": 2},
    }
    series = [
        {"series": f'{metric}{{pod="a", model="{model}"}}', "values": str(value)}
        for metric, models in metrics.items()
        for model, value in models.items()
    ]
    expected = [
        {"expr": query, "eval_time": "0m", "exp_samples": [{"labels": labels, "value": value}]}
        for query, labels, value in zip(queries, ('{pod="a"}', "{}"), (1, 32), strict=True)
    ]
    (tmp_path / "test.yml").write_bytes(msgspec.json.encode({"tests": [{"input_series": series, "promql_expr_test": expected}]}))

    assert "SUCCESS" in promtool("test", "rules", "test.yml", folder=tmp_path)


@pytest.mark.system
def test_prometheus_finds_the_pods(cluster: Cluster, tmp_path: Path) -> None:
    """Debian's promtool knows no discovery in Kubernetes, so that fixed targets take its place."""
    config = load(DEPLOY / "prometheus" / "prometheus.kubernetes.yml")
    ports = {port["name"] for container in cluster.containers() for port in container["ports"]}
    for job in config["scrape_configs"]:
        (discovery,) = job.pop("kubernetes_sd_configs")
        job["static_configs"] = [{"targets": ["127.0.0.1:1"]}]
        assert discovery["namespaces"]["names"] == [cluster.one("Namespace")["metadata"]["name"]]
        assert job["relabel_configs"][0]["regex"] in ports
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    (tmp_path / "prometheus.yml").write_bytes(msgspec.yaml.encode(config))

    assert "2 rule files found" in promtool("check", "config", "--lint-fatal", "prometheus.yml", folder=tmp_path)


def test_triton_is_scaled_up_when_more_than_one_full_batch_waits() -> None:
    (metric,) = plain("separate", "nfs").one("HorizontalPodAutoscaler", "triton")["spec"]["metrics"]
    (production,) = (field.default for field in msgspec.structs.fields(Description) if field.name == "production")

    assert int(metric["external"]["target"]["averageValue"]) >= production.max_batch


def test_the_operator_scrapes_as_prometheus_does() -> None:
    (monitor,) = example("sidecar", "nfs", has_options=True).all_of("PodMonitor")
    endpoints = {endpoint["port"]: endpoint["relabelings"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    jobs = load(DEPLOY / "prometheus" / "prometheus.kubernetes.yml")["scrape_configs"]
    read = set(re.findall(r'[{,] *(\w+)=~?"', kubernetes_rules.FILE.read_text(encoding="utf-8")))

    assert {job["relabel_configs"][0]["regex"]: job["job_name"] for job in jobs} == {
        port: rule["replacement"] for port, rules in endpoints.items() for rule in rules if rule.get("targetLabel") == "job"
    }
    assert "endpoint" in read
    for rules in [*endpoints.values(), *(job["relabel_configs"] for job in jobs)]:
        named = [{name.replace("_", "").lower(): value for name, value in rule.items()} for rule in rules]
        assert {"sourcelabels": ["__meta_kubernetes_pod_phase"], "regex": "Running", "action": "keep"} in named
        assert {"sourcelabels": ["__meta_kubernetes_pod_name"], "targetlabel": "instance"} in named
    for rules in endpoints.values():
        dropped = {rule["regex"] for rule in rules if rule.get("action") == "labeldrop"}
        assert read & {"container", "endpoint"} <= dropped  # which the operator sets


def test_the_rules_of_the_operator_are_those_of_prometheus() -> None:
    """After a change: `python -m tests.tools.kubernetes_rules`."""
    (rule,) = example("sidecar", "nfs", has_options=True).all_of("PrometheusRule")

    assert kubernetes_rules.FILE.read_text(encoding="utf-8") == kubernetes_rules.render()
    assert rule["spec"]["groups"] == [group for source in kubernetes_rules.SOURCES for group in load(source)["groups"]]
