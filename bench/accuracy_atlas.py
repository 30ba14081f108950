#!/usr/bin/env python3
"""How exact every version is: outputs, loss and every gradient against V1 in float64, on the same
device.

Whole models (V1 to V4, V2 compiled, Llama with Liger's kernels) and parts (triangle multiplication
and attention, also of cuEquivariance; V2's attention is PyTorch's SDPA), in float32, TF32 and
bfloat16. Cases: "plain" input; an "outlier" channel that stands above the others everywhere; "large
logits", from weights of queries and keys four times as large; "odd" sizes, in bfloat16 only, as is
what is compiled.

An error is the norm of the difference from float64 over the norm of what is exact: of an output,
the loss, the gradient of a parameter, and of each of its rows and columns. Some are mathematically
near zero, and rounding alone changes them by their size. There the norm is replaced by a floor,
which is measured: ten times V1's error in the same precision, for rows and columns the root mean
square of their errors in this parameter. Below it V1 has less than one digit right, and what errs
as much as V1 does has an error of 0.1. The last column of the table has the parameter in which one
of our versions is furthest above V1: its worst row or column over V1's.

Equal bits: are loss and gradients of so many --runs, of plain input in the last of the
--precisions, all the same? What is not installed is left out, and said so.

Examples:
  python bench/accuracy_atlas.py --output results/h100/accuracy.json
  python bench/accuracy_atlas.py --table results/h100/accuracy.json   the table again
  python bench/accuracy_atlas.py --device cpu --subjects "triangle attention" --sizes 13 \\
      --output accuracy.json
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn

from bench.sizes import ALL_VERSIONS, PRECISIONS, script_of
from lab.accuracy import GRADIENT, relative_error, values_of
from lab.cli import Parser, ToolError, at_least, documented_parser, print_notes, program
from lab.records import Record, Row
from lab.script import load_script
from lab.show import Column, render
from lab.study import Part, measure_study, read_study
from lab.turns import make_trainer

PROG = Path(__file__).name
SIZES = {  # of whole models
    "tiny_openfold": "--num-blocks 1 --num-seqs 8 --seq-len 96 --batch-size 1",
    "tiny_llama": "--num-layers 2 --seq-len 256 --batch-size 2",
}
ODD = {"tiny_openfold": "--num-seqs 7 --seq-len 61", "tiny_llama": "--seq-len 61 --batch-size 3"}
PARTS = {
    "triangle multiplication": "TriangleMultiplicationOutgoing",
    "triangle attention": "TriangleAttentionEndingNode",
}
LENGTHS = {"plain": 96, "outlier": 96, "large logits": 96, "odd": 61}  # of the parts in each case
SUBJECTS = (*SIZES, *PARTS)
OUTLIER = 5  # the channel
QUERY_AND_KEY = ("q_proj.weight", "k_proj.weight", "linear_q.weight", "linear_k.weight")
# what the first block reads
EMBEDDINGS = ("embed_tokens.weight", "linear_relpos.weight", "linear_msa_m.weight")
# outputs, loss and gradients; of each by name, in float64 on the host
Values = dict[str, dict[str, Tensor]]
# with the answer about equal bits, if it was asked for
Side = Callable[[], tuple[Values, bool | None]]


class Errors(Record):
    """How far a side is from float64, or why it failed."""

    outputs: float | None = None
    loss: float | None = None
    parameters: dict[str, float] = None
    lines: dict[str, list[float | str]] = None  # the worst row or column of each, and which
    equal_bits: bool | None = None
    failed: str = None


class Compared(Row):
    """The sides of one case."""

    subject: str
    case: str
    precision: str
    sides: dict[str, Errors]


def tested_weights(state: dict[str, Tensor], case: str) -> dict[str, Tensor]:
    """V1's initial weights, with norms and biases as training leaves them: not 1 and not 0.

    Changed for the case.
    """
    generator, weights = torch.Generator().manual_seed(1), {}
    for name, value in sorted(state.items()):
        noise = torch.randn(value.shape, generator=generator)
        weights[name] = weight = value + 0.2 * noise if value.dim() == 1 else value.clone()
        if case == "large logits" and name.endswith(QUERY_AND_KEY):
            weight *= 4
        # a row is a token in one, a channel in the others
        if case == "outlier" and name.endswith(EMBEDDINGS):
            channel = weight[:, OUTLIER] if name.startswith("embed_tokens") else weight[OUTLIER]
            channel += 10 * value.std()
    return weights


def on_host(values: Values) -> Values:
    """In float64, where nothing changes them any more."""
    return {
        what: {n: v.detach().double().cpu() for n, v in several.items()}
        for what, several in values.items()
    }


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by the names of state_dict(), where nothing is fused. Weights are lost."""
    for parameter in model.parameters():
        parameter.data = parameter.grad
    return model.state_dict()


def same_bits(run: Callable[[], list[Tensor]], runs: int) -> bool | None:
    """Are the tensors of so many runs equal to the last bit? None for no run.

    The device is asked once, at the end.
    """
    if not runs:
        return None
    first = [value.clone() for value in run()]
    differ = torch.zeros((), dtype=torch.bool, device=first[0].device)
    for _ in range(runs - 1):
        for value, expected in zip(run(), first, strict=True):
            differ |= (value != expected).any()
    return not differ.item()


def installed(package: str) -> bool:
    """Is this library there?"""
    return importlib.util.find_spec(package) is not None


# Whole models


def trainer_of(script: str, argv: Sequence[str], weights: dict[str, Tensor]):
    """A Trainer of a version with these weights, without a graph: nothing is repeated here."""
    trainer = make_trainer(load_script(f"{script}.py"), [*argv, "--disable-cuda-graph"])
    trainer.model.load_state_dict(weights)
    return trainer


def model_side(
    script: str, argv: Sequence[str], weights: dict[str, Tensor], runs: int = 0, exact: bool = False
):
    """Values of a version, or the `exact` ones: in float64, also where it asks for float32, as for
    its losses."""
    trainer = trainer_of(script, argv, weights)
    batch = trainer.next_batch()

    def run() -> list[Tensor]:
        trainer.optimizer.zero_grad(set_to_none=True)
        with trainer.autocast():
            loss = trainer.forward(**batch)
        loss.backward()
        return [loss.detach(), *(p.grad for p in trainer.model.parameters() if p.grad is not None)]

    equal = same_bits(run, runs)
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.next_batch = lambda: batch
    found = values_of(load_script(f"{script}.py"), trainer, exact)
    gradients = {name: found.pop(f"{GRADIENT}{name}") for name in weights}
    loss = {"loss": found.pop("loss")}
    return on_host({"loss": loss, "outputs": found, "gradients": gradients}), equal


def liger_side(argv: Sequence[str], weights: dict[str, Tensor]) -> tuple[Values, None]:
    """Hugging Face's Llama with Liger's kernels and our weights."""
    from bench.peers import hugging_face, with_liger

    ours = trainer_of("tiny_llama_v1", argv, weights)
    theirs, batch = hugging_face(ours.model), ours.next_batch()
    forward = with_liger(theirs, fused_linear_cross_entropy=False)
    with ours.autocast():
        found = forward(**batch)
    found.loss.backward()
    gradients = {name.removeprefix("model."): g for name, g in gradients_of(theirs).items()}
    outputs, loss = {"outputs": found.logits}, {"loss": found.loss}
    return on_host({"outputs": outputs, "loss": loss, "gradients": gradients}), None


def models(
    model: str, case: str, precision: str, runs: int, device: str, sizes: str
) -> tuple[Side, dict[str, Side]]:
    """What makes the exact values of a whole model, and the sides."""
    odd = ODD[model] if case == "odd" else ""
    argv = f"{SIZES[model]} {odd} {sizes} --device {device}".split()
    v1 = load_script(f"{model}_v1.py")
    initial = v1.build_model(v1.parse_args(argv), torch.device("cpu"))
    weights = tested_weights(initial.state_dict(), case)
    rounded = [*argv, *PRECISIONS[precision]]
    scripts = {version: script_of(model, version) for version in ALL_VERSIONS}
    sides = {
        side: partial(model_side, script, rounded, weights, runs)
        for side, script in scripts.items()
    }
    if device != "cpu" and precision == "bf16" and case != "odd":
        compiled = [*rounded, "--enable-torch-compile"]
        sides["V2 compiled"] = partial(model_side, scripts["V2"], compiled, weights, runs)
    liger = installed("liger_kernel") and installed("transformers")
    if device != "cpu" and model == "tiny_llama" and liger:
        sides["Liger"] = partial(liger_side, rounded, weights)
    return partial(model_side, scripts["V1"], argv, weights, exact=True), sides


# Parts


def part_side(
    version: ModuleType,
    name: str,
    weights: dict[str, Tensor],
    x: Tensor,
    precision: str,
    runs: int = 0,
    use: Callable[[nn.Module], Callable[[Tensor], Tensor]] = lambda part: part,
) -> tuple[Values, bool | None]:
    """Output of a part for x, gradients of x and its parameters.

    `use` makes another forward pass of the part.
    """
    config = version.ModelConfig(pair_dim=x.shape[-1])
    part = getattr(version, name)(config, version.Fusions()).to(x.device)
    part.load_state_dict(weights)
    part, x = (part.double(), x.double()) if precision == "float64" else (part, x)
    torch.set_float32_matmul_precision("high" if precision == "TF32" else "highest")
    x, forward = x.clone().requires_grad_(), use(part)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x)

    def run() -> list[Tensor]:
        x.grad = None
        part.zero_grad(set_to_none=True)
        low = {"enabled": precision == "bf16", "cache_enabled": False}
        with torch.autocast(x.device.type, torch.bfloat16, **low):
            out = forward(x) - x if version.VERSION > 3 else forward(x)  # V4 adds the update
        out.backward(grad.to(out.dtype))
        return [out.detach(), x.grad, *(p.grad for p in part.parameters())]

    equal = same_bits(run, runs)
    out, grad_x, *_ = run()
    gradients = {"x": grad_x.flatten(0, -2), **gradients_of(part)}
    return on_host({"outputs": {"update": out}, "loss": {}, "gradients": gradients}), equal


def with_cuequivariance(part: nn.Module) -> Callable[[Tensor], Tensor]:
    """NVIDIA's operation with the parameters of V1's part."""
    from bench.peers import cuequivariance, joined

    def multiplication(pair: Tensor) -> Tensor:
        operation = cuequivariance("triangle_multiplicative_update")
        return operation(pair, direction="outgoing", **joined(part.get_parameter))

    def attend(x: Tensor, bias: Tensor, present: None) -> Tensor:  # no padding here
        linears = part.linear_q, part.linear_k, part.linear_v, part.linear_g
        packed = (linear(x).unflatten(-1, (part.heads, -1)) for linear in linears)
        q, k, v, gate = (tensor.transpose(2, 3) for tensor in packed)
        out = torch.sigmoid(gate) * cuequivariance("triangle_attention")(q, k, v, bias[:, None])
        return part.linear_o(out.transpose(2, 3).flatten(3))

    if hasattr(part, "linear_a_p"):
        return multiplication
    part.attend = attend
    return part


def parts(
    subject: str, case: str, precision: str, runs: int, device: str, sizes: str
) -> tuple[Side, dict[str, Side]]:
    """What makes the exact values of a part of TinyOpenFold, and the sides."""
    scripts = {version: script_of("tiny_openfold", version) for version in ALL_VERSIONS}
    versions = {version: load_script(f"{script}.py") for version, script in scripts.items()}
    v1, name = versions["V1"], PARTS[subject]
    config, generator = v1.ModelConfig(), torch.Generator().manual_seed(3)
    state = getattr(v1, name)(config, v1.Fusions()).state_dict()
    # the module draws its own from the process's generator
    for key, value in sorted(state.items()):
        if value.dim() == 2:
            state[key] = torch.randn(value.shape, generator=generator) / value.shape[1] ** 0.5
        elif "norm" not in key:
            state[key] = torch.zeros(value.shape)
    length = int(sizes or LENGTHS[case])
    x = torch.randn(1, length, length, config.pair_dim, generator=generator)
    x[..., OUTLIER] += 10 if case == "outlier" else 0
    given = name, tested_weights(state, case), x.to(device)
    sides = {
        side: partial(part_side, version, *given, precision, runs)
        for side, version in versions.items()
    }
    if device != "cpu" and installed("cuequivariance_torch"):
        library = partial(part_side, use=with_cuequivariance)
        sides["cuEquivariance"] = partial(library, v1, *given, precision, runs)
    return partial(part_side, v1, *given, "float64"), sides


# Errors


def errors_of(values: Values, exact: Values, baseline: Values) -> dict:
    """Of outputs and loss the worst error, of gradients that of each parameter and of each one's
    rows and columns."""
    found = {}
    for what in ("outputs", "loss"):
        pairs = [(values[what][name], value) for name, value in exact[what].items()]
        errors = (relative_error(value - right, right)[0] for value, right in pairs)
        found[what] = max(errors, default=None)
    found |= {"parameters": {}, "lines": {}}
    for name, value in exact["gradients"].items():
        error, rounding = (side["gradients"][name] - value for side in (values, baseline))
        found["parameters"][name], _ = relative_error(error, value, rounding)
        dims = (0, 1) if value.dim() == 2 else (None,)
        found["lines"][name] = max(relative_error(error, value, rounding, dim) for dim in dims)
    return found


def compared(make: Callable[[], tuple[Side, dict[str, Side]]]) -> dict[str, dict]:
    """The errors of each side, V1 first; of a library that raises, why."""
    make_exact, sides = make()
    (exact, _), baseline, found = make_exact(), {}, {}
    for side, measure in sides.items():
        try:
            values, equal = measure()
        except Exception as error:
            if side.startswith("V"):  # one of ours; a library may not take what it is given
                raise
            found[side] = {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}
            print_notes(PROG, f"{side} failed: {found[side]['failed']}")
            continue
        baseline = baseline or values
        found[side] = errors_of(values, exact, baseline) | {"equal_bits": equal}
    return {"sides": found}


def atlas(args: argparse.Namespace) -> Iterator[Part]:
    """Rows of the study."""
    for subject in args.subjects:
        for precision in args.precisions:
            for case in LENGTHS:
                if case == "odd" and precision != "bf16":
                    continue
                if case == "large logits" and subject == "triangle multiplication":
                    continue  # it has none
                runs = args.runs if case == "plain" and precision == args.precisions[-1] else 0
                made_by = models if subject in SIZES else parts
                make = partial(made_by, subject, case, precision, runs, args.device, args.sizes)
                names = {"subject": subject, "case": case, "precision": precision}
                yield names, partial(compared, make)


def furthest(sides: dict[str, dict]) -> str:
    """The parameter in whose gradient one of our versions is furthest above V1, by their worst rows
    and columns."""
    before = sides["V1"]["lines"]
    ours = [side for side, found in sides.items() if side.startswith("V") and "lines" in found]
    ratios = [
        (sides[side]["lines"][name][0] / worst, side, name + sides[side]["lines"][name][1])
        for side in ours
        for name, (worst, _) in before.items()
        if worst and side != "V1"
    ]
    ratio, side, name = max(ratios)
    return f"{ratio:.1f}x {side}: {name}"


def worst(found: dict | None) -> str:
    """Of a side: its worst errors of outputs, of parameters, and of their rows and columns."""
    if found is None or "failed" in found:
        return "failed" if found else ""
    line = max(error for error, _ in found["lines"].values())
    errors = found["outputs"], max(found["parameters"].values()), line
    return " / ".join(f"{error:.1e}" for error in errors)


def equal_bits(rows: Sequence[dict], side: str) -> str:
    """The answer of all rows that have one."""
    found = [row["sides"][side].get("equal_bits") for row in rows if side in row["sides"]]
    return "no" if False in found else "yes" if True in found else ""


def table(study: dict) -> str:
    """A line for each subject, case and precision."""
    rows = study["rows"]
    sides = list(dict.fromkeys(side for row in rows for side in row["sides"]))
    lines = []
    for row in rows:
        errors = {side: worst(row["sides"].get(side)) for side in sides}
        name = f"{row['subject']}, {row['case']}, {row['precision']}"
        lines.append({"name": name, **errors, "furthest": furthest(row["sides"])})
    asked = f"equal bits in {study['runs']} runs, {study['precisions'][-1]}"
    answers = {side: equal_bits(rows, side) for side in sides}
    lines.append({"name": asked, **answers, "furthest": ""})
    columns = [
        Column("outputs / worst parameter / worst row or column", "name"),
        *(Column(side, side) for side in sides),
        Column("furthest above V1", "furthest"),
    ]
    return render(columns, lines)


def run_atlas(args: argparse.Namespace) -> int:
    """Measure and print the table; returns the exit status."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ToolError("--device cuda: there is no GPU here")
    if not args.table:
        packages = ("cuequivariance_torch", "liger_kernel", "transformers")
        missing = [name for name in packages if not installed(name)]
        print_notes(PROG, *(f"{package} is not installed and left out" for package in missing))
        args.runs = args.runs or (3 if args.device == "cpu" else 100)
        names = ("subjects", "precisions", "runs", "sizes")
        settings = {name: getattr(args, name) for name in names}
        measure_study(args.output, atlas(args), argv=["--device", args.device], **settings)
    print(table(read_study(args.table or args.output, kind=Compared)))
    return 0


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True).add_argument
    file = {"type": Path, "metavar": "FILE.json"}
    where("--output", **file, help="measure, and write the result there")
    where("--table", **file, help="measure nothing, print the table of this result")
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    subjects = {"choices": SUBJECTS, "default": list(SUBJECTS), "metavar": "NAME"}
    add("--subjects", nargs="+", **subjects, help=", ".join(SUBJECTS))
    precisions = {"choices": PRECISIONS, "default": list(PRECISIONS)}
    add("--precisions", nargs="+", **precisions, help="(default: all)")
    add("--runs", type=at_least(2), metavar="N", help="for equal bits (default: 100, on a CPU 3)")
    sizes = "other sizes: arguments of whole models, or the length of parts"
    add("--sizes", default="", metavar="TEXT", help=sizes)
    return parser


main = program(build_parser, run_atlas)

if __name__ == "__main__":
    sys.exit(main())
