"""The JSON of reports on health, member by member."""

import msgspec

from app.api.reports.health_schema import (
    GpuHealth,
    Health,
    Memory,
    Performance,
    Resources,
    Services,
    TritonHealth,
    TritonService,
    Workers,
)
from tests.support import DEPLOYMENT


def test_a_health_report_has_the_members_that_dashboards_read() -> None:
    """Memory is there twice, under the names that two kinds of them know."""
    report = Health(
        status="healthy",
        version="0",
        api="healthy",
        triton=TritonHealth("ready", "2.51.0"),
        tritons=[],
        model="tiny",
        model_ready=True,
        gpu=GpuHealth(in_use=False, devices=[]),
        memory=Memory(1.5, [1.5, 2.0]),
        performance=Performance(3.5, {"transport": "shm"}),
        limits=DEPLOYMENT.limits,
        api_version="v1",
        services=Services(TritonService(ok=True, detail="ready", url="triton:8001")),
        resources=Resources(1.5, 3.0),
        workers=Workers(1, 2),
        refused_files=["api_keys"],
    )

    names = ["status", "version", "api", "triton", "tritons", "model", "model_ready", "gpu", "memory", "performance", "limits"]
    names += ["api_version", "services", "resources", "workers", "refused_files"]
    assert list(msgspec.to_builtins(report)) == names
    assert msgspec.to_builtins(report)["performance"] == {"memory_mb": 3.5, "optimizations": {"transport": "shm"}}
