"""The memory of an input tensor: a slot if there is one, and given back when nobody uses it any more, not before."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from app.errors import TritonUnavailable
from app.pipeline.buffer import InputBuffer
from app.triton.client import TritonClient
from app.triton.shared_memory import Slot
from app.triton.transport import SLOTS, Transport
from tests.fakes.triton import FakeTriton

NBYTES = 4096
SHAPE = (64, 64)


@pytest.fixture
async def transport(fake_triton: tuple[FakeTriton, TritonClient]) -> AsyncIterator[Transport]:
    """A transport with slots of `NBYTES`."""
    _, client = fake_triton
    made = Transport(client, "auto")
    await made.prepare(NBYTES)
    yield made
    await made.close()


def allocated(buffer: InputBuffer) -> Slot:
    """Allocate a tensor that just fits a slot."""
    buffer.allocate(SHAPE, np.uint8, NBYTES)
    assert buffer.slot is not None
    return buffer.slot


def times_free(slot: Slot) -> int:
    """Count how often a slot is among the free ones of its arena."""
    return slot.arena.free_offsets.count(slot.offset)


async def test_a_tensor_lies_in_a_slot(transport: Transport) -> None:
    """Data written to the tensor is in the slot, which is free again after the block."""
    with InputBuffer(transport) as buffer:
        tensor = buffer.allocate(SHAPE, np.uint8, NBYTES)
        slot = buffer.slot
        assert slot is not None
        assert buffer.tensor is tensor
        tensor[:] = 7
        assert slot.array((NBYTES,), np.uint8).tolist() == [7] * NBYTES
        assert times_free(slot) == 0

    assert times_free(slot) == 1
    assert len(slot.arena.free_offsets) == SLOTS


async def test_a_smaller_tensor_lies_at_the_start_of_its_slot(transport: Transport) -> None:
    """A file, for example, is rarely as large as the largest that fits."""
    with InputBuffer(transport) as buffer:
        tensor = buffer.allocate((10,), np.float32, NBYTES)
        assert buffer.slot is not None
        tensor[:] = 1

        assert tensor.shape == (10,)
        assert buffer.slot.array((10,), np.float32).tolist() == [1.0] * 10


async def test_a_tensor_larger_than_a_slot_has_memory_of_its_own(transport: Transport) -> None:
    """No slot is taken for it; not even one element more fits."""
    with InputBuffer(transport) as buffer:
        tensor = buffer.allocate((NBYTES // 4 + 1,), np.float32, NBYTES)

        assert buffer.slot is None
        assert tensor.shape == (NBYTES // 4 + 1,)
        slot = transport.take(NBYTES)
        assert slot
        assert len(slot.arena.free_offsets) == SLOTS - 1


async def test_without_shared_memory_a_tensor_has_memory_of_its_own(fake_triton: tuple[FakeTriton, TritonClient]) -> None:
    """The type and the shape are the same."""
    _, client = fake_triton
    with InputBuffer(Transport(client, "inline")) as buffer:
        tensor = buffer.allocate(SHAPE, np.float16, NBYTES * 2)

        assert buffer.slot is None
        assert (tensor.shape, tensor.dtype) == (SHAPE, np.dtype(np.float16))
        tensor[:] = 1


async def test_without_a_free_slot_a_tensor_has_memory_of_its_own(transport: Transport) -> None:
    """More requests than slots are no failure."""
    slots = [transport.take(NBYTES) for _ in range(SLOTS)]
    with InputBuffer(transport) as buffer:
        buffer.allocate(SHAPE, np.uint8, NBYTES)

        assert all(slots)
        assert buffer.slot is None


async def test_a_buffer_that_was_not_allocated_frees_nothing(transport: Transport) -> None:
    """An image may be rejected before there is a tensor; the buffer is then empty."""
    with InputBuffer(transport) as buffer:
        assert buffer.slot is None
        assert buffer.tensor.nbytes == 0

    slot = transport.take(NBYTES)
    assert slot
    assert len(slot.arena.free_offsets) == SLOTS - 1


async def test_a_missing_slot_is_an_error_where_shared_memory_is_required(fake_triton: tuple[FakeTriton, TritonClient]) -> None:
    """The transport says so; nothing was taken that would have to be freed."""
    _, client = fake_triton
    with pytest.raises(TritonUnavailable), InputBuffer(Transport(client, "shm")) as buffer:
        buffer.allocate(SHAPE, np.uint8, NBYTES)


async def test_a_failure_in_the_block_frees_the_slot(transport: Transport) -> None:
    """An image that cannot be decoded has a slot already."""
    with pytest.raises(ValueError, match="broken"), InputBuffer(transport) as buffer:  # noqa: PT012 - the block is the subject
        slot = allocated(buffer)
        raise ValueError("broken")

    assert times_free(slot) == 1


async def test_a_thread_that_still_decodes_keeps_the_slot(transport: Transport) -> None:
    """It cannot be stopped, and writes into the slot until it ends, whether or not the request has ended."""
    may_end = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        with InputBuffer(transport) as buffer:
            slot = allocated(buffer)
            work = executor.submit(may_end.wait, 10)
            buffer.keep_for(work)
        assert times_free(slot) == 0
        may_end.set()

    assert work.result()
    assert times_free(slot) == 1


async def test_a_thread_may_allocate_after_the_request_has_ended(transport: Transport) -> None:
    """A header may be read after its request has timed out; the slot taken then is free when the thread ends."""
    may_start = threading.Event()
    taken: list[Slot] = []

    def fill(buffer: InputBuffer) -> None:
        may_start.wait(10)
        taken.append(allocated(buffer))
        assert times_free(taken[0]) == 0

    with ThreadPoolExecutor(1) as executor:
        with InputBuffer(transport) as buffer:
            work = executor.submit(fill, buffer)
            buffer.keep_for(work)
        may_start.set()
    work.result()

    assert times_free(taken[0]) == 1


async def test_an_rpc_that_still_runs_keeps_the_slot(transport: Transport) -> None:
    """Triton reads it until the RPC ends."""
    may_answer = asyncio.Event()
    with InputBuffer(transport) as buffer:
        slot = allocated(buffer)
        rpc = asyncio.ensure_future(may_answer.wait())
        buffer.keep_for(rpc)
    await asyncio.sleep(0)
    assert times_free(slot) == 0
    may_answer.set()
    await rpc
    await asyncio.sleep(0)

    assert times_free(slot) == 1


async def test_a_cancelled_request_leaves_the_slot_to_its_rpc(transport: Transport) -> None:
    """The client disconnected; the block is left by the cancellation, the RPC goes on."""
    may_answer = asyncio.Event()
    rpc = asyncio.ensure_future(may_answer.wait())
    slots: list[Slot] = []

    async def request() -> None:
        with InputBuffer(transport) as buffer:
            slots.append(allocated(buffer))
            buffer.keep_for(rpc)
            await asyncio.shield(rpc)

    asking = asyncio.ensure_future(request())
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert times_free(slots[0]) == 0
    may_answer.set()
    await rpc
    await asyncio.sleep(0)

    assert times_free(slots[0]) == 1


@pytest.mark.parametrize("end", ["result", "failure", "cancel"])
async def test_work_ends_however_it_ends(transport: Transport, end: str) -> None:
    """A result, an exception and a cancellation all give the slot back."""
    work: Future[None] = Future()
    with InputBuffer(transport) as buffer:
        slot = allocated(buffer)
        buffer.keep_for(work)
    assert times_free(slot) == 0
    if end == "cancel":
        assert work.cancel()
    elif end == "failure":
        work.set_exception(ValueError())
    else:
        work.set_result(None)

    assert times_free(slot) == 1


async def test_work_that_has_ended_already_keeps_nothing(transport: Transport) -> None:
    """A thread may be faster than the loop that started it."""
    work: Future[None] = Future()
    work.set_result(None)
    with InputBuffer(transport) as buffer:
        slot = allocated(buffer)
        buffer.keep_for(work)
        assert times_free(slot) == 0

    assert times_free(slot) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
async def test_the_last_of_all_users_frees_the_slot(transport: Transport, order: tuple[int, ...]) -> None:
    """Decoding and several RPCs may end in any order."""
    works: list[Future[None]] = [Future() for _ in order]
    with InputBuffer(transport) as buffer:
        slot = allocated(buffer)
        for work in works:
            buffer.keep_for(work)
    for index in order:
        assert times_free(slot) == 0
        works[index].set_result(None)

    assert times_free(slot) == 1


async def test_many_threads_free_a_slot_exactly_once(transport: Transport) -> None:
    """A slot that were freed twice would be given to two requests."""
    offsets = set()
    for _ in range(50):
        barrier = threading.Barrier(9, timeout=10)
        buffer = InputBuffer(transport)
        with ThreadPoolExecutor(8) as executor, buffer:
            slot = allocated(buffer)
            for _ in range(8):
                buffer.keep_for(executor.submit(barrier.wait))
            assert times_free(slot) == 0
            barrier.wait()
        assert times_free(slot) == 1
        offsets.add(slot.offset)

    assert len(offsets) == 1
