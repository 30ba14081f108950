"""Sizes that nobody tuned for: widths, lengths, precisions and flags at random, by a seed.

A case is --verify-accuracy of a version, in this process; it passes, or is refused in one line. On
a CPU a few narrow ones; on a GPU, `pytest -m slow tests/test_random_sizes.py`, many of all widths.
"""

import random

import pytest
import torch
from conftest import captured, load, words

GPU = torch.cuda.is_available()
CASES = range(300 if GPU else 6)
WIDTHS = {  # by model: the narrowest first, the widest last; heads have 4 to 128 channels
    "tiny_openfold": (
        "--msa-dim 16 --num-heads-msa 2 --pair-dim 16 --num-heads-pair 4",
        "--msa-dim 16 --num-heads-msa 2 --pair-dim 64 --num-heads-pair 8",
        "--msa-dim 96 --num-heads-msa 4 --pair-dim 96 --num-heads-pair 3",
        "--msa-dim 128 --num-heads-msa 1 --pair-dim 128 --num-heads-pair 1",
        "--msa-dim 24 --num-heads-msa 2 --pair-dim 192 --num-heads-pair 6",
        "--msa-dim 512 --num-heads-msa 8 --pair-dim 32 --num-heads-pair 2",
        "--msa-dim 1024 --num-heads-msa 16 --pair-dim 64 --num-heads-pair 4",
        "--msa-dim 256 --num-heads-msa 8 --pair-dim 512 --num-heads-pair 8",
    ),
    "tiny_llama": (
        "--hidden-dim 64 --num-heads 4 --vocab-size 100",
        "--hidden-dim 96 --num-heads 6 --num-kv-heads 1 --vocab-size 257",
        "--hidden-dim 192 --num-heads 3 --num-kv-heads 3 --vocab-size 1001 --intermediate-dim 500",
        "--hidden-dim 480 --num-heads 5 --num-kv-heads 1 --vocab-size 1003 --intermediate-dim 1001",
        "--hidden-dim 512 --num-heads 2 --vocab-size 4099",
        "--hidden-dim 768 --num-heads 12 --num-kv-heads 4 --vocab-size 8191",
    ),
}
PRECISIONS = ("", "--matmul-precision high", "--use-amp", "--use-amp --amp-dtype float16")


def flags_of(chance: random.Random, script: str) -> str:
    """Return fusions as they are by default, or some of them on or off."""
    names = [flag for flag, _, _ in load(script).FUSIONS]
    some = chance.sample(names, chance.randint(1, 2))
    off = " ".join(f"--disable-{name}" for name in some)
    on = " ".join(f"--enable-{name}" for name in some)
    return chance.choice(["", "", off, f"--disable-all-fusion {on}"])


def sizes_of(chance: random.Random, model: str) -> str:
    """Return widths with a length, a depth and a batch; on a CPU all are tiny."""
    widths = chance.choice(WIDTHS[model] if GPU else WIDTHS[model][:1])
    length = chance.choice((4, 5, 16, 33, 37, 64, 65, 100)[: None if GPU else 2])
    depth, batch = (chance.randint(1, 3 if GPU else 1) for _ in range(2))
    if model == "tiny_llama":
        return f"{widths} --seq-len {length} --num-layers {depth} --batch-size {batch}"
    sequences = chance.choice((1, 2, 3, 8, 16, 33)[: None if GPU else 3])
    more = chance.choice(["", "", "--checkpoint-blocks"])
    shape = f"--seq-len {length} --num-seqs {sequences} --num-blocks {depth} --batch-size {batch}"
    return f"{widths} {shape} {more}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", CASES)
def test_at_any_size_a_version_is_right_or_refuses_in_one_line(seed: int, capsys):
    chance = random.Random(seed)
    model = chance.choice(list(WIDTHS))
    script = f"{model}_{chance.choice(('v2', 'v3', 'v4', 'v4'))}"
    argv = f"{sizes_of(chance, model)} {flags_of(chance, script)} {chance.choice(PRECISIONS)}"
    status, output, errors = captured(load(script).main, words(f"{argv} --verify-accuracy"))
    lines = [line for line in errors.splitlines() if f"{script}.py: error: " in line]
    refused = status in (2, 3, 4) and len(lines) == 1
    assert refused or (status == 0 and "Accuracy check: PASS" in output), f"{script} {argv}"
