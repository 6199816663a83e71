# SPDX-License-Identifier: Apache-2.0
"""Memory in every form, and how long it is held.

A buffer that kvt may touch must not go away: it is held from register() until
the library has given it back. Weak references tell when an owner is gone, and
refcounts that nothing is held too often.
"""

from __future__ import annotations

import gc
import mmap
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import kvt
from conftest import BLOCK, PATIENCE, Pair

np = pytest.importorskip("numpy")
MakePair = Callable[..., Pair]


class Owner(bytearray):
    """A buffer that can be referred to weakly."""


class Tensor:
    """What of a torch tensor matters here."""

    def __init__(self, size: int, *, device: int | None = None) -> None:
        self.memory = np.zeros(size, np.uint8)
        self.is_cuda = device is not None
        self.device_index = device
        self.nbytes = size
        self.contiguous = True

    def data_ptr(self) -> int:
        return int(self.memory.ctypes.data)

    def get_device(self) -> int:
        assert self.device_index is not None
        return self.device_index

    def is_contiguous(self) -> bool:
        return self.contiguous


@pytest.fixture
def transport() -> Any:
    with kvt.Transport("local") as made:
        yield made


def buffers() -> list[Any]:
    array = np.zeros((4, 1024), np.float32)
    return [
        bytearray(4096),
        memoryview(bytearray(4096)),
        array,
        array.T,
        array[1:3],
        mmap.mmap(-1, 4096),
        kvt.SharedMemory(4096),
        memoryview(kvt.SharedMemory(4096)),
        Tensor(4096),
        kvt.region_of(array),
        tuple(kvt.region_of(array))[:2],
    ]


@pytest.mark.parametrize("form", range(len(buffers())))
def test_memory_is_registered_in_every_form(
    transport: kvt.Transport, form: int
) -> None:
    memory = buffers()[form]
    transport.register(memory)
    assert transport.stats().regions == 1
    region = kvt.region_of(memory)
    assert region.length in (4096, 8192, 16384)
    transport.prepare("all", [(region.addr, region.length, 1)])
    transport.deregister(memory)
    assert transport.stats().regions == 0
    with pytest.raises(kvt.NotFound):
        transport.deregister(memory)


def test_a_list_is_registered_all_or_none(transport: kvt.Transport) -> None:
    good, more = bytearray(64), np.zeros(64)
    transport.register([good, more, kvt.region_of(bytearray(0))])
    assert transport.stats().regions == 2
    transport.deregister((good, more))
    with pytest.raises(kvt.InvalidArgument, match="region 1"):
        transport.register([good, (0, 4096)])
    assert transport.stats().regions == 0
    good.append(0)  # not held
    transport.register([])
    transport.deregister([])


@pytest.mark.parametrize(
    "wrong",
    [
        b"bytes",
        memoryview(b"bytes"),
        np.zeros((8, 8))[:, ::2],
        np.zeros(64)[::2],
        (),
        ((1, 2),),
        (4096,),
        (1, 2, 0, 0, 1, 0, 0),
        (-1, 10),
        (2**64, 10),
        (4096, -1),
        (4096, 10, 2**32),
        (2**64 - 10, 20),
        (1.0, 10),
        ("1", 10),
        "text",
        None,
        5,
        object(),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_no_memory_is_refused(
    transport: kvt.Transport, wrong: Any
) -> None:
    # An empty tuple is an empty list; everything else is an error.
    if isinstance(wrong, tuple) and not wrong:
        transport.register(wrong)
    else:
        with pytest.raises((kvt.Error, TypeError)):
            transport.register(wrong)
    assert transport.stats().regions == 0


def test_a_tensor_says_where_it_is(transport: kvt.Transport) -> None:
    tensor = Tensor(64, device=3)
    assert kvt.region_of(tensor) == (
        tensor.data_ptr(),
        64,
        kvt.VRAM,
        3,
        None,
        0,
    )
    with pytest.raises(kvt.Unsupported):
        transport.register(tensor)
    tensor.contiguous = False
    with pytest.raises(kvt.InvalidArgument, match="contiguous"):
        transport.register(tensor)
    count = sys.getrefcount(tensor)
    tensor.is_cuda, tensor.contiguous = False, True
    transport.register(tensor)
    held = sys.getrefcount(tensor)
    transport.deregister(tensor)
    after = sys.getrefcount(tensor)
    assert (held, after) == (count + 1, count)


def test_kind_and_device_are_for_those_that_do_not_say(
    transport: kvt.Transport,
) -> None:
    memory = bytearray(64)
    region = kvt.region_of(memory, kind=kvt.VRAM, device=2)
    assert (region.kind, region.device) == (kvt.VRAM, 2)
    with pytest.raises(kvt.Unsupported):
        transport.register(memory, kind=kvt.VRAM, device=2)


def test_shared_memory_is_registered_with_its_file(
    transport: kvt.Transport,
) -> None:
    with kvt.SharedMemory(8192) as memory:
        region = kvt.region_of(memory)
        assert region.fd == memory.fileno()
        assert region.addr == memory.addr
        assert len(memory) == memory.size == region.length == 8192
        transport.register(memory)
        with pytest.raises(BufferError):
            memory.close()
        transport.deregister(memory)
        transport.register((memory.addr, 8192), fd=memory.fileno(), fd_offset=0)
        transport.deregister((memory.addr, 8192))
        with pytest.raises(kvt.InvalidArgument, match="fd"):
            transport.register(bytearray(8192), fd=memory.fileno())
        with memoryview(memory) as view:
            view[10] = 7
            with pytest.raises(BufferError):
                memory.close()
        assert bytes(memory)[9:12] == b"\0\7\0"
    assert memory.closed
    assert memory.size == 0
    memory.close()
    for name in ("addr", "fileno"):
        with pytest.raises(kvt.Closed):
            value = getattr(memory, name)
            value()
    with pytest.raises(BufferError):
        memoryview(memory)
    with pytest.raises(kvt.InvalidArgument):
        transport.register(memory)
    for size in (0, -1, 2**63, 2**70):
        with pytest.raises(kvt.Error):
            kvt.SharedMemory(size)
    with pytest.raises(TypeError):
        kvt.SharedMemory("1")  # type: ignore[arg-type]


def test_a_registered_buffer_cannot_be_resized_or_closed(
    transport: kvt.Transport,
) -> None:
    memory, mapped = bytearray(64), mmap.mmap(-1, 4096)
    transport.register([memory, mapped])
    with pytest.raises(BufferError):
        memory.append(1)
    with pytest.raises(BufferError):
        mapped.close()
    transport.deregister([memory, mapped])
    memory.append(1)
    mapped.close()


def test_a_buffer_lives_until_it_is_deregistered(
    transport: kvt.Transport,
) -> None:
    memory = Owner(64)
    alive = weakref.ref(memory)
    region = kvt.region_of(memory)
    transport.register(memory)
    transport.register(memory)
    del memory
    gc.collect()
    assert alive() is not None
    transport.deregister(region)
    gc.collect()
    assert alive() is not None
    transport.deregister(region)
    gc.collect()
    assert alive() is None


def test_the_owner_that_is_named_is_let_go_of(
    transport: kvt.Transport,
) -> None:
    memory = bytearray(64)
    views = [memory, memoryview(memory), np.frombuffer(memory, np.uint8)]
    transport.register(views[1])
    transport.register(views[2])
    # Outside of an assert, which would refer to its operands itself.
    before = sys.getrefcount(views[2])
    transport.deregister(views[2])
    after = sys.getrefcount(views[2])
    assert after == before - 1
    transport.deregister(views[1])


@pytest.mark.parametrize("how", ["close", "collect"])
def test_a_buffer_lives_until_the_transport_ends(how: str) -> None:
    memory = Owner(64)
    alive = weakref.ref(memory)
    transport = kvt.Transport("local")
    transport.register(memory)
    del memory
    gc.collect()
    assert alive() is not None
    if how == "close":
        transport.close()
    else:
        with pytest.warns(ResourceWarning, match="unclosed"):
            del transport
            gc.collect()
    gc.collect()
    assert alive() is None


def test_a_failed_call_holds_nothing(transport: kvt.Transport) -> None:
    memory = Owner(64)
    count = sys.getrefcount(memory)
    for wrong in (5, (0, 10), b"x"):
        with pytest.raises((kvt.Error, TypeError)):
            transport.register([memory, wrong])
    with pytest.raises(kvt.NotFound):
        transport.deregister(memory)
    after = sys.getrefcount(memory)
    assert after == count
    memory.append(0)


def test_memory_of_a_transfer_in_flight_is_held(fault_pair: MakePair) -> None:
    pair = fault_pair("hang=*")
    memory = Owner(BLOCK)
    alive = weakref.ref(memory)
    region = kvt.region_of(memory)
    pair.source.register(memory)
    xfer = pair.source.write(pair.peer, [(region.addr, pair.target_addr, 64)])
    with pytest.raises(kvt.Busy):
        pair.source.deregister(memory, timeout=0.01)
    del memory
    gc.collect()
    assert alive() is not None
    pair.source.set_fault("")
    pair.source.wait(xfer, PATIENCE)
    pair.source.deregister(region)
    gc.collect()
    assert alive() is None


def test_memory_of_a_lost_transfer_is_never_let_go_of(
    fault_pair: MakePair,
) -> None:
    pair = fault_pair("never=*")
    memory = Owner(BLOCK)
    alive = weakref.ref(memory)
    region = kvt.region_of(memory)
    pair.source.register(memory)
    xfer = pair.source.write(pair.peer, [(region.addr, pair.target_addr, 64)])
    with pytest.raises(kvt.Lost):
        pair.source.wait(xfer, PATIENCE)
    with pytest.raises(kvt.Busy):
        pair.source.close(timeout=0.2)
    assert pair.source.closed
    del memory, pair
    gc.collect()
    assert alive() is not None


def test_a_deregistration_that_timed_out_ends_later(
    fault_pair: MakePair,
) -> None:
    pair = fault_pair("drop_hang=*")
    memory = Owner(64)
    alive = weakref.ref(memory)
    region = kvt.region_of(memory)
    pair.source.register(memory)
    with pytest.raises(kvt.TimedOut):
        pair.source.deregister(memory, timeout=0.01)
    del memory
    gc.collect()
    assert alive() is not None
    pair.source.set_fault("")
    while True:
        try:
            pair.source.deregister(region, timeout=PATIENCE)
            break
        except kvt.Busy:
            pass
    gc.collect()
    assert alive() is None


def test_a_registration_that_timed_out_is_held_until_close(
    fault_pair: MakePair,
) -> None:
    pair = fault_pair("mem_hang=*")
    memory = Owner(64)
    alive = weakref.ref(memory)
    with pytest.raises(kvt.TimedOut):
        pair.source.register(memory, timeout=0.01)
    del memory
    gc.collect()
    assert alive() is not None
    pair.source.set_fault("")
    pair.source.close()
    gc.collect()
    assert alive() is None


# B38
def test_cycles_through_a_transport_are_collected() -> None:
    class Pool(bytearray):
        transport: kvt.Transport

    pool = Pool(64)
    pool.transport = kvt.Transport("local")
    pool.transport.register(pool)
    alive = weakref.ref(pool)
    with pytest.warns(ResourceWarning):
        del pool
        gc.collect()
    assert alive() is None


class Device:
    """As torch.device."""

    def __init__(self, kind: str) -> None:
        self.type = kind


@pytest.mark.parametrize("kind", ["xpu", "npu", "meta"])
def test_tensors_of_other_accelerators_are_refused(
    transport: kvt.Transport, kind: str
) -> None:
    tensor: Any = Tensor(64)
    tensor.device = Device(kind)
    with pytest.raises(kvt.InvalidArgument, match=f"type {kind}"):
        transport.register(tensor)


def test_the_device_of_a_tensor_says_where_it_is() -> None:
    tensor: Any = Tensor(64, device=2)
    tensor.device = Device("cpu")
    assert kvt.region_of(tensor).kind == kvt.DRAM
    tensor.is_cuda = False
    tensor.device = Device("cuda")
    region = kvt.region_of(tensor)
    assert (region.kind, region.device) == (kvt.VRAM, 2)


@pytest.mark.parametrize("device", [2**32, 2**40 + 1, 2**64, -1])
def test_a_device_number_is_not_cut(device: int) -> None:
    with pytest.raises(kvt.OutOfRange):
        kvt.region_of(Tensor(64, device=device))


@pytest.mark.parametrize(
    "name", ["is_cuda", "device", "is_contiguous", "data_ptr"]
)
def test_an_attribute_that_fails_is_not_one_that_is_missing(
    transport: kvt.Transport, name: str
) -> None:
    def fail(self: object) -> None:
        raise RuntimeError("the device is lost")

    class Broken(Tensor):
        def __init__(self) -> None:
            self.memory = np.zeros(64, np.uint8)
            self.nbytes = 64
            self.contiguous = True

    setattr(Broken, name, property(fail))
    with pytest.raises(RuntimeError, match="the device is lost"):
        transport.register(Broken())
