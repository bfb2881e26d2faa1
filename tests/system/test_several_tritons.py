"""Two real Tritons behind one gateway."""

from pathlib import Path

from bench.harness.counters import read_counters
from bench.harness.triton import embedded_tritons, settings_for
from tests.faults import models
from tests.faults.traffic import traffic
from tests.support import eventually
from tests.system.gateway import running_gateway


async def test_nobody_notices_that_one_of_two_is_killed(tmp_path: Path) -> None:
    """Both are used; when one is killed under load, the other one answers everything, and rightly."""
    models.write(tmp_path / "models")
    with embedded_tritons(tmp_path / "models", "checksum", 2) as tritons:
        settings = settings_for(tritons)
        addresses = settings.pop("triton_urls")
        async with (
            running_gateway(addresses, tmp_path, model="checksum", workers=2, **settings) as gateway,
            traffic(gateway.url) as counted,
        ):
            assert await eventually(lambda: all(read_counters(triton.url, "checksum").inferences > 50 for triton in tritons))
            tritons[0].process.kill()
            await counted.until(counted.requests + 200)

    assert set(counted.statuses) == {200}
    assert counted.wrong == []
