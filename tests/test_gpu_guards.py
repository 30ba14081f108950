"""No kernel reads or writes beyond the ends of its tensors: each launch gets copies that lie
between guard zones.

Runs on the GPU where there is one, and without one at small sizes in Triton's interpreter. A read
beyond the ends finds NaN, which spreads to the loss or a gradient; a write changes the pattern of a
zone. The runs are deterministic ones, for which PyTorch fills new tensors with NaN, so an element
that a kernel forgets to write shows as well.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from conftest import TRITON, load, random_state
from test_triton_llama_v4 import layer_arguments, one_launch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NOT_IN_A_STEP = {
    # float32: a row of 128 is too long for a whole transition, and on a GPU the library projects;
    # 129 residues: the library multiplies triangles
    "tiny_openfold_v4": [
        {f"{kernel}_kernel" for kernel in (*product, *transition, *projections)}
        for product in ((), ("triangle_product", "triangle_product_backward"))
        for transition in ((), ("transition_backward_hidden",))
        for projections in ((), ("project_residual",))
    ],
}
ZONE = 1 << 16  # elements on each side: more than a block of rows that lies wrongly
PATTERN = 0x5A5A5A5A5A5A5A5A  # of integers: as a label or an index it is out of range
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
SIZES = {  # odd ones, with more than one block; each launches every kernel
    "tiny_llama_v3": {
        "small": "--hidden-dim 60 --num-heads 3 --num-kv-heads 1 --intermediate-dim 35 "
        "--num-layers 1 --vocab-size 67"
        " --seq-len 65 --batch-size 2",
        "large": "--hidden-dim 480 --num-heads 5 --num-kv-heads 1 --intermediate-dim 1001 "
        "--num-layers 2"
        " --vocab-size 1003 --seq-len 129 --batch-size 3",
    },
    "tiny_llama_v4": {  # small: head_dim 16, of which the backward kernels turn gradients back
        "small": "--hidden-dim 48 --num-heads 3 --num-kv-heads 1 --intermediate-dim 35 "
        "--num-layers 1 --vocab-size 67"
        " --seq-len 65 --batch-size 2",
        "large": "--hidden-dim 320 --num-heads 5 --num-kv-heads 1 --intermediate-dim 1001 "
        "--num-layers 2"
        " --vocab-size 1003 --seq-len 129 --batch-size 3",
    },
    "tiny_openfold_v3": {
        "small": "--msa-dim 24 --pair-dim 16 --num-heads-msa 2 --num-heads-pair 1 --num-blocks 1 "
        "--num-seqs 2"
        # short is 2, but not 17
        " --seq-len 17 --batch-size 1 --blocks attention_backward_short:BLOCK_N=16",
        "large": "--msa-dim 96 --pair-dim 64 --num-blocks 2 --num-seqs 7 --seq-len 129 "
        "--batch-size 2",
    },
    "tiny_openfold_v4": {
        "small": "--msa-dim 16 --pair-dim 128 --num-heads-msa 2 --num-heads-pair 4 --num-blocks 1"
        " --num-seqs 2 --seq-len 17 --batch-size 1 --blocks attention_backward_short:BLOCK_N=16",
        "large": "--msa-dim 64 --pair-dim 128 --num-blocks 1 --num-seqs 7 --seq-len 129 "
        "--batch-size 2",
    },
}


class Guarded:
    """A copy of a tensor with its strides and alignment, in a buffer that holds NaN (of integers
    PATTERN) elsewhere."""

    def __init__(self, tensor: Tensor):
        self.original, size = tensor, tensor.element_size()
        span = 1 + sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        guard = torch.nan if tensor.is_floating_point() else PATTERN >> 8 * (8 - size)
        self.buffer = tensor.new_full((2 * ZONE + 256 + span,), guard)
        layout = tensor.shape, tensor.stride(), ZONE + tensor.data_ptr() % 256 // size
        self.copy = self.buffer.as_strided(*layout)
        self.outside = torch.ones_like(self.buffer, dtype=torch.bool)
        self.outside.as_strided(*layout).fill_(False)
        self.zones = self.bits()
        self.copy.copy_(tensor)

    def bits(self) -> Tensor:
        """What stands outside the copy, as integers, because NaN differs from itself."""
        return self.buffer.view(BITS[self.buffer.element_size()])[self.outside]

    def finish(self, name: str) -> None:
        """After the launch: the zones are as they were, and the original gets what the kernel
        wrote."""
        assert torch.equal(self.bits(), self.zones), f"written outside {name}"
        # past autograd, which takes it for a change of an input
        self.original.data.copy_(self.copy)


def guarded(wrap_triton: Callable, launched: set[str]) -> Callable:
    """A script's wrap_triton, but every tensor of a launch lies between guard zones while the
    kernel runs."""

    def wrap(kernel):
        class Launcher:
            def __getitem__(self, grid):
                def launch(*pointers, **arguments) -> None:
                    arguments |= zip(kernel.arg_names, pointers, strict=False)
                    tensors = {
                        name: value
                        for name, value in arguments.items()
                        if isinstance(value, Tensor)
                    }
                    # one given twice has one copy
                    copies = {id(t): Guarded(t) for t in tensors.values()}
                    replaced = {name: copies[id(tensor)].copy for name, tensor in tensors.items()}
                    wrap_triton(kernel)[grid](**arguments | replaced)
                    launched.add(kernel.__name__)
                    for name, tensor in tensors.items():
                        copies[id(tensor)].finish(f"{name} by {kernel.__name__}")

                return launch

        return Launcher()

    return wrap


def training_step(module: ModuleType, argv: list[str]) -> dict[str, Tensor]:
    """Loss, gradients and new weights of a step with random weights."""
    args = module.parse_args([*argv, "--deterministic"])
    device = module.prepare(args)
    model = module.build_model(args, device)
    optimizer = module.build_optimizer(args, model)
    model.load_state_dict(random_state(model.state_dict()))
    batch = {
        n: t.to(device)
        for n, t in module.make_batches(args, device, args.seed).next_batch().items()
    }
    with torch.autocast(device.type, torch.bfloat16, enabled=args.use_amp):
        loss = model(**batch)
    loss.backward()
    found = {
        f"gradient of {name}": parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    optimizer.step()
    return {"loss": loss.detach(), **found, **dict(model.named_parameters())}


def in_precisions(float32: object, bfloat16: object) -> pytest.MarkDecorator:
    """The interpreter gets float32 copies of bfloat16 tensors, without their guard zones: those
    need a GPU."""
    wide = pytest.param(float32, id="float32")
    return pytest.mark.parametrize(
        "precision", [wide, pytest.param(bfloat16, id="bfloat16", marks=pytest.mark.gpu)]
    )


@in_precisions("", "--use-amp")
@pytest.mark.parametrize("size", ["small", pytest.param("large", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("script", [*TRITON[:-1], pytest.param(TRITON[-1], marks=pytest.mark.slow)])
def test_kernels_stay_within_their_tensors(
    script: str, size: str, precision: str, monkeypatch: pytest.MonkeyPatch
):
    module, launched = load(script), set()
    argv = f"{SIZES[script][size]} {precision}".split()
    expected = training_step(module, argv)
    monkeypatch.setattr(module, "wrap_triton", guarded(module.wrap_triton, launched))
    for name, value in training_step(module, argv).items():
        assert value.isfinite().all(), name
        assert torch.equal(value, expected[name]), name
    kernels = {name for name, value in vars(module).items() if hasattr(value, "arg_names")}
    kernels = {name for name in kernels if name.endswith("_kernel")}
    assert launched <= kernels
    assert kernels - launched in NOT_IN_A_STEP.get(script, [set()])


@in_precisions(torch.float32, torch.bfloat16)
def test_a_layer_in_one_launch_stays_within_its_tensors(
    precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    launched, layer = set(), layer_arguments(2, 33, 4, 2, 12, 35, precision)
    expected = one_launch.transformer_block(*layer)
    guard = guarded(one_launch.wrap_triton, launched)
    monkeypatch.setattr(one_launch, "wrap_triton", guard)
    assert expected.isfinite().all()
    assert torch.equal(one_launch.transformer_block(*layer), expected)
    assert launched == {"transformer_block_kernel"}


@pytest.mark.gpu
def test_a_wide_transition_stays_within_its_tensors(monkeypatch: pytest.MonkeyPatch):
    """Rows of 256 in 16 bits, which no step above has: two blocks of rows and a part of one."""
    module, launched = load("tiny_openfold_v4"), set()
    args = module.parse_args(["--msa-dim", "256", "--num-heads-msa", "8", "--num-blocks", "1"])
    block = module.build_model(args, DEVICE).blocks[0]

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(3, 43, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        parameters = [*block.msa_transition.parameters()]
        with torch.autocast(DEVICE.type, torch.bfloat16):
            out = block.msa_transition(x)
        return [out, *torch.autograd.grad(out, [x, *parameters], torch.randn_like(out))]

    expected = gradients()
    monkeypatch.setattr(module, "wrap_triton", guarded(module.wrap_triton, launched))
    for found, value in zip(gradients(), expected, strict=True):
        assert found.isfinite().all()
        assert torch.equal(found, value)
    assert "transition_backward_hidden_kernel" in launched


def copy_shifted(script: str, read: int, write: int) -> Tensor:
    """What a kernel that copies 100 elements, between guard zones, leaves if it reads and writes
    beside its tensors."""
    module = load(script)
    triton, tl = module.triton, module.tl

    @triton.jit
    def shift_kernel(X, OUT, size, READ: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(OUT + at + WRITE, tl.load(X + at + READ, mask=at < size), mask=at < size)

    x, out = torch.arange(100.0, device=DEVICE), torch.zeros(100, device=DEVICE)
    guarded(module.wrap_triton, set())(shift_kernel)[(1,)](
        X=x, OUT=out, size=100, READ=read, WRITE=write, BLOCK=128
    )
    return out


@pytest.mark.parametrize("script", TRITON[:1])
class TestGuards:
    """They pass what is right and show what is not."""

    def test_right(self, script: str):
        assert torch.equal(copy_shifted(script, 0, 0).cpu(), torch.arange(100.0))

    @pytest.mark.parametrize("shift", [-1, 1, 5000])
    def test_read_beyond_an_end_is_nan(self, script: str, shift: int):
        assert copy_shifted(script, shift, 0).isnan().any()

    @pytest.mark.parametrize("shift", [-1, 1, 5000])
    def test_write_beyond_an_end_fails(self, script: str, shift: int):
        with pytest.raises(AssertionError, match="written outside OUT by shift_kernel"):
            copy_shifted(script, 0, shift)
