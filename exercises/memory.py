"""What launches in Triton's interpreter do to memory. They must stay in the tensors that they were
given, and their programs out of each other's way; what a mask leaves out of a load is undefined."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
from torch import Tensor

BEYOND = "beyond every tensor of the launch"
RACE = "another program is at the same address"
NOBODY, SEVERAL = -1, -2  # in place of the number of a program
BFLOAT16_NAN = 0x7FC0  # the interpreter keeps bfloat16 as whole numbers


class Storage:
    """The memory of a tensor in one launch: which programs were where. An address has the place of
    its first byte."""

    def __init__(self, tensor: Tensor):
        storage = tensor.untyped_storage()
        self.low, self.nbytes = storage.data_ptr(), storage.nbytes()
        self.writers, self.readers = np.full((2, self.nbytes), NOBODY, np.int32)

    def inside(self, addresses: np.ndarray) -> np.ndarray:
        return (self.low <= addresses) & (addresses < self.low + self.nbytes)

    def load(self, places: np.ndarray, program: int) -> bool:
        """Note a load; is it of what another program has stored?"""
        before = self.readers[places]
        self.readers[places] = np.where((before == NOBODY) | (before == program), program, SEVERAL)
        writers = self.writers[places]
        return bool(((writers != NOBODY) & (writers != program)).any())

    def store(self, places: np.ndarray, changed: np.ndarray, program: int) -> bool:
        """Note a store; does it change what another program has stored or loaded?"""
        others = [
            (before != NOBODY) & (before != program)
            for before in (self.writers[places], self.readers[places])
        ]
        self.writers[places] = program
        return bool((changed & (others[0] | others[1])).any())


@dataclass
class Memory:
    """Looks at each load and store of the launches inside of `watched`; a ValueError is a fault."""

    storages: list[Storage] = field(default_factory=list)  # of this launch; none: it is not known
    moved: Counter = field(default_factory=Counter)  # bytes of a storage: bytes loaded and stored
    without_other: str = ""  # 'line 12', the first that loads with a mask and without `other`
    locked: bool = False  # programs wait for each other by themselves
    atomic: str = ""  # 'line 12', the first that adds up by an atomic operation

    def begin(self, given: list[object]) -> None:
        """A launch with these arguments."""
        known = all(isinstance(x, Tensor | int | float | str) or x is None for x in given)
        tensors = {x.untyped_storage().data_ptr(): x for x in given if isinstance(x, Tensor)}
        self.storages = [Storage(tensor) for tensor in tensors.values()] if known else []
        self.locked = False

    def accesses(self, builder: object, pointer: object, wanted: np.ndarray) -> Iterator[tuple]:
        """Each storage with its lanes among those that are wanted, their places, the program."""
        addresses = pointer.data[wanted]
        itemsize = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
        (x, y, z), (_, ny, nz) = builder.grid_idx, builder.grid_dim
        if self.storages and not sum(s.inside(addresses) for s in self.storages).all():
            raise ValueError(BEYOND)
        for storage in self.storages:
            lanes = storage.inside(addresses)
            places = (addresses[lanes] - storage.low).astype(np.int64)
            self.moved[storage.nbytes] += len(places) * itemsize
            yield storage, lanes, places, (x * ny + y) * nz + z

    @contextlib.contextmanager
    def watched(self, interpreter: ModuleType) -> Iterator[Memory]:
        """Look at all launches inside."""
        executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
        begin, load, store = (
            executor._init_args_hst,
            builder.create_masked_load,
            builder.create_masked_store,
        )

        def noted(launch, *arguments):
            positional, named = found = begin(launch, *arguments)
            self.begin([*positional, *named.values()])
            return found

        def loaded(builder, pointer, mask, other, *rest):
            wanted = mask.data.astype(bool)
            for storage, _, places, program in self.accesses(builder, pointer, wanted):
                self.refuse(storage.load(places, program))
            result = load(builder, pointer, mask, other, *rest)
            if other is None and not wanted.all() and pointer.get_element_ty().is_floating():
                self.without_other = self.without_other or line_of_kernel()
                bfloat16 = np.issubdtype(result.data.dtype, np.integer)
                result.data[~wanted] = BFLOAT16_NAN if bfloat16 else np.nan
            return result

        def stored(builder, pointer, value, mask, *rest):
            wanted = mask.data.astype(bool)
            accesses = [*self.accesses(builder, pointer, wanted)]
            before = load(builder, pointer, mask, None, None, False).data
            result = store(builder, pointer, value, mask, *rest)
            after = load(builder, pointer, mask, None, None, False).data
            changed = (before != after)[wanted]
            for storage, lanes, places, program in accesses:
                self.refuse(storage.store(places, changed[lanes], program))
            return result

        def locked(builder, *arguments):
            self.locked = True
            return compare_and_swap(builder, *arguments)

        def added(builder, *arguments):
            self.atomic = self.atomic or line_of_kernel()
            return atomic(builder, *arguments)

        compare_and_swap, atomic = builder.create_atomic_cas, builder.create_atomic_rmw
        with (
            mock.patch.object(executor, "_init_args_hst", noted),
            mock.patch.object(builder, "create_masked_load", loaded),
            mock.patch.object(builder, "create_masked_store", stored),
            mock.patch.object(builder, "create_atomic_cas", locked),
            mock.patch.object(builder, "create_atomic_rmw", added),
        ):
            yield self

    def refuse(self, race: bool) -> None:
        if race and not self.locked:
            raise ValueError(RACE)


def line_of_kernel() -> str:
    """'line 12': the innermost that is neither of Triton nor of this file."""
    import triton

    others = str(Path(triton.__file__).parent), __file__
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(others):
        frame = frame.f_back
    return f"line {frame.f_lineno}"
