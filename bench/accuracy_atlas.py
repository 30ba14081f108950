"""How exact every version is: outputs, loss and every gradient against V1 in float64, on the same
device. The suite `accuracy` of bench/versions.py.

Whole models (V1 to V4, and on a GPU V2 compiled) and parts (triangle multiplication and attention,
on a GPU also of cuEquivariance), in float32, TF32 and bfloat16. Cases: "plain" input; an "outlier"
channel that stands above the others everywhere; "large logits", from weights of queries and keys
four times as large; "odd" sizes, in bfloat16 only, as is what is compiled.

An error is the norm of the difference from float64 over the norm of what is exact: of an output,
the loss, the gradient of a parameter, and of each of its rows and columns. Some are mathematically
near zero, and rounding alone changes them by their size. There the norm is replaced by a floor,
which is measured: ten times V1's error in the same precision, for rows and columns the root mean
square of their errors in this parameter. Below it V1 has less than one digit right, and what errs
as much as V1 does has an error of 0.1. The last column of the table has the parameter in which one
of our versions is furthest above V1: its worst row or column over V1's.

Equal bits: are loss and gradients of RUNS runs, of plain input in bfloat16, all the same?
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn

from bench.sizes import ALL_VERSIONS, PRECISIONS, RUNS, script_of
from lab.accuracy import GRADIENT, relative_error, values_of
from lab.cli import note
from lab.script import load_script
from lab.study import Part
from lab.turns import make_trainer

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
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
OUTLIER = 5  # the channel
QUERY_AND_KEY = ("q_proj.weight", "k_proj.weight", "linear_q.weight", "linear_k.weight")
# what the first block reads
EMBEDDINGS = ("embed_tokens.weight", "linear_relpos.weight", "linear_msa_m.weight")
Values = dict[str, Tensor]  # outputs, the loss and gradients, as lab.accuracy names them
# with the answer about equal bits, if it was asked for
Side = Callable[[], tuple[Values, bool | None]]


def tested_weights(state: Values, case: str) -> Values:
    """V1's initial weights, with norms not 1 and biases not 0, as training leaves them; for the
    case."""
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
    return {name: value.detach().double().cpu() for name, value in values.items()}


def same_bits(run: Callable[[], list[Tensor]], runs: int) -> bool | None:
    """Are the tensors of so many runs equal to the last bit? None for no run."""
    if not runs:
        return None
    first = [value.clone() for value in run()]
    differ = torch.zeros((), dtype=torch.bool, device=first[0].device)
    for _ in range(runs - 1):
        for value, expected in zip(run(), first, strict=True):
            differ |= (value != expected).any()
    return not differ.item()


# Whole models


def model_side(
    script: str, argv: Sequence[str], weights: Values, runs: int = 0, exact: bool = False
) -> tuple[Values, bool | None]:
    """Values of a version, or the `exact` ones: in float64, also where it asks for float32, as for
    its losses."""
    module = load_script(f"{script}.py")
    trainer = make_trainer(module, [*argv, "--disable-cuda-graph"])  # nothing is repeated here
    trainer.model.load_state_dict(weights)
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
    return on_host(values_of(module, trainer, exact)), equal


def models(model: str, case: str, precision: str, runs: int) -> tuple[Side, dict[str, Side]]:
    """What makes the exact values of a whole model, and the sides."""
    argv = f"{SIZES[model]} {ODD[model] if case == 'odd' else ''}".split()
    v1 = load_script(f"{model}_v1.py")
    initial = v1.build_model(v1.parse_args(argv), torch.device("cpu"))
    weights = tested_weights(initial.state_dict(), case)
    rounded = [*argv, *PRECISIONS[precision]]
    scripts = {version: script_of(model, version) for version in ALL_VERSIONS}
    sides = {
        side: partial(model_side, script, rounded, weights, runs)
        for side, script in scripts.items()
    }
    if GPU and precision == "bf16" and case != "odd":
        compiled = [*rounded, "--enable-torch-compile"]
        sides["V2 compiled"] = partial(model_side, scripts["V2"], compiled, weights, runs)
    return partial(model_side, scripts["V1"], argv, weights, exact=True), sides


# Parts


def part_side(
    version: ModuleType,
    name: str,
    weights: Values,
    x: Tensor,
    precision: str,
    runs: int = 0,
    use: Callable[[nn.Module], Callable[[Tensor], Tensor]] = lambda part: part,
) -> tuple[Values, bool | None]:
    """Output of a part, gradients of x and of parameters; `use` makes another forward pass of
    it."""
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
    for parameter in part.parameters():  # state_dict then splits gradients of fused weights
        parameter.data = parameter.grad
    gradients = {"x": grad_x.flatten(0, -2), **part.state_dict()}
    named = {f"{GRADIENT}{name}": gradient for name, gradient in gradients.items()}
    return on_host({"update": out, **named}), equal


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


def parts(subject: str, case: str, precision: str, runs: int) -> tuple[Side, dict[str, Side]]:
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
    length = LENGTHS[case]
    x = torch.randn(1, length, length, config.pair_dim, generator=generator)
    x[..., OUTLIER] += 10 if case == "outlier" else 0
    given = name, tested_weights(state, case), x.to(DEVICE)
    sides = {
        side: partial(part_side, version, *given, precision, runs)
        for side, version in versions.items()
    }
    if GPU:
        library = partial(part_side, use=with_cuequivariance)
        sides["cuEquivariance"] = partial(library, v1, *given, precision, runs)
    return partial(part_side, v1, *given, "float64"), sides


# Errors


def errors_of(values: Values, exact: Values, baseline: Values) -> dict:
    """Of outputs and loss the worst error, of gradients that of each parameter and of each one's
    rows and columns."""
    found = {"outputs": None, "loss": None, "parameters": {}, "lines": {}}
    for name, value in exact.items():
        error, rounding = (side[name] - value for side in (values, baseline))
        if name.startswith(GRADIENT):
            name, dims = name.removeprefix(GRADIENT), (0, 1) if value.dim() == 2 else (None,)
            found["parameters"][name], _ = relative_error(error, value, rounding)
            found["lines"][name] = max(relative_error(error, value, rounding, dim) for dim in dims)
        else:
            what = "loss" if name == "loss" else "outputs"
            found[what] = max(found[what] or 0.0, relative_error(error, value)[0])
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
            note(f"{side} failed: {found[side]['failed']}")
            continue
        baseline = baseline or values
        found[side] = errors_of(values, exact, baseline) | {"equal_bits": equal}
    return {"sides": found}


def study(args: argparse.Namespace) -> Iterator[Part]:
    for subject, precision, case in itertools.product((*SIZES, *PARTS), PRECISIONS, LENGTHS):
        if case == "odd" and precision != "bf16":
            continue
        if case == "large logits" and subject == "triangle multiplication":
            continue  # it has none
        runs = RUNS if case == "plain" and precision == "bf16" else 0
        make = partial(models if subject in SIZES else parts, subject, case, precision, runs)
        names = {"subject": subject, "case": case, "precision": precision}
        yield names, partial(compared, make)
