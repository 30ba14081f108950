"""Memory as waves see it: tensors at addresses with nothing between them, and the LDS of each
workgroup, which knows who wrote and who read each of its bytes since the last barrier."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

SHIFT = 40  # tensor number k begins at address k << SHIFT


class Fault(Exception):
    """What no GPU says: an access outside, a race, a barrier that not all reach. `lanes` are those
    that it concerns, [waves, 64] or [waves, 1]."""

    def __init__(self, text: str, lanes: np.ndarray):
        super().__init__(text)
        self.lanes = lanes


class Part:
    """The bytes behind a tensor."""

    def __init__(self, name: str, content: np.ndarray):
        self.name, self.bytes, self.was_read = name, content.copy(), False


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
            if (outside := here & (offset + size > part.bytes.size)).any():
                at = int(offset[outside][0])
                bounds = f"byte {at} of {part.name}, which has {part.bytes.size}"
                raise Fault(f"{verb} {size} bytes from {bounds}", outside)
            yield part, here, offset
            left = left & ~here

    def load(self, address: np.ndarray, active: np.ndarray, size: int, count: int) -> np.ndarray:
        """`count` elements of `size` bytes from each active lane's address on, [count, *lanes]; of
        lanes that are not active 0."""
        found = np.zeros((*address.shape, size * count), np.uint8)
        for part, here, offset in self.places(address, active, size * count, "reads"):
            part.was_read = True
            found[here] = part.bytes[offset[here][:, None] + np.arange(size * count)]
        return words_of_bytes(found, size)

    def store(
        self, address: np.ndarray, active: np.ndarray, size: int, values: list[np.ndarray]
    ) -> None:
        """The reverse of load."""
        content = bytes_of_words(values, active, size)
        for part, here, offset in self.places(address, active, size * len(values), "writes"):
            at = offset[here][:, None] + np.arange(size * len(values))
            part.bytes[at] = content[here[active]]

    def atomic(
        self, address: np.ndarray, active: np.ndarray, kind: type, change, operands: list
    ) -> np.ndarray:
        """Change a value in memory for each active lane, one after the other; returns what was
        there before."""
        before = np.zeros(address.shape, kind)
        for part, here, offset in self.places(address, active, 4, "changes"):
            part.was_read = True
            for wave, lane in np.argwhere(here):
                at = offset[wave, lane]
                value = part.bytes[at : at + 4].view(kind)
                before[wave, lane] = value[0]
                value[0] = change(value[0], *(operand[wave, lane] for operand in operands))
        return before


def words_of_bytes(content: np.ndarray, size: int) -> np.ndarray:
    """Bytes [*lanes, count * size] as numbers [count, *lanes]."""
    return np.moveaxis(content.view(f"u{size}"), -1, 0).astype(np.uint32)


def bytes_of_words(values: list[np.ndarray], active: np.ndarray, size: int) -> np.ndarray:
    """Of each value the lowest `size` bytes, [active lanes, count * size]."""
    columns = [np.broadcast_to(value, active.shape)[active] for value in values]
    return np.stack(columns, axis=1).astype(f"u{size}").view(np.uint8)


class Lds:
    """The LDS of `groups` workgroups of `waves` each, one behind the other.

    Beside each byte stand the waves, as bits, that wrote what it holds and that read it since the
    last barrier, and whether it was ever written.
    """

    def __init__(self, groups: int, waves: int, size: int):
        self.groups, self.waves, self.size = groups, waves, size
        total = groups * size
        self.bytes, self.known = np.zeros(total, np.uint8), np.zeros(total, bool)
        self.writers, self.readers = np.zeros(total, np.uint16), np.zeros(total, np.uint16)
        group, self.wave = np.divmod(np.arange(groups * waves)[:, None], waves)
        self.base = group * size

    def forget(self, groups: np.ndarray) -> None:
        """All waves of these workgroups have passed a barrier."""
        for touched in (self.writers, self.readers):
            touched.reshape(self.groups, self.size)[groups] = 0

    def places(
        self, address: np.ndarray, active: np.ndarray, size: int, count: int, verb: str
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.uint16]]:
        """For each wave of the workgroups its active lanes, the numbers of their bytes
        [lanes, size * count], and its bit."""
        length = size * count
        if (outside := active & (address + length > self.size)).any():
            at = int(address[outside][0])
            raise Fault(f"{verb} {length} bytes from byte {at} of {self.size} in LDS", outside)
        if (odd := active & (address % size != 0)).any():
            raise Fault(f"{verb} {size} bytes of LDS at {int(address[odd][0])}, misaligned", odd)
        for wave in range(self.waves):
            lanes = active & (self.wave == wave)
            first = (self.base + address)[lanes]
            yield lanes, first[:, None] + np.arange(length), np.uint16(1 << wave)

    def load(self, address: np.ndarray, active: np.ndarray, size: int, count: int) -> np.ndarray:
        found = np.zeros((*address.shape, size * count), np.uint8)
        for lanes, index, bit in self.places(address, active, size, count, "reads"):
            self.check(~self.known[index], "reads LDS that nobody has written", address, lanes)
            others = (self.writers[index] != 0) & (self.writers[index] & bit == 0)
            what = "race: reads what another wave has written since the last barrier"
            self.check(others, what, address, lanes)
            self.readers[index] |= bit
            found[lanes] = self.bytes[index]
        return words_of_bytes(found, size)

    def store(
        self, address: np.ndarray, active: np.ndarray, size: int, values: list[np.ndarray]
    ) -> None:
        """Of a wave's lanes that write one byte the last wins. What is there already any wave may
        write: whoever comes first, it is the same."""
        for lanes, index, bit in self.places(address, active, size, len(values), "writes"):
            before = self.bytes[index]
            self.bytes[index] = bytes_of_words(values, lanes, size)
            self.known[index] = True
            changed = self.bytes[index] != before
            for touched, verb in ((self.writers, "written"), (self.readers, "read")):
                others = changed & (touched[index] & ~bit != 0)
                what = f"race: writes what another wave has {verb} since the last barrier"
                self.check(others, what, address, lanes)
            self.writers[index[changed]] = 0
            self.writers[index] |= bit

    def check(self, bad: np.ndarray, what: str, address: np.ndarray, active: np.ndarray) -> None:
        """Raise a Fault if there is any such byte of the active lanes."""
        if bad.any():
            lanes = np.zeros_like(active)
            lanes[active] = bad.any(1)
            raise Fault(f"{what} (byte {int(address[lanes][0])} of LDS)", lanes)
