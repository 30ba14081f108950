"""Memory as waves see it: tensors at addresses with nothing between them, and the LDS of each
workgroup, which knows who wrote and who read each of its bytes since the last barrier."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

SHIFT = 40  # tensor number k begins at address k << SHIFT
SIZES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Fault(Exception):
    """What no GPU says: an access outside, a race, a barrier that not all reach. `lanes` are those
    that it concerns, [waves, 64] or [waves, 1]."""

    def __init__(self, text: str, lanes: np.ndarray):
        super().__init__(text)
        self.lanes = lanes


class Part:
    """The bytes behind a tensor."""

    def __init__(self, name: str, content: np.ndarray):
        self.name, self.size, self.was_read = name, content.size, False
        # longer than the tensor, so that lanes that are off may read its first elements
        self.bytes = np.zeros(-(-content.size // 64) * 64 + 64, np.uint8)
        self.bytes[: content.size] = content
        self.as_size = {size: self.bytes.view(kind) for size, kind in SIZES.items()}

    def content(self) -> np.ndarray:
        return self.bytes[: self.size]


class Memory:
    def __init__(self) -> None:
        self.parts: list[Part] = []

    def add(self, name: str, content: np.ndarray) -> int:
        """Take a copy of these bytes in; returns their address."""
        self.parts.append(Part(name, content))
        return len(self.parts) << SHIFT

    def places(
        self, address: np.ndarray, active: np.ndarray, size: int, verb: str
    ) -> Iterator[tuple[Part, np.ndarray, np.ndarray]]:
        """The tensors that active lanes reach, with these lanes and their offsets in bytes; `size`
        bytes from there must belong to the tensor, too."""
        number, left = address >> SHIFT, active
        while left.any():
            first = int(number[left][0])
            here = left & (number == first)
            offset = (address - np.uint64(first << SHIFT)).astype(np.int64)
            if not 0 < first <= len(self.parts):
                raise Fault(f"{verb} at address {int(address[here][0]):#x}, where nothing is", here)
            part = self.parts[first - 1]
            if (outside := here & (offset + size > part.size)).any():
                at = int(offset[outside][0])
                bounds = f"byte {at} of {part.name}, which has {part.size}"
                raise Fault(f"{verb} {size} bytes from {bounds}", outside)
            yield part, here, offset
            left = left & ~here

    def load(self, address: np.ndarray, active: np.ndarray, size: int, count: int) -> np.ndarray:
        """`count` elements of `size` bytes from each active lane's address on, [count, *lanes]; of
        lanes that are not active 0."""
        found = np.zeros((count, *address.shape), np.uint32)
        for part, here, offset in self.places(address, active, size * count, "reads"):
            part.was_read = True
            if (offset[here] % size).any():
                for byte in range(size * count):
                    value = part.bytes[np.where(here, offset + byte, 0)].astype(np.uint32)
                    found[byte // size] |= np.where(here, value << 8 * (byte % size), 0)
                continue
            index = np.where(here, offset // size, 0)
            for i in range(count):
                np.copyto(found[i], part.as_size[size][index + i], where=here)
        return found

    def store(
        self, address: np.ndarray, active: np.ndarray, size: int, values: list[np.ndarray]
    ) -> None:
        """The reverse of load."""
        for part, here, offset in self.places(address, active, size * len(values), "writes"):
            first = offset[here]
            aligned = not (first % size).any()
            for i, value in enumerate(values):
                value = np.broadcast_to(value, here.shape)[here]
                if aligned:
                    part.as_size[size][first // size + i] = value
                    continue
                for byte in range(size):
                    part.bytes[first + size * i + byte] = value >> 8 * byte & 255

    def atomic(
        self, address: np.ndarray, active: np.ndarray, kind: type, change, operands: list
    ) -> np.ndarray:
        """Change a value in memory for each active lane, one after the other; returns what was
        there before."""
        before = np.zeros(address.shape, kind)
        for part, here, offset in self.places(address, active, 4, "changes"):
            part.was_read = True
            values = part.bytes.view(kind)
            for wave, lane in np.argwhere(here):
                at = offset[wave, lane] // 4
                before[wave, lane] = values[at]
                values[at] = change(values[at], *(operand[wave, lane] for operand in operands))
        return before


class Lds:
    """The LDS of `groups` workgroups of `waves` each, one behind the other.

    Beside each byte stand 16 bits, one for each wave, of those that wrote what it holds and of
    those that read it since the last barrier, and whether it was ever written.
    """

    def __init__(self, groups: int, waves: int, size: int):
        self.groups, self.waves, self.size = groups, waves, size
        self.stride = -(-size // 16) * 16
        total = groups * self.stride
        self.bytes, self.known = np.zeros(total, np.uint8), np.zeros(total, np.uint8)
        self.writers, self.readers = np.zeros(total, np.uint16), np.zeros(total, np.uint16)
        wave = np.arange(groups * waves)[:, None]
        self.base = wave // waves * self.stride
        self.bit = (1 << wave % waves).astype(np.uint64)

    def forget(self, groups: np.ndarray) -> None:
        """All waves of these workgroups have passed a barrier."""
        for touched in (self.writers, self.readers):
            touched.reshape(self.groups, self.stride)[groups] = 0

    def views(self, size: int) -> Iterator[np.ndarray]:
        """Content, `known`, writers and readers, an element for `size` bytes."""
        yield self.bytes.view(f"u{size}")
        yield self.known.view(f"u{size}")
        yield self.writers.view(f"u{2 * size}")
        yield self.readers.view(f"u{2 * size}")

    def elements(
        self, address: np.ndarray, active: np.ndarray, size: int, count: int, verb: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of the active lanes the numbers of the elements [count, lanes], and the bits of their
        waves, repeated for each byte."""
        if (outside := active & (address + size * count > self.size)).any():
            at = int(address[outside][0])
            raise Fault(
                f"{verb} {size * count} bytes from byte {at} of {self.size} in LDS", outside
            )
        if (odd := active & (address % size != 0)).any():
            raise Fault(f"{verb} {size} bytes of LDS at {int(address[odd][0])}, misaligned", odd)
        first = (self.base + address)[active] // size
        repeated = sum(1 << 16 * byte for byte in range(size))
        bits = np.broadcast_to(self.bit * np.uint64(repeated), active.shape)[active]
        return first + np.arange(count)[:, None], bits.astype(f"u{2 * size}")

    def load(self, address: np.ndarray, active: np.ndarray, size: int, count: int) -> np.ndarray:
        index, bits = self.elements(address, active, size, count, "reads")
        content, known, writers, readers = self.views(size)
        if (known[index] != np.iinfo(known.dtype).max).any():
            bad = (known[index] != np.iinfo(known.dtype).max).any(0)
            self.fault("reads LDS that nobody has written", address, active, bad)
        if self.waves > 1:
            self.check(writers[index], bits, "reads what another wave has written", address, active)
            add_bits(readers, index, np.broadcast_to(bits, index.shape))
        found = np.zeros((count, *address.shape), np.uint32)
        found[:, active] = content[index]
        return found

    def store(
        self, address: np.ndarray, active: np.ndarray, size: int, values: list[np.ndarray]
    ) -> None:
        index, bits = self.elements(address, active, size, len(values), "writes")
        content, known, writers, readers = self.views(size)
        values = np.stack([np.broadcast_to(value, active.shape)[active] for value in values])
        values, before = values.astype(content.dtype), content[index]
        content[index] = values
        known[index] = np.iinfo(known.dtype).max
        if self.waves == 1:
            return
        # what is there already any wave may write: whoever comes first, it is the same
        new = before != values
        if (content[index] != values).any():  # of a wave's lanes the last wins, of waves either
            last = last_of_each_wave(index, bits)
            new &= last
            lost = np.where(last & (content[index] != values), np.iinfo(writers.dtype).max, 0)
            others = lost.astype(writers.dtype) & ~bits
            self.check(others, bits, "two waves write different values", address, active)
        for touched, what in ((writers, "written"), (readers, "read")):
            # by others: what the wave itself has done there comes before
            here = np.where(new, touched[index] & ~bits, 0).astype(touched.dtype)
            self.check(here, bits, f"writes what another wave has {what}", address, active)
        writers[index] = np.where(new, 0, writers[index])
        add_bits(writers, index, np.broadcast_to(bits, index.shape))

    def check(
        self, touched: np.ndarray, bits: np.ndarray, what: str, address: np.ndarray,
        active: np.ndarray,
    ) -> None:  # fmt: skip
        """No other wave may have touched a byte since the last barrier."""
        if touched.any():
            apart = touched.view(np.uint16).reshape(*touched.shape, -1)
            mine = bits.view(np.uint16).reshape(*bits.shape, -1)
            bad = ((apart != 0) & (apart & mine == 0)).any((0, 2))
            if bad.any():
                self.fault(f"race: {what} since the last barrier", address, active, bad)

    def fault(self, text: str, address: np.ndarray, active: np.ndarray, bad: np.ndarray) -> None:
        lanes = np.zeros_like(active)
        lanes[active] = bad
        if bad.any():
            raise Fault(f"{text} (byte {int(address[lanes][0])} of LDS)", lanes)


def last_of_each_wave(index: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Whether no later lane of the wave has the same index."""
    last = np.zeros(index.shape, bool)
    for i, row in enumerate(index):
        pairs = np.stack([row, bits.astype(np.int64)])[:, ::-1]
        _, first = np.unique(pairs, axis=1, return_index=True)
        last[i, len(row) - 1 - first] = True
    return last


def add_bits(array: np.ndarray, index: np.ndarray, bits: np.ndarray) -> None:
    """array[index] |= bits, also where an index occurs more than once."""
    while index.size:
        array[index] |= bits
        missing = (array[index] & bits) != bits
        index, bits = index[missing], bits[missing]
