"""Wrong kernels, a table: the code, and the sentence that names the mistake and the next step.

Most were taken from public questions about Triton. Each is a solution of a puzzle with some words
replaced; puzzle 0 is build_a_fusion's. Triton's interpreter runs them all; those that its compiler
refuses are compiled as well, for a GPU that need not be there.
"""

import json
from pathlib import Path

import pytest
from conftest import ROOT, Mistake, call, finished, mistakes, triton_before, with_mistakes

from exercises.explain import explaining

pytestmark = pytest.mark.usefixtures("same_numbers")

# name | puzzle, with c if the compiler says the same | sentence | right -> wrong | ...
# Of a sentence ... is anything; what begins with blanks goes on with the line before. At the end
# stands what kernels compute otherwise.
TABLE = r"""
index | 1c | X is an address, not a tensor: tl.load(X + at) reads numbers |
    tl.store(OUT + at, tl.load(X + at) + tl.load(Y + at)) -> OUT[at] = X[at] + Y[at]
add addresses | 1c | X and Y are addresses: tl.load(X + at) |
    tl.load(X + at) + tl.load(Y + at) -> X + Y
store addresses | 1c | this stores addresses: tl.load(X + at) |
    tl.load(X + at) + tl.load(Y + at) -> X + at
load twice | 1c | are numbers | tl.load(X + at) -> tl.load(tl.load(X + at))
divide address | 1c | `//` divides them, `/` gives a fraction | * BLOCK + -> * BLOCK / 1 +
store turned | 3c | first the addresses | OUT + row, tl.sum(x, 0) -> tl.sum(x, 0), OUT + row
store without value | 3c | needs addresses and values | OUT + row, tl.sum(x, 0) -> OUT + row
comma for plus | 3c | addresses are one sum, tl.load(X + at): what follows a comma is the mask |
    tl.load(X + row * C + column, mask=column < C, other=0.0) -> tl.load(X, column)
shape | 3c | pass the sizes to the kernel as arguments | row * C -> row * X.shape[1]
no program | 1 |
    never written: ... both wrote out[0]: a program begins at tl.program_id(axis) * BLOCK |
    tl.program_id(0) * BLOCK +  ->
axis 3 | 1c | axes 0, 1 and 2 | program_id(0) -> program_id(3)
half | 1 | never written: ... is the block whole, is the grid large | (0, BLOCK) -> (0, BLOCK // 2)
one end | 1c | needs both ends: tl.arange(0, BLOCK) | (0, BLOCK) -> (BLOCK)
no power | 1c | block is a power of two | (0, BLOCK) -> (0, BLOCK - 1)
arange n | 2c | must be known when the kernel is compiled: write BLOCK: tl.constexpr |
    (0, BLOCK) -> (0, n)
no constexpr | 1c | must be known when the kernel is compiled: write BLOCK: tl.constexpr |
    BLOCK: tl.constexpr -> BLOCK
range | 1c | range is for loops: tl.arange(0, BLOCK) | tl.arange -> range
no jit | 1 | @triton.jit is missing in the line above | @triton.jit\n ->
if | 2c | a condition must be one truth value, and this is a block of them |
    tl.store( -> if at < n:\n        tl.store(
precedence | 7 | & is applied before <: write (a < b) & (c < d) |
    (row < rows)[:, None] & (column < C)[None, :] -> row[:, None] < rows & column < C
no mask, load | 2 | reads out of bounds: ... the load has no mask; give it |
    X + at, mask=inside -> X + at
mask n | 2c | a mask is a block of true and false | mask=inside -> mask=n
mask one too long | 2 | writes out of bounds: ... `<` in place of `<=`? | at < n -> at <= n
mask too short | 2 | never written: out[15], 1 of 16 ... its mask is false there |
    at < n -> at < n - 1
other alone | 3c | give it a mask= as well | mask=column < C,  ->
no other | 3 | mask: line 11 loads without `other` ... other=0.0 adds nothing to a sum |
    , other=0.0 ->
other of a maximum | 4 | wrong at odd sizes only ... does what the mask leaves out take |
    -float("inf") -> 0.0
stride BLOCK | 3 | with 13 elements in a row? | row * C -> row * BLOCK
no stride | 3 | the first row is right and no other | row * C -> row
exchanged | 7 | are exchanged | * C + column[None, :], swiglu -> + column[None, :] * rows, swiglu
no such axis | 3c | the block has no such axis | tl.sum(x, 0) -> tl.sum(x, 1)
dim | 4c | is called axis, not dim | tl.max(x, 0) -> tl.max(x, dim=0)
block to one address | 3c | a block of values needs a block of addresses | tl.sum(x, 0) -> x
one axis for two | 7 | do not go together: give each an axis of its own |
    (row < rows)[:, None] & (column < C)[None, :] -> (row < rows) & (column < C)
element | 3c | no element of a | tl.store( -> x[0] = 0.0\n    tl.store(
torch | 4c | take the function from tl | import triton\n -> import torch\nimport triton\n |
    tl.exp -> torch.exp
torch unknown | 4c | take the function from tl | tl.exp -> torch.exp
sum | 3c | Python's own sum, max and min do not work on blocks: tl.sum(x, 0) |
    tl.sum(x, 0) -> sum(x)
mean | 3c | Triton has no mean: tl.sum(x, 0) / C | tl.sum(x, 0) -> x.mean()
spelling | 3c | there is no tl.sun: did you mean tl.sum? | tl.sum -> tl.sun
unknown | 3c | `columns` is not known here | column < C -> columns < C
one branch | 3 | `z` gets a value in one branch only |
    tl.store( -> if row > 0:\n        z = 1.0\n    tl.store( | (x, 0) -> (x, 0) + z
global | 1c | `WIDTH` is a global | import triton\n -> import triton\nWIDTH = 8\n |
    (0, BLOCK) -> (0, WIDTH)
helper | 4 | stable is a function of Python: @triton.jit above its `def` | tl.exp(x -> stable(x |
    @triton.jit -> def stable(x):\n    return tl.exp(x)\n\n\n@triton.jit
return | 3 | a kernel returns nothing | tl.store(OUT + row, tl.sum(x, 0)) -> return tl.sum(x, 0)
import | 1 | a kernel has no `import torch` | tl.store( -> import torch\n    tl.store(
list | 1 | a kernel has no `[0 for y in range(1)]` |
    tl.store( -> [0 for y in range(1)]\n    tl.store(
column | 3 | its address is OUT + row, without a column | OUT + row -> OUT + row + column
column and mask | 3 | its address is OUT + row, without a column |
    OUT + row, tl.sum(x, 0) -> OUT + row + column, tl.sum(x, 0), mask=column < C
print | 3c | takes a fixed text and then the blocks: print("x", x) |
    tl.store( -> print(x)\n    tl.store(
float() | 4c | float() and int() take one | tl.load(X -> float(tl.load(X | "inf")) -> "inf")))
.float() | 5c | .float() is PyTorch's | .to(tl.float32) -> .float()
torch.float32 | 5c | tl.float32, not | import triton\n -> import torch\nimport triton\n |
    tl.float32 -> torch.float32
power | 5c | there is no ** for blocks: x * x | x * x -> x ** 2
// | 5c | are for whole numbers: `/` divides | / C + eps -> // C + eps
16 bits | 5 | wrong in float16 ... directly behind the load |
    other=0.0).to(tl.float32) -> other=0.0)
sum in 16 bits | 8 | add up in float32 | N), tl.float32 -> N), tl.float16
@ | 8c | is tl.dot(a, b) | total = tl.dot(a, b, total) -> total += a @ b
no tile | 8c | tiles with two axes | m[:, None] * K + k[None, :] -> m * K
no dtype | 8c | a shape and a dtype | , BLOCK_N), tl.float32 -> , BLOCK_N)
begin with 0 | 8c | is a tile [M, N]: begin it with |
    tl.zeros((BLOCK_M, BLOCK_N), tl.float32) -> 0.0
not stable | 4 | wrong where inputs are large ... what becomes inf on the way, or 0 |
    x - tl.max(x, 0) -> x
sign | 4 | each is -1 times what it should be | e / tl -> -e / tl
zero | 4 | all is 0: does the result reach the store? | e / tl -> 0.0 * e / tl
another formula | 7 | no program loads x[0, 25] | X + at + C -> X + at + 1
race | 6 | race: line 27: program 1 writes parts[0, 0] ... must be part of the address |
    PARTS + program * C -> PARTS
atomic | 3 | atomic operation: line 12 ... to a place of its own | tl.store( -> tl.atomic_add(
before the output | 1 | reads out of bounds: line 11: program 0 goes to x - 1, but x [16] |
    X + at -> X + at - 1
behind the output | 1 | writes out of bounds: line 11: program 1 goes to out + 16 |
    OUT + at -> OUT + at + 1
input | 2 | writes to an input: line 14: x is only to be read | OUT + at -> X + at
own output | 1 | reads an output: line 11 ... add up in a block, and store it once |
    tl.store(OUT + at, -> tl.store(OUT + at, tl.load(OUT + at) +
output of another | 3 | race: ... which another program reads |
    OUT + row,  -> OUT + row, tl.load(OUT + row + 1, mask=row < 2) +
reads the first | 3 | race: ... program 1 reads |
    tl.sum(x, 0)) -> tl.sum(x, 0) + tl.load(OUT + row * 0))
mask in block | 2 | writes out of bounds: ... are mask and stride those of this tensor? |
    inside = at < n -> inside = tl.arange(0, BLOCK) < n
number | 1 | at other sizes and blocks only ... a number in place of a size or of a block? |
    tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) -> tl.program_id(0) * 8 + tl.arange(0, 8)
x twice | 1 | no program loads y: is another tensor in its place? |
    tl.load(Y + at) -> tl.load(X + at)
minus | 1 | this is x - y | tl.load(X + at) + -> tl.load(X + at) -
maximum | 3 | this is the maximum: tl.sum adds up | tl.sum(x, 0)) -> tl.max(x, 0))
no sum | 4 | exp is not divided by its sum | e / tl.sum(e, 0) -> e
sum of x | 4 | this divides by the sum of x, not of exp(x - m) | tl.sum(e, 0) -> tl.sum(x, 0)
logarithm | 4 | this is the logarithm of softmax |
    e / tl.sum(e, 0) -> x - tl.max(x, 0) - tl.log(tl.sum(e, 0))
BLOCK for C | 5 | wrong at odd sizes only, right with rows = 4, C = 16: out[0, 0] |
    / C + eps -> / BLOCK + eps
no eps | 5 | wrong where inputs are small ... eps is missing | / C + eps -> / C
eps outside | 5 | eps is outside of the root |
    1 / tl.sqrt(tl.sum(x * x, 0) / C + eps) -> 1 / (tl.sqrt(tl.sum(x * x, 0) / C) + eps)
eps in the sum | 5 | eps is added to the sum: add it to the mean |
    tl.sum(x * x, 0) / C + eps -> (tl.sum(x * x, 0) + eps) / C
no root | 5 | the root is missing | 1 / tl.sqrt( -> 1 / (
root | 5 | this multiplies by the root: 1 / tl.sqrt(...) | 1 / tl.sqrt( -> tl.sqrt(
no mean | 5 | the sum is not divided by C | / C + eps -> + eps
gate for up | 7 | gate and up are exchanged |
    gate * tl.sigmoid(gate) * up -> up * tl.sigmoid(up) * gate
no gate | 7 | silu(a) is a * sigmoid(a): a is missing |
    gate * tl.sigmoid(gate) * up -> tl.sigmoid(gate) * up
no up | 7 | the factor up is missing | gate * tl.sigmoid(gate) * up -> gate * tl.sigmoid(gate)
last block alone | 8 | right if all is one block: what of a block is lost or wrong when the next |
    total = tl.dot(a, b, total) -> total = tl.dot(a, b)
product in 16 bits | 8 | add up in float32 |
    total = tl.dot(a, b, total) -> total = tl.dot(a, b, total).to(tl.float16)
NaN | 10 | all of these are NaN: is there inf - inf, inf / inf or 0 / 0? |
    tl.exp(row_max - new_max) -> tl.exp(new_max - row_max)
infinity | 10 | all of these are infinite: is it exp, 1 / 0, or -inf that a loop never |
    row_max = new_max\n -> \n
no row mask | 6 | writes out of bounds | (column < C) & (row < rows) -> column < C
rest of K | 9 | wrong at odd sizes only |
    range(0, K, BLOCK_K) -> range(0, K // BLOCK_K * BLOCK_K, BLOCK_K)
rounded sum | 9 | as large as those of 16 bits |
    total = tl.dot(a, b, total) -> total = tl.dot(a, b, total).to(tl.float16).to(tl.float32)
other | 10 | wrong at odd sizes only | other=-float("inf") -> other=0.0
first maximum | 10 | wrong where inputs are large | row_max = -float("inf") -> row_max = 0.0
no maximum | 11 | wrong where inputs are large |
    new_max = tl.maximum(row_max, tl.max(scores, 1)) -> new_max = tl.zeros((BLOCK_M,), tl.float32) |
    tl.full((BLOCK_M,), -float("inf"), tl.float32) -> tl.zeros((BLOCK_M,), tl.float32)
keys beyond | 11 | wrong at odd sizes only ... out[0, 0, 0] |
    (key < n)[None, :], scores -> True, scores
two rows | 12 | wrong at odd sizes only | range(rows) -> range(2)
last row | 12 | no program loads q[1, 0, 0] | range(rows) -> range(rows - 1)
rounded p | 12 | as large as those of 16 bits |
    tl.exp(scores - log_sum_exp[:, None]) -> tl.exp(scores - log_sum_exp[:, None]).to(tl.float16)
stride | 0 | race | row[:, None] * (2 * C) -> row[:, None] * C
no mask | 0 | reads out of bounds | X + at + C, mask=inside) -> X + at + C)
rounded s | 0 | as large as those of 16 bits |
    s = tl.sigmoid(gate) -> s = tl.sigmoid(gate).to(tl.float16)
exp | 0 | wrong where inputs are large | tl.sigmoid(gate) -> tl.exp(gate) / (1 + tl.exp(gate))
"""
MISTAKES = mistakes(TABLE)


def write(checker, mistake: Mistake, file: Path):
    """The puzzle with the mistake in place of its kernel, which is written to this file."""
    return with_mistakes(checker, mistake.puzzle, mistake.changes, file)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained_in_one_sentence(checker, name, tmp_path):
    mistake = MISTAKES[name]
    right, text, _ = checker.verdict(write(checker, mistake, tmp_path / "wrong.py"))
    assert not right
    assert [part for part in mistake.sentence.split(" ... ") if part not in text] == [], text
    assert len(text.splitlines()) == 1


# Compiles each file for an H100, as far as it gets, and prints what is said of it.
COMPILE = """
import json, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from exercises.explain import explained
from fusion_lab.script import import_file

for name, file in json.load(sys.stdin).items():
    try:
        [kernel] = [v for v in vars(import_file(Path(file))).values() if hasattr(v, "params")]
        tile = "BLOCK_K" in kernel.arg_names
        sizes = {"n", "rows", "M", "N", "K"} | ({"C"} if not tile else set())
        signature, constants = {}, {}
        for parameter in kernel.params:
            kind = "i32" if parameter.name in sizes | {"BLOCK"} else "*fp16" if tile else "*fp32"
            signature[parameter.name] = "fp32" if parameter.name == "eps" else kind
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
                constants[parameter.name] = 16
        source = ASTSource(kernel, signature, constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
        print(json.dumps([name, "it compiles"]))
    except Exception as error:
        print(json.dumps([name, explained(error, {file})]))
"""


@pytest.mark.skipif(triton_before("3.3"), reason="a mistake ends the process of Triton 3.2")
def test_the_compiler_gets_the_same_sentences(checker, tmp_path):
    files = {}
    for number, (name, mistake) in enumerate(MISTAKES.items()):
        if mistake.compiled:
            files[name] = str(tmp_path / f"wrong_{number}.py")
            write(checker, mistake, Path(files[name]))
    settings = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(ROOT)}
    done = finished("-c", COMPILE, stdin=json.dumps(files), **settings)
    said = dict(map(json.loads, done.stdout.splitlines()))
    assert said.keys() == files.keys(), done.stderr
    assert {name: text for name, text in said.items() if MISTAKES[name].sentence not in text} == {}
    assert all(len(text.splitlines()) == 1 for text in said.values())


# --- other checkers

OWN = r"""
own seed | 0 | a seed is a number, and SEED an address | seed = tl.load(SEED) -> seed = SEED
own gradient of scale | 0 | the gradient of scale | grad_scale += grad * -> grad_scale = grad *
own output | 0 | the output | x + scale * update -> x - scale * update
own constant | 0 | tl.load(SEED) is the seed | seed = tl.load(SEED) -> seed = 1
own columns | 0 | rows or columns have equal |
    RANDOM -> [:, None] * BLOCK_C + tl.zeros((1, BLOCK_C), tl.int32)
own sum | 0 | [0, 1] and [1, 0] have equal random numbers |
    RANDOM -> [:, None] + tl.arange(0, BLOCK_C)
own threshold | 0 | % are kept, not 75 %; an element is dropped where | random >= p -> random < p
own grid | 0 | the grid is a tuple | [(programs,)](x -> [programs](x
own launch | 0 | a kernel is launched with its grid | _kernel[(programs,)](x -> _kernel(x
own argument | 0 | must name each argument | seed, out, rows, **sizes -> seed, out, **sizes
own result | 0 | does forward end in `return out`? | return out\n -> pass\n
own gradients | 0 | returns 2 values for the 5 arguments of forward |
    RETURN -> return grad, grad_update
"""
LONG = {
    "RANDOM": "[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]",
    "RETURN": "return grad, grad_update, sum_parts(parts, scale.dtype), None, None",
}


@pytest.mark.parametrize("mistake", mistakes(OWN).values(), ids=mistakes(OWN))
def test_a_mistake_in_a_kernel_of_ones_own(checker, mistake, tmp_path):
    from exercises.tiny_llama_v3 import check_custom_kernel

    if mistake == mistakes(OWN)["0 own seed"] and triton_before("3.3"):
        pytest.skip("Triton 3.2 takes the address for the seed, and says nothing")
    folder, (right, wrong) = Path(check_custom_kernel.__file__).parent, mistake.code
    right = LONG.get(right, right)
    text = (folder / "custom_kernel_solution.py").read_text()
    assert right in text
    (tmp_path / "wrong.py").write_text(text.replace(right, wrong))
    status, _, err = call(check_custom_kernel, tmp_path / "wrong.py")
    assert (status, len(err.splitlines())) == (1, 1)
    assert mistake.sentence in err


def test_an_error_of_the_tool_itself_stays_one(tmp_path):
    with pytest.raises(ZeroDivisionError), explaining(tmp_path / "module.py"):
        1 / 0  # noqa: B018
