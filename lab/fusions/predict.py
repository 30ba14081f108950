"""What each step of fusion would save: chains, products with what surrounds them, attention, the
optimizer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lab.fusions.groups import Group, Joiner, Key, groups_of
from lab.fusions.rates import Rates
from lab.fusions.record import Operator
from lab.fusions.step import Recorded

LEVELS = {
    "chains": "(a) chains of streaming operators, each as one kernel",
    "products": "(b) and those that a matrix product could take along",
    "attention": "(c) and attention as one kernel: product, softmax, product",
    "optimizer": "(d) and the optimizer with the casts of weights as one",
}


@dataclass
class Level:
    """A step of the whole with so much fused: microseconds if known, bytes and launches."""

    us: float | None
    bytes: int
    launches: int


@dataclass
class Finding:
    """The groups of a step, what each one takes now and fused, and what each step of fusion gives."""

    recorded: Recorded
    groups: list[Group]
    joiner: Joiner
    rates: Rates | None
    fused_us: list[float | None] = field(default_factory=list)
    levels: dict[str, Level] = field(default_factory=dict)

    @property
    def kept_us(self) -> float:
        """Time that no fusion of chains touches: products, libraries, what nobody understands."""
        return sum(group.now_us for group in self.groups if group.kind != "stream")


def find(recorded: Recorded, rates: Rates | None) -> Finding:
    """All of it for a recorded step; without rates there are bytes and launches, and no time."""
    for operator in recorded.operators:
        if operator.us is None and rates:
            operator.us = estimate(operator, rates)
    groups, joiner = groups_of(recorded.operators, recorded.sizes, recorded.alive)
    found = Finding(recorded, groups, joiner, rates)
    found.fused_us = [rates and fused_us(group, rates) for group in groups]
    now = [rates and group.now_us for group in groups]
    found.levels["now"] = level(now, [g.now_bytes for g in groups], [g.launches for g in groups])
    us, moved = list(found.fused_us), [group.fused_bytes for group in groups]
    launches = [min(1, g.launches) if g.kind == "stream" else g.launches for g in groups]
    found.levels["chains"] = level(us, moved, launches)
    steps = {"products": products, "attention": attention, "optimizer": optimizer}
    for name, step in steps.items():
        for number, (bytes_then, us_then, launches_then) in step(found).items():
            better = bytes_then < moved[number] if rates is None else us_then < us[number]
            if better or name != "products":
                moved[number], us[number], launches[number] = bytes_then, us_then, launches_then
        found.levels[name] = level(us, moved, launches)
    return found


def level(us: Sequence[float | None], moved: Iterable[int], launches: Iterable[int]) -> Level:
    return Level(None if None in us else sum(us), sum(moved), sum(launches))


def estimate(operator: Operator, rates: Rates) -> float:
    """The time of an operator that was not measured."""
    moved = sum(use.bytes for use in (*operator.reads, *operator.writes))
    if operator.kernels == 0:  # a second pass, within the same launch
        return rates.us(moved, launch=False)
    return max(rates.us(moved), operator.flop / rates.gemm_tflops / 1e6)


def fused_us(group: Group, rates: Rates) -> float:
    """The time of a group as one kernel: that of a copy which moves as many bytes."""
    if group.kind != "stream" or not group.launches:
        return group.now_us
    return min(group.now_us, rates.us(group.fused_bytes))


def neighbours(groups: Sequence[Group]) -> tuple[dict[Key, int], dict[Key, set[int]]]:
    """Which group makes a tensor, and which ones read it."""
    maker, users = {}, defaultdict(set)
    for number, group in enumerate(groups):
        for operator in group.members:
            maker |= {use.key: number for use in operator.writes}
        for key in group.reads:
            users[key].add(number)
    return maker, users


def products(found: Finding) -> dict[int, tuple[int, float, int]]:
    """Groups that the product before them could finish with, or the products behind them begin
    with: what they move beyond what the product moves anyway."""
    maker, users = neighbours(found.groups)
    result = {}
    for number, group in enumerate(found.groups):
        if group.kind != "stream" or not group.pointwise:
            continue
        reads, keeps, best = group.reads, group.keeps, None
        for key, count in reads.items():
            product = maker.get(key, number)
            alone = users[key] == {number} and found.groups[product].kind == "matrix"
            if alone and not found.joiner.between(group.root, found.groups[product].root):
                rest = sum(reads.values()) - count + max(0, sum(keeps.values()) - count)
                best = rest if best is None else min(best, rest)
        takers = [users[key] for key in keeps]
        if len(takers) == 1 and all(found.groups[n].kind == "matrix" for n in takers[0]):
            (written,) = keeps.values()
            rest = max(0, len(takers[0]) * (sum(reads.values()) - written))
            best = rest if best is None else min(best, rest)
        if best is not None:
            us = found.rates and found.rates.us(best, launch=False)
            result[number] = best, us, 0
    return result


def attention(found: Finding) -> dict[int, tuple[int, float, int]]:
    """Products with a softmax between them: as one kernel they read queries, keys, values and what
    is added, write the result, and in the backward pass compute the probabilities again."""
    groups, (maker, users) = found.groups, neighbours(found.groups)
    blocks: list[set[int]] = []

    def matrix(numbers: Iterable[int]) -> set[int]:
        return {n for n in numbers if groups[n].kind == "matrix"}

    def around(number: int) -> tuple[set[int], set[int]]:
        most = max(groups[number].reads.items(), key=lambda e: e[1] * (e[0] in maker), default=None)
        before = matrix({maker[most[0]]} if most and most[0] in maker else ())
        behind = matrix(n for key in groups[number].keeps for n in users[key])
        return before, behind

    forward: dict[int, set[int]] = {}
    for number, group in enumerate(groups):
        names = {operator.name for operator in group.members}
        if names & {"_softmax", "_safe_softmax"}:
            before, behind = around(number)
            same = {n for n in behind if groups[n].members[0].phase == group.members[0].phase}
            if before and same:
                blocks.append({number} | before | same)
                forward[number] = behind - same
    for number, group in enumerate(groups):
        if any(operator.name == "_softmax_backward_data" for operator in group.members):
            before, behind = around(number)
            made = {maker.get(key) for key in group.reads}
            values = set().union(*(rest for n, rest in forward.items() if n in made))
            if before and behind:
                blocks.append({number} | before | behind | values)
    inside = set().union(*blocks)
    result = {}
    for block in blocks:
        made = {use.key for n in block for o in groups[n].members for use in o.writes}
        reads = {k: c for n in block for k, c in groups[n].reads.items() if k not in made}
        reads = {
            k: c
            for k, c in reads.items()
            if maker.get(k) not in inside or small(k, c, groups, maker)
        }
        keeps = {
            use.key: use.bytes
            for n in block
            for o in groups[n].members
            for use in o.writes
            if users[use.key] - inside or use.key in found.recorded.alive
        }
        moved = sum(reads.values()) + sum(keeps.values())
        flop = sum(o.flop for n in block for o in groups[n].members)
        first, *rest = sorted(block)
        backward = groups[first].members[0].phase == "backward"
        us = None
        if found.rates:
            rate = found.rates.attention_tflops[backward]
            again = 1.25 if backward else 1.0  # the scores are computed again
            us = max(found.rates.us(moved), again * flop / rate / 1e6)
            us = min(us, sum(found.fused_us[n] for n in block))
        result |= {first: (moved, us, 1)} | dict.fromkeys(rest, (0, us and 0.0, 0))
    return result


def small(key: Key, count: int, groups: Sequence[Group], maker: dict[Key, int]) -> bool:
    """Is this a result, not the probabilities or the scores."""
    return groups[maker[key]].kind == "matrix" and all(
        count <= use.bytes for o in groups[maker[key]].members for use in o.reads
    )


def optimizer(found: Finding) -> dict[int, tuple[int, float, int]]:
    """The optimizer with the casts of its weights and gradients: one kernel that reads and writes
    weights and moments once, and writes the copies."""
    groups, (_, users) = found.groups, neighbours(found.groups)
    own = [n for n, group in enumerate(groups) if group.members[0].phase == "optimizer"]
    if not own:
        return {}
    moved, taken = sum(groups[n].now_bytes for n in own), []
    for number, group in enumerate(groups):
        if group.kind != "stream" or {o.name for o in group.members} - {"_to_copy"}:
            continue
        read, kept = sum(group.reads.values()), sum(group.keeps.values())
        if {key[0] for key in group.reads} <= found.recorded.weights:
            moved += kept
            taken.append(number)
        elif all(users[key] and users[key] <= set(own) for key in group.keeps):
            moved += read - kept
            taken.append(number)
    launches = dict.fromkeys(own + taken, (0, found.rates and 0.0, 0))
    us = found.rates and min(found.rates.us(moved), sum(found.fused_us[n] for n in launches))
    return launches | {own[0]: (moved, us, 1)}


# --- chains in words


def words(names: Iterable[str]) -> str:
    """Operators as a reader knows them, in their order, those that come again with a number."""
    count = Counter(map(plain, names))
    return ", ".join(f"{name} x{n}" if n > 1 else name for name, n in count.items())


def plain(name: str) -> str:
    """An operator's name without what only PyTorch's inside needs."""
    name = name.strip("_").removeprefix("native_").replace("to_copy", "cast")
    return name.replace("_backward_data", "_backward").replace("clone", "copy")


def places(lines: Iterable[str]) -> str:
    """Lines of files, `model.py:12,14`."""
    by_file: dict[str, set[int]] = defaultdict(set)
    for line in lines:
        file, _, number = line.rpartition(":")
        if number.isdigit():
            by_file[file].add(int(number))
    found = [f"{f}:{','.join(map(str, sorted(n)))}" for f, n in by_file.items()]
    return " ".join(found) or "?"


def chains(found: Finding) -> list[dict]:
    """The groups that fusion changes, those of the same operators and lines together, by time saved
    or else bytes saved."""
    rows: dict[tuple, dict] = {}
    for group, us in zip(found.groups, found.fused_us, strict=True):
        names = tuple(operator.name for operator in group.members)
        now, then = group.now_us, us
        if group.kind != "stream" or not group.launches:
            continue
        if len(names) == 1 and (us is None or us > 0.9 * now):
            continue
        line = places(operator.line for operator in group.members)
        row = rows.setdefault(
            (names, group.members[0].phase, line),
            {
                "chain": words(names),
                "operators": list(map(plain, names)),
                "phase": group.members[0].phase,
                "lines": line,
                "places": 0,
                **dict.fromkeys(("launches_now", "bytes_now", "bytes_fused"), 0),
                **dict.fromkeys(("us_now", "us_fused"), None if us is None else 0.0),
            },
        )
        row["places"] += 1
        row["launches_now"] += group.launches
        row["bytes_now"] += group.now_bytes
        row["bytes_fused"] += group.fused_bytes
        if us is not None:
            row["us_now"] += now
            row["us_fused"] += then
    key = "us" if found.rates else "bytes"
    return sorted(rows.values(), key=lambda row: row[f"{key}_fused"] - row[f"{key}_now"])


def not_understood(found: Finding) -> list[dict]:
    """Operators that keep their time because nobody knows what they do, and kernels unseen."""
    rows: dict[str, dict] = {}
    for operator in found.recorded.operators:
        if operator.kind == "unknown":
            row = rows.setdefault(
                operator.name, {"operator": operator.name, "calls": 0, "us": None}
            )
            row["calls"] += 1
            row["lines"] = operator.line
            if operator.us is not None:
                row["us"] = (row["us"] or 0.0) + operator.us
    return list(rows.values())
