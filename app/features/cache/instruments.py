"""The metrics of the cache."""

from app.resilience.worker_table import WorkerTable
from app.telemetry.instruments import CommonGauge, Counter, Gauge, Histogram


class Instruments:
    """What the cache counts."""

    def __init__(self, table: WorkerTable) -> None:
        self.requests = Counter(
            table, "api_cache_requests", "Images for which the cache was asked, by how they were answered.", ["result"]
        )
        self.saved = Histogram(table, "api_cache_saved_seconds", "Time of the inferences that hits have saved.", [], ())
        self.bytes = CommonGauge(table, "api_cache_bytes", "Memory that cached results take.")
        self.evictions = Counter(
            table, "api_cache_evictions", "Results that left the cache in memory before their time, because it was full."
        )
        self.store_failures = Counter(table, "api_cache_store_failures", "Operations of the cache's Redis that failed.")
        self.circuit_open = Gauge(table, "api_cache_circuit_open", "Workers that do not use the cache's Redis, because it fails.")
