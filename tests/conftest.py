"""Helpers of all tests: the scripts as modules, sizes that are quick on a CPU, and a way to run a
command X"""

import argparse
import contextlib
import csv
import functools
import gc
import importlib.util
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
# the sizes are so small that threads only wait for each other, for long on a busy machine
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # and so in the processes that tests start
ROOT = Path(__file__).resolve().parent.parent

from fusion_lab import cli  # noqa: E402
from fusion_lab.accuracy import GRADIENT, check_gradients, judge, least_limit, values_of  # noqa: E402


def triton_before(release: str) -> bool:
    """Is the Triton that is here older?"""
    import triton

    return Version(triton.__version__) < Version(release)


CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where kernels run
# the largest error of a kernel, over the largest right value
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
both_types = pytest.mark.parametrize("dtype", LIMITS, ids=["float32", "bfloat16"])


def words(text: str) -> list[str]:
    """A command line as main() takes it."""
    return text.split()


# The smallest sizes that still have several layers, heads, sequences and samples.
TINY = {
    "llama": words(
        "--hidden-dim 64 --num-layers 2 --num-heads 4 --seq-len 32 --batch-size 2 --vocab-size 100"
    ),
    "openfold": words(
        "--num-blocks 1 --seq-len 10 --num-seqs 3 --batch-size 2 --msa-dim 32 --pair-dim 32"
        " --num-heads-msa 2 --num-heads-pair 2"
    ),
}
# Where kernels run in Triton's interpreter.
SMALLEST = {
    "llama": words(
        "--num-layers 1 --hidden-dim 32 --num-heads 2 --num-kv-heads 1 --seq-len 9 --batch-size 1"
    ),
    "openfold": words(
        "--num-blocks 1 --num-seqs 2 --seq-len 5 --batch-size 1"
        " --msa-dim 16 --num-heads-msa 1 --pair-dim 16 --num-heads-pair 1"
    ),
}
MODELS = tuple(TINY)
SCRIPTS = tuple(f"tiny_{model}_v{version}" for model in MODELS for version in "1234")
TRITON = tuple(script for script in SCRIPTS if script[-1] in "34")  # with kernels of their own
SCRIPT = "tiny_llama_v2"  # the one whose core is tested
QUICK = ["--num-steps", "3", "--warmup-steps", "1"]
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))),
    reason="torch.compile on a CPU needs a C++ compiler",
)


def model_of(script: str) -> str:
    """'llama' or 'openfold'."""
    return script.split("_")[1]


def load(script: str) -> ModuleType:
    """The script as a module, imported once."""
    if script not in sys.modules:
        spec = importlib.util.spec_from_file_location(script, ROOT / f"{script}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[script] = module
        spec.loader.exec_module(module)
        if "llama" in script:  # the same synthetic text is read by many tests, and takes 0.1 s
            module.markov_text = functools.cache(module.markov_text)
    return sys.modules[script]


def parse(script: str, *argv: str) -> argparse.Namespace:
    """Validated arguments of a tiny run on the CPU; `argv` wins over the tiny sizes."""
    return load(script).parse_args([*TINY[model_of(script)], "--device", "cpu", *argv])


def build(script: str, *argv: str) -> nn.Module:
    """The tiny model with its initial weights, on the CPU."""
    return load(script).build_model(parse(script, *argv), CPU)


def batches(script: str, *argv: str):
    """The source of batches of a tiny run on the CPU."""
    args = parse(script, *argv)
    return load(script).make_batches(args, CPU, args.seed)


# to do anything
NEEDS = {"norm-from-output": ["triton-rms-norm"], "overlap": ["fused-optimizer"]}


def fusion_settings(script: str) -> dict[str, list[str]]:
    """Arguments for all fusions on, all off, and alone each that the version before lacks."""
    before = {flag for flag, _, _ in load(f"{script[:-1]}{int(script[-1]) - 1}").FUSIONS}
    flags = {
        flag: [flag, *NEEDS.get(flag, [])]
        for flag, _, _ in load(script).FUSIONS
        if flag not in before
    }
    alone = {
        name: ["--disable-all-fusion", *(f"--enable-{flag}" for flag in on)]
        for name, on in flags.items()
    }
    return {"all-on": [], "all-off": ["--disable-all-fusion"], **alone}


ALL_SETTINGS = [
    pytest.param(script, argv, id=f"{script.removeprefix('tiny_')}-{name}")
    for script in SCRIPTS
    if not script.endswith("v1")
    for name, argv in fusion_settings(script).items()
]


def random_state(state: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Weights for comparisons: none is zero or one, and attention is far from uniform, so that no
    term can hide. With seed 0 an argument of a ReLU is so near to zero that rounding decides."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, value in sorted(state.items()):  # their order depends on what is fused
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        if "norm" in name and name.endswith("weight"):
            noise = 1 + 0.2 * noise
        elif value.dim() == 1:
            noise = 0.3 * noise
        elif "embed_tokens" not in name:
            noise = 1.5 * noise / value.shape[1] ** 0.5
        result[name] = noise.to(value.dtype)
    return result


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Gradients by canonical name, split by state_dict as fused weights are, which are lost."""
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        parameter.data = parameter.grad
    return {name: value.clone() for name, value in module.state_dict().items()}


def relative_difference(value: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Norm of the difference over the norm of what is expected, `floor` at least."""
    value, expected = value.detach().double(), expected.detach().double()
    assert value.shape == expected.shape
    return float((value - expected).norm() / max(float(expected.norm()), floor, 1e-300))


def assert_same_gradients(
    found: dict[str, Tensor], expected: dict[str, Tensor], limit: float
) -> None:
    """Every gradient agrees; one that is zero but for rounding is measured against all of them."""
    assert found.keys() == expected.keys()
    total = sum(float(g.double().square().sum()) for g in expected.values()) ** 0.5
    off = {n: relative_difference(found[n], g, 1e-3 * total) for n, g in expected.items()}
    assert {n: difference for n, difference in off.items() if not difference <= limit} == {}


def faults_that_pass(
    module: ModuleType, args: argparse.Namespace, factors: tuple[float, ...] = (0.0, -1.0, 1.3)
) -> tuple[list[tuple[str, float]], int]:
    """Gradients that --verify-accuracy would take for right if they were multiplied by one of
    these, and how many it judges: not those that are zero in theory. As they are, all pass."""
    exact = module.all_off(args, use_amp=False, matmul_precision="highest")
    exact, found = (
        values_of(module, module.Trainer(a).build(), exact=a is exact) for a in (exact, args)
    )
    off, least = module.all_off(args), least_limit(args)
    unfused = [values_of(module, module.Trainer(off).build(), seed=seed) for seed in range(9)]
    verdicts = judge(exact, unfused, found, least)
    assert [name for name, (error, limit) in verdicts.items() if not error <= limit] == []
    norms = {
        name: float(value.norm()) for name, value in exact.items() if name.startswith(GRADIENT)
    }
    judged = [name for name, norm in norms.items() if norm > 1e-12 * max(norms.values())]
    passed = []
    for factor in factors:
        wrong = found | {name: factor * found[name] for name in judged}
        verdicts = judge(exact, unfused, wrong, least)
        passed += [(name, factor) for name in judged if verdicts[name][0] <= verdicts[name][1]]
    return passed, len(judged)


def randn(
    *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, shift: float = 0.0
) -> Tensor:
    """Random numbers where the kernels run."""
    return (scale * torch.randn(shape) + shift).to(DEVICE, dtype)


def apart(x: object) -> object:
    """The same numbers, not side by side in memory; nor are those of its gradient."""
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return x
    return torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]


def check_close(mine: Callable, reference: Callable, *inputs: object, limit: float) -> None:
    """Results and gradients of a kernel's operation are those of float64; neither inputs nor
    gradients of results lie side by side in memory."""

    def spread(*given: object) -> object:
        found = mine(*map(apart, given))
        return tuple(map(apart, found)) if isinstance(found, tuple) else apart(found)

    check_gradients(reference, spread, inputs, limit)


@dataclass(frozen=True)
class Run:
    """What a command line left behind; `stderr` are its notes and errors, without progress."""

    status: int
    stdout: str
    stderr: str
    directory: Path
    summary: dict | None  # None if there is no result file
    progress: str = ""

    def __iter__(self) -> Iterator:
        return iter((self.status, self.stdout, self.stderr, self.summary))


def strict_json(text: str) -> dict:
    """JSON as every reader understands it: NaN and Infinity are refused."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def captured(main: Callable[[list[str]], int], argv: list[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of main(argv)."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            status = main(argv)
        except SystemExit as end:
            status = end.code
    return status, stdout.getvalue(), stderr.getvalue()


def finished(
    *command: object, cwd: Path | None = None, stdin: str | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """A Python program in a process of its own, to its end; `environment` is beside this one's."""
    options = {"capture_output": True, "text": True, "timeout": 900, "cwd": cwd, "input": stdin}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, env=os.environ | environment, **options)


def call(tool: ModuleType, *argv: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a program's command line."""
    return captured(tool.main, [str(argument) for argument in argv])


def assert_refused(answer: tuple[int, str, str], *words: str) -> None:
    """One line on stderr with these words, nothing that looks like a result on stdout."""
    assert (*answer[:2], len(answer[2].splitlines())) == (2, "", 1), answer
    assert not [word for word in words if word not in answer[2]], answer[2]


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a csv file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table_of(text: str) -> list[dict[str, str]]:
    """The first Markdown table of a text, row by row."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    width = len(cells[0])
    end = next((i for i, row in enumerate(cells) if len(row) != width), len(cells))
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:end]]


def summary_in(directory: Path, script: str = SCRIPT) -> dict | None:
    """The result file in this directory, None if there is none."""
    path = directory / f"{script}_summary.json"
    return strict_json(path.read_text()) if path.is_file() else None


def arguments(script: str, directory: Path, *argv: str) -> list[str]:
    """A tiny run on the CPU with results in `directory`; of equal options the last one counts."""
    return [*TINY[model_of(script)], "--device", "cpu", "--profile-dir", str(directory), *argv]


def command_line(script: str, directory: Path, *argv: str) -> list[str]:
    """The same run as a process of its own."""
    return [sys.executable, "-B", str(ROOT / f"{script}.py"), *arguments(script, directory, *argv)]


def run_main(script: str, directory: Path, *argv: str) -> Run:
    """Run main(argv) of a script with tiny sizes, on the CPU unless `argv` says otherwise."""
    status, stdout, stderr = captured(load(script).main, arguments(script, directory, *argv))
    lines = stderr.splitlines(keepends=True)
    said = [line for line in lines if re.search(": (error|note): ", line)]
    progress = "".join(line for line in lines if line not in said)
    summary = summary_in(directory, script)
    return Run(status, stdout, "".join(said), directory, summary, progress)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    """`run(script, *argv)` -> (status, stdout, stderr, summary), with a fresh --profile-dir for
    each test."""
    return lambda script, *argv: run_main(script, tmp_path / "profiles", *argv)


def assert_one_error(result: Run, status: int, *words: str) -> None:
    """The run ended with this status and one line on stderr that has all of the words."""
    lines = result.stderr.splitlines()
    assert result.status == status, result.stderr
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stdout
    for word in words:
        assert word in lines[0]


@pytest.fixture
def same_numbers(monkeypatch):
    """The checker draws other inputs and sizes each time: which fault shows first can depend on
    them."""
    random.seed(0)
    monkeypatch.setattr(torch, "seed", lambda: torch.manual_seed(0))


@pytest.fixture(scope="module")
def checker():
    """The module, in the interpreter.

    It asks for that when it is imported, so not where kernels are compiled.
    """
    if torch.cuda.is_available():
        pytest.skip("Triton compiles in this process")
    from exercises.puzzles import checker

    return checker


def as_given(file: Path) -> str:
    """A puzzle's file with `pass` for its kernels, whatever a reader has written there."""
    text = file.read_text()
    solution = (file.parent / "solutions" / file.name).read_text()
    head = re.search(r"@triton\.jit\ndef \w+\(.*?\):[^\n]*\n", solution, re.DOTALL)[0]
    begin = re.search(r"^(@triton\.jit|def )", text, re.MULTILINE).start()
    launch = text.rindex("\n\n\ndef ", 0, text.index("\n# --- what the checker needs"))
    return f"{text[:begin]}{head}    pass\n{text[launch:]}"


@functools.cache
def given_puzzles() -> tuple[list[Path], tempfile.TemporaryDirectory]:
    """Puzzles and build_a_fusion's kernel as they were given, in a folder of the tests: readers
    write in the repository's."""
    folder = tempfile.TemporaryDirectory(prefix="given_")
    files = [*(ROOT / "exercises/puzzles").glob("puzzle_*.py")]
    files += [ROOT / "exercises/build_a_fusion/swiglu_backward.py"]
    copies = []
    for file in files:
        copy = Path(folder.name, file.parent.name, file.name)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(as_given(file))
        solutions = copy.parent / "solutions"
        if not solutions.exists():
            solutions.symlink_to(file.parent / "solutions")
        copies.append(copy)
    return sorted(copies, key=lambda copy: copy.name), folder


def puzzle_file(number: int) -> Path:
    """The file of a puzzle as it was given; 0 is build_a_fusion's."""
    return given_puzzles()[0][number - 1]


class Mistake(NamedTuple):
    """`code` is what stands in the solution of a puzzle, what is put in its place, and so on."""

    puzzle: int
    code: tuple[str, ...]
    sentence: str
    compiled: bool  # is it refused, with this sentence, by the compiler, too?

    @property
    def changes(self) -> Iterable[tuple[str, str]]:
        return zip(self.code[::2], self.code[1::2], strict=True)


def mistakes(table: str, **sentences: str) -> dict[str, Mistake]:
    """Its rows by name.

    A row is `name | puzzle | sentence | right -> wrong | ...`, the puzzle with c if the compiler
    says the same. What begins with blanks goes on with the line before; `sentences` have names.
    """
    found = {}
    for line in re.sub(r"\n {4}", " ", table.strip()).splitlines():
        name, puzzle, sentence, *changes = line.split(" | ")
        code = [part.strip() for change in changes for part in change.split("->")]
        code = tuple(part.replace("\\n", "\n") for part in code)
        sentence = sentences.get(sentence, sentence)
        number = int(puzzle.rstrip("c"))
        found[f"{number} {name}"] = Mistake(number, code, sentence, puzzle.endswith("c"))
    return found


def replaced(text: str, changes: Iterable[tuple[str, str]]) -> str:
    """The text with these parts replaced, each of which must be there."""
    for right, wrong in changes:
        assert right in text
        text = text.replace(right, wrong)
    return text


def with_mistakes(checker: ModuleType, number: int, changes: Iterable[tuple[str, str]], file: Path):
    """A puzzle with its solution, in which these texts are replaced; it is written to the file."""
    puzzle = checker.load(puzzle_file(number)).PUZZLE
    text = checker.solution_of(puzzle).read_text()
    file.write_text(replaced(text, changes))
    checker.use_kernels_of(puzzle, file)
    return puzzle


@pytest.fixture(autouse=True, scope="module")
def no_search_for_garbage_in_what_is_imported() -> Iterator[None]:
    """Each run collects garbage before it measures memory: PyTorch's modules alone took 0.2 s."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """Put back what a run sets for the whole process, and a script in whose place a test has
    loaded its own. Random numbers begin anew."""
    torch.manual_seed(0)
    scripts = {name: sys.modules[name] for name in SCRIPTS if name in sys.modules}
    cli.SIGN_SECONDS = 1e6  # none on stderr where a machine is busy
    yield
    sys.modules.update(scripts)
    if torch.are_deterministic_algorithms_enabled():  # else it would import all of the compiler
        torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU, and where there is one those that run Triton's kernels
    on the CPU.

    Triton compiles kernels or interprets them, in all of a process. Sheets come first: they take
    longest, and what comes last should be short, so that no worker waits for the other.
    """
    items.sort(key=lambda item: "block_of_a_sheet" not in item.name)
    gpu = torch.cuda.is_available()
    for item in items:
        script = item.callspec.params.get("script") if hasattr(item, "callspec") else None
        on_cpu = not item.path.name.startswith(("test_gpu", "test_triton", "test_core"))
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif gpu and on_cpu and script in TRITON:
            item.add_marker(
                pytest.mark.skip(reason="Triton's interpreter is for machines without a GPU")
            )
