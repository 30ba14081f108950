"""Result files: the fields of each kind, checked when a file is read, whatever happened to it;
ToolError names the file and the field that is not as its kind has it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from typing_extensions import NotRequired, Required, TypedDict

from fusion_lab.cli import ToolError
from fusion_lab.files import read_json

HUGE = 1e300  # numbers from here on are no measurements
Number = Annotated[float, Meta(ge=-HUGE, le=HUGE)]
Positive = Annotated[float, Meta(gt=0, le=HUGE)]
Count = Annotated[int, Meta(ge=1)]
Value = str | Number | bool | None
Turns = Annotated[list[Positive], Meta(min_length=1)]


class Environment(TypedDict, total=False):
    """What something was measured on."""

    device_name: Required[str]
    device: str | None
    torch: str | None
    triton: str | None
    cuda: str | None
    hip: str | None
    cpu_threads: Count | None


class Training(TypedDict, total=False):
    """Arguments of a script."""

    batch_size: Count | None
    num_steps: int | None
    use_amp: bool
    amp_dtype: str | None
    matmul_precision: str | None
    torch_compile: bool
    torch_compile_mode: str | None
    cuda_graph: bool
    processes: Count


class Written(TypedDict):
    """A file of a script, or of a profiler of it: what it was run with."""

    schema_version: Literal[1]
    script: str
    config: dict[str, Value]
    training: Training
    environment: Environment
    fusions: NotRequired[dict[str, bool]]


class Timing(TypedDict, total=False):
    """Milliseconds of a step."""

    steps: Count | None
    samples_per_sec: Positive | None
    batch_ms: Positive | None
    batch_median_ms: Positive | None
    batch_p95_ms: Positive | None
    turns_ms: list[Positive] | None  # empty where a run failed before the first one ended
    data_ms: Number | None
    forward_ms: Number | None
    backward_ms: Number | None
    optimizer_ms: Number | None
    graph_ms: Number | None
    compilation_overhead_ms: Number | None


class Memory(TypedDict, total=False):
    peak_mb: Positive | None


class Kernels(TypedDict, total=False):
    unit: str
    per_step: Count | None
    host_launches: int | None


class Loss(TypedDict, total=False):
    initial: Number | None
    final: Number | None
    curve: list[Number]


class Summary(Written):
    """A run, <script>_summary.json; of one that did not finish, groups may be empty."""

    status: Literal["ok", "oom", "failed"]
    timing: Timing
    memory: Memory
    kernels: Kernels
    loss: Loss
    error: NotRequired[str | None]


class Ceilings(TypedDict):
    precision: str
    gemm_tflops: Positive
    copy_gb_per_s: Positive


class Share(TypedDict):
    """Of a category or phase."""

    kernels_per_step: Number
    copies_per_step: Number
    ms_per_step: Number
    percent: Number


class Profile(Written):
    """<script>_profile.json of run_pytorch_profiler.py."""

    unit: Literal["kernels", "operators"]
    steps: Count
    kernels: NotRequired[Kernels]
    kernels_per_step: NotRequired[Number]
    operators_per_step: NotRequired[Number]
    ms_per_step: Number
    categories: dict[str, Share]
    phases: dict[str, Share]


class Module(TypedDict):
    module: str
    flop: Number
    bytes: Number | None
    flop_per_byte: Number | None
    ms: Number | None


class ForwardFlops(Written):
    """<script>_flops.json of run_deepspeed_flops.py: of a forward pass."""

    modules: list[Module]
    ceilings: Ceilings | None
    flops_counted_by: str


class Row(TypedDict, total=False):
    """One side of a study: what it is, and what came out, or how it ended.

    Rows that have the same model, shape, precision and so on are sides, which took turns; ratios
    are between them. A study that has more fields than these has a kind of its own.
    """

    # what was measured
    model: str  # tiny_llama or tiny_openfold
    version: str  # V1 to V4; a library has none
    side: str  # its name among the sides: V1, V3 compiled, cuEquivariance, none, only overlap
    shape: str  # a name for the sizes
    batch_size: Count
    seq_len: Count
    precision: str  # fp32, TF32, bf16, fp16
    mode: str  # eager, graph, compiled, compiled graph
    fusions: list[str]  # flags of those in effect
    script: str
    argv: list[str]
    on: list[str]  # of the fusions that vary
    seed: int
    group: int  # of sets of fusions that took turns
    # how it ended, unless it finished; "missing": a library that is not installed
    status: Literal["ok", "oom", "failed", "missing"]
    error: str
    # time, in milliseconds or microseconds per step: the median, and that of each turn
    batch_ms: Positive | None
    batch_median_ms: Positive | None
    batch_p95_ms: Positive | None
    turns_ms: Turns
    us: Positive
    turns_us: Turns
    samples_per_sec: Positive
    speedup: Positive | None  # over the side `none`
    # memory, in MB: at the peak, of it beside what was there, held for the backward pass
    peak_mb: Positive | None
    extra_mb: Number | None
    held_mb: Number | None
    # of a step
    per_step: Count
    unit: str  # of per_step: kernels or operator calls
    host_launches: int | None
    final_loss: Number | None


class Study(TypedDict):
    """Rows that were measured on one device, and with what settings."""

    environment: Environment
    rows: list[dict]
    complete: NotRequired[bool]  # are all rows there that were asked for?
    provenance: NotRequired[list[dict]]  # of each session, as provenance.py reads it
    script: NotRequired[str]
    argv: NotRequired[list[str]]
    rounds: NotRequired[Count]
    processes: NotRequired[Count]
    libraries: NotRequired[dict[str, str | None]]  # versions; None: not installed


class Gradients(TypedDict):
    """exercises/performance_debugging/check_step.py's <script>_gradients.json."""

    percent: Number


class Stage(TypedDict):
    stage: str
    gradient_percent: Number | None
    kernel_ms: Number | None
    result: Summary


class Stages(TypedDict):
    """What exercises/performance_debugging/compare_stages.py --output writes."""

    stages: Annotated[list[Stage], Meta(min_length=1)]


class Step(TypedDict):
    name: str
    status: Literal["ok", "skipped", "failed"]
    reason: str | None


class Steps(TypedDict):
    """summary.json of run_all_profilers.sh."""

    steps: list[Step]


def read(kind: type, path: Path) -> dict:
    """The object in a file; ToolError if it is not of this kind."""
    return checked(kind, read_json(path), path)


def checked(kind: type, value: object, path: Path, place: str = "") -> dict:
    """The value, an object of this kind; ToolError names the file and the field where it is not."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        field = (place + where.rstrip("`")).lstrip(".")
        message = f"{field}: {reason}" if field else reason
        raise ToolError(f"{path}: {message}: another kind of file, or damaged") from error
    return value


def checked_study(
    value: object,
    path: Path,
    keys: Iterable[str] = (),
    measured: Iterable[str] = (),
    kind: type = Row,
) -> dict:
    """The value, a study whose rows are of this kind and have the keys, and either a status and an
    error or all that is to be `measured`."""
    study = checked(Study, value, path)
    for number, row in enumerate(study["rows"]):
        checked(kind, row, path, f"rows[{number}]")
        found = ("error",) if "status" in row else measured
        missing = [key for key in keys if key not in row]
        missing += [key for key in found if row.get(key) is None]
        if missing:
            reason = "another study, or of an older version"
            raise ToolError(f"{path}: rows[{number}] has no {missing[0]}: {reason}")
    check_turns(study["rows"], path)
    return study


def read_study(path: Path, *wanted: Iterable[str]) -> dict:
    """A study, finished or not, as `checked_study` wants it, with at least one row."""
    study = checked_study(read_json(path), path, *wanted)
    if not study["rows"]:
        raise ToolError(f"{path}: a study without a row")
    return study


def read_rows(path: Path, *wanted: Iterable[str], kind: type = Row) -> Sequence[dict]:
    """The rows of a finished study; none if it is not there."""
    if not path.exists():
        return []
    study = checked_study(read_json(path), path, *wanted, kind=kind)
    if not study.get("complete", True):
        raise ToolError(f"{path}: the study is not finished; its command goes on with it")
    return study["rows"]


def check_turns(rows: Iterable[dict], path: Path) -> None:
    """ToolError unless rows of the same shape and precision that were measured in turns have
    equally many, in which they are compared."""
    turns: dict[tuple, int] = {}
    for number, row in enumerate(rows):
        for key in ("turns_ms", "turns_us"):
            same = row.get("shape"), row.get("precision")
            if key in row and len(row[key]) != (first := turns.setdefault(same, len(row[key]))):
                there = f"{len(row[key])} turns, others have {first}"
                raise ToolError(f"{path}: rows[{number}].{key} has {there}")
