"""Operators joined to what one kernel could compute, the bytes that must still cross memory, and
the time that follows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lab.fusions.rates import Rates
from lab.fusions.record import MOVES, Operator, Use

Key = tuple[int, int]
MOVED = 2  # times that an element goes elsewhere, before it must lie in memory
MIXED = 2**22  # elements from which a compiler sums rows and columns in one kernel
LONGEST = 4096  # a row that the registers of a block hold
RAGGED = 1.5  # how much longer rows take that no vector load fits, of elements of two bytes
ATTENTION = 0.5  # of the rate of a large product, which one kernel reaches on an H100
LEVELS = {
    "now": "the step now",
    "chains": "(a) chains of streaming operators, each as one kernel",
    "products": "(b) and those that a matrix product could take along",
    "attention": "(c) and attention as one kernel: product, softmax, product",
    "optimizer": "(d) and the optimizer with the casts of weights as one",
    "joined": "(e) and products of one matrix, or that are added up, as one product",
}
SOFTMAX = {"_softmax", "_safe_softmax", "_softmax_backward_data"}
SUMS = {"sum", "_to_copy", "clone"}  # of the gradient of what attention adds
SUMMED = {"add", "add_", "_to_copy", "clone"}  # between products and their sum


@dataclass
class Recorded:
    """What was recorded of a step; nothing of its tensors."""

    operators: list[Operator]
    sizes: list[int]  # bytes of the storages
    alive: set[Key]  # what is there when the step is over
    weights: set[int]  # storages of weights
    unwritten: list[str]  # operators that read what no operator wrote


@dataclass
class Group:
    """Operators that are one kernel, or would be: its bytes, time and launches when fused so far as
    the last level says."""

    members: list[Operator]
    root: int
    reads: dict[Key, int] = field(default_factory=dict)  # bytes that come from memory
    keeps: dict[Key, int] = field(default_factory=dict)  # bytes that others need
    moved: int = 0
    us: float | None = None
    launches: int = 0

    def __post_init__(self) -> None:
        self.kind, self.phase = self.members[0].kind, self.members[0].phase
        self.names = [*{operator.call: operator.name for operator in self.members}.values()]

    def now(self, what: str) -> float:
        """The sum of `moved`, `us` or `kernels` of its operators."""
        return sum(getattr(operator, what) or 0 for operator in self.members)

    def becomes(self, moved: int, us: float | None, launches: int) -> None:
        self.moved, self.us, self.launches = moved, us, launches


class Joiner:
    """Joins operators where that saves bytes and no group comes to wait for itself. Sets of
    operators are the bits of a number; a group has the number of its first operator."""

    def __init__(self, operators: Sequence[Operator]):
        self.operators = operators
        self.members = {i: [i] for i in range(len(operators))}
        self.root, self.mask = [*self.members], [1 << i for i in self.members]
        self.before, self.after = [0] * len(operators), [0] * len(operators)
        self.writer: dict[Key, int] = {}
        self.readers: dict[Key, list[int]] = defaultdict(list)
        self.segment: list[int] = []  # between barriers; a phase that comes again is another
        waits: list[set[int]] = []
        segment = 0
        for i, operator in enumerate(operators):
            last = operators[i - 1] if i else operator
            segment += last.barrier or last.phase != operator.phase
            self.segment.append(segment)
            old = [(use.key[0], use.key[1] - 1) for use in operator.writes]
            wanted = [*(use.key for use in operator.reads), *old]
            earlier = {self.writer[key] for key in wanted if key in self.writer}
            earlier |= {reader for key in old for reader in self.readers[key]}  # of what was there
            waits.append(earlier)
            for j in earlier:
                self.before[i] |= self.before[j] | self.mask[j]
            for use in operator.reads:
                self.readers[use.key].append(i)
            self.writer |= {use.key: i for use in operator.writes}
        for i in reversed(self.members):
            for j in waits[i]:
                self.after[j] |= self.after[i] | self.mask[i]

    def between(self, a: int, b: int) -> bool:
        """Is there something that waits for one of these groups, and the other one for it?"""
        through = self.after[a] & self.before[b] | self.after[b] & self.before[a]
        return bool(through & ~(self.mask[a] | self.mask[b]))

    def independent(self, a: int, b: int) -> bool:
        """May these groups begin at the same time?"""
        a, b = self.root[a], self.root[b]
        waits = self.before[a] & self.mask[b] or self.before[b] & self.mask[a]
        return not waits and self.segment[a] == self.segment[b]

    def fits(self, a: int, b: int) -> bool:
        """Could these groups be one kernel?"""
        numbers = sorted(self.members[a] + self.members[b])
        both = [self.operators[i] for i in numbers]
        if len({self.segment[i] for i in numbers}) > 1 or any(o.kind != "stream" for o in both):
            return False
        numel, over = max(o.numel for o in both), {o.reduced for o in both} - {None}
        if len(over) > 1 or any(r[0] != numel for r in over):
            return False
        if any(o.apart or (o.closed and o.numel != numel) for o in both):
            return False
        made: dict[Key, tuple[int, int, bool]] = {}  # how often it moved, its bytes, is it late
        for operator in both:
            inside = [(use, *made[use.key]) for use in operator.reads if use.key in made]
            if any(late or use.key in operator.source for use, _, _, late in inside):
                return False
            moves = max((n + (0 < use.bytes < size) for use, n, size, _ in inside), default=0)
            moves += bool(inside and MOVES.fullmatch(operator.name))
            if moves > MOVED:
                return False
            made |= {use.key: (moves, use.bytes, operator.closed) for use in operator.writes}
        return not self.between(a, b)

    def merge(self, a: int, b: int) -> None:
        """Make these groups one; `a` is the earlier one."""
        self.mask[a] |= self.mask[b]
        self.members[a] = sorted(self.members[a] + self.members.pop(b))
        for i in self.members[a]:
            self.root[i] = a
        for side, other in ((self.before, self.after), (self.after, self.before)):
            side[a] = (side[a] | side[b]) & ~self.mask[a]
            for x in self.members:
                if side[a] & self.mask[x]:
                    other[x] |= other[a] | other[b] | self.mask[a]

    def groups(self) -> list[Group]:
        """Join each operator to those that make what it reads; then such as read the same and go
        over as many elements."""
        pairs = [
            (i, self.writer[use.key])
            for i, operator in enumerate(self.operators)
            for use in operator.reads
            if use.key in self.writer and use.key not in operator.source
        ]
        numel = [operator.numel for operator in self.operators]
        for readers in self.readers.values():
            pairs += [(i, j) for i, j in pairwise(readers) if numel[i] == numel[j]]
        for i, j in pairs:
            a, b = sorted((self.root[i], self.root[j]))
            if a != b and self.fits(a, b):
                self.merge(a, b)
        return [Group([self.operators[i] for i in m], root) for root, m in self.members.items()]


def covered(uses: Iterable[Use], size: int) -> int:
    """Bytes of a storage in these uses, each place once; what a gather takes, each time."""
    places = {(use.offset, use.bytes) for use in uses}
    taken = sum(count for offset, count in places if offset < 0)
    return taken + min(size, sum(count for offset, count in places if offset >= 0))


class Finding:
    """The groups of a step, and what each level of fusion would make of the whole: microseconds
    (None without rates), bytes, launches."""

    def __init__(
        self, recorded: Recorded, rates: Rates | None, levels: Iterable[str] = tuple(LEVELS)
    ):
        self.recorded, self.rates = recorded, rates
        # what in-place operators have changed, and when
        self.gone = {(use.key[0], use.key[1] - 1): o.call
                     for o in recorded.operators for use in o.writes}  # fmt: skip
        same: dict[Key, Key] = {}
        first: dict[tuple, Key] = {}
        for o in recorded.operators:
            if rates and o.us is None:
                o.us = max(rates.us(o.moved), o.flop / rates.gemm_tflops / 1e6) if o.kernels else 0
            # a second cast of the same is none when fused
            o.reads = [use._replace(key=same.get(use.key, use.key)) for use in o.reads]
            o.operands = [(same.get(key, key), *form) for key, *form in o.operands]
            if o.name in ("_to_copy", "clone") and o.writes and o.writes[0].key not in self.gone:
                what, key = (o.name, o.dtype, o.phase, *o.reads), o.writes[0].key
                same[key] = first.setdefault(what, key)
        self.joiner = Joiner(recorded.operators)
        self.groups = self.joiner.groups()
        self.maker, self.made = {}, {}  # group and operator by what they write
        self.users: dict[Key, set[int]] = defaultdict(set)
        for number, group in enumerate(self.groups):
            self.memory_of(number, group)
        unseen = recorded.unwritten or any(
            o.kind == "unknown" and not o.reads for o in recorded.operators
        )
        for number, group in enumerate(self.groups):
            taken = {use.key for operator in group.members for use in operator.reads}
            group.keeps = {
                key: count
                for key, count in group.keeps.items()
                if self.users[key] - {number}
                or key in recorded.alive
                or (unseen and key not in taken)  # somebody must read it
            }
        self.remake()
        self.levels: dict[str, dict] = {}
        for level in levels:
            getattr(self, level)()
            self.levels[level] = {
                "us": sum(group.us for group in self.groups) if rates else None,
                "bytes": sum(group.moved for group in self.groups),
                "kernels": sum(group.launches for group in self.groups),
            }

    def memory_of(self, number: int, group: Group) -> None:
        """What a group reads from memory and what it makes. What is written in part is what was
        there before, and that part."""
        sizes, made, reads = self.recorded.sizes, {}, defaultdict(list)
        for operator in group.members:
            for use in operator.reads:
                if use.key not in made or covered(made[use.key], sizes[use.key[0]]) < use.bytes:
                    reads[use.key].append(use)
            for use in operator.writes:
                storage, version = use.key
                made[use.key] = [*made.get(use.key, made.get((storage, version - 1), ())), use]
                self.maker[use.key], self.made[use.key] = number, operator
        group.reads = {key: covered(uses, sizes[key[0]]) for key, uses in reads.items()}
        group.keeps = {key: covered(uses, sizes[key[0]]) for key, uses in made.items()}
        for key in group.reads:
            self.users[key].add(number)

    # --- what is not written at all

    def remake(self) -> None:
        """Let groups compute a tensor again from what lies in memory, where that moves fewer bytes
        than to write and read it: what compilers do with what the backward pass needs."""
        certain = self.recorded.alive | {(number, v - 1) for number, v in self.maker}  # in place
        certain |= {key for g in self.groups if g.kind != "stream" for key in (*g.reads, *g.keeps)}
        order = [
            (count, key, n) for n, g in enumerate(self.groups) for key, count in g.keeps.items()
        ]
        for count, key, number in sorted(order, reverse=True):
            others = {n: self.groups[n] for n in self.users[key] - {number}}
            leaves = None if key in certain else self.leaves(self.groups[number], key)
            if leaves is None or not others:
                continue
            last = max(g.members[-1].call for g in others.values())
            if any(self.gone.get(leaf, last) < last for leaf in leaves):
                continue  # something of it has changed in place by then
            # of a tensor of which a group takes a part, it computes that part
            extra = {
                n: {k: c * g.reads[key] // count for k, c in leaves.items() if k not in g.reads}
                for n, g in others.items()
            }
            now = count + sum(g.reads[key] for g in others.values())
            if sum(sum(more.values()) for more in extra.values()) < now:
                del self.groups[number].keeps[key]
                certain |= leaves.keys()
                for n, group in others.items():
                    del group.reads[key]
                    group.reads |= extra[n]
                    for leaf in leaves:
                        self.users[leaf].add(n)
                self.users[key] -= others.keys()

    def leaves(self, group: Group, key: Key) -> dict[Key, int] | None:
        """What of that which a group reads a tensor of it is computed from; None where it cannot be
        computed again."""
        found: dict[Key, int] = {}
        wanted = {key}
        for operator in reversed(group.members):
            made = {use.key for use in operator.writes}
            if made & wanted:
                if operator.closed or operator.random:
                    return None
                wanted |= {use.key for use in operator.reads}
                for use in operator.reads:
                    found[use.key] = max(use.bytes, found.get(use.key, 0))
        inside = {use.key for operator in group.members for use in operator.writes}
        return {k: count for k, count in found.items() if k not in inside}

    # --- the levels

    def now(self) -> None:
        for group in self.groups:
            us = group.now("us") if self.rates else None
            group.becomes(group.now("moved"), us, group.now("kernels"))

    def chains(self) -> None:
        """A group is one kernel, or two where sums are long: their last step is another one."""
        for group in self.groups:
            if group.kind == "stream" and group.launches:
                moved = sum(group.reads.values()) + sum(group.keeps.values())
                launches = 1 + any(o.closed and o.sums for o in group.members)
                if not group.keeps:  # others compute what they need of it
                    moved = launches = 0
                us = self.rates and min(group.us, self.time(group, moved, launches))
                group.becomes(moved, us, launches)
        self.fused = [(group.us, group.moved) for group in self.groups]

    def time(self, group: Group, moved: int, launches: int) -> float:
        """Kernels move bytes as fast as a copy, with three exceptions."""
        rows = [o.reduced for o in group.members if o.reduced]
        if group.phase == "forward" and any(length > LONGEST for _, length, _ in rows):
            moved += sum(group.reads.values())  # no block holds such a row: it is read twice
        if any(length % 8 for _, length, columns in rows if not columns):
            moved = int(RAGGED * moved)
        for o in group.members if rows else ():
            if o.closed and o.sums and not o.apart and o.numel >= MIXED:
                # sums of columns beside those of rows: PyTorch adds up what blocks have left, in
                # the time of reading a float32 tensor of that size
                launches += len(o.writes) - 1
                moved += len(o.writes) * 4 * o.numel
        return (launches - 1) * self.rates.us(0) + self.rates.us(moved)

    def products(self) -> None:
        """A group without sums that the product before it could finish with, or those behind it
        begin with, is no kernel any more: it costs what it moves beyond what these move anyway."""
        for number, group in enumerate(self.groups):
            if group.kind != "stream" or any(
                o.reduced or o.closed or o.source for o in group.members
            ):
                continue
            read, kept, rest = sum(group.reads.values()), sum(group.keeps.values()), []
            for key, count in group.reads.items():
                product = self.groups[self.maker.get(key, number)]
                alone = product.kind == "matrix" and self.users[key] == {number}
                if alone and not self.joiner.between(group.root, product.root):
                    rest.append(read - count + max(0, kept - count))
            takers = self.users[next(iter(group.keeps))] if len(group.keeps) == 1 else ()
            if takers and all(self.groups[n].kind == "matrix" for n in takers):
                rest.append(max(0, len(takers) * (read - kept)))
            us = self.rates and min(rest, default=0) / self.rates.gb_per_s / 1e3
            if rest and min(rest) <= group.moved and (us is None or us <= group.us):
                group.becomes(min(rest), us, 0)

    def attention(self) -> None:
        """Products with a softmax between them: one kernel reads queries, keys, values, and what is
        added, and writes the result; the backward pass computes the probabilities again."""
        softmax = {n for n, group in enumerate(self.groups) if SOFTMAX & {*group.names}}
        blocks = []
        for number in softmax:
            group = self.groups[number]
            made = {key: count for key, count in group.reads.items() if key in self.maker}
            if not made:
                continue
            before = self.maker[max(made, key=made.get)]
            # in the backward pass the product of the probabilities, too
            own = {number} | softmax & {self.maker[key] for key in made}
            behind = {n for m in own for key in self.groups[m].keeps for n in self.users[key]}
            ahead = {n for n in behind - own if self.groups[n].phase == group.phase}
            ends = {n for n in ahead if {*self.groups[n].names} <= SUMS}  # the gradient of a bias
            if (
                all(self.groups[n].kind == "matrix" for n in {before} | ahead - ends)
                and ahead > ends
            ):
                blocks.append({number, before} | ahead)
        inside = set().union(*blocks)
        for block in blocks:
            moved, us = self.needed(block, inside), None
            if self.rates:
                flop = sum(o.flop for n in block for o in self.groups[n].members)
                us = max(self.rates.us(moved), flop / ATTENTION / self.rates.gemm_tflops / 1e6)
            self.replace(block, moved, us)

    def optimizer(self) -> None:
        """The optimizer with the casts of its weights and gradients: one kernel that reads and
        writes weights and moments once, and writes the copies."""
        own = {n for n, g in enumerate(self.groups)
               if g.phase == "optimizer" and g.kind == "library"}  # fmt: skip
        block = set(own)
        for number, group in enumerate(self.groups):
            if own and group.kind == "stream" and {*group.names} <= {"_to_copy"}:
                of_weights = {key[0] for key in group.reads} <= self.recorded.weights
                of_gradients = all(self.users[k] and self.users[k] <= own for k in group.keeps)
                block |= {number} if of_weights or of_gradients else set()
        if block:
            moved = self.needed(block, block)
            self.replace(block, moved, self.rates and self.rates.us(moved))

    def needed(self, block: Collection[int], inside: set[int]) -> int:
        """Bytes that one kernel in place of these groups moves, where what goes from one group to
        another `inside` lies in no memory."""
        reads: dict[Key, int] = {}
        kept = 0
        for n in block:
            for key, count in self.groups[n].reads.items():
                if self.maker.get(key) not in inside:
                    reads[key] = max(count, reads.get(key, 0))
            for key, count in self.groups[n].keeps.items():
                kept += count if self.users[key] - inside or key in self.recorded.alive else 0
        return sum(reads.values()) + kept

    def joined(self) -> None:
        """Products of one matrix, or whose results are added up, are one product. It takes as long
        as the longest of them, or as their bytes or FLOPs together."""
        flop: Counter = Counter()
        alike: dict[tuple, dict[int, int]] = defaultdict(dict)  # products, and what is moved once
        for number, group in enumerate(self.groups):
            for o in group.members:
                flop[o.dtype] += o.flop
                for place, operand in enumerate(o.operands if group.launches else ()):
                    shared = next(use.bytes for use in o.reads if use.key == operand[0])
                    alike[o.dtype, o.phase, place, operand][number] = shared
                for n in self.summands(number, o):
                    result = self.groups[n].members[0]
                    alike[result.dtype, o.call][n] = result.writes[0].bytes
        usual = max(flop, key=flop.get, default="")  # rates are those of this type
        done: set[int] = set()
        for (dtype, *_), products in sorted(alike.items(), key=lambda item: -len(item[1])):
            own: dict[int, Group] = {}
            for n in sorted(products.keys() - done) if dtype == usual else ():
                if all(self.joiner.independent(self.groups[n].root, g.root) for g in own.values()):
                    own[n] = self.groups[n]
            if len(own) > 1:
                done |= own.keys()
                first, *others = own.values()
                for other in others:
                    self.joiner.merge(first.root, other.root)
                moved = sum(g.moved for g in own.values()) - len(others) * max(products.values())
                us = None
                if self.rates:
                    work = sum(o.flop for g in own.values() for o in g.members)
                    us = max(moved / self.rates.gb_per_s / 1e3, work / self.rates.gemm_tflops / 1e6)
                    us = max(us, *(g.us for g in own.values()))
                self.replace(own, moved, us)

    def summands(self, number: int, operator: Operator) -> set[int]:
        """Products whose results a group adds up in this operator, and nobody else reads."""
        found: set[int] = set()
        for use in operator.reads if operator.name in SUMMED else ():
            n = self.maker.get(use.key)
            if n == number:
                found |= self.summands(number, self.made[use.key])
            elif n is not None and self.groups[n].launches and self.users[use.key] == {number}:
                found |= {n} if self.groups[n].members[0].operands else set()
        return found

    def replace(self, block: Iterable[int], moved: int, us: float | None) -> None:
        """One kernel in place of these groups, which takes no longer than they do."""
        first, *others = (self.groups[n] for n in sorted(block))
        us = self.rates and min(us, sum(group.us for group in (first, *others)))
        first.becomes(moved, us, 1)
        for group in others:
            group.becomes(0, self.rates and 0.0, 0)

    # --- in words

    def rows(self) -> list[dict]:
        """The chains by what they save, those of the same operators and lines together."""
        rows: dict[tuple, dict] = {}
        for group, (us, moved) in zip(self.groups, self.fused, strict=True):
            now = group.now("us")
            single = len(group.names) == 1 and (us is None or us > 0.9 * now)
            if group.kind != "stream" or single:
                continue
            lines = places(operator.line for operator in group.members)
            first = {"chain": words(group.names), "pass": group.phase, "lines": lines}
            first |= {"places": 0, "kernels": 0, "bytes_now": 0, "bytes_fused": 0}
            first |= dict.fromkeys(("us_now", "us_fused"), self.rates and 0.0)
            row = rows.setdefault((*group.names, group.phase, lines), first)
            row["places"] += 1
            row["kernels"] += group.now("kernels")
            row["bytes_now"] += group.now("moved")
            row["bytes_fused"] += moved
            if us is not None:
                row["us_now"] += now
                row["us_fused"] += us
        key = "us" if self.rates else "bytes"
        return sorted(rows.values(), key=lambda row: row[f"{key}_fused"] - row[f"{key}_now"])

    def unknown(self) -> list[dict]:
        """Operators that keep their time because nobody knows what they do, and kernels unseen."""
        found = defaultdict(list)
        for operator in self.recorded.operators:
            if operator.kind == "unknown":
                found[operator.name].append(operator)
        return [
            {
                "operator": name,
                "calls": len(same),
                "lines": places(o.line for o in same),
                "us": sum(o.us or 0.0 for o in same) if self.rates else None,
            }
            for name, same in found.items()
        ]


def words(names: Iterable[str]) -> str:
    """Operators as a reader knows them, in their order, those that come again with a number."""
    plain = (name.strip("_").removeprefix("native_").replace("to_copy", "cast") for name in names)
    count = Counter(
        n.replace("_backward_data", "_backward").replace("clone", "copy") for n in plain
    )
    return ", ".join(f"{name} x{n}" if n > 1 else name for name, n in count.items())


def places(lines: Iterable[str]) -> str:
    """Lines of files: `model.py:12,14`."""
    by_file: dict[str, set[int]] = defaultdict(set)
    for line in lines:
        file, _, number = line.rpartition(":")
        by_file[file] |= {int(number)} if number.isdigit() else set()
    found = (f"{f}:{','.join(map(str, sorted(n)))}" for f, n in by_file.items() if n)
    return " ".join(found) or "?"
