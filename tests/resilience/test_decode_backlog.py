"""Large images that wait for their decoding."""

import pytest

from app.errors import GatewayFull
from app.resilience.deadline import Deadline
from app.resilience.decode_backlog import DecodeBacklog
from app.resilience.fairness import ANYBODY, SHADOW, Caller
from app.resilience.worker_table import WorkerTable
from tests.support import OpenTable

MP = 10**6
"""Takes 12 ms at first."""


def test_images_are_accepted_while_they_take_less_than_half_of_the_time(table: WorkerTable) -> None:
    """Two threads decode 833 megapixels in five seconds; a request has half of that for its decoding."""
    backlog = DecodeBacklog(table, threads=2)
    with backlog.add(390 * MP, Deadline.after(5), ANYBODY):
        with backlog.add(20 * MP, Deadline.after(5), ANYBODY):
            assert backlog.pixels == 410 * MP
        with pytest.raises(GatewayFull, match="would take too long") as caught, backlog.add(40 * MP, Deadline.after(5), ANYBODY):
            pass
        assert caught.value.retry_after_seconds == 3
        with backlog.add(40 * MP, Deadline.after(6), ANYBODY):
            assert backlog.pixels == 430 * MP
        assert backlog.pixels == 390 * MP

    assert backlog.pixels == 0


def test_a_single_image_is_always_accepted(table: WorkerTable) -> None:
    """Its decoding time is unknown and nothing is queued before it; its deadline decides."""
    with DecodeBacklog(table, threads=1).add(1000 * MP, Deadline.after(1), ANYBODY):
        pass


def test_small_images_do_not_count(table: WorkerTable) -> None:
    """They are decoded in next to no time; also while large ones wait."""
    backlog = DecodeBacklog(table, threads=1)
    with backlog.add(1000 * MP, Deadline.after(5), ANYBODY), backlog.add(10_000, Deadline.after(5), ANYBODY):
        assert backlog.pixels == 1000 * MP


def test_images_of_shadows_do_not_count(table: WorkerTable) -> None:
    """They have a thread of their own, for which no request waits."""
    backlog = DecodeBacklog(table, threads=1)
    with backlog.add(1000 * MP, Deadline.after(1), Caller("shadow", priority=SHADOW)):
        assert backlog.pixels == 0


def test_images_of_all_workers_count(open_table: OpenTable) -> None:
    one, other = (DecodeBacklog(open_table(), threads=1) for _ in range(2))
    with one.add(240 * MP, Deadline.after(5), ANYBODY):
        assert other.pixels == 240 * MP
        with pytest.raises(GatewayFull), other.add(2 * MP, Deadline.after(5), ANYBODY):
            pass


def test_the_speed_is_measured(table: WorkerTable) -> None:
    """What is extraordinarily fast or slow is not believed, and small images tell nothing."""
    backlog = DecodeBacklog(table, threads=1)
    for _ in range(60):
        backlog.measure(MP, 0.0)
    for _ in range(60):
        backlog.measure(MP - 1, 1.0)
    with backlog.add(500 * MP, Deadline.after(5), ANYBODY), backlog.add(100 * MP, Deadline.after(5), ANYBODY):
        pass  # three times as fast as assumed
    backlog.measure(MP, 1.0)
    with (
        backlog.add(500 * MP, Deadline.after(5), ANYBODY),
        pytest.raises(GatewayFull),
        backlog.add(100 * MP, Deadline.after(5), ANYBODY),
    ):
        pass

    with backlog.add(80 * MP, Deadline.after(5), ANYBODY), backlog.add(20 * MP, Deadline.after(5), ANYBODY):
        pass  # one slow image changes little
