"""What is said of several Tritons."""

import msgspec
import pytest
from grpc import StatusCode

from app.doctor.finding import Severity
from app.settings.schema import Settings
from tests.doctor.setups import assert_useful, examine
from tests.doctor.test_triton import EXTENSIONS, fake_in_a_thread
from tests.fakes.triton import CONFIG, FakeTriton
from tests.support import free_port

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def fakes() -> list[FakeTriton]:
    made = [FakeTriton(), FakeTriton()]
    for fake in made:
        fake.version, fake.extensions = "2.59.1", EXTENSIONS
    return made


def test_each_triton_is_examined(without_triton: Settings, fakes: list[FakeTriton], capsys: Capture) -> None:
    dead = f"127.0.0.1:{free_port()}"
    with fake_in_a_thread(fakes[0]):
        examined = examine(msgspec.structs.replace(without_triton, triton_endpoints=f"{dead},{fakes[0].url}", model="a"), capsys)

    down, up = examined.all("triton")
    assert_useful(down, Severity.FAILURE, says=[dead, "Connection refused"], fix="NEREID_TRITON_ENDPOINTS")
    assert (up.severity, up.message) == (Severity.OK, f"{fakes[0].url}: Triton 2.59.1 answers at {fakes[0].url}")
    assert examined["triton_version"].message.startswith(f"{fakes[0].url}: ")
    assert not examined.all("extensions")
    assert examined.report.triton == f"{dead},{fakes[0].url}"


@pytest.mark.parametrize(("side", "severity"), [(32, Severity.OK), (64, Severity.WARNING)])
def test_the_model_must_be_the_same(
    without_triton: Settings, fakes: list[FakeTriton], capsys: Capture, side: int, severity: Severity
) -> None:
    """A Triton with another model of that name is not used for it."""
    fakes[1].config = {**CONFIG, "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [side, side, 3]}]}
    with fake_in_a_thread(fakes[0]), fake_in_a_thread(fakes[1]):
        urls = ",".join(fake.url for fake in fakes)
        examined = examine(msgspec.structs.replace(without_triton, triton_endpoints=urls, model="a"), capsys)

    finding = examined["same_model"]
    assert finding.severity is severity
    if severity is Severity.WARNING:
        assert_useful(finding, severity, says=[f"at {fakes[1].url} than at {fakes[0].url}"], fix="same model repository")


def test_a_name_that_has_no_address(without_triton: Settings, capsys: Capture) -> None:
    examined = examine(msgspec.structs.replace(without_triton, triton_endpoints="dns:///no-such-name.invalid:8001"), capsys)

    assert_useful(examined["triton"], Severity.FAILURE, says=["dns:///no-such-name.invalid:8001", "resolved"], fix="headless")


def test_a_triton_for_other_models_is_no_failure(without_triton: Settings, fakes: list[FakeTriton], capsys: Capture) -> None:
    """Another one has the default model."""
    fakes[1].model_refusal, fakes[1].index = (StatusCode.NOT_FOUND, "Request for unknown model: 'a' is not found"), []
    with fake_in_a_thread(fakes[0]), fake_in_a_thread(fakes[1]):
        urls = ",".join(fake.url for fake in fakes)
        examined = examine(msgspec.structs.replace(without_triton, triton_endpoints=urls, model="a"), capsys)

    assert_useful(examined.all("model")[1], Severity.WARNING, says=[fakes[1].url, "does not have a"], fix="other models")
