"""Operators joined to what one kernel could compute, the bytes that must still cross memory, and
the time that follows."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from fusion_lab.fusions.rates import NO_RATES, Rates
from fusion_lab.fusions.record import MOVES, WINDOWS, Operator, Recorded, Use

Key = tuple[int, int]
LEVELS = {
    "now": "the step now",
    "chains": "(a) chains of streaming operators, each as one kernel",
    "products": "(b) and those that a matrix product could take along",
    "attention": "(c) and attention as one kernel: product, softmax, product",
}
WHAT = ("us", "moved", "kernels")
SOFTMAX = {"_softmax", "_safe_softmax", "_softmax_backward_data"}
SUMS = {"sum", "_to_copy", "clone"}  # of the gradient of what attention adds
# A block holds a row of so many elements in its registers: 1,024 threads, four each. Sums over
# longer rows are complete when their kernel has ended.
LONGEST_ROW = 4096
# Along columns a block adds up so many, as its threads lie along the rows.
LONGEST_COLUMN = 64
MOST_OPERATORS = 64  # that inductor makes one kernel: its max_fusion_size
MOST_MOVES = 2  # times that an element goes elsewhere before it must lie in memory
FLASH = 0.5  # of the rate of a large product, which FlashAttention reaches
TURNS = re.compile("nchwToNhwc|nhwcToNchw|tensorTransform")  # cuDNN's kernels that turn a picture
BIAS = re.compile("elementwise_kernel")  # PyTorch's that adds the bias
FEW = 300  # operators to a convolution from which a compiler leaves layouts as they are


class Group:
    """Operators that are one kernel, or would be: its bytes, time and kernels when fused so far as
    the last level says."""

    def __init__(self, members: list[Operator], number: int, segment: int):
        self.members = members
        self.number = number
        self.segment = segment
        self.kind = members[0].kind
        self.phase = members[0].phase
        self.calls = {operator.call: operator.name for operator in members}
        self.names = [*self.calls.values()]
        self.reads: dict[Key, int] = {}  # bytes that come from memory
        self.keeps: dict[Key, int] = {}  # bytes that others need
        self.us, self.moved, self.kernels = (self.now(what) for what in WHAT)

    def now(self, what: str) -> float:
        """The sum of `us`, `moved` or `kernels` of its operators."""
        return sum(getattr(operator, what) for operator in self.members)

    def bytes(self) -> int:
        """What must cross memory."""
        return sum(self.reads.values()) + sum(self.keeps.values())


def cap(groups: Collection[Group], what: str, most: float) -> None:
    """Together these take no more than this: fusing makes nothing worse."""
    if sum(getattr(group, what) for group in groups) > most:
        for group in groups:
            setattr(group, what, 0)
        setattr(min(groups, key=lambda group: group.number), what, most)


class Joiner:
    """Joins operators where that saves bytes and no group comes to wait for itself. A group has the
    number of its first operator, and a place in an order in which none waits for a later one."""

    def __init__(self, operators: Sequence[Operator]):
        self.operators = operators
        count = range(len(operators))
        self.members = {i: [i] for i in count}
        self.root = [*count]
        self.place = [*count]
        self.segment = [0] * len(operators)
        self.ahead: list[set[int]] = [set() for _ in count]  # groups that wait for this one
        self.behind: list[set[int]] = [set() for _ in count]  # those that it waits for
        self.writer: dict[Key, int] = {}
        self.readers: dict[Key, list[int]] = defaultdict(list)
        for i, operator in enumerate(operators):
            last = operators[i - 1] if i else operator
            self.segment[i] = self.segment[i - 1] + (last.barrier or last.phase != operator.phase)
            old = [use.old for use in operator.writes]
            wanted = [*(use.key for use in operator.reads), *old]
            earlier = {self.writer[key] for key in wanted if key in self.writer}
            earlier |= {reader for key in old for reader in self.readers[key]}  # of what was there
            for j in earlier - {i}:
                self.ahead[j].add(i)
                self.behind[i].add(j)
            for use in operator.reads:
                self.readers[use.key].append(i)
            self.writer |= {use.key: i for use in operator.writes}

    def late(self, operator: Operator) -> bool:
        """Are its results complete only when its kernel has ended? Sums of an optimizer are, whose
        kernels have many weights."""
        _, length, columns = operator.sums or (0, 0, False)
        longest = LONGEST_COLUMN if columns else LONGEST_ROW
        return operator.closed or length > (1 if operator.phase == "optimizer" else longest)

    def between(self, block: Collection[int], edges: list[set[int]]) -> set[int] | None:
        """The groups that these edges lead to from a block, as far as its other end in the order;
        None if they lead back into it."""
        places = [self.place[i] for i in block]
        low = min(places)
        high = max(places)
        between: set[int] = set()
        todo = [x for i in block for x in edges[i] if x not in block]
        while todo:
            x = todo.pop()
            if x in block:
                return None
            if low < self.place[x] < high and x not in between:
                between.add(x)
                todo += edges[x]
        return between

    def merge(self, block: Collection[int]) -> bool:
        """Make these groups one, unless that would come to wait for itself."""
        behind = self.between(block, self.ahead)
        before = None
        if behind is not None:
            before = self.between(block, self.behind)
        if behind is None or before is None:
            return False
        order = [*sorted(before, key=self.place.__getitem__), min(block)]
        order += sorted(behind, key=self.place.__getitem__)
        free = sorted(self.place[i] for i in {*block, *behind, *before})
        keep, *others = sorted(block)
        for i in others:
            for edges, back in ((self.ahead, self.behind), (self.behind, self.ahead)):
                for x in edges[i]:
                    back[x].discard(i)
                    back[x].add(keep)
                edges[keep] |= edges[i]
            for member in self.members[i]:
                self.root[member] = keep
            self.members[keep] += self.members.pop(i)
        self.members[keep].sort()
        self.ahead[keep] -= {*block}
        self.behind[keep] -= {*block}
        for i, place in zip(order, free, strict=False):
            self.place[i] = place
        return True

    def fits(self, a: int, b: int) -> bool:
        """Could these groups be one kernel, whatever stands between them?"""
        if self.segment[a] != self.segment[b]:
            return False
        numbers = sorted(self.members[a] + self.members[b])
        both = [self.operators[i] for i in numbers]
        if len(both) > MOST_OPERATORS or any(o.kind != "stream" for o in both):
            return False
        late = [self.late(o) for o in both]
        sums = {o.sums for o, ends in zip(both, late, strict=True) if o.sums and not ends}
        rows = {each for each in sums if each[1] > 1}
        numel = max(o.numel for o in both)
        if len(rows) > 1 or any(row[0] != numel for row in rows):
            return False
        results: dict[Key, tuple[int, int, bool]] = {}  # how often it moved, its bytes, is it late
        for operator, ends in zip(both, late, strict=True):
            if ends and (operator.numel != numel or (operator.alone and operator.sums[2])):
                return False
            inside = [(use, *results[use.key]) for use in operator.reads if use.key in results]
            if any(too or use.key in operator.source for use, _, _, too in inside):
                return False
            moves = max((n + (0 < use.bytes < size) for use, n, size, _ in inside), default=0)
            moves += bool(inside and MOVES.fullmatch(operator.name))
            if moves > MOST_MOVES:
                return False
            results |= {use.key: (moves, use.bytes, ends) for use in operator.writes}
        return True

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
                self.merge((a, b))
        return [
            Group([self.operators[i] for i in numbers], root, self.segment[root])
            for root, numbers in self.members.items()
        ]


def covered(uses: Iterable[Use], size: int) -> int:
    """Bytes of a storage in these uses, each place once; what a gather takes, each time."""
    places = {(use.offset, use.bytes) for use in uses}
    taken = sum(count for offset, count in places if offset < 0)
    return taken + min(size, sum(count for offset, count in places if offset >= 0))


class Finding:
    """The groups of a step, and what each level of fusion would make of the whole: microseconds
    (None without rates), bytes, kernels. No level has more of these than the one before."""

    def __init__(self, recorded: Recorded, rates: Rates | None):
        self.recorded = recorded
        self.rates = rates or NO_RATES
        operators = [replace(operator) for operator in recorded.operators]
        # what in-place operators have changed, and when
        self.gone = {use.old: o.call for o in operators for use in o.writes}
        same: dict[Key, Key] = {}
        first: dict[tuple, Key] = {}
        for o in operators:
            if o.us is None:
                o.us = self.rates.of(o) if o.kernels and rates else 0.0
            else:
                o.us += o.queued * self.rates.gap_us
            # a second cast of the same is none when fused
            o.reads = [use._replace(key=same.get(use.key, use.key)) for use in o.reads]
            o.operands = [(same.get(key, key), *form) for key, *form in o.operands]
            if o.name in ("_to_copy", "clone") and o.writes and o.writes[0].key not in self.gone:
                size = o.writes[0].bytes
                what = (o.name, size, o.phase, *o.reads)
                key = o.writes[0].key
                same[key] = first.setdefault(what, key)
        # types of products that have no rate: there is no time of the whole
        self.without = {o.dtype for o in operators if math.isnan(o.us)}
        self.timed = bool(rates) and not self.without
        self.operators = operators
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
        self.clusters = self.passes_together()
        self.levels: dict[str, dict] = {}
        for level in LEVELS:
            if level != "now":
                getattr(self, level)()
            self.levels[level] = {
                "us": sum(group.us for group in self.groups) if self.timed else None,
                "bytes": sum(group.moved for group in self.groups),
                "kernels": sum(group.kernels for group in self.groups),
            }

    def passes_together(self) -> list[list[Group]]:
        """The groups by what they are now: those together that have passes of the same call."""
        of: dict[int, list[Group]] = {}
        for group in self.groups:
            cluster = [group]
            for old in {id(of[call]): of[call] for call in group.calls if call in of}.values():
                cluster += old
            of |= {call: cluster for each in cluster for call in each.calls}
        return [*{id(cluster): cluster for cluster in of.values()}.values()]

    def memory_of(self, group: Group) -> None:
        """What a group reads from memory and what it makes. What is written in part is what was
        there before, and that part."""
        sizes = self.recorded.sizes
        results = {}
        reads = defaultdict(list)
        for operator in group.members:
            for use in operator.reads:
                if (
                    use.key not in results
                    or covered(results[use.key], sizes[use.key[0]]) < use.bytes
                ):
                    reads[use.key].append(use)
            for use in operator.writes:
                results[use.key] = [*results.get(use.key, results.get(use.old, ())), use]
                self.maker[use.key] = group
        group.reads = {key: covered(uses, sizes[key[0]]) for key, uses in reads.items()}
        group.keeps = {key: covered(uses, sizes[key[0]]) for key, uses in results.items()}
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
        # each place of a window would compute it once more
        certain |= {key for o in self.operators if WINDOWS.fullmatch(o.name) for key in o.source}
        self.again: list[Operator] = []  # gathers that are
        order = [(count, key, g) for g in self.groups for key, count in g.keeps.items()]
        for count, key, group in sorted(order, key=lambda item: item[:2], reverse=True):
            leaves = self.leaves(group, key)
            others = self.users[key] - {group}
            if key in certain or leaves is None or not others:
                continue
            last = max(g.members[-1].call for g in others)
            if any(self.gone.get(leaf, last) < last for leaf in leaves):
                continue  # something of it has changed in place by then
            # of a tensor of which a group takes a part, it computes that part
            extra = {g: {k: c * g.reads[key] // count for k, c in leaves.items()} for g in others}
            more = sum(max(0, c - g.reads.get(k, 0)) for g in others for k, c in extra[g].items())
            if more < count + sum(g.reads[key] for g in others):
                del group.keeps[key]
                self.again += [o for o in group.members if o.source][:1]
                certain |= leaves.keys()
                for other in others:
                    del other.reads[key]
                    for leaf, wanted in extra[other].items():
                        other.reads[leaf] = max(wanted, other.reads.get(leaf, 0))
                    for leaf in leaves:
                        self.users[leaf].add(other)
                self.users[key] -= others

    def leaves(self, group: Group, key: Key) -> dict[Key, int] | None:
        """What of that which a group reads a tensor of it is computed from; None where it cannot be
        computed again."""
        leaves: dict[Key, int] = {}
        wanted = {key}
        for operator in reversed(group.members):
            if wanted & {use.key for use in operator.writes}:
                if self.joiner.late(operator) or operator.random:
                    return None
                wanted |= {use.key for use in operator.reads}
                for use in operator.reads:
                    leaves[use.key] = max(use.bytes, leaves.get(use.key, 0))
        return {k: count for k, count in leaves.items() if self.maker.get(k) is not group}

    # --- the levels

    def fuse(self, cluster: list[Group]) -> None:
        """A group is one kernel, or two where it adds up long columns: blocks have a part of each.
        Where others compute what they need of it, it is none."""
        now = {what: sum(group.now(what) for group in cluster) for what in WHAT}
        for group in cluster:
            sums = any(o.sums and o.sums[2] and self.joiner.late(o) for o in group.members)
            group.kernels = 1 + sums if group.keeps else 0
            group.moved = group.bytes() if group.keeps else 0
            group.us = (self.rates.us(group.moved) if group.keeps else 0) + self.rates.us(0) * sums
        for what, most in now.items():
            cap(cluster, what, most)

    def chains(self) -> None:
        """The kernel of each group of streaming operators moves its bytes as fast as a copy."""
        for cluster in self.clusters:
            if cluster[0].kind == "stream" and cluster[0].phase != "optimizer":
                self.fuse(cluster)
        self.fused = [
            {what: sum(getattr(group, what) for group in cluster) for what in WHAT}
            for cluster in self.clusters
        ]

    def products(self) -> None:
        """A group without sums that the product before it could finish with, or those behind it
        begin with, is no kernel any more: it costs what it moves beyond what these move anyway."""
        for group in self.groups:
            closed = any(o.sums or o.closed or o.source for o in group.members)
            if closed or group.kind != "stream" or group.phase == "optimizer":
                continue
            read = sum(group.reads.values())
            kept = sum(group.keeps.values())
            rest = []
            for key, count in group.reads.items():
                product = self.maker.get(key, group)
                if product.kind == "matrix" and self.users[key] == {group}:
                    rest.append(read - count + max(0, kept - count))
            takers = self.users[next(iter(group.keeps))] if len(group.keeps) == 1 else ()
            if takers and all(taker.kind == "matrix" for taker in takers):
                rest.append(max(0, len(takers) * (read - kept)))
            us = min(rest, default=0) / self.rates.gb_per_s / 1e3
            if rest and min(rest) <= group.moved and us <= group.us:
                group.moved = min(rest)
                group.us = us
                group.kernels = 0

    def blocks(self) -> list[set[Group]]:
        """Attention that is written out: a softmax with the products around it."""
        softmax = [group for group in self.groups if SOFTMAX & {*group.names}]
        blocks = []
        for group in softmax:
            inner = {key: count for key, count in group.reads.items() if key in self.maker}
            if not inner:
                continue
            before = self.maker[max(inner, key=inner.get)]
            # in the backward pass the product of the probabilities, too
            own = {group} | {self.maker[key] for key in inner} & {*softmax}
            behind = {user for g in own for key in g.keeps for user in self.users[key]} - own
            ahead = {g for g in behind if g.phase == group.phase}
            products = {g for g in ahead if not {*g.names} <= SUMS}  # the gradient of a bias is one
            if products and all(g.kind == "matrix" for g in {before} | products):
                blocks.append({group, before} | ahead)
        return blocks

    def attention(self) -> None:
        """One kernel reads queries, keys, values, and what is added, and writes the result; the
        backward pass computes the probabilities again."""
        self.written_out = [block for block in self.blocks() if self.merge(block)]
        inside = set().union(*self.written_out)
        for block in self.written_out:
            flop = sum(o.flop for group in block for o in group.members)
            (dtype,) = {o.dtype for group in block for o in group.members if o.flop} or {""}
            moved = self.needed(block, inside)
            self.replace(block, moved, self.rates.us(moved, flop / FLASH, dtype))

    def needed(self, block: Iterable[Group], inside: set[Group]) -> int:
        """Bytes that one kernel in place of these groups moves, where what goes from one group to
        another `inside` lies in no memory."""
        reads: dict[Key, int] = {}
        kept = 0
        for group in block:
            reads |= {k: c for k, c in group.reads.items() if self.maker.get(k) not in inside}
            kept += sum(c for k, c in group.keeps.items() if self.needed_by(k) - inside)
        return sum(reads.values()) + kept

    def merge(self, block: Iterable[Group]) -> bool:
        """Make these one, unless something stands between them."""
        return self.joiner.merge({self.joiner.root[group.number] for group in block})

    def replace(self, block: Iterable[Group], moved: int, us: float) -> None:
        """One kernel in place of these groups, which takes no longer than they do."""
        first, *_ = block = sorted(block, key=lambda group: group.number)
        most = {what: sum(getattr(group, what) for group in block) for what in WHAT}
        for group in block:
            group.moved = group.us = group.kernels = 0
        first.moved = min(moved, most["moved"])
        first.kernels = min(1, most["kernels"])
        first.us = most["us"] if math.isnan(us) else min(us, most["us"])

    # --- in words

    def rows(self) -> list[dict]:
        """The chains by what they save, those of the same operators and lines together."""
        rows: dict[tuple, dict] = {}
        for cluster, fused in zip(self.clusters, self.fused, strict=True):
            members = [operator for group in cluster for operator in group.members]
            now = {what: sum(getattr(o, what) for o in members) for what in WHAT}
            if cluster[0].kind != "stream" or now == fused:
                continue
            members.sort(key=lambda operator: operator.call)
            called = [*{operator.call: operator.name for operator in members}.values()]
            lines = places(operator.line for operator in members)
            names = {"chain": words(called), "pass": cluster[0].phase, "lines": lines}
            sums = {"places": 1}
            for what, title in (("kernels", "kernels"), ("moved", "bytes"), ("us", "us")):
                sums |= {f"{title}_now": now[what], f"{title}_fused": fused[what]}
            row = rows.setdefault((*called, *names.values()), names | dict.fromkeys(sums, 0))
            for key, value in sums.items():
                row[key] += value
        timed = self.rates is not NO_RATES
        key = "us" if timed else "bytes"
        best = sorted(rows.values(), key=lambda row: row[f"{key}_fused"] - row[f"{key}_now"])
        return best if timed else [{**row, "us_now": None, "us_fused": None} for row in best]

    def otherwise_us(self) -> float | None:
        """What products take less in a compiled step: convolutions, but for what turns the pictures
        that the step was given, and biases that no chain behind can add; and matrices that are
        padded."""
        if not self.timed:
            return None
        saved = sum(o.biased for o in self.operators if o.biased and self.streams_on(o))
        for o in self.operators:
            if copied := padding(o):
                saved += max(
                    0.0, o.us - self.rates.us(o.moved, o.flop, o.dtype) - self.rates.us(copied)
                )
        for o in laid_out(self.operators):
            saved += o.turned
            if o.turned and o.name == "convolution" and o.operands[0][0] not in self.maker:
                saved -= self.rates.us(
                    2 * next(u.bytes for u in o.reads if u.key == o.operands[0][0])
                )
        return saved

    def compiled_us(self) -> float:
        """The time of a step whose chains are kernels, and products as a compiler has them."""
        return self.levels["chains"]["us"] - self.otherwise_us()

    def streams_on(self, operator: Operator) -> bool:
        """Does a chain read what an operator makes, element by element?"""
        key = operator.writes[0].key
        return any(
            user.kind == "stream" and key not in o.source
            for user in self.users[key]
            for o in user.members
            if any(use.key == key for use in o.reads)
        )

    def untouched_us(self) -> float | None:
        """The time of what no chain has."""
        left = (o.us for o in self.operators if o.kind != "stream" or o.phase == "optimizer")
        return sum(left) if self.timed else None

    def unknown(self) -> list[dict]:
        """Operators that keep their time because nobody knows what they do, and kernels unseen;
        also those of which something is missing in the totals."""
        unknown = defaultdict(list)
        for operator in self.operators:
            if operator.kind == "unknown" or operator.lacks:
                unknown[operator.name].append(operator)
        return [
            {
                "operator": name,
                "calls": len(same),
                "lines": places(o.line for o in same),
                "us": sum(o.us for o in same) if self.timed else None,
                "lacks": same[0].lacks,
            }
            for name, same in unknown.items()
        ]

    def remarks(self) -> list[str]:
        """Why a compiled step can be another than predicted, where that is known before."""
        layout = laid_out(self.operators)
        padded = [o for o in self.operators if padding(o)]
        softmax = [g.members[0] for g in self.written_out for g in g if SOFTMAX & {*g.names}]
        recurrent = [o for o in self.operators if "rnn" in o.name and o.phase == "forward"]
        grown = [o for o in self.operators if re.fullmatch(r"upsample_bi.*_backward", o.name)]
        apart = {o.call: o for o in self.operators if o.apart}.values()
        meet = [o for o in self.operators if o.meets and o.kind == "stream"]
        dense = [
            max(g.members, key=lambda o: o.numel)
            for g in self.groups
            if g.kind == "stream" and g.keeps and g.bytes() < max(o.numel for o in g.members)
        ]
        reasons = [
            (layout, "convolutions are not channels_last: a compiler changes that"),
            (padded, "products have rows of an odd number of elements: a compiler pads them"),
            (softmax, "times attention is written out: a compiler may put a kernel there, see (c)"),
            (self.again, "gathers are taken again by several kernels, maybe slower than a copy"),
            (dense, "chains compute more elements than they move bytes: slower than a copy"),
            (grown, "gradients of an interpolation: a compiler adds them up at indices, slower"),
            (apart, "norms add up what lies apart in memory: a compiler's are slower than a copy"),
            (meet, "sums at indices, many to a place: a compiler's are atomic, slower than a copy"),
            (recurrent, "recurrent layers: torch.compile leaves the function that calls one as it"
             " is, unless torch._dynamo.config.allow_rnn"),
        ]  # fmt: skip
        remarks = [
            f"{len(o)} {what} ({places(each.line for each in o)})" for o, what in reasons if o
        ]
        return remarks + self.recorded.remarks


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
    lines_by_file = (f"{f}:{','.join(map(str, sorted(n)))}" for f, n in by_file.items() if n)
    return " ".join(lines_by_file) or "?"


# What torch.compile changes of products beside fusing: pictures have their channels last, so that
# no kernel turns them, the bias of a convolution is added by the kernel behind, and matrices are
# padded whose rows begin at any element.


def gone(operator: Operator, kernel: str) -> str:
    """The part of a convolution in a compiled step that one of its kernels is not: turned, biased,
    or none."""
    if "convolution" not in operator.name:
        return ""
    if TURNS.search(kernel):
        return "turned"
    return "biased" if operator.name == "convolution" and BIAS.search(kernel) else ""


def laid_out(operators: Sequence[Operator]) -> list[Operator]:
    """The convolutions of pictures of which a compiler changes the layout, see `decide_layout_opt`
    in torch/_inductor/graph.py."""
    convolutions = [o for o in operators if "convolution" in o.name and len(o.operands[0][1]) == 4]
    weights = [o.operands[1][1] for o in convolutions]
    grouped = any(o.groups > 1 and o.operands[1][1][1] > 1 for o in convolutions)
    shrinks = any(2 * w[0] <= w[1] and w[2] > 1 for w in weights)
    small = all(w[0] <= 64 and w[1] <= 64 for w in weights)
    training = any(o.phase == "backward" for o in operators)
    few = len(operators) >= FEW * len(convolutions)
    if grouped or few or (training and (shrinks or small)):
        return []
    return [o for o in convolutions if o.operands[0][2][1:2] != (1,)]  # that is channels_last


def padding(operator: Operator) -> int:
    """Bytes of those operands of a product of matrices that a compiler copies into longer rows: to
    read and to write them. Whether padding pays it measures; where rows begin at two bytes it does,
    as asynchronous copies need four."""
    if operator.name not in ("mm", "addmm") or operator.dtype not in ("bf16", "fp16"):
        return 0
    odd = (shape for _, shape, strides in operator.operands if any(s % 2 for s in strides if s > 1))
    return sum(2 * 2 * math.prod(shape) for shape in odd)
