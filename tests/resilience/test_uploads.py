"""Bodies of which nobody knows yet who sends them."""

from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from app.errors import GatewayFull
from app.resilience.uploads import AnonymousUploads
from tests.support import OpenTable

FULL = "whose API key is not known yet"


@pytest.fixture
def workers(open_table: OpenTable) -> Sequence[AnonymousUploads]:
    return [AnonymousUploads(open_table(), 100) for _ in range(2)]


def test_address_may_send_eight_bodies(workers: Sequence[AnonymousUploads]) -> None:
    with ExitStack() as stack:
        for number in range(7):
            stack.enter_context(workers[number % 2].start("192.0.2.1"))
        with workers[1].start("192.0.2.1"):
            for worker in workers:
                with pytest.raises(GatewayFull, match=FULL):
                    worker.start("192.0.2.1")
            stack.enter_context(workers[0].start("192.0.2.2"))
        stack.enter_context(workers[0].start("192.0.2.1"))


@pytest.mark.parametrize(
    ("one", "other"), [("2001:db8::{}", "2001:db8::ffff:0"), ("::ffff:192.0.2.1", "192.0.2.1"), ("192.0.2.1", "::ffff:192.0.2.1")]
)
def test_a_sender_has_a_whole_network_of_ipv6(workers: Sequence[AnonymousUploads], one: str, other: str) -> None:
    """A /64 network belongs to one customer; an IPv4 address is the same in both notations."""
    with ExitStack() as stack:
        for number in range(8):
            stack.enter_context(workers[0].start(one.format(number)))
        with pytest.raises(GatewayFull, match=FULL):
            workers[0].start(other)
        stack.enter_context(workers[0].start("2001:db8:0:1::1"))


@pytest.mark.parametrize("address", ["192.0.2.{}", ""])
def test_a_host_receives_sixty_four(workers: Sequence[AnonymousUploads], address: str) -> None:
    """An unknown address stands for many callers, so it has no limit of its own."""
    for _ in range(2):  # everything is given back
        with ExitStack() as stack:
            for number in range(64):
                stack.enter_context(workers[number % 3 // 2].start(address.format(number)))
            for worker in workers:
                with pytest.raises(GatewayFull, match=FULL) as caught:
                    worker.start("192.0.2.99")
                assert (caught.value.reason, caught.value.retry_after_seconds) == ("uploads", 1)


def test_bytes_of_anonymous_uploads_are_limited(workers: Sequence[AnonymousUploads]) -> None:
    """A single body above the limit is still possible."""
    one, other = workers
    with one.start("") as first, other.start("") as second:
        first.add(60)
        second.add(40)
        with pytest.raises(GatewayFull):
            second.add(1)
    with one.start("") as first:
        first.add(1000)


def test_check_rejects_an_upload_that_would_not_be_received(workers: Sequence[AnonymousUploads]) -> None:
    with ExitStack() as stack:
        for number in range(7):
            workers[1].check("192.0.2.1", 101)
            stack.enter_context(workers[number % 2].start("192.0.2.1"))
        upload = stack.enter_context(workers[1].start("192.0.2.1"))
        with pytest.raises(GatewayFull, match=FULL):
            workers[0].check("192.0.2.1", 0)
        upload.add(60)
        workers[0].check("192.0.2.2", 46)
        with pytest.raises(GatewayFull, match=FULL):
            workers[0].check("192.0.2.2", 47)
