"""The waves of some workgroups at work: their registers, and which of them stand where.

All waves at one instruction execute it at once, those that are furthest back first. A vector
register is an array [waves, 64], a scalar one a column of `scalars`.
"""

from __future__ import annotations

import numpy as np

from fusion_lab.amd.assembly import Program
from fusion_lab.amd.memory import Fault, Lds, Memory

EXEC, VCC = 126, 106  # their places among the scalar registers
UNSET = 0x7FDEAD00  # what registers hold that nobody wrote; as a float32 it is NaN
END = 1 << 60  # where a wave stands that has ended
TURN = 20_000  # instructions before waves that stand further ahead, and may be waited for, go on
MOST = 2_000_000  # instructions before it is taken that a kernel never ends


def packed(mask: np.ndarray) -> np.ndarray:
    """Bits [waves, 64] as two words [waves, 2]."""
    return np.packbits(mask, axis=1, bitorder="little").view(np.uint32)


def unpacked(words: np.ndarray) -> np.ndarray:
    """Two words [waves, 2] as bits [waves, 64]."""
    return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(bool)


class Waves:
    """`count` = groups x waves of each; wave w belongs to group w // waves."""

    def __init__(self, program: Program, registers: int, groups: int, waves: int, lds: int):
        self.program, self.groups, self.waves, self.count = program, groups, waves, groups * waves
        self.vectors = np.full((registers, self.count, 64), UNSET, np.uint32)
        self.scalars = np.full((self.count, 128), UNSET, np.uint32)
        self.scc = np.zeros((self.count, 1), bool)
        self.memory: Memory | None = None
        self.lds = Lds(groups, waves, lds)
        self.pc = 0  # of the waves that are here
        self.at = np.zeros(self.count, np.int64)  # of the others
        self.at_barrier = np.zeros(self.count, bool)
        self.here = np.ones((self.count, 1), bool)
        self.exec = np.ones((self.count, 64), bool)
        self.scalars[:, EXEC : EXEC + 2] = packed(self.exec)
        self.furthest_first, self.steps = False, 0
        self.executed = [0] * len(program.code)  # how many waves, for each instruction
        self.watch = None  # what counters.py notes at accesses of memory
        self.meet()

    def choose(self, here: np.ndarray) -> None:
        """These waves execute now."""
        self.here = here
        self.number = int(here.sum())
        self.lanes = self.exec & here
        self.all_lanes = bool(self.lanes.all())

    # --- registers: they are written where waves are here and lanes at work

    def put(self, index: int, words: np.ndarray, allowed: np.ndarray | None = None) -> None:
        """Write a vector register, or of it the lanes that are `allowed`."""
        if self.all_lanes and allowed is None:
            self.vectors[index][:] = words
            return
        lanes = self.lanes if allowed is None else self.lanes & allowed
        np.copyto(self.vectors[index], words, where=lanes)

    def put_scalar(self, index: int, words: np.ndarray) -> None:
        """Write one scalar register [waves, 1], two [waves, 2] or more."""
        end = index + words.shape[1]
        np.copyto(self.scalars[:, index:end], words, where=self.here)
        if end > EXEC:
            self.exec = unpacked(self.scalars[:, EXEC : EXEC + 2])
            self.choose(self.here)

    def put_mask(self, index: int, mask: np.ndarray) -> None:
        """Write two scalar registers with a bit for each lane, 0 for those that are not at work."""
        self.put_scalar(index, packed(mask.astype(bool) & self.lanes))

    def put_scc(self, value: np.ndarray) -> None:
        np.copyto(self.scc, value, where=self.here)

    def mask(self, index: int) -> np.ndarray:
        """Two scalar registers as bits [waves, 64]."""
        return unpacked(self.scalars[:, index : index + 2])

    # --- the way through the program

    def branch(self, taken: np.ndarray, target: int) -> None:
        """Waves [waves, 1] for which `taken` is true go on at another place."""
        taken = taken & self.here
        if not taken.any():
            return
        if self.number == taken.sum():
            self.pc = target
            return
        self.at[self.here[:, 0]] = self.pc
        self.at[taken[:, 0]] = target
        self.meet()

    def barrier(self) -> None:
        """Wait for all waves of the workgroup."""
        self.at_barrier |= self.here[:, 0]
        self.at[self.here[:, 0]] = self.pc
        together = self.at_barrier.reshape(self.groups, self.waves).all(1)
        places = self.at.reshape(self.groups, self.waves)
        if (together & (places != places[:, :1]).any(1)).any():
            raise Fault("waves of a workgroup wait at different barriers", self.here)
        self.lds.forget(together)
        self.at_barrier &= ~np.repeat(together, self.waves)
        self.meet()

    def end(self) -> None:
        self.at[self.here[:, 0]] = END
        self.meet()

    def meet(self) -> None:
        """Choose the waves that execute next: those that stand furthest back."""
        ready = ~self.at_barrier & (self.at < END)
        self.running = bool(ready.any())
        if not self.running:
            if self.at_barrier.any():
                alone = self.at_barrier[:, None]
                raise Fault("waits at a barrier that other waves of its group never reach", alone)
            return
        places = self.at[ready]
        self.pc = int(places.max() if self.furthest_first else places.min())
        ahead = places[places > self.pc]
        self.others = int(ahead.min()) if len(ahead) else END
        self.choose((ready & (self.at == self.pc))[:, None])
        self.left = TURN

    def step(self) -> None:
        """Execute one instruction."""
        instruction = self.program.code[self.pc]
        self.executed[self.pc] += self.number
        self.pc += 1
        self.left -= 1
        self.steps += 1
        if self.steps > MOST:
            raise Fault(f"does not end after {MOST:,} instructions: a loop, or a wait for "
                        "workgroups that come later?", self.here)  # fmt: skip
        instruction.run(self)
        if self.pc >= self.others or self.left < 0:
            if self.left < 0:
                self.furthest_first ^= True
            self.at[self.here[:, 0]] = self.pc
            self.meet()

    def run(self) -> None:
        """Execute the program to its end, for all waves."""
        with np.errstate(all="ignore"):
            while self.running:
                self.step()
