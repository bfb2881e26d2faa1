"""What NGINX costs: throughput through it and directly, in one run."""

from pathlib import Path
from statistics import median

import pytest

from bench.load.closed_loop import drive_closed_loop
from bench.load.images import unlabelled_samples
from tests.faults.conftest import RecordFigure
from tests.faults.serving import Gateway
from tests.nginx import proxying
from tests.support import NEEDS_BYTES

_ROUNDS, _SECONDS, _CLIENTS = 3, 4.0, 16


@pytest.mark.parametrize("model", ["null", pytest.param("null_file", marks=NEEDS_BYTES)])
async def test_nginx_costs_less_than_half_of_the_throughput(
    gateway: Gateway, tmp_path: Path, model: str, record_figure: RecordFigure
) -> None:
    """Clients, NGINX, gateway and Triton share the cores; `null_file` decodes nothing, so that HTTP is most of the work."""
    rates: dict[str, list[float]] = {"directly": [], "through nginx": []}
    with proxying([gateway.address], tmp_path) as proxy:
        for _ in range(_ROUNDS):
            for url, measured in zip((gateway.url, proxy.local_url), rates.values(), strict=True):
                endpoint = f"{url}/predict/{model}"
                outcome = await drive_closed_loop(endpoint, unlabelled_samples(), clients=_CLIENTS, seconds=_SECONDS)
                assert set(outcome.statuses) == {"200"}
                measured.append(outcome.rate)
    directly, through = (median(measured) for measured in rates.values())
    record_figure(f"{model}: requests/s directly", directly)
    record_figure(f"{model}: requests/s through nginx", through)
    record_figure(f"{model}: throughput through nginx, of that without", through / directly)

    assert through > directly / 2
