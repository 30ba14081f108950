"""Operators joined to groups that one kernel could compute, and the bytes that must still cross
memory then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lab.fusions.record import MOVES, Operator, Use

Key = tuple[int, int]
MOST = 64  # operators in a kernel, as compilers have it
SMALL = 16  # what is so many times smaller than a tensor is kept rather than computed again
MOVED = 2  # times that an element is wanted elsewhere, before it must be in memory
TILE = 256  # the longest row that a tile of a matrix product has as a whole


@dataclass
class Group:
    """Operators that are one kernel, or would be."""

    members: list[Operator]
    root: int = 0  # its number among the joiner's
    reads: dict[Key, int] = field(default_factory=dict)  # bytes that come from memory
    keeps: dict[Key, int] = field(default_factory=dict)  # bytes that others need

    @property
    def kind(self) -> str:
        return self.members[0].kind

    @property
    def now_us(self) -> float:
        return sum(o.us or 0.0 for o in self.members)

    @property
    def now_bytes(self) -> int:
        return sum(use.bytes for o in self.members for use in (*o.reads, *o.writes))

    @property
    def fused_bytes(self) -> int:
        if self.kind != "stream":
            return self.now_bytes
        return sum(self.reads.values()) + sum(self.keeps.values())

    @property
    def launches(self) -> int:
        return sum(o.kernels for o in self.members)

    @property
    def pointwise(self) -> bool:
        """Can a tile of a matrix product have what this needs?"""
        short = all(o.reduced is None or o.reduced[1] <= TILE for o in self.members)
        return short and not any(o.closed or o.source for o in self.members)


class Joiner:
    """Joins operators where that saves bytes and no group comes to wait for itself."""

    def __init__(self, operators: Sequence[Operator]):
        self.operators = operators
        self.root = list(range(len(operators)))
        self.mask = [1 << i for i in self.root]
        self.members = [[i] for i in self.root]
        self.before, self.after = [0] * len(operators), [0] * len(operators)
        self.writer: dict[Key, int] = {}
        self.readers: dict[Key, list[int]] = defaultdict(list)
        self.segment, segment = [], 0
        for i, operator in enumerate(operators):
            self.segment.append(segment)
            segment += operator.barrier
            earlier = {self.writer[u.key] for u in operator.reads if u.key in self.writer}
            for use in operator.writes:  # who reads the old version goes first
                earlier |= set(self.readers[(use.key[0], use.key[1] - 1)]) - {i}
                earlier |= {self.writer.get((use.key[0], use.key[1] - 1), i)} - {i}
                self.writer[use.key] = i
            for use in operator.reads:
                self.readers[use.key].append(i)
            for j in earlier:
                self.before[i] |= self.before[j] | self.mask[j]
        for i in reversed(self.root):
            rest = self.before[i]
            while rest:
                j = rest.bit_length() - 1
                self.after[j] |= self.mask[i]
                rest ^= 1 << j

    def find(self, i: int) -> int:
        while self.root[i] != i:
            self.root[i] = self.root[self.root[i]]
            i = self.root[i]
        return i

    def between(self, a: int, b: int) -> int:
        """Operators outside of two groups that wait for one and are waited for by the other."""
        return (self.after[a] & self.before[b] | self.after[b] & self.before[a]) & ~(
            self.mask[a] | self.mask[b]
        )

    def fits(self, a: int, b: int) -> bool:
        """Could these groups be one kernel?"""
        first, second = (self.operators[self.members[x][0]] for x in (a, b))
        both = [self.operators[i] for x in (a, b) for i in self.members[x]]
        same = first.phase == second.phase and self.segment[a] == self.segment[b]
        if not same or len(both) > MOST or any(o.kind != "stream" for o in both):
            return False
        numel = max(o.numel for o in both)
        reduced = {o.reduced for o in both} - {None}
        if len(reduced) > 1 or any(r[0] != numel for r in reduced):
            return False
        if any(o.numel != numel and o.closed for o in both):
            return False
        for one, other in ((a, b), (b, a)):
            made = [self.operators[i] for i in self.members[one]]
            late = {use.key for o in made if o.closed for use in o.writes}
            all_made = {use.key for o in made for use in o.writes}
            for i in self.members[other]:
                taker = self.operators[i]
                if any(use.key in late for use in taker.reads) or taker.source & all_made:
                    return False
        return not self.between(a, b) and moves(self.members[a] + self.members[b], self) <= MOVED

    def join(self, a: int, b: int) -> None:
        a, b = min(a, b), max(a, b)
        self.root[b] = a
        self.mask[a] |= self.mask[b]
        self.members[a] = sorted(self.members[a] + self.members[b])
        self.before[a] = (self.before[a] | self.before[b]) & ~self.mask[a]
        self.after[a] = (self.after[a] | self.after[b]) & ~self.mask[a]
        before, after = self.before[a] | self.mask[a], self.after[a] | self.mask[a]
        for i, root in enumerate(self.root):
            if i == root and i != a:
                if self.after[a] & self.mask[i]:
                    self.before[i] |= before
                if self.before[a] & self.mask[i]:
                    self.after[i] |= after

    def run(self) -> list[list[int]]:
        """Join each operator to those that make what it reads, the most bytes first; then those
        that read the same."""
        for i, operator in enumerate(self.operators):
            for use in sorted(operator.reads, key=lambda use: -use.bytes):
                if use.key in self.writer and use.key not in operator.source:
                    a, b = self.find(i), self.find(self.writer[use.key])
                    if a != b and self.fits(a, b):
                        self.join(a, b)
        for readers in self.readers.values():
            roots = sorted({self.find(i) for i in readers})
            for one, other in zip(roots, roots[1:], strict=False):
                a, b = self.find(one), self.find(other)
                sizes = {max(self.operators[i].numel for i in self.members[x]) for x in (a, b)}
                if a != b and len(sizes) == 1 and self.fits(a, b):
                    self.join(a, b)
        return [self.members[i] for i in range(len(self.root)) if self.root[i] == i]


def moves(members: Sequence[int], joiner: Joiner) -> int:
    """How often an element goes to another place on its way through these operators: each time,
    what made it is computed once more."""
    made: dict[Key, tuple[int, int]] = {}
    most = 0
    for i in sorted(members):
        operator, times = joiner.operators[i], 0
        for use in operator.reads:
            if use.key in made:
                before, size = made[use.key]
                times = max(times, before + (0 < use.bytes < size))
        times += (
            operator.name in MOVES and times + any(use.key in made for use in operator.reads) > 0
        )
        made |= {use.key: (times, use.bytes) for use in operator.writes}
        most = max(most, times)
    return most


def covered(uses: Iterable[Use], size: int) -> int:
    """Bytes of a storage in these uses, each place once."""
    return min(size, sum(count for _, count in {(use.offset, use.bytes) for use in uses}))


def memory_of(members: Sequence[Operator], sizes: Sequence[int]) -> tuple[dict, dict]:
    """Bytes that a group reads from memory and bytes that it makes, by storage and version."""
    made: dict[Key, list[Use]] = defaultdict(list)
    reads: dict[Key, list[Use]] = defaultdict(list)
    for operator in members:
        for use in operator.reads:
            if covered(made.get(use.key, ()), sizes[use.key[0]]) < use.bytes:
                reads[use.key].append(use)
        for use in operator.writes:
            made[use.key].append(use)

    def total(found: dict[Key, list[Use]]) -> dict[Key, int]:
        return {key: covered(uses, sizes[key[0]]) for key, uses in found.items()}

    return total(reads), total(made)


def copies_of_copies(operators: Sequence[Operator], alive: set[Key]) -> dict[Key, Key]:
    """Copies that have the same in them as an earlier one: autocast casts an input for each of its
    products."""
    first: dict[tuple, Key] = {}
    same: dict[Key, Key] = {}
    for operator in operators:
        if operator.name in ("_to_copy", "clone") and len(operator.writes) == 1:
            what = operator.name, operator.dtype, operator.phase, *operator.reads
            key = operator.writes[0].key
            if first.setdefault(what, key) != key and key not in alive:
                same[key] = first[what]
    return same


def groups_of(
    operators: Sequence[Operator], sizes: Sequence[int], alive: set[Key]
) -> tuple[list[Group], Joiner]:
    """The groups of a step with what they read and keep; `alive` is what is there after it."""
    joiner = Joiner(operators)
    groups = []
    users: dict[Key, set[int]] = defaultdict(set)
    same = copies_of_copies(operators, alive)
    for number, members in enumerate(joiner.run()):
        group = Group([operators[i] for i in members], joiner.find(members[0]))
        reads, group.keeps = memory_of(group.members, sizes)
        for key, count in reads.items():
            group.reads[same.get(key, key)] = count
        for key in same.keys() & group.keeps.keys():
            del group.keeps[key]
        groups.append(group)
        for key in group.reads:
            users[key].add(number)
    for number, group in enumerate(groups):
        needed = {key for key in group.keeps if users[key] - {number} or key in alive}
        group.keeps = {key: group.keeps[key] for key in needed}
    remake(groups, users, alive)
    return groups, joiner


def remake(groups: Sequence[Group], users: dict[Key, set[int]], alive: set[Key]) -> None:
    """Let groups compute a tensor again from what is in memory where that moves fewer bytes than
    writing and reading it: what compilers do with what the backward pass needs."""
    certain = set(alive)
    for key, numbers in users.items():
        certain |= {key} if any(groups[n].kind != "stream" for n in numbers) else set()
    order = [
        (count, key, n) for n, group in enumerate(groups) for key, count in group.keeps.items()
    ]
    for count, key, number in sorted(order, key=lambda entry: -entry[0]):
        group = groups[number]
        if group.kind != "stream" or key in certain:
            continue
        others = users[key] - {number}
        found = leaves(group, key, count, certain)
        if found is None or not others:
            continue
        extra = {n: {k: c for k, c in found.items() if k not in groups[n].reads} for n in others}
        if sum(sum(more.values()) for more in extra.values()) < count * (1 + len(others)):
            del group.keeps[key]
            for n in others:
                groups[n].reads.pop(key)
                for k, c in extra[n].items():
                    groups[n].reads[k] = c
                    users[k].add(n)
            for k in found:
                if k not in group.reads:
                    certain.add(k)
            users[key] -= others


def leaves(group: Group, key: Key, count: int, certain: set[Key]) -> dict[Key, int] | None:
    """What a tensor of a group can be computed from, and is in memory anyway, or small; None where
    it cannot."""
    maker = {use.key: o for o in group.members for use in o.writes}
    found: dict[Key, int] = {}
    wanted, seen = [key], set()
    while wanted:
        operator = maker[wanted.pop()]
        if operator.closed or operator.kind != "stream":
            return None
        for use in operator.reads:
            inside = use.key in maker
            kept = use.key in group.keeps and (use.key in certain or use.bytes * SMALL <= count)
            if not inside or kept:
                found[use.key] = max(use.bytes, found.get(use.key, 0))
            elif use.key not in seen:
                seen.add(use.key)
                wanted.append(use.key)
    return found
