"""Pages for readers: START.md shows what its programs measure, sentences have the numbers of the
results, the tables of claims and of names name what exists. And the results themselves."""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest
import torch
from conftest import ROOT, captured, load, needs_compiler
from torch.utils.flop_counter import FlopCounterMode

from bench import operations, version_tables, versions
from bench.sizes import ALL_VERSIONS
from bench.version_tables import COMPILED, as_graphs, best_over, versions_of
from exercises.start import add_relu, attention_memory
from lab.cli import ToolError
from lab.profile.kernels import complete, load_trace
from lab.study import by_side
from lab.turns import ratios, speedup
from tools.tables import CELLS, TABLE

H100 = ROOT / "results/h100"
PAGE = (ROOT / "docs/START.md").read_text()


def test_fused_attention_is_the_same_and_its_memory_grows_with_the_length_alone():
    q, k, v = torch.randn(3, attention_memory.HEADS, 40, attention_memory.HEAD_DIM)
    torch.testing.assert_close(
        attention_memory.fused(q, k, v), attention_memory.with_scores(q, k, v)
    )
    scores, fused = (
        [attention_memory.peak_bytes(way, length) for length in (512, 1024)]
        for way in (attention_memory.with_scores, attention_memory.fused)
    )
    # float32 scores, their softmax, a gradient
    assert scores[1] > 3 * attention_memory.HEADS * 1024**2 * 4
    assert scores[1] > 3.5 * scores[0]
    assert fused[1] < 3 * fused[0]


def test_the_page_shows_what_its_commands_printed_and_the_table_that_the_figure_draws():
    run = json.loads((ROOT / "results/cpu/start.json").read_text())
    assert sum(run["seconds"].values()) < 180
    for lines in run["printed"].values():
        assert not [line for line in lines if line not in PAGE and not line.startswith("drawn:")]
    for row in json.loads((ROOT / "results/cpu/attention_memory.json").read_text())["rows"]:
        mb = [f"{row[way] / 1e6:.1f} |" for way in ("scores", "fused")]
        assert any(
            line.startswith(f"| {row['length']} ") and all(n in line for n in mb)
            for line in PAGE.splitlines()
        )


def test_the_page_shows_the_kernel_that_its_command_runs():
    code = (ROOT / "exercises/start/first_kernel.py").read_text().partition("@triton.jit")[2]
    assert code in PAGE


@needs_compiler
def test_add_relu_predicts_by_bytes_then_measures(monkeypatch):
    status, printed, errors = captured(add_relu.main, ["--n", "1000000", "--turns", "3"])
    assert (status, errors) == (0, "")
    assert "predicted by bytes: 1.67x" in printed
    assert "made 1 kernel, the results are equal" in printed
    assert "measured in 3 turns" in printed


def test_without_a_compiler_add_relu_says_so_in_one_line(monkeypatch):
    def refuse(*_: torch.Tensor) -> None:
        raise RuntimeError("no C++ compiler\nmany lines more")

    monkeypatch.setattr(add_relu, "one_kernel", refuse)
    status, printed, errors = captured(add_relu.main, ["--n", "1000"])
    assert status == 4
    assert errors == "add_relu.py: error: torch.compile does not work here (no C++ compiler)\n"
    assert "measured" not in printed


# A page and a sentence of it; the numbers in braces are those of `figures`.
SENTENCES = """
docs/RESULTS.md | step becomes {gains} times as fast
docs/RESULTS.md | is {longer[64]:.1f} times as fast as V1 at 64 residues and {longer[128]:.1f} times
docs/RESULTS.md | default is still {openfold[V4][per_step]} kernels
{LEFT} | {openfold[V4][per_step]} of {openfold[V3][per_step]}
docs/MEASURING.md | spread by {spread[graph]:.1f} % at most in twelve pairs
docs/MEASURING.md | in eager mode by up to {spread[eager]:.0f} %
README.md | {medium:.1f}x for medium TinyLlama, V1 to V3
docs/CLAIMS.md | {llama[0]:.2f}x (medium, fp32, `headline_v3.json`) to {llama[1]:.2f}x (32 samples
docs/CLAIMS.md | bf16: {v4}x (`suite_llama.json`), {saved[0]} % less (small) and {saved[1]}
docs/CLAIMS.md | at a real crop: {crop_exact:.2f}x in fp32, {crop_bf16:.2f}x in bf16
docs/RESULTS.md | V4 adds up to {v4_over_v3:.1f} times.
README.md | V4 is {ahead} times as fast as the best compiled version of TinyLlama
README.md | the best compiled version of TinyLlama, {ahead_openfold} times for TinyOpenFold
docs/RESULTS.md | {ahead} times as
docs/RESULTS.md | {ahead_openfold} times as
docs/START.md | runs {small[V1][per_step]} kernels
docs/START.md | the step takes {small[V1][batch_ms]:.1f} ms
docs/START.md | leaves {small[V2][per_step]} kernels and {small[V2][batch_ms]:.1f} ms
docs/START.md | leaves {small[V3][per_step]} kernels and {small[V3][batch_ms]:.1f} ms
docs/START.md | from {crop[V1][batch_ms]:.1f} ms in V1 to {crop[V3][batch_ms]:.1f} at the size
docs/START.md | That is {small[V4][batch_ms]:.1f} ms with {small[V4][per_step]} kernels
README.md | V2 needs checkpoints, and {trunk_ratio:.1f} times as long
docs/RESULTS.md | takes {trunk[0]:.0f} ms, V2 with them {trunk[1]:.0f}: {trunk_ratio:.1f} times as
docs/RESULTS.md | {worst[V3]:.0f} % off in V3, {worst[V1]:.0f} % in V1,
docs/RESULTS.md | {worst[cuEquivariance]:.0f} % in cuEquivariance and {worst[V2]:.0f} % in PyTorch's
docs/RESULTS.md | triangle multiplication of {triangle[1]} residues
docs/RESULTS.md | cuEquivariance wins from {triangle[1]} residues
docs/RESULTS.md | wins by a fifth** from {flex[0]} residues on
docs/CLAIMS.md | {least_saved} to {most_saved}
docs/CLAIMS.md | TinyLlama V2: {fewer} % and {smaller} % (`headline.json`)
docs/CLAIMS.md | V1, V2, V4: {used[0]} % (small), {used[1]} % (medium), bf16
docs/CLAIMS.md | less: {occupancies} %, V1 to V4
docs/CLAIMS.md | {qkv[0]:.0f} and {qkv[1]:.0f} µs a layer
docs/CLAIMS.md | {fewer_kernels} % of a step's {kernels}
docs/CLAIMS.md | with flash attention {attention_ms} %, forward
docs/CLAIMS.md | forward {mlp_slower} % slower, {mlp_bytes} % fewer bytes
docs/CLAIMS.md | {qkv_memory:.0f} % more memory (`exercises.json`)
docs/CLAIMS.md | TinyOpenFold {flash_256} % at 256 residues
docs/CLAIMS.md | {doubled[0]:.1f} times TinyLlama's, {doubled[1]:.1f} times TinyOpenFold's
docs/CLAIMS.md | {triton[0]:.2f}x: {triton[2]:.0f} and {triton[1]:.0f} (8 samples
docs/CLAIMS.md | {rate[stage2]:.1f}x and {rate[stage4]:.2f}x
docs/CLAIMS.md | {ms[stage2]:.2f} ms become {ms[stage5]:.2f}: {over_5[stage2]:.2f}x
docs/CLAIMS.md | takes {ms[stage4]:.2f} ms in place of {ms[stage5]:.2f}: {over_5[stage4]:.1f}x
docs/CLAIMS.md | 0.9x | {there[openfold]} (`headline_v3.json`)
docs/CLAIMS.md | samples/s | {compiled} (`fastest_openfold.json`)
docs/CLAIMS.md | 2.7x | {there[llama]} (`headline_v3.json`)
docs/CLAIMS.md | MB | {peaks[scores]} MB (`memory.json`)
docs/CLAIMS.md | MB | {peaks[flash]} MB: memory
docs/CLAIMS.md | step {alone[0]} (norms with their residual addition), {alone[1]} (triangle),
docs/CLAIMS.md | {alone[2]} (attention with bias and gate) and {alone[3]} times (outer product)
docs/CLAIMS.md | as fast, and all {alone[4]} times
docs/CLAIMS.md | {intensity[0]:.1f} FLOP/byte become {intensity[1]:.1f}, {intensity[2]:.1f}x
{FAULT} | {ms[stage3]:.2f} ms, while the kernels
{IMPACT} | {backward[0]:.1f} to {backward[1]:.1f} ms, the forward pass from {forward[0]:.1f} to
{IMPACT} | to {forward[1]:.1f}, the optimizer,
{IMPACT} | from {optimizer[0]:.2f} to {optimizer[1]:.2f}.
{ROCM} | {gemms[0]:.1f} and {gemms[1]:.1f} % of the time
docs/RESULTS.md | {padded_default} % longer at default sizes, {padded_crop} % at the crop
docs/MANY_GPUS.md | {one:.2f} ms for 16 samples, {half:.2f} for 8, and {two:.2f}
"""
SHEETS = {
    "{FAULT}": "exercises/performance_debugging/exercise_1_find_the_fault.md",
    "{LEFT}": "exercises/tiny_openfold_v4/exercise_1_what_is_left.md",
    "{IMPACT}": "exercises/tiny_openfold_v2/exercise_1_fusion_impact.md",
    "{ROCM}": "exercises/tiny_openfold_v2/exercise_4_rocm_profiling.md",
}


def content(name: str) -> dict:
    """A file of results/h100/."""
    return json.loads((H100 / name).read_text())


def less(before: float, after: float) -> int:
    """By how many per cent it fell."""
    return round(100 * (1 - after / before))


def span(values: Iterable[float], form: str) -> str:
    """The first and last of the sorted values."""
    low, *_, high = sorted(values)
    return f"{low:{form}} to {high:{form}}"


def occupancy(kernel: dict) -> float:
    """The part of a multiprocessor's 64 warps that a launch fills on an H100: by registers, shared
    memory and blocks, and by how many blocks there are for 132 multiprocessors."""
    launch = kernel["args"]
    warps = math.ceil(math.prod(launch["block"]) / 32)
    registers = 256 * math.ceil(32 * launch["registers per thread"] / 256)  # of a warp
    shared = 128 * math.ceil((launch["shared memory"] + 1024) / 128)
    fit = min(32, 64 // warps, 4 * (16384 // registers) // warps, 228 * 1024 // shared)
    return min(fit, math.prod(launch["grid"]) / 132) * warps / 64


def of_versions() -> Iterator[tuple[str, object]]:
    """Steps of the versions, as graphs and beside compiled ones."""
    steps = as_graphs(H100)
    gains = {key: speedup(sides["V1"], sides["V3"]) for key, sides in steps.items()}
    suite, longer = (
        by_side(content(f"suite_{model}.json")["rows"], "batch_size", "seq_len")
        for model in ("llama", "openfold")
    )
    yield "medium", gains["tiny_llama, medium", "fp32"]
    llama = [gain for (shape, _), gain in gains.items() if shape.startswith("tiny_llama")]
    llama += [speedup(sides["v1"], sides["v3"]) for sides in suite.values()]
    yield "llama", (min(llama), max(llama))
    longer = {length: speedup(sides["v1"], sides["v3"]) for (_, length), sides in longer.items()}
    yield from {"longer": longer, "openfold": steps["tiny_openfold, default", "bf16"]}.items()
    yield "gains", span((*gains.values(), *llama, *longer.values()), ".1f")
    v4 = span((speedup(sides["v1"], sides["v4"]) for sides in suite.values()), ".2f")
    yield "v4", v4.replace(" ", "x ", 1)
    small = suite[8, 128]
    rates = [1e3 * row["batch_size"] / row["batch_ms"] for row in (small["v1"], small["v3"])]
    yield "triton", (speedup(small["v1"], small["v3"]), *rates)
    sizes = [steps[f"tiny_llama, {size}", "bf16"] for size in ("small", "medium")]
    yield "saved", [less(sides["V1"]["peak_mb"], sides["V4"]["peak_mb"]) for sides in sizes]
    table = rows_in((H100 / "sheets/performance_debugging/comparison.md").read_text())
    ms = {row["stage"]: float(row["ms per step"]) for row in table}
    yield from {"ms": ms, "over_5": {k: v / ms["stage5"] for k, v in ms.items()}}.items()
    yield "rate", {row["stage"]: float(row["samples/sec"]) / rates[0] for row in table}
    yield "crop_exact", gains["tiny_openfold, crop", "fp32"]
    yield "crop_bf16", gains["tiny_openfold, crop", "bf16"]
    yield "small", steps["tiny_llama, small", "bf16"]
    yield "crop", steps["tiny_openfold, crop", "bf16"]
    llama, openfold = (versions_of(H100 / f"fastest{model}.json") for model in ("", "_openfold"))
    sides = [sides for sides in (*llama.values(), *openfold.values()) if "V4" in sides]
    yield "v4_over_v3", max(speedup(side["V3"], side["V4"]) for side in sides)
    for name, study in (("ahead", llama), ("ahead_openfold", openfold)):
        best = (best_over(COMPILED, "V4", sides) for sides in study.values())
        yield name, span((over[0] for over in best if over), ".2f")
    trunk = by_side(content("trunk.json")["rows"], "shape", "checkpointed")
    v4, v2 = (trunk["128 x 256", kept][v]["batch_ms"] for v, kept in (("V4", False), ("V2", True)))
    yield from {"trunk": (v4, v2), "trunk_ratio": v2 / v4}.items()
    sizes = by_side(content("padding.json")["rows"], "shape")
    for name in ("default", "crop"):
        sides = sizes[f"tiny_openfold, {name}",]
        longer = [100 * speedup(sides[f"{v}, padded"], sides[v]) - 100 for v in ALL_VERSIONS]
        yield f"padded_{name}", "{:.0f}, {:.0f}, {:.0f} and {:.0f}".format(*longer)


def of_libraries() -> Iterator[tuple[str, object]]:
    """How far each is off, and the lengths at which one takes less time than our kernel."""
    case = {"subject": "triangle attention", "case": "outlier", "precision": "bf16"}
    rows = [row for row in content("accuracy.json")["rows"] if case.items() <= row.items()]
    worst = {side: found["lines"].values() for side, found in rows[0]["sides"].items()}
    yield "worst", {s: 100 * max(error for error, _ in lines) for s, lines in worst.items()}
    for name, study, library in (
        ("triangle", "triangle", "cuEquivariance, bf16 parameters"),
        ("flex", "attention", "FlexAttention, own layout"),
    ):
        cells = by_side(content(f"{study}.json")["rows"], "shape", "precision").items()
        won = sorted(
            int(shape.removeprefix("N="))
            for (shape, precision), sides in cells
            if precision == "bf16" and shape.startswith("N=") and "batch" not in shape
            if sides[library].get("us") < sides["triton"].get("us")
        )
        yield name, (won[0], f"{won[0]} to {won[-1]}")


def of_memory_and_bandwidth() -> Iterator[tuple[str, object]]:
    headline = versions_of(H100 / "headline.json", "mode")
    widest = {"eager": 0.0, "graph": 0.0}
    for (*_, mode), sides in headline.items():
        if mode in widest:
            turns = ratios(sides["V1"], sides["V2"])
            share = 100 * (max(turns) - min(turns)) / statistics.median(turns)
            widest[mode] = max(widest[mode], share)
    yield "spread", widest
    llama = {key: sides for key, sides in headline.items() if key[0].startswith("tiny_llama")}
    graphs = {key[:2]: sides for key, sides in llama.items() if key[2] == "graph"}
    saved = sorted(
        (less(sides["V1"]["peak_mb"], sides["V2"]["peak_mb"]), *key)
        for key, sides in graphs.items()
    )
    texts = [f"{n} % ({shape.partition(', ')[2]}, {precision})" for n, shape, precision in saved]
    yield from {"least_saved": texts[0], "most_saved": texts[-1]}.items()
    for name, what, before, after in (
        ("fewer", "per_step", "eager", "compiled"),
        ("smaller", "peak_mb", "graph", "compiled graph"),
    ):
        both = [(llama[(*key, before)]["V2"], llama[(*key, after)]["V2"]) for key in graphs]
        yield name, span((less(one[what], two[what]) for one, two in both), "d")
    copy = content("flops_tiny_llama_v2.json")["ceilings"]["copy_gb_per_s"]
    traffic = by_side(content("traffic.json")["rows"], "shape", "precision")
    last, used = versions_of(H100 / "fastest.json"), []
    for key in (("tiny_llama, small", "bf16"), ("tiny_llama, medium", "bf16")):
        steps = graphs[key] | {"V4": last[key]["V4"]}
        rates = (traffic[key][v]["gb"] / steps[v]["batch_ms"] for v in ("V1", "V2", "V4"))
        used.append(", ".join(f"{1e5 * rate / copy:.0f}" for rate in rates))
    yield "used", used
    shares = []
    for run in ("v1_eager", "v2_eager", "v3_graph", "v4_graph"):
        kernels = complete(load_trace(H100 / f"traces/tiny_llama_{run}.json.gz"), "kernel")
        busy = sum(kernel["dur"] for kernel in kernels)
        shares.append(sum(kernel["dur"] * occupancy(kernel) for kernel in kernels) / busy)
    yield "occupancies", ", ".join(f"{100 * share:.0f}" for share in shares)


def of_single_fusions() -> Iterator[tuple[str, object]]:
    alone = by_side(content("ablation_tiny_llama_v2.json")["rows"], "precision")
    both = [(sides["none"], sides["only qkv-fusion"]) for sides in alone.values()]
    yield "qkv", [1e3 * (none["batch_ms"] - qkv["batch_ms"]) / 8 for none, qkv in both]
    kernels = {side: row["per_step"] for side, row in alone["fp32",].items()}
    names = ("qkv-fusion", "flash-attention", "swiglu-fusion")
    yield "kernels", kernels["none"]
    fewer = [less(kernels["none"], kernels[f"only {name}"]) for name in names]
    yield "fewer_kernels", "{}, {} and {}".format(*fewer)
    change = {}
    for side in ("_all_off", ""):
        path = H100 / f"roofline/tiny_llama_v2{side}/tiny_llama_v2_flops.csv"
        for row in csv.DictReader(path.open()):
            for key in ("ms", "bytes"):
                change.setdefault((row["module"], key), []).append(float(row[key] or 0))
    yield "attention_ms", less(*change["layers.*.self_attn", "ms"])
    yield "mlp_slower", -less(*change["layers.*.mlp", "ms"])
    yield "mlp_bytes", less(*change["layers.*.mlp", "bytes"])
    runs = content("exercises.json")["runs"]
    mb = {name: run["memory"]["peak_mb"] for name, run in runs.items() if run["memory"]}
    yield "qkv_memory", 100 * (mb["llama_v2/ablation/qkv-fusion"] / mb["llama_v2/v1"] - 1)
    scores, flash, shorter = (
        f"memory_scaling/{n}" for n in ("no_flash_256", "flash_256", "flash_128")
    )
    yield "flash_256", less(mb[scores], mb[flash])
    rows = by_side(content("memory.json")["rows"], "seq_len")
    llama = [rows[length,]["flash"]["peak_mb"] for length in (2048, 1024)]
    yield "doubled", [llama[0] / llama[1], mb[flash] / mb[shorter]]


def of_the_public_workshop() -> Iterator[tuple[str, object]]:
    """Ours at the sizes of another workshop, in float32."""
    modes = versions_of(H100 / "headline_v3.json", "mode")

    def rates(samples: int, *rows: dict) -> str:
        return ", ".join(f"{1e3 * samples / row['batch_ms']:.0f}" for row in rows)

    def rates_and_ratios(samples: int, first: dict, *rows: dict) -> str:
        ratios = ", ".join(f"{speedup(first, row):.2f}x" for row in rows)
        return f"{rates(samples, first, *rows)}: {ratios}"

    openfold = modes["tiny_openfold, default", "fp32", "graph"]
    llama = [modes["tiny_llama, small", "fp32", mode] for mode in ("graph", "compiled graph")]
    yield (
        "there",
        {
            "openfold": rates_and_ratios(4, *(openfold[v] for v in ("V1", "V2", "V3"))),
            "llama": rates_and_ratios(8, llama[0]["V1"], llama[0]["V2"], llama[1]["V2"]),
        },
    )
    fastest = versions_of(H100 / "fastest_openfold.json")["tiny_openfold, default", "fp32"]
    yield "compiled", rates(4, *(fastest[f"V{number} compiled"] for number in (1, 2, 3)))
    peaks = defaultdict(list)
    for row in content("memory.json")["rows"]:
        peaks[row["side"]].append(f"{row['peak_mb']:.0f}")
    yield "peaks", {side: ", ".join(mb[:4]) for side, mb in peaks.items()}
    rows = content("ablation_tiny_openfold_v3.json")["rows"]
    gains = {row["side"]: f"{row['speedup']:.2f}" for row in rows if row["precision"] == "fp32"}
    names = ("layer-norm", "triangle", "attention", "outer-product")
    yield "alone", [*(gains[f"only triton-{name}"] for name in names), gains["all"]]
    path = "roofline/tiny_llama_v2{}/tiny_llama_v2_flops.csv"
    sides = [csv.DictReader((H100 / path.format(side)).open()) for side in ("_all_off", "")]
    before, after = (
        next(float(row["flop_per_byte"]) for row in side if row["module"] == "layers.*.self_attn")
        for side in sides
    )
    yield "intensity", (before, after, after / before)


def of_profiles() -> Iterator[tuple[str, object]]:
    names = [f"profiles/tiny_openfold_v2_{side}/tiny_openfold_v2" for side in ("all_off", "fused")]
    sides = [content(f"{name}_profile.json") for name in names]
    for phase in ("forward", "backward", "optimizer"):
        yield phase, [side["phases"][phase]["ms_per_step"] for side in sides]
    yield "gemms", [side["categories"]["GEMM"]["percent"] for side in sides]


def of_two_gpus() -> Iterator[tuple[str, object]]:
    """TinyLlama V1 with 16 samples on one GPU, with half of them, and with half on each of two."""
    rows = json.loads((ROOT / "results/h100x2/scaling.json").read_text())["rows"]
    steps = by_side(rows, "name", "processes", "batch_size")
    for name, processes, batch in (("one", 1, 16), ("half", 1, 8), ("two", 2, 16)):
        yield name, steps["tiny_llama", processes, batch]["V1"]["batch_ms"]


@functools.cache
def figures() -> dict[str, object]:
    """What the studies have, by the names in SENTENCES."""
    parts = (of_versions, of_libraries, of_memory_and_bandwidth, of_single_fusions, of_profiles)
    parts += (of_two_gpus, of_the_public_workshop)
    return dict(itertools.chain(*(part() for part in parts)))


@pytest.mark.parametrize("line", SENTENCES.strip().splitlines())
def test_sentences_have_the_numbers_of_the_studies(line: str):
    """Wherever the lines of the page end."""
    page, sentence = line.split(" | ", 1)
    text = " ".join((ROOT / SHEETS.get(page, page)).read_text().split())
    assert sentence.format(**figures()) in text


def test_every_result_file_behind_a_claim_is_there():
    text = (ROOT / "docs/CLAIMS.md").read_text()
    files = set(re.findall(r"`([\w/.*]+\.(?:json|csv))`", text))
    assert len(files) > 10
    assert not [name for name in files if not [*(ROOT / "results/h100").glob(name)]]


def test_what_an_older_name_became_is_there():
    section = (ROOT / "docs/CLAIMS.md").read_text().partition("## Names of other editions")[2]
    rows = re.findall(r"^\| (.*) \| (.*) \|$", section, re.MULTILINE)
    named = {word for _, here in rows for word in re.findall(r"[\w/.-]+\.(?:py|sh|md|txt)", here)}
    assert len(named) > 15
    assert not [
        name for name in named if not (ROOT / name).exists() and not (ROOT / "docs" / name).exists()
    ]


# The committed result files: complete runs that name their device and learn

RUNS = sorted((ROOT / "results").glob("*/tiny_*.json"))
STUDIES = sorted((ROOT / "results").glob("*/*.json"))


def test_committed_runs_finished_where_they_lie_and_learn():
    runs = {path: json.loads(path.read_text()) for path in RUNS}
    for path in (ROOT / "results").glob("*/exercises.json"):
        runs |= {path / name: run for name, run in json.loads(path.read_text())["runs"].items()}
    assert len(runs) > 30
    for path, result in runs.items():
        loss, training, here = (result[name] for name in ("loss", "training", "environment"))
        device = path.relative_to(ROOT / "results").parts[0]
        assert result["status"] == "ok", path
        assert len(loss["curve"]) == training["warmup_steps"] + training["num_steps"], path
        assert loss["final"] < (0.7 if path in RUNS else 1.0) * loss["initial"], path
        named = here["device"] if device == "cpu" else here["device_name"].lower()
        assert device.partition("x")[0] in named, path


def rows_in(printed: str) -> list[dict[str, str]]:
    """The rows of Markdown tables, the cells that are not empty by their columns."""
    rows = []
    for table in re.findall(r"(?:^\|.*\n?)+", printed, re.MULTILINE):
        header, _, *lines = (
            [c.strip() for c in CELLS.split(line)[1:-1]] for line in table.splitlines()
        )
        cells = (zip(header, line, strict=True) for line in lines)
        rows += [{label: text for label, text in row if text not in ("", "-")} for row in cells]
    return rows


@pytest.mark.parametrize("device", sorted({path.parent for path in STUDIES}), ids=lambda d: d.name)
@pytest.mark.parametrize("program", [versions, operations], ids=lambda p: p.__name__)
def test_each_row_of_a_table_is_of_one_file(program, device, tmp_path):
    """What a study prints by itself has each row of the tables that all studies print."""
    alone = []
    for path in device.glob("*.json"):
        (tmp_path / path.stem).mkdir()
        (tmp_path / path.stem / path.name).symlink_to(path)
        with contextlib.suppress(ToolError):  # of other programs
            alone += rows_in(program.table(tmp_path / path.stem))
    try:
        rows = rows_in(program.table(device))
    except ToolError:
        rows = []
    assert len(rows) > (20 if device.name == "h100" else -1)
    assert not [row for row in rows if not any(row.items() <= one.items() for one in alone)]


def test_other_tables_on_pages_name_one_file():
    pages = [p for p in ROOT.glob("**/*.md") if not p.is_relative_to(ROOT / ".venv")]
    commands = [match[2] for page in pages for match in TABLE.finditer(page.read_text())]
    assert len(commands) > 12
    files = [set(re.findall(r"results/[\w/]+\.\w+", command)) for command in commands]
    assert not [command for command, named in zip(commands, files, strict=True) if len(named) > 1]


def test_times_of_one_step_agree_in_all_tables():
    """Within what RESULTS.md says of tables."""
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/RESULTS.md")]
    said = re.search(r"in two tables differ by up to (\d+) %", "".join(pages))
    times = defaultdict(set)
    for row in itertools.chain(*map(rows_in, pages)):
        head, label = next(iter(row.items()))
        shape = label if label.startswith("tiny_") else f"{head}, {label}"
        for column, text in row.items():
            if re.fullmatch(r"V\d, ms", column) and re.match(r"tiny_\w+, \w+, \w+$", shape):
                times[shape, column].add(float(text))
    assert max(map(len, times.values())) > 2
    assert all(max(ms) <= (1 + int(said[1]) / 100) * min(ms) for ms in times.values()), times


def test_the_path_has_the_minutes_of_the_sheets():
    for row in rows_in((ROOT / "exercises/README.md").read_text()):
        if "core, minutes" in row:
            folder = ROOT / "exercises" / re.search(r"\(([\w/]+)README.md\)", row["step"])[1]
            sheets = rows_in((folder / "README.md").read_text())
            minutes = sum(int(sheet.get("core, minutes", 0)) for sheet in sheets)
            assert minutes in (0, int(row["core, minutes"])), folder


def test_ablations_name_flags_that_exist():
    for script in version_tables.ABLATIONS:
        flags = {flag for flag, *_ in load(script).FUSIONS}
        rows = rows_in(version_tables.ablation_tables(H100, script))
        named = {
            flag for row in rows for flag in version_tables.flags_named(next(iter(row.values())))
        }
        assert named <= flags, script


@pytest.mark.parametrize("script", ["tiny_llama_v1", "tiny_openfold_v1"])
def test_the_totals_in_architecture_are_counted(script):
    """Parameters, and GFLOP forward and of the whole step, at the default sizes on the meta
    device."""
    module, meta = load(script), torch.device("meta")
    args = module.parse_args(["--device", "cpu"])
    model = module.build_model(args, meta)
    batch = module.make_batches(args, torch.device("cpu"), 1).next_batch()
    batch = {name: value.to(meta) for name, value in batch.items()}
    with FlopCounterMode(display=False) as counter:
        loss = model(**batch)
        forward = counter.get_total_flops()
        loss.backward()
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    assert f"**{sum(parameter.numel() for parameter in model.parameters()):,}**" in text
    whole = counter.get_total_flops() / 1e9
    assert f"**{forward / 1e9:.3f}** | **{whole:.3f}**" in text
