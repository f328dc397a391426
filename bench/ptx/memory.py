"""Global and shared memory that remember who read and wrote each byte.

Between two barriers, warps of a program run in any order, and programs always do. So two warps may touch a byte between
two barriers, and two programs in a launch, only if neither writes it. Warps may also write the value that is there: the
compiler lets several warps store the same value. Bytes that all use only for atomic additions are an exception.

Each byte has two *stamps*, one for writes and one for reads. A stamp is an interval and the warps that accessed the
byte in it. Intervals are the times between barriers, numbered through all programs of a launch, which run one after the
other. This is enough to find a conflict whatever the order of execution was.
"""

import ctypes
import random
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from drm_triton.bench.ptx.errors import EmulatorError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

WARP_BITS = 32  # a stamp is interval << 32 | a bit for each warp; intervals count from 1, and 0 means "never"
WARPS = (1 << WARP_BITS) - 1
SECTOR_BITS = 5  # a sector has 32 bytes
OFFSETS = np.arange(32)  # of the bytes of the largest access
SEVERAL_PROGRAMS = 1  # as a stamp: read by more than one


def some(x: Array) -> bool:
    """Return whether an entry is not 0, faster than `x.any()` for the few entries of a warp."""
    return bool(np.count_nonzero(x))


class Visitor(NamedTuple):
    """Who accesses memory."""

    stamp: int
    program: int  # stamps below are those of earlier programs

    @classmethod
    def of(cls, interval: int, first_interval: int, warp: int) -> "Visitor":
        """Return the visitor for a warp in an interval of a program that began with `first_interval`."""
        return cls(interval << WARP_BITS | 1 << warp, first_interval << WARP_BITS)

    @property
    def bit(self) -> int:
        """The bit of the warp."""
        return self.stamp & WARPS

    def now(self, stamps: Array) -> Array:
        """Return which stamps are of this interval."""
        result: Array = stamps >> WARP_BITS == self.stamp >> WARP_BITS
        return result

    def elsewhere(self, stamps: Array) -> Array:
        """Return which stamps are of another program."""
        result: Array = (stamps != 0) & (stamps < self.program)
        return result


class Bytes:
    """Contiguous memory with the stamps of its bytes.

    Parameters
    ----------
    data : uint8 [size], modified in place
    name : for messages
    initialized : whether reading a byte that nobody wrote is allowed
    """

    def __init__(self, data: Array, name: str, initialized: bool) -> None:
        self.data, self.name, self.initialized = data, name, initialized
        self.written = np.zeros(len(data), np.int64)
        self.read = np.zeros(len(data), np.int64)
        self.arriving = np.zeros(0 if initialized else len(data), bool)  # targets of asynchronous copies under way
        self.atomic = np.zeros(0, bool)  # bytes that atomic additions have used, once there are any

    def load(self, index: Array, me: Visitor) -> Array:
        """Return the bytes at index [lanes, size]."""
        written = self.written[index]
        if not self.initialized:
            if np.count_nonzero(written) < written.size:
                raise EmulatorError(f"read of {self.name} that nobody wrote")
            if some(self.arriving[index]):
                raise EmulatorError(f"read of {self.name} that an asynchronous copy may still change")
        self._check_atomic(index, "read of")
        if some(written):
            self._check(me.elsewhere(written), me.now(written) & (written & me.bit == 0), "read of", "written")
        read = self.read[index]
        if some(read):
            several = me.elsewhere(read)
            read = np.where(several, SEVERAL_PROGRAMS, np.where(me.now(read), read | me.bit, me.stamp))
            self.read[index] = read
        else:
            self.read[index] = me.stamp
        return self.data[index]

    def store(self, index: Array, values: Array, me: Visitor) -> None:
        """Write values to the bytes at index, both [lanes, size]."""
        self._claim(index, me, self.data[index] != values)
        self.data[index] = values
        if some(self.data[index] != values):
            raise EmulatorError(f"lanes of a warp write different values to one address of {self.name}")

    def expect(self, index: Array, me: Visitor) -> None:
        """Begin an asynchronous copy to the bytes at index: until it arrives, nobody may touch them."""
        self._claim(index, me, True)
        self.arriving[index] = True

    def arrive(self, index: Array, values: Array, me: Visitor) -> None:
        """End an asynchronous copy."""
        self.arriving[index] = False
        self.store(index, values, me)

    def _claim(self, index: Array, me: Visitor, changed: Array | bool) -> None:
        """Mark bytes as written, after a check of who used them; `changed` tells which get another value."""
        if self.arriving.size and some(self.arriving[index]):
            raise EmulatorError(f"write to {self.name} that an asynchronous copy may still change")
        self._check_atomic(index, "write to")
        written, read = self.written[index], self.read[index]
        for stamps, earlier in ((written, "written"), (read, "read")):
            if some(stamps):
                others = me.now(stamps) & (stamps & WARPS & ~me.bit != 0)
                self._check(me.elsewhere(stamps), others & changed, "write to", earlier)
        self.written[index] = np.where(me.now(written), written | me.bit, me.stamp)

    def add(self, index: Array, values: Array) -> Array:
        """Add integers to those at index [lanes, size], one lane after the other; return what each lane found.

        All warps and programs may do so. But in the same launch, nothing else may touch these bytes.
        """
        if some(self.written[index]) or some(self.read[index]):
            raise EmulatorError(f"atomic addition to {self.name} that the launch also reads or writes otherwise")
        if not self.atomic.size:
            self.atomic = np.zeros(len(self.data), bool)
        self.atomic[index] = True
        found = np.empty_like(values)
        for lane, place in enumerate(index):
            found[lane] = self.data[place].view(values.dtype)[0]
            self.data[place] = (found[lane : lane + 1] + values[lane]).view(np.uint8)
        return found

    def _check_atomic(self, index: Array, access: str) -> None:
        if self.atomic.size and some(self.atomic[index]):
            raise EmulatorError(f"{access} {self.name} in a launch with atomic additions to it")

    def _check(self, programs: Array, warps: Array, access: str, earlier: str) -> None:
        if some(programs):
            who = "another program of the launch"
            raise EmulatorError(f"{access} {self.name} that was {earlier} by {who}")
        if some(warps):
            who = "another warp, with no barrier between"
            raise EmulatorError(f"{access} {self.name} that was {earlier} by {who}")


def check_alignment(addresses: Array, size: int, name: str) -> None:
    """Raise if an access of `size` bytes is not at a multiple of `size`."""
    wrong = addresses & (size - 1) != 0
    if some(wrong):
        raise EmulatorError(f"access of {size} bytes to {name} memory at {hex(int(addresses[wrong][0]))}: misaligned")


class SharedMemory:
    """The shared memory of one program, at addresses 0 .. size - 1. It begins with random bytes."""

    def __init__(self, size: int, order: random.Random) -> None:
        noise = np.frombuffer(order.randbytes(size), np.uint8).copy()
        self.bytes = Bytes(noise, "shared memory", False)

    def locate(self, addresses: Array, size: int) -> Array:
        """Return the indices [lanes, size] of the bytes at int64 addresses [lanes]."""
        check_alignment(addresses, size, "shared")
        outside = (addresses < 0) | (addresses + size > len(self.bytes.data))
        if some(outside):
            where = f"{int(addresses[outside][0])} of {len(self.bytes.data)} bytes"
            raise EmulatorError(f"access of {size} bytes to shared memory at {where}: out of bounds")
        return addresses[:, None] + OFFSETS[:size]

    def load(self, addresses: Array, size: int, me: Visitor) -> Array:
        """Return `size` bytes at each address: [lanes, size]."""
        return self.bytes.load(self.locate(addresses, size), me)

    def store(self, addresses: Array, values: Array, me: Visitor) -> None:
        """Write values [lanes, size]."""
        self.bytes.store(self.locate(addresses, values.shape[1]), values, me)

    def expect(self, addresses: Array, size: int, me: Visitor) -> None:
        """Begin an asynchronous copy."""
        self.bytes.expect(self.locate(addresses, size), me)

    def arrive(self, addresses: Array, values: Array, me: Visitor) -> None:
        """End an asynchronous copy of values [lanes, size]."""
        self.bytes.arrive(self.locate(addresses, values.shape[1]), values, me)


class GlobalMemory:
    """The tensors of a launch, at addresses far from each other.

    A kernel may touch the bytes of its arguments only. Arguments that overlap, as views of one tensor may, are one
    region, so that a conflict through two pointers is found.

    Parameters
    ----------
    spans : (name, address on the host, bytes) of each argument. The memory must outlive this object.
    """

    GAP = 40  # bits between the addresses of regions: an index that overflows or is negative ends between them

    def __init__(self, spans: Iterable[tuple[str, int, int]]) -> None:
        self.regions: list[Bytes] = []
        self.starts: list[int] = []
        self._hosts: list[int] = []
        merged: list[tuple[list[str], int, int]] = []
        for name, start, size in sorted((span for span in spans if span[2] > 0), key=lambda span: span[1]):
            if merged and start < merged[-1][1] + merged[-1][2]:
                names, first, length = merged.pop()
                merged.append(([*names, name], first, max(length, start + size - first)))
            else:
                merged.append(([name], start, size))
        for number, (names, start, size) in enumerate(merged):
            data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
            self.regions.append(Bytes(data, " and ".join(dict.fromkeys(names)), True))
            self.starts.append((number + 1 << self.GAP) + start % 256)  # aligned as on the host
            self._hosts.append(start)

    def address(self, host: int) -> int:
        """Return the address of a byte that the host has at `host`, 0 if it belongs to no argument."""
        number = bisect_right(self._hosts, host) - 1
        if number < 0 or host >= self._hosts[number] + len(self.regions[number].data):
            return 0
        return self.starts[number] + host - self._hosts[number]

    def bytes_touched(self) -> int:
        """Return the number of bytes that were read plus the number that were written, so far."""
        counted = ((region.read, region.written, region.atomic, region.atomic) for region in self.regions)
        return sum(int(np.count_nonzero(stamps)) for region in counted for stamps in region)

    def load(self, addresses: Array, size: int, me: Visitor) -> Array:
        """Return `size` bytes at each address: [lanes, size]."""
        values = np.empty((len(addresses), size), np.uint8)
        for region, lanes, index in self._locate(addresses, size, "read"):
            values[lanes] = region.load(index, me)
        return values

    def store(self, addresses: Array, values: Array, me: Visitor) -> None:
        """Write values [lanes, size]."""
        for region, lanes, index in self._locate(addresses, values.shape[1], "write"):
            region.store(index, values[lanes], me)

    def add(self, addresses: Array, values: Array) -> Array:
        """Add integers [lanes] atomically; return what each lane found: [lanes]."""
        found = np.empty_like(values)
        for region, lanes, index in self._locate(addresses, values.itemsize, "atomic addition"):
            found[lanes] = region.add(index, values[lanes])
        return found

    def sectors(self) -> tuple[set[int], set[int]]:
        """Return the sectors that were read, and those that were written, as numbers on the host."""
        read: set[int] = set()
        written: set[int] = set()
        for region, host in zip(self.regions, self._hosts, strict=True):
            atomic = np.flatnonzero(region.atomic)
            for bytes_used, sectors in ((region.read, read), (region.written, written)):
                used = host + np.concatenate([np.flatnonzero(bytes_used), atomic])
                sectors.update(np.unique(used >> SECTOR_BITS).tolist())
        return read, written

    def _locate(self, addresses: Array, size: int, access: str) -> Iterable[tuple[Bytes, Array | slice, Array]]:
        """Yield regions, the lanes that access them, and the indices [lanes, size] of their bytes."""
        check_alignment(addresses, size, "global")
        offsets = OFFSETS[:size]
        numbers = np.searchsorted(self.starts, addresses, side="right") - 1
        for number in set(numbers.tolist()):
            mine = numbers == number
            lanes: Array | slice = slice(None) if mine.all() else np.flatnonzero(mine)
            here = addresses[lanes]
            if number < 0 or int(here.max()) + size > self.starts[number] + len(self.regions[number].data):
                raise EmulatorError(self._outside(here, size, number, access))
            yield self.regions[number], lanes, (here - self.starts[number])[:, None] + offsets

    def _outside(self, addresses: Array, size: int, number: int, access: str) -> str:
        """Describe an access out of bounds, relative to the nearest region."""
        last = int(addresses.max())
        if number >= 0 and last - self.starts[number] < 1 << self.GAP - 1:
            beyond = last + size - self.starts[number] - len(self.regions[number].data)
            return f"{access} of {size} bytes that ends {beyond} bytes after {self.regions[number].name}: out of bounds"
        if number + 1 < len(self.regions):
            before = self.starts[number + 1] - last
            return f"{access} of {size} bytes {before} bytes before {self.regions[number + 1].name}: out of bounds"
        return f"{access} of {size} bytes at {hex(last)}: out of bounds"
