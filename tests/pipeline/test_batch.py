"""Selection of the images for a call."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from app.model.spec import ModelSpec, from_triton_config
from app.pipeline import batch as batch_module
from app.pipeline.batch import Batch, PendingImage, next_batch
from app.pipeline.call import CallContext
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, HIGH, LOW, NORMAL, SHADOW
from app.telemetry.timing import Timing
from app.telemetry.trace_context import TraceContext
from app.triton.shared_memory import Arena
from tests.fakes.triton import CONFIG

SPEC = from_triton_config({**CONFIG, "max_batch_size": 8}, "1")
TRACES = [TraceContext(f"{index:032x}", f"{index:016x}", 1) for index in (1, 2)]


def pending(  # noqa: PLR0913 - what an image has
    arena: Arena | None = None,
    nbytes: int = 10,
    *,
    spec: ModelSpec = SPEC,
    seconds: float = 30,
    request_id: str = "id",
    trace: TraceContext | None = None,
) -> PendingImage:
    """Make a waiting image in the next slot of an arena, or inline."""
    slot = None if arena is None else arena.take(nbytes)
    assert arena is None or slot is not None
    buffer: Any = SimpleNamespace(slot=slot, tensor=np.zeros(nbytes, np.uint8))
    call = CallContext(Deadline.after(seconds), Timing(), request_id, trace=trace)
    permit: Any = None
    return PendingImage(spec, buffer, call, permit)


def chosen(waiting: Sequence[PendingImage], max_images: int) -> Sequence[PendingImage]:
    return next_batch(waiting, max_images, lambda _: True).images


@contextmanager
def open_arena(nbytes: int = 100) -> Iterator[Arena]:
    made = Arena(nbytes)
    yield made
    made.close()


async def test_neighbours_go_together() -> None:
    with open_arena() as arena:
        images = [pending(arena) for _ in range(4)]

        batch = next_batch(images, 8, lambda _: True)
        assert batch.images == images
        assert batch.slot == images[0].buffer.slot


async def test_the_order_in_memory_counts() -> None:
    with open_arena() as arena:
        a, b, c = (pending(arena) for _ in range(3))

        assert chosen([b, c, a], 8) == [a, b, c]


async def test_slot_that_is_not_ready_ends_a_batch() -> None:
    with open_arena() as arena:
        a, b, _, d, e = (pending(arena) for _ in range(5))

        assert chosen([a, b, d, e], 8) == [a, b]
        assert chosen([d, a, b, e], 8) == [d, e]


@pytest.mark.parametrize("is_shared", [True, False])
async def test_a_batch_has_an_end(is_shared: bool) -> None:  # noqa: FBT001
    with open_arena() as arena:
        images = [pending(arena if is_shared else None) for _ in range(6)]

        assert chosen(images, 4) == images[:4]
        full = chosen(images[4:] + images[:4], 4)
        assert (len(full), images[4] in full) == (4, True)
        assert chosen(images, 1) == images[:1]


async def test_slots_and_messages_do_not_mix() -> None:
    with open_arena() as arena, open_arena() as other:
        a, b, c, d, e = pending(arena), pending(), pending(other), pending(arena), pending()

        assert chosen([a, b, c, d, e], 8) == [a, d]
        assert chosen([b, c, d, e, a], 8) == [b, e]
        assert chosen([c, d, e, a, b], 8) == [c]


async def test_for_a_triton_that_maps_no_memory_slots_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "_MAX_INLINE_BYTES", 25)
    with open_arena() as arena:
        a, b, _, d = (pending(arena) for _ in range(4))
        c = pending()

        assert next_batch([a, c, d, b], 8, lambda _: False) == Batch([a, c], None)
        assert next_batch([a, c, d, b], 8, lambda _: True) == Batch([a, b], a.buffer.slot)
        assert next_batch([d], 8, lambda _: False) == Batch([d], d.buffer.slot)


async def test_a_message_has_a_size_that_does_not_stop_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "_MAX_INLINE_BYTES", 25)
    small, large = [pending() for _ in range(3)], [pending(nbytes=100) for _ in range(2)]

    assert chosen([*small, *large], 8) == small[:2]
    assert chosen([*large, *small], 8) == large[:1]


async def test_only_images_of_one_spec_go_together() -> None:
    with open_arena() as arena:
        before, after = pending(arena), pending(arena, spec=from_triton_config({**CONFIG, "max_batch_size": 8}, "2"))

        assert chosen([before, after], 8) == [before]


@pytest.mark.parametrize("is_shared", [True, False])
async def test_image_that_goes_alone_takes_no_other_along(is_shared: bool) -> None:  # noqa: FBT001
    with open_arena() as arena:
        a, b, c = (pending(arena if is_shared else None) for _ in range(3))
        b.goes_alone = True

        assert chosen([b, a, c], 8) == [b]
        assert b not in chosen([a, b, c], 8)


async def test_a_batch_has_what_its_images_have() -> None:
    """The latest deadline, all ids, and the span of the first that has one."""
    batch = Batch(
        [
            pending(request_id="a", seconds=5),
            pending(request_id="b", seconds=20, trace=TRACES[0]),
            pending(request_id="c", seconds=10, trace=TRACES[1]),
        ],
        None,
    )

    assert batch.request_id == "a,b,c"
    assert 19 < batch.remaining_seconds <= 20
    assert batch.trace == TRACES[0]
    assert batch.spec is SPEC


async def test_a_batch_is_abandoned_when_the_last_request_has_left() -> None:
    batch = Batch([pending(), pending()], None)
    batch.images[0].result.cancel()
    assert not batch.is_abandoned
    batch.images[1].result.cancel()

    assert batch.is_abandoned


@pytest.mark.parametrize(
    ("levels", "priority", "expected"),
    [
        *((0, priority, (0, 0)) for priority in (HIGH, NORMAL, LOW, SHADOW)),  # a model without levels knows no priority
        (3, HIGH, (1, 1)),
        (3, NORMAL, (0, 1)),
        (3, LOW, (3, 3)),
        (3, SHADOW, (3, 3)),
    ],
)
async def test_tritons_queue_has_the_priority_of_the_caller(levels: int, priority: int, expected: tuple[int, int]) -> None:
    """As far as the model has levels; 0 is the default of its config. Of a normal caller, an urgent call has the highest one."""
    image = pending(spec=msgspec.structs.replace(SPEC, priority_levels=levels))
    image.turn = image.turn._replace(caller=ANYBODY._replace(priority=priority))

    assert tuple(Batch([image], None, is_urgent=is_urgent).priority for is_urgent in (False, True)) == expected


async def test_an_ensemble_passes_the_priority_of_an_urgent_call_to_its_steps() -> None:
    image = pending(spec=msgspec.structs.replace(SPEC, backend="ensemble"))

    assert tuple(Batch([image], None, is_urgent=is_urgent).priority for is_urgent in (False, True)) == (0, 1)
