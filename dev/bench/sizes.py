"""Sizes, precisions and modes in which versions are measured, by the names that results have."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import NamedTuple

from fusion_lab.turns import GRAPH, graph_of

VERSIONS = ("V1", "V2", "V3")
ALL_VERSIONS = (*VERSIONS, "V4")


def script_of(model: str, version: str) -> str:
    return f"{model}_{version.lower()}"


class Shape(NamedTuple):
    model: str
    argv: list[str]


def sized(model: str, argv: str = "") -> Shape:
    """The sizes that this command line gives a model."""
    return Shape(f"tiny_{model}", argv.split())


MEDIUM = "--hidden-dim 1024 --num-layers 12 --num-heads 16 --seq-len 512 --batch-size 16"
CROP = "--batch-size 1 --num-blocks 1 --num-seqs 128 --seq-len 256 --msa-dim 256 --num-heads-msa 8"
ODD = "--num-blocks 2 --batch-size 2 --num-seqs 37 --seq-len 173 --msa-dim 128"
TRUNK = CROP.replace("--num-blocks 1", "--num-blocks 48")
SHAPES = {  # of the headline table
    "tiny_llama, small": sized("llama", "--seq-len 128"),
    "tiny_llama, medium": sized("llama", MEDIUM),
    "tiny_openfold, default": sized("openfold"),
    "tiny_openfold, crop": sized("openfold", CROP),
}
PRECISIONS = {"fp32": [], "TF32": ["--matmul-precision", "high"], "bf16": ["--use-amp"]}
COMPILE = ["--enable-torch-compile"]
MODES = {  # the best mode of torch.compile is that with graphs of its own
    "eager": [],
    "graph": [GRAPH],
    "compiled": [*COMPILE, "--torch-compile-mode", "reduce-overhead"],
    "compiled graph": [*COMPILE, GRAPH],
}


def in_sizes(
    precisions: Iterable[str] = ("bf16",), model: str = "", shapes: Mapping[str, Shape] = SHAPES
) -> Iterator[tuple[dict, str, list[str]]]:
    """What names each size and precision, of this model only if one is given; the model, and its
    arguments as a graph."""
    for (shape, (of_model, sizes)), precision in product(shapes.items(), precisions):
        if model in ("", of_model):
            names = {"shape": shape, "precision": precision}
            yield names, of_model, graph_of([*sizes, *PRECISIONS[precision]])
