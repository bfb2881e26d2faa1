"""The memory of an input tensor: a slot if there is one, which is given back with the request's lease."""

import asyncio

import numpy as np
import pytest

from app.errors import TritonUnavailable
from app.pipeline.buffer import InputBuffer
from app.resilience.lease import Lease
from app.triton.arena_size import SLOTS
from app.triton.shared_memory import Slot
from app.triton.transport import Transport
from tests.support import open_buffer
from tests.world import World

NBYTES = 4096
SHAPE = (64, 64)


@pytest.fixture
async def transport(world: World) -> Transport:
    await world.transport.prepare(NBYTES)
    return world.transport


def allocated(buffer: InputBuffer) -> Slot:
    buffer.allocate(SHAPE, np.uint8, NBYTES)
    assert buffer.slot is not None
    return buffer.slot


async def test_a_tensor_lies_in_a_slot(transport: Transport) -> None:
    """Data written to the tensor is in the slot, which is free again after the block."""
    with open_buffer(transport) as buffer:
        tensor = buffer.allocate(SHAPE, np.uint8, NBYTES)
        slot = buffer.slot
        assert slot is not None
        assert buffer.tensor is tensor
        tensor[:] = 7
        assert slot.array((NBYTES,), np.uint8).tolist() == [7] * NBYTES
        assert slot.arena.lent_bytes == NBYTES

    assert slot.arena.lent_bytes == 0


async def test_a_smaller_tensor_lies_at_the_start_of_its_slot(transport: Transport) -> None:
    """A file, for example, is rarely as large as the largest that fits."""
    with open_buffer(transport) as buffer:
        tensor = buffer.allocate((10,), np.float32, NBYTES)
        assert buffer.slot is not None
        tensor[:] = 1

        assert tensor.shape == (10,)
        assert buffer.slot.array((10,), np.float32).tolist() == [1.0] * 10


async def test_a_tensor_larger_than_a_slot_has_memory_of_its_own(transport: Transport) -> None:
    with open_buffer(transport) as buffer:
        tensor = buffer.allocate((NBYTES // 4 + 1,), np.float32, NBYTES)

        assert buffer.slot is None
        assert tensor.shape == (NBYTES // 4 + 1,)
        slot = transport.take(NBYTES, NBYTES)
        assert slot
        assert slot.arena.lent_bytes == NBYTES


async def test_without_shared_memory_a_tensor_has_memory_of_its_own() -> None:
    with open_buffer(Transport("inline")) as buffer:
        tensor = buffer.allocate(SHAPE, np.float16, NBYTES * 2)

        assert buffer.slot is None
        assert (tensor.shape, tensor.dtype) == (SHAPE, np.dtype(np.float16))
        tensor[:] = 1


async def test_without_a_free_slot_a_tensor_has_memory_of_its_own(transport: Transport) -> None:
    slots = [transport.take(NBYTES, NBYTES) for _ in range(SLOTS)]
    with open_buffer(transport) as buffer:
        buffer.allocate(SHAPE, np.uint8, NBYTES)

        assert all(slots)
        assert buffer.slot is None


async def test_a_buffer_that_was_not_allocated_frees_nothing(transport: Transport) -> None:
    """An image may be rejected before there is a tensor; the buffer is then empty."""
    with open_buffer(transport) as buffer:
        assert buffer.slot is None
        assert buffer.tensor.nbytes == 0

    slot = transport.take(NBYTES, NBYTES)
    assert slot
    assert slot.arena.lent_bytes == NBYTES


async def test_a_missing_slot_is_an_error_where_shared_memory_is_required() -> None:
    """The transport says so; nothing was taken that would have to be freed."""
    with pytest.raises(TritonUnavailable), open_buffer(Transport("shm")) as buffer:
        buffer.allocate(SHAPE, np.uint8, NBYTES)


async def test_a_failure_in_the_block_frees_the_slot(transport: Transport) -> None:
    with pytest.raises(ValueError, match="broken"), open_buffer(transport) as buffer:  # noqa: PT012 - the block is the subject
        slot = allocated(buffer)
        raise ValueError("broken")

    assert slot.arena.lent_bytes == 0


async def test_work_that_goes_on_keeps_the_slot(transport: Transport) -> None:
    """A decoding thread writes into it and Triton reads it, whether or not the request still waits for them."""
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with Lease() as lease:
        slot = allocated(InputBuffer(transport, lease))
        lease.keep_for(work)
    assert slot.arena.lent_bytes == NBYTES
    work.set_result(None)
    await asyncio.sleep(0)

    assert slot.arena.lent_bytes == 0


async def test_a_thread_may_allocate_after_the_request_has_ended(transport: Transport) -> None:
    """The slot that it takes then is free when the thread has ended."""
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with Lease() as lease:
        lease.keep_for(work)
    slot = await asyncio.to_thread(allocated, InputBuffer(transport, lease))
    assert slot.arena.lent_bytes == NBYTES
    work.set_result(None)
    await asyncio.sleep(0)

    assert slot.arena.lent_bytes == 0
