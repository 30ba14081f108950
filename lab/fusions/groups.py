"""Operators joined to what one kernel could compute, the bytes that must still cross memory, and
the time that follows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from lab.fusions.rates import NO_RATES, Rates
from lab.fusions.record import MOVES, Operator, Recorder, Use

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


class Group:
    """Operators that are one kernel, or would be: its bytes, time and launches when fused so far as
    the last level says."""

    def __init__(self, root: int, members: list[Operator]):
        self.root, self.members, self.segment = root, members, members[0].segment
        self.kind, self.phase = members[0].kind, members[0].phase
        self.names = [*{operator.call: operator.name for operator in members}.values()]
        self.reads: dict[Key, int] = {}  # bytes that come from memory
        self.keeps: dict[Key, int] = {}  # bytes that others need

    def now(self, what: str) -> float:
        """The sum of `moved`, `us` or `kernels` of its operators."""
        return sum(getattr(operator, what) for operator in self.members)

    def becomes(self, moved: int, us: float, launches: int) -> None:
        self.moved, self.us, self.launches = moved, us, launches


class Joiner:
    """Joins operators where that saves bytes and no group comes to wait for itself. Sets of
    operators are the bits of a number; a group has the number of its first operator."""

    def __init__(self, operators: Sequence[Operator]):
        self.operators = operators
        self.members = {i: [i] for i in range(len(operators))}
        self.root, self.mask = [*self.members], [1 << i for i in self.members]
        self.waits: list[set[int]] = []
        self.before = [0] * len(operators)  # what they wait for, and what that waits for
        self.writer: dict[Key, int] = {}
        self.readers: dict[Key, list[int]] = defaultdict(list)
        for i, operator in enumerate(operators):
            last = operators[i - 1] if i else operator
            operator.segment = last.segment + (last.barrier or last.phase != operator.phase)
            old = [use.old for use in operator.writes]
            wanted = [*(use.key for use in operator.reads), *old]
            earlier = {self.writer[key] for key in wanted if key in self.writer}
            earlier |= {reader for key in old for reader in self.readers[key]}  # of what was there
            self.waits.append(earlier)
            for j in earlier:
                self.before[i] |= self.before[j] | self.mask[j]
            for use in operator.reads:
                self.readers[use.key].append(i)
            self.writer |= {use.key: i for use in operator.writes}

    def between(self, a: int, b: int) -> bool:
        """Does one of these groups wait for something that waits for the other one?"""
        for first, last in ((a, b), (b, a)):
            direct = {self.root[j] for i in self.members[last] for j in self.waits[i]} - {a, b}
            if any(self.before[x] & self.mask[first] for x in direct):
                return True
        return False

    def waits_for(self, a: int, b: int) -> bool:
        """Does one of these groups wait for the other one?"""
        return bool(self.before[a] & self.mask[b] or self.before[b] & self.mask[a])

    def fits(self, a: int, b: int) -> bool:
        """Could these groups be one kernel?"""
        numbers = sorted(self.members[a] + self.members[b])
        both = [self.operators[i] for i in numbers]
        if len({o.segment for o in both}) > 1 or any(o.kind != "stream" for o in both):
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
        self.members[a] = sorted(self.members[a] + self.members.pop(b))
        for i in self.members[a]:
            self.root[i] = a
        self.mask[a] |= self.mask[b]
        self.before[a] = (self.before[a] | self.before[b]) & ~self.mask[a]
        for x in self.members:
            if self.before[x] & self.mask[a]:
                self.before[x] |= self.before[a] | self.mask[a]

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
        return [Group(root, [self.operators[i] for i in m]) for root, m in self.members.items()]


def covered(uses: Iterable[Use], size: int) -> int:
    """Bytes of a storage in these uses, each place once; what a gather takes, each time."""
    places = {(use.offset, use.bytes) for use in uses}
    taken = sum(count for offset, count in places if offset < 0)
    return taken + min(size, sum(count for offset, count in places if offset >= 0))


class Finding:
    """The groups of a step, and what each level of fusion would make of the whole: microseconds
    (None without rates), bytes, launches."""

    def __init__(
        self, recorded: Recorder, rates: Rates | None, levels: Iterable[str] = tuple(LEVELS)
    ):
        self.recorded, self.timed, self.rates = recorded, bool(rates), rates or NO_RATES
        operators = recorded.operators
        # what in-place operators have changed, and when
        self.gone = {use.old: o.call for o in operators for use in o.writes}
        same: dict[Key, Key] = {}
        first: dict[tuple, Key] = {}
        for o in operators:
            if o.us is None:
                o.us = self.rates.us(o.moved, o.flop) if o.kernels else 0.0
            # a second cast of the same is none when fused
            o.reads = [use._replace(key=same.get(use.key, use.key)) for use in o.reads]
            o.operands = [(same.get(key, key), *form) for key, *form in o.operands]
            if o.name in ("_to_copy", "clone") and o.writes and o.writes[0].key not in self.gone:
                what, key = (o.name, o.dtype, o.phase, *o.reads), o.writes[0].key
                same[key] = first.setdefault(what, key)
        self.joiner = Joiner(operators)
        self.groups = self.joiner.groups()
        self.maker: dict[Key, Group] = {}
        self.users: dict[Key, set[Group]] = defaultdict(set)
        for group in self.groups:
            self.memory_of(group)
        blind = recorded.unwritten or any(o.kind == "unknown" and not o.reads for o in operators)
        read = {use.key for o in operators for use in o.reads}
        for group in self.groups:
            group.keeps = {
                key: count
                for key, count in group.keeps.items()
                if self.needed_by(key) - {group} or (blind and key not in read)
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

    def memory_of(self, group: Group) -> None:
        """What a group reads from memory and what it makes. What is written in part is what was
        there before, and that part."""
        sizes, made, reads = self.recorded.sizes, {}, defaultdict(list)
        for operator in group.members:
            for use in operator.reads:
                if use.key not in made or covered(made[use.key], sizes[use.key[0]]) < use.bytes:
                    reads[use.key].append(use)
            for use in operator.writes:
                made[use.key] = [*made.get(use.key, made.get(use.old, ())), use]
                self.maker[use.key] = group
        group.reads = {key: covered(uses, sizes[key[0]]) for key, uses in reads.items()}
        group.keeps = {key: covered(uses, sizes[key[0]]) for key, uses in made.items()}
        for key in group.reads:
            self.users[key].add(group)

    def needed_by(self, key: Key) -> set[Group | None]:
        """The groups that read it, and None where it is there when the step is over."""
        return self.users[key] | ({None} if key in self.recorded.alive else set())

    def remake(self) -> None:
        """Let groups compute a tensor again from what lies in memory, where that moves fewer bytes
        than to write and read it: what compilers do with what the backward pass needs."""
        certain = self.recorded.alive | {(number, v - 1) for number, v in self.maker}  # in place
        certain |= {key for g in self.groups if g.kind != "stream" for key in (*g.reads, *g.keeps)}
        order = [(count, key, g) for g in self.groups for key, count in g.keeps.items()]
        for count, key, group in sorted(order, key=lambda item: item[:2], reverse=True):
            leaves, others = self.leaves(group, key), self.users[key] - {group}
            if key in certain or leaves is None or not others:
                continue
            last = max(g.members[-1].call for g in others)
            if any(self.gone.get(leaf, last) < last for leaf in leaves):
                continue  # something of it has changed in place by then
            # of a tensor of which a group takes a part, it computes that part
            extra = {
                g: {k: c * g.reads[key] // count for k, c in leaves.items() if k not in g.reads}
                for g in others
            }
            now = count + sum(g.reads[key] for g in others)
            if sum(sum(more.values()) for more in extra.values()) < now:
                del group.keeps[key]
                certain |= leaves.keys()
                for other in others:
                    del other.reads[key]
                    other.reads |= extra[other]
                    for leaf in leaves:
                        self.users[leaf].add(other)
                self.users[key] -= others

    def leaves(self, group: Group, key: Key) -> dict[Key, int] | None:
        """What of that which a group reads a tensor of it is computed from; None where it cannot be
        computed again."""
        found: dict[Key, int] = {}
        wanted = {key}
        for operator in reversed(group.members):
            if wanted & {use.key for use in operator.writes}:
                if operator.closed or operator.random:
                    return None
                wanted |= {use.key for use in operator.reads}
                for use in operator.reads:
                    found[use.key] = max(use.bytes, found.get(use.key, 0))
        return {k: count for k, count in found.items() if self.maker.get(k) is not group}

    # --- the levels

    def now(self) -> None:
        """As it is."""
        for group in self.groups:
            group.becomes(*(group.now(what) for what in ("moved", "us", "kernels")))

    def chains(self) -> None:
        """A group is one kernel, or two where sums are long: their last step is another one. Where
        others compute what they need of it, it is none."""
        for group in self.groups:
            if group.kind == "stream" and group.launches:
                moved = sum(group.reads.values()) + sum(group.keeps.values())
                launches = 1 + any(o.closed and o.sums for o in group.members)
                if not group.keeps:
                    moved = launches = 0
                group.becomes(moved, min(group.us, self.time(group, moved, launches)), launches)
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
        for group in self.groups:
            closed = any(o.reduced or o.closed or o.source for o in group.members)
            if closed or group.kind != "stream":
                continue
            read, kept, rest = sum(group.reads.values()), sum(group.keeps.values()), []
            for key, count in group.reads.items():
                product = self.maker.get(key, group)
                if product.kind == "matrix" and self.users[key] == {group}:
                    rest.append(read - count + max(0, kept - count))
            takers = self.users[next(iter(group.keeps))] if len(group.keeps) == 1 else ()
            if takers and all(taker.kind == "matrix" for taker in takers):
                rest.append(max(0, len(takers) * (read - kept)))
            us = min(rest, default=0) / self.rates.gb_per_s / 1e3
            if rest and min(rest) <= group.moved and us <= group.us:
                group.becomes(min(rest), us, 0)

    def attention(self) -> None:
        """Products with a softmax between them: one kernel reads queries, keys, values, and what is
        added, and writes the result; the backward pass computes the probabilities again."""
        softmax = [group for group in self.groups if SOFTMAX & {*group.names}]
        blocks = []
        for group in softmax:
            made = {key: count for key, count in group.reads.items() if key in self.maker}
            if not made:
                continue
            before = self.maker[max(made, key=made.get)]
            # in the backward pass the product of the probabilities, too
            own = {group} | {self.maker[key] for key in made} & {*softmax}
            behind = {user for g in own for key in g.keeps for user in self.users[key]} - own
            ahead = {g for g in behind if g.phase == group.phase}
            products = {g for g in ahead if not {*g.names} <= SUMS}  # the gradient of a bias is one
            if products and all(g.kind == "matrix" for g in {before} | products):
                blocks.append({group, before} | ahead)
        inside = set().union(*blocks)
        for block in blocks:
            flop = sum(o.flop for group in block for o in group.members)
            self.replace(block, self.needed(block, inside), flop / ATTENTION)

    def optimizer(self) -> None:
        """The optimizer with the casts of its weights and gradients: one kernel that reads and
        writes weights and moments once, and writes the copies."""
        own = {g for g in self.groups if g.phase == "optimizer" and g.kind == "library"}
        block = set(own)
        for group in self.groups if own else ():
            of_weights = {key[0] for key in group.reads} <= self.recorded.weights
            of_gradients = all(self.users[k] and self.users[k] <= own for k in group.keeps)
            if {*group.names} == {"_to_copy"} and (of_weights or of_gradients):
                block.add(group)
        if block:
            self.replace(block, self.needed(block, block))

    def needed(self, block: Iterable[Group], inside: set[Group]) -> int:
        """Bytes that one kernel in place of these groups moves, where what goes from one group to
        another `inside` lies in no memory."""
        reads: dict[Key, int] = {}
        kept = 0
        for group in block:
            reads |= {k: c for k, c in group.reads.items() if self.maker.get(k) not in inside}
            kept += sum(c for k, c in group.keeps.items() if self.needed_by(k) - inside)
        return sum(reads.values()) + kept

    def joined(self) -> None:
        """Products of one matrix, or whose results are added up, are one product. It takes as long
        as the longest of them, or as their bytes or FLOPs together."""
        flop: Counter = Counter()
        alike: dict[tuple, dict[Group, int]] = defaultdict(dict)  # products, what is moved once
        for group in self.groups:
            for o in group.members:
                flop[o.dtype] += o.flop
                for place, operand in enumerate(o.operands if group.launches else ()):
                    shared = next(use.bytes for use in o.reads if use.key == operand[0])
                    alike[o.dtype, group.segment, place, operand][group] = shared
                for product in self.summands(group, o):
                    result = product.members[0]
                    alike[result.dtype, product.segment, o.call][product] = result.writes[0].bytes
        usual = max(flop, key=flop.get, default="")  # rates are those of this type
        done: set[Group] = set()
        for (dtype, *_), products in sorted(alike.items(), key=lambda item: -len(item[1])):
            own: list[Group] = []
            for product in sorted(products.keys() - done, key=lambda group: group.root):
                if not any(self.joiner.waits_for(product.root, other.root) for other in own):
                    own.append(product)
            if len(own) > 1 and dtype == usual:
                done |= {*own}
                moved = sum(g.moved for g in own) - (len(own) - 1) * max(products.values())
                longest = max(group.us for group in own)
                self.replace(own, moved, sum(o.flop for g in own for o in g.members), longest)

    def summands(self, group: Group, operator: Operator) -> set[Group]:
        """Products whose results a group adds up in this operator, and nobody else reads."""
        found: set[Group] = set()
        for use in operator.reads if operator.name in SUMMED else ():
            maker = self.maker.get(use.key)
            if maker is group:
                writer = self.joiner.operators[self.joiner.writer[use.key]]
                found |= self.summands(group, writer)
            elif maker and maker.launches and self.users[use.key] == {group}:
                found |= {maker} if maker.members[0].operands else set()
        return found

    def replace(
        self, block: Iterable[Group], moved: int, flop: float = 0.0, longest: float = 0.0
    ) -> None:
        """One kernel in place of these groups, which takes no longer than they do."""
        first, *others = sorted(block, key=lambda group: group.root)
        us = max(self.rates.us(moved, flop), longest)
        first.becomes(moved, min(us, sum(group.us for group in (first, *others))), 1)
        for group in others:
            group.becomes(0, 0.0, 0)

    # --- in words

    def rows(self) -> list[dict]:
        """The chains by what they save, those of the same operators and lines together."""
        rows: dict[tuple, dict] = {}
        for group, (us, moved) in zip(self.groups, self.fused, strict=True):
            now = group.now("us")
            if group.kind != "stream" or (len(group.names) == 1 and us >= 0.9 * now):
                continue
            lines = places(operator.line for operator in group.members)
            sums = {
                "places": 1,
                "kernels": group.now("kernels"),
                "bytes_now": group.now("moved"),
                "bytes_fused": moved,
                "us_now": now,
                "us_fused": us,
            }
            names = {"chain": words(group.names), "pass": group.phase, "lines": lines}
            row = rows.setdefault((*group.names, *names.values()), names | dict.fromkeys(sums, 0))
            for key, value in sums.items():
                row[key] += value
        key = "us" if self.timed else "bytes"
        best = sorted(rows.values(), key=lambda row: row[f"{key}_fused"] - row[f"{key}_now"])
        return best if self.timed else [{**row, "us_now": None, "us_fused": None} for row in best]

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
                "us": sum(o.us for o in same) if self.timed else None,
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
