"""The arenas of a worker for two Tritons, which accept or reject them, hang, are restarted, come and go."""

import asyncio
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from app.errors import GatewayError, TritonUnavailable
from app.resilience.lease import Lease
from app.triton import shared_memory, transport
from app.triton.regions import Regions
from app.triton.shared_memory import SHM, Arena, Slot
from app.triton.transport import InputBuffer, Transport
from tests.machines import Machine, check

SLOTS = 3
SIZES = (64, 80, 128)
ROOM = 500
"""Bytes for two of the arenas that these sizes need, but not for any two."""
TRITONS = st.integers(0, 1)
MANNERS = st.sampled_from(["accept", "reject", "hang", "be gone", "lose answers"])


class Triton:
    """Treats registrations as `manner` says; it stands for its client, too."""

    address = "triton:8001"

    def __init__(self) -> None:
        self.manner = "accept"
        self.answers = asyncio.Event()
        self.answers.set()
        self.mapped: dict[str, str] = {}
        """Files by region."""
        self.registering: list[str] = []
        self.read: list[str] = []
        """Regions that its calls read."""
        self.forgotten: set[str] = set()
        """Regions that it had mapped before a restart, or would not map again after one."""
        self.missed: set[str] = set()
        """Regions that it was told to unmap while it was gone."""
        self.faults: list[str] = []

    def behave(self, manner: str) -> None:
        self.manner = manner
        (self.answers.clear if manner == "hang" else self.answers.set)()

    async def register(self, arena: Arena) -> None:
        self.registering.append(arena.region)
        try:
            await self.answers.wait()
        finally:
            self.registering.remove(arena.region)
        if self.manner == "reject" and arena.region not in self.mapped:
            raise GatewayError("no such file")
        if self.manner != "be gone":
            self.mapped[arena.region] = arena.name
        if self.manner != "accept":
            raise TritonUnavailable("no answer")

    async def unregister(self, region: str) -> None:
        """Unmap a region that no call reads. Its file still exists, so that the next worker finds it if this one is killed now."""
        if region in self.registering:
            self.faults.append("may unmap a region before it maps it")
        await self.answers.wait()
        if self.manner == "be gone":
            self.missed.add(region)
        elif name := self.mapped.pop(region, None):
            if region in self.read and region not in self.forgotten:
                self.faults.append("unmaps what a call reads")
            if region not in self.missed and not (SHM / name).exists():
                self.faults.append("unmaps a file that is gone")

    async def list_regions(self) -> dict[str, str]:
        return self.mapped


class Call(NamedTuple):
    """A call of a Triton, which reads the slot if there is one."""

    triton: Triton
    slot: Slot | None
    end: "asyncio.Future[None]"


class Image:
    """A tensor that nobody else may change until its request has left and all its calls have ended."""

    def __init__(self, number: int, lease: Lease, buffer: InputBuffer) -> None:
        self.number, self.lease, self.buffer = number, lease, buffer
        self.buffer.tensor[:] = number
        self.calls: list[Call] = []
        self.is_awaited = True


class Arenas(Machine):
    """Requests get slots, or go inline where they may, and every slot, file and mapping is given back."""

    TIMED = ("app.triton.transport", "app.triton.regions", "app.triton.shared_memory")

    @initialize(mode=st.sampled_from(["auto", "auto", "shm"]))
    def begin(self, mode: Any) -> None:  # noqa: ANN401
        self.patch.setattr(shared_memory, "SLOTS", SLOTS)
        self.patch.setattr(transport, "MAX_WORKER_BYTES", ROOM)
        self.patch.setattr(transport, "Arena", self.create)
        self.arenas: list[Arena] = []
        self.is_full = False
        self.tritons = [Triton(), Triton()]
        self.regions = [Regions(triton) for triton in self.tritons]  # type: ignore[arg-type]  # which are their clients, too
        self.mode = mode
        self.transport = Transport(mode, *self.regions)
        self.asking: list[asyncio.Task[None]] = []
        self.images: list[Image] = []
        self.abandoned: set[Arena] = set()
        self.number = 0

    def create(self, nbytes: int) -> Arena:
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.arenas.append(Arena(nbytes))
        return self.arenas[-1]

    async def request(self, size: int, nbytes: int, *, stays: bool) -> None:
        await self.transport.prepare(size)
        self.number = self.number % 255 + 1
        lease = Lease()
        try:
            image = Image(self.number, lease, self.transport.allocate((nbytes,), np.uint8, size, lease))
        except TritonUnavailable:
            assert self.mode == "shm"
            return
        lease.__enter__()
        assert image.buffer.slot is None or image.buffer.slot.arena not in self.abandoned
        self.images.append(image)
        if not stays:
            self.end_request(image)

    @rule(
        size=st.sampled_from(SIZES), less=st.sampled_from([0, 0, 7]), images=st.sampled_from([1, 1, SLOTS + 1]), stays=st.booleans()
    )
    def ask(self, size: int, less: int, images: int, stays: bool) -> None:  # noqa: FBT001
        self.asking += [self.start(self.request(size, size - less, stays=stays)) for _ in range(images)]

    def settle(self) -> None:
        """Let requests go on for as long as they may need, and forget those that have ended."""
        for _ in range(5):
            if not all(asking.done() for asking in self.asking):
                self.call(lambda: None)
        self.asking = [asking for asking in self.asking if not asking.done() or (not asking.cancelled() and asking.result())]

    @precondition(lambda self: self.images)
    @rule(data=st.data(), number=TRITONS)
    def send(self, data: st.DataObject, number: int) -> None:
        self.begin_call(data.draw(st.sampled_from(self.images)), number)

    def begin_call(self, image: Image, number: int) -> None:
        """A Triton that was restarted has to map the arena again, or gets the tensor inline."""
        triton, regions = self.tritons[number], self.regions[number]
        slot = None
        try:
            slot = self.transport.find(regions, image.buffer.slot)
            assert slot is None or slot.arena in regions.mapped
            if slot is not None and slot.arena.region not in triton.mapped:
                assert slot.arena.region in triton.forgotten
                again = self.start(regions.add_again(slot.arena))
                if not again.done():
                    again.cancel()
                    return
                if not again.result():
                    assert slot.arena not in regions.mapped
                    slot = None
        except TritonUnavailable:
            assert self.mode == "shm" or triton.manner in {"be gone", "lose answers"}
            assert slot is None or slot.arena in regions.mapped
            return
        call = Call(triton, slot, self.loop.create_future())
        triton.read += [slot.arena.region] if slot else []
        image.lease.keep_for(call.end)
        image.calls.append(call)

    @precondition(lambda self: any(image.calls for image in self.images))
    @rule(data=st.data(), is_lost=st.sampled_from([False, False, True]))
    def end_call(self, data: st.DataObject, is_lost: bool) -> None:  # noqa: FBT001
        """After a call without an answer, Triton may read the slot at any time: it is never lent again."""
        image = data.draw(st.sampled_from([image for image in self.images if image.calls]))
        self.end(image, image.calls[-1], is_lost=is_lost)

    def end(self, image: Image, call: Call, *, is_lost: bool) -> None:
        image.calls.remove(call)
        if call.slot is not None:
            arena = call.slot.arena
            call.triton.read.remove(arena.region)
            if is_lost:
                self.call(lambda: self.transport.abandon(arena))
                self.abandoned.add(arena)
                assert arena.take(1) is None  # as by a thread that has found the arena before
        self.call(lambda: call.end.set_result(None))
        self.forget_done()

    @precondition(lambda self: any(image.is_awaited for image in self.images))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.end_request(data.draw(st.sampled_from([image for image in self.images if image.is_awaited])))

    def end_request(self, image: Image) -> None:
        image.is_awaited = False
        image.lease.__exit__(None, None, None)
        self.forget_done()

    def forget_done(self) -> None:
        self.images = [image for image in self.images if image.is_awaited or image.calls]

    @precondition(lambda self: self.asking)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        asking = data.draw(st.sampled_from(self.asking))
        self.call(asking.cancel)

    @rule(number=TRITONS, manner=st.just("accept") | MANNERS)
    def change(self, number: int, manner: str) -> None:
        self.call(lambda: self.tritons[number].behave(manner))

    @rule(data=st.data(), numbers=st.sampled_from([[0], [1], [0, 1]]), manner=st.just("reject") | MANNERS)
    def restart(self, data: st.DataObject, numbers: list[int], manner: str) -> None:
        """It has lost all regions, and its calls."""
        for number in numbers:
            self.change(number, "accept")
            triton = self.tritons[number]
            triton.forgotten |= triton.mapped.keys()
            triton.mapped.clear()
            for image in list(self.images):
                for call in [call for call in image.calls if call.triton is triton]:
                    self.end(image, call, is_lost=True)
            self.change(number, manner)
        if self.images:
            image = data.draw(st.sampled_from(self.images))
            for number in numbers:
                self.begin_call(image, number)
            self.ask(len(image.buffer.tensor), 0, 1, stays=False)

    @rule(number=TRITONS, size=st.sampled_from(SIZES), manner=st.just("lose answers") | MANNERS)
    def replace(self, number: int, size: int, manner: str) -> None:
        """A Triton is detached once its calls have ended; it unmaps everything. The one that comes maps what there is."""
        self.change(number, manner)
        self.ask(size, 0, 1, stays=False)
        triton = self.tritons[number]
        if triton.manner == "hang" or any(call.triton is triton for image in self.images for call in image.calls):
            return
        self.run(self.transport.detach(self.regions[number]))
        assert not triton.faults
        assert not triton.mapped.keys() - triton.missed
        self.tritons[number] = Triton()
        self.regions[number] = Regions(self.tritons[number])  # type: ignore[arg-type]  # as above
        self.call(lambda: self.transport.attach(self.regions[number]))
        assert self.transport.maps_memory(self.regions[number]) or not self.transport.maps_memory(self.regions[1 - number])

    @rule(first=st.sampled_from(SIZES), then=st.sampled_from(SIZES), manners=st.tuples(MANNERS, MANNERS), is_full=st.booleans())
    def ask_in_bad_times(self, first: int, then: int, manners: tuple[str, str], is_full: bool) -> None:  # noqa: FBT001
        """Also while /dev/shm has no room. What nobody uses is removed later."""
        self.let_pass(61)
        for number, manner in enumerate(manners):
            self.change(number, manner)
        self.is_full = is_full
        self.ask(first, 0, 1, stays=False)
        self.is_full = False
        self.ask(then, 0, 1, stays=False)
        self.let_pass(61)

    @rule(seconds=st.sampled_from([0.25, 2.5, 6, 31, 61]))
    def let_pass(self, seconds: float) -> None:
        """No request waits for a Triton for longer than a moment, unless none can do without."""
        self.skip(seconds)
        self.settle()
        assert self.mode == "shm" or all(asking.done() for asking in self.asking)
        _ = self.start(self.transport.refresh())

    @invariant()
    def nothing_is_mixed_up(self) -> None:
        self.settle()
        assert not self.asking or "hang" in {triton.manner for triton in self.tritons}
        assert not [fault for triton in self.tritons for fault in triton.faults]
        for image in self.images:
            assert (image.buffer.tensor == image.number).all()
        existing = [arena for arena in self.arenas if (SHM / arena.name).exists()]
        assert sum(arena.nbytes for arena in existing) <= ROOM
        mapped = {region for triton in self.tritons for region in triton.mapped.keys() - triton.missed}
        assert mapped <= {arena.region for arena in existing}

    def finish(self) -> None:
        """What was used up can be had again, and nothing is left."""
        self.change_both("accept")
        for image in list(self.images):
            for call in list(image.calls):
                self.end(image, call, is_lost=False)
        for size in SIZES:
            for image in [image for image in self.images if image.is_awaited]:
                self.end_request(image)
            self.let_pass(61)
            self.ask(size, 0, SLOTS + 1, stays=True)
            self.settle()
            assert sum(image.buffer.slot is not None for image in self.images) == SLOTS
            assert self.transport.count_slots()[1] == SLOTS
        assert not any(regions.silent_until for regions in self.regions)
        for image, number in zip(self.images, (0, 1), strict=False):
            self.begin_call(image, number)
        self.end(self.images[0], self.images[0].calls[0], is_lost=True)
        self.skip(0.1)
        self.nothing_is_mixed_up()
        self.change_both("hang")
        self.ask(32, 0, 1, stays=True)
        closing = self.start(self.transport.close())
        self.change_both("accept")
        self.end(self.images[1], self.images[1].calls[0], is_lost=False)
        while not closing.done():
            self.skip(0.01)
        assert not [arena for arena in self.arenas if (SHM / arena.name).exists()]
        assert not [triton for triton in self.tritons if triton.mapped.keys() - triton.missed]

    def change_both(self, manner: str) -> None:
        for number in (0, 1):
            self.change(number, manner)


@pytest.mark.parametrize("runs", [20, pytest.param(60, marks=pytest.mark.system)])
def test_arenas_of_a_worker(runs: int) -> None:
    check(Arenas, runs=runs, steps=40)
