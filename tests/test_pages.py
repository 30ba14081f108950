"""Pages for readers:

START.md shows what its programs measure, sentences have the numbers of the results, the tables of
claims and of names name what exists.
"""

from __future__ import annotations

import csv
import json
import math
import re

import pytest
import torch
from conftest import ROOT, captured, needs_compiler

from bench.sizes import ALL_VERSIONS
from bench.version_tables import as_graphs, over_best_compiled, versions_of
from exercises.start import add_relu, attention_memory
from lab.profile.kernels import complete, load_trace
from lab.study import by_side
from lab.turns import speedup

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
    status, printed, errors = captured(add_relu.main, ["--n", "1000", "--turns", "3"])
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


@pytest.mark.parametrize(
    "word", ["kernel", "host", "register", "stream", "graph", "GEMM", "turn", "program", "crop"]
)
def test_words_in_italics_are_in_the_table(word):
    text, _, table = PAGE.partition("## Words")
    assert f"*{word}" in text
    assert f"| {word} |" in table


def says(page: str, sentence: str) -> bool:
    """Whether a page has this sentence, wherever its lines end."""
    return " ".join(sentence.split()) in " ".join((ROOT / page).read_text().split())


def test_sentences_on_versions_have_the_numbers_of_the_studies():
    steps = as_graphs(H100)
    gains = {key: speedup(sides["V1"], sides["V3"]) for key, sides in steps.items()}
    low, high = min(gains.values()), max(gains.values())
    assert says("docs/RESULTS.md", f"step becomes {low:.1f} to {high:.1f} times as fast")
    medium = gains["tiny_llama, medium", "fp32"]
    assert says("README.md", f"{medium:.1f}x for medium TinyLlama, V1 to V3")

    llama = [gain for (shape, _), gain in gains.items() if shape.startswith("tiny_llama")]
    words = (
        f"{min(llama):.2f}x (medium, fp32, `headline_v3.json`) to {max(llama):.2f}x (medium, bf16"
    )
    assert says("docs/CLAIMS.md", words)
    exact, bf16 = (gains["tiny_openfold, crop", precision] for precision in ("fp32", "bf16"))
    assert says("docs/CLAIMS.md", f"at a real crop: {exact:.2f}x in fp32, {bf16:.2f}x in bf16")

    fastest = versions_of(H100 / "fastest.json")
    openfold = versions_of(H100 / "fastest_openfold.json")
    over_v3 = [
        speedup(sides["V3"], sides["V4"])
        for sides in (*fastest.values(), *openfold.values())
        if "V4" in sides
    ]
    assert says("docs/RESULTS.md", f"V4 adds up to {max(over_v3):.1f} times.")
    for study, words in (
        (fastest, "V4 is {} times as fast as the best of them for TinyLlama"),
        (openfold, "fast as the best of them for TinyLlama, {} times for TinyOpenFold"),
    ):
        ahead = list(filter(None, map(over_best_compiled, study.values())))
        assert says("README.md", words.format(f"{min(ahead):.2f} to {max(ahead):.2f}"))
        assert says("docs/RESULTS.md", f"{min(ahead):.2f} to {max(ahead):.2f} times as")

    small = steps["tiny_llama, small", "bf16"]
    ms, kernels = ({v: side[key] for v, side in small.items()} for key in ("batch_ms", "per_step"))
    last = small["V4"]
    crop = steps["tiny_openfold, crop", "bf16"]
    for words in (
        f"runs {kernels['V1']} kernels",
        f"the step takes {ms['V1']:.1f} ms",
        f"leaves {kernels['V2']} kernels and {ms['V2']:.1f} ms",
        f"leaves {kernels['V3']} kernels and {ms['V3']:.1f} ms",
        f"from {crop['V1']['batch_ms']:.1f} ms in V1 to {crop['V3']['batch_ms']:.1f} at the size",
        f"That is {last['batch_ms']:.1f} ms with {last['per_step']} kernels",
    ):
        assert says("docs/START.md", words)


def test_sentences_on_the_trunk_and_on_accuracy_have_the_numbers_of_the_studies():
    rows = json.loads((H100 / "trunk.json").read_text())["rows"]
    trunk = by_side(rows, "shape", "checkpointed")
    v4, v2 = (
        trunk["128 x 256", checkpointed][side]["batch_ms"]
        for side, checkpointed in (("V4", False), ("V2", True))
    )
    assert says("README.md", f"V2 needs checkpoints, and {v2 / v4:.1f} times as long")
    words = f"takes {v4:.0f} ms, V2 with them {v2:.0f}: {v2 / v4:.1f} times as long"
    assert says("docs/RESULTS.md", words)

    case = {"subject": "triangle attention", "case": "outlier", "precision": "bf16"}
    rows = json.loads((H100 / "accuracy.json").read_text())["rows"]
    (row,) = (row for row in rows if {key: row[key] for key in case} == case)
    worst = {
        side: 100 * max(error for error, _ in found["lines"].values())
        for side, found in row["sides"].items()
    }
    assert says(
        "docs/RESULTS.md",
        f"{worst['V3']:.0f} % off in V3, {worst['V1']:.0f} % in V1, "
        f"{worst['cuEquivariance']:.0f} % in cuEquivariance and {worst['V2']:.0f} % in PyTorch's",
    )


def test_where_a_library_wins_is_said():
    def wins(study: str, library: str) -> list[int]:
        """The lengths at which it takes less time than our kernel in bf16."""
        rows = json.loads((H100 / f"{study}.json").read_text())["rows"]
        times = {
            shape: {side: row.get("us") for side, row in sides.items()}
            for (shape, precision), sides in by_side(rows, "shape", "precision").items()
            if precision == "bf16"
        }
        return [
            int(shape.removeprefix("N="))
            for shape, us in times.items()
            if shape.startswith("N=") and "batch" not in shape and us[library] < us["triton"]
        ]

    won = wins("triangle", "cuEquivariance, bf16 parameters")
    first, last = min(won), max(won)
    assert says("docs/RESULTS.md", f"triangle multiplication of {first} to {last} residues")
    assert says("docs/RESULTS.md", f"cuEquivariance wins from {first} to {last} residues")
    won = wins("attention", "FlexAttention, own layout")
    assert says("docs/RESULTS.md", f"wins by a fifth** from {min(won)} residues on")


def content(name: str) -> dict:
    """A file of results/h100/."""
    return json.loads((H100 / name).read_text())


def less(before: float, after: float) -> str:
    """By how many per cent it fell."""
    return f"{100 * (1 - after / before):.0f}"


def occupancy(kernel: dict) -> float:
    """The part of a multiprocessor's 64 warps that a launch fills on an H100: by registers, shared
    memory and blocks, and by how many blocks there are for 132 multiprocessors."""
    launch = kernel["args"]
    warps = math.ceil(math.prod(launch["block"]) / 32)
    registers = 256 * math.ceil(32 * launch["registers per thread"] / 256)  # of a warp
    shared = 128 * math.ceil((launch["shared memory"] + 1024) / 128)
    fit = min(32, 64 // warps, 4 * (16384 // registers) // warps, 228 * 1024 // shared)
    return min(fit, math.prod(launch["grid"]) / 132) * warps / 64


def test_claims_on_memory_kernels_and_bandwidth_have_the_numbers_of_the_studies():
    headline = versions_of(H100 / "headline.json", "mode")
    llama = {key: sides for key, sides in headline.items() if key[0].startswith("tiny_llama")}
    graphs = {key[:2]: sides for key, sides in llama.items() if key[2] == "graph"}
    saved = {
        key: less(*(sides[v]["peak_mb"] for v in ("V1", "V2"))) for key, sides in graphs.items()
    }
    low, high = saved["tiny_llama, small", "TF32"], saved["tiny_llama, medium", "bf16"]
    assert (low, high) == (min(saved.values(), key=int), max(saved.values(), key=int))
    assert says("docs/CLAIMS.md", f"{low} % (small, TF32) to {high} % (medium, bf16)")
    fewer, smaller = (
        sorted(
            int(less(llama[(*key, before)]["V2"][what], llama[(*key, after)]["V2"][what]))
            for key in graphs
        )
        for what, before, after in (
            ("per_step", "eager", "compiled"),
            ("peak_mb", "graph", "compiled graph"),
        )
    )
    words = f"{fewer[0]} to {fewer[-1]} % and {smaller[0]} to {smaller[-1]} %"
    assert says("docs/CLAIMS.md", f"TinyLlama V2: {words} (`headline.json`)")

    copy = content("flops_tiny_llama_v2.json")["ceilings"]["copy_gb_per_s"]
    traffic = by_side(content("traffic.json")["rows"], "shape", "precision")
    last = versions_of(H100 / "fastest.json")
    used = []
    for size in ("small", "medium"):
        key = (f"tiny_llama, {size}", "bf16")
        steps = graphs[key] | {"V4": last[key]["V4"]}
        rates = {v: traffic[key][v]["gb"] / steps[v]["batch_ms"] * 1e3 for v in ("V1", "V2", "V4")}
        used.append(", ".join(f"{100 * rate / copy:.0f}" for rate in rates.values()))
    assert says("docs/CLAIMS.md", f"V1, V2, V4: {used[0]} % (small), {used[1]} % (medium), bf16")

    shares = []
    for run in ("v1_eager", "v2_eager", "v3_graph", "v4_graph"):
        kernels = complete(load_trace(H100 / f"traces/tiny_llama_{run}.json.gz"), "kernel")
        busy = sum(kernel["dur"] for kernel in kernels)
        shares.append(sum(kernel["dur"] * occupancy(kernel) for kernel in kernels) / busy)
    words = ", ".join(f"{100 * share:.0f}" for share in shares)
    assert says("docs/CLAIMS.md", f"less: {words} %, V1 to V4")


def test_claims_on_single_fusions_have_the_numbers_of_the_studies():
    rows = content("ablation_tiny_llama_v2.json")["rows"]
    alone = by_side(rows, "precision")
    ms = [
        sides["none"]["batch_ms"] - sides["only qkv-fusion"]["batch_ms"] for sides in alone.values()
    ]
    assert says("docs/CLAIMS.md", f"{ms[0] / 8 * 1e3:.0f} and {ms[1] / 8 * 1e3:.0f} µs a layer")
    kernels = {side: row["per_step"] for side, row in alone["fp32",].items()}
    parts = [less(kernels["none"], kernels[f"only {name}"])
             for name in ("qkv-fusion", "flash-attention", "swiglu-fusion")]  # fmt: skip
    words = f"{parts[0]}, {parts[1]} and {parts[2]} % of a step's {kernels['none']}"
    assert says("docs/CLAIMS.md", words)

    off, on = (
        {row["module"]: row for row in csv.DictReader(path.open())}
        for path in (
            H100 / f"roofline/tiny_llama_v2{side}/tiny_llama_v2_flops.csv"
            for side in ("_all_off", "")
        )
    )
    change = {
        (module, key): less(
            float(off[f"layers.*.{module}"][key]), float(on[f"layers.*.{module}"][key])
        )
        for module in ("self_attn", "mlp")
        for key in ("ms", "bytes")
    }
    attention, mlp = change["self_attn", "ms"], -int(change["mlp", "ms"])
    assert says("docs/CLAIMS.md", f"with flash attention {attention} %, forward")
    assert says("docs/CLAIMS.md", f"forward {mlp} % slower, {change['mlp', 'bytes']} % fewer bytes")

    runs = content("exercises.json")["runs"]
    mb = {name: run["memory"]["peak_mb"] for name, run in runs.items() if run["memory"]}
    more = 100 * (mb["llama_v2/ablation/qkv-fusion"] / mb["llama_v2/v1"] - 1)
    assert says("docs/CLAIMS.md", f"{more:.0f} % more memory (`exercises.json`)")
    saved = less(mb["memory_scaling/no_flash_256"], mb["memory_scaling/flash_256"])
    assert says("docs/CLAIMS.md", f"TinyOpenFold {saved} % at 256 residues")
    flash = by_side(content("memory.json")["rows"], "seq_len")
    doubled = [flash[2048,]["flash"]["peak_mb"] / flash[1024,]["flash"]["peak_mb"],
               mb["memory_scaling/flash_256"] / mb["memory_scaling/flash_128"]]  # fmt: skip
    words = f"{doubled[0]:.1f} times TinyLlama's, {doubled[1]:.1f} times TinyOpenFold's"
    assert says("docs/CLAIMS.md", words)

    stages = {row["stage"]: row["result"]["timing"]["samples_per_sec"]
              for row in content("performance_debugging.json")["stages"]}  # fmt: skip
    first = stages["baseline"]
    assert says("docs/CLAIMS.md", f"| {first:.0f} and {stages['stage5']:.0f}, bf16")
    words = f"{stages['stage2'] / first:.1f}x and {stages['stage4'] / first:.2f}x"
    assert says("docs/CLAIMS.md", words)


def test_sheets_on_phases_and_gemms_have_the_numbers_of_the_profiles():
    off, on = (
        content(f"profiles/tiny_openfold_v2_{side}/tiny_openfold_v2_profile.json")
        for side in ("all_off", "fused")
    )
    ms = {
        name: [side["phases"][name]["ms_per_step"] for side in (off, on)] for name in on["phases"]
    }
    sheet = "exercises/tiny_openfold_v2/exercise_1_fusion_impact.md"
    (back, back_on), (forward, forward_on), (update, update_on) = (
        ms[name] for name in ("backward", "forward", "optimizer")
    )
    assert says(sheet, f"{back:.1f} to {back_on:.1f} ms, the forward pass from {forward:.1f} to")
    assert says(sheet, f"to {forward_on:.1f}, the optimizer,")
    assert says(sheet, f"from {update:.2f} to {update_on:.2f}.")
    sheet = "exercises/tiny_openfold_v2/exercise_4_rocm_profiling.md"
    gemms, gemms_on = (side["categories"]["GEMM"]["percent"] for side in (off, on))
    assert says(sheet, f"{gemms:.1f} and {gemms_on:.1f} % of the time")
    for kernel in on["top"][:5]:
        assert says(sheet, f"{kernel['percentage']:.1f} %")


def test_sentences_on_padding_and_on_two_gpus_have_the_numbers_of_the_studies():
    (sides,) = by_side(content("padding.json")["rows"], "shape", "precision").values()
    more = [100 * speedup(sides[f"{v}, padded"], sides[v]) - 100 for v in ALL_VERSIONS]
    words = "V1 to V4 {:.0f}, {:.0f}, {:.0f} and {:.0f} % longer".format(*more)
    assert says("docs/RESULTS.md", words)

    rows = json.loads((ROOT / "results/h100x2/scaling.json").read_text())["rows"]
    places = by_side(rows, "name", "processes", "batch_size")
    page, limits = "docs/MANY_GPUS.md", {}
    for (name, gpus, batch), both in places.items():
        if gpus == 2:
            one, half = places[name, 1, batch], places[name, 1, batch // 2]
            for side in one.keys() & half.keys() & both.keys():
                two, whole, part = (run[side]["batch_ms"] for run in (both, one, half))
                limits.setdefault(name, []).append((part / whole, 1 - part / two))
                if (name, side) == ("tiny_llama", "V1"):
                    words = f"{whole:.2f} ms for {batch} samples, {part:.2f} for 8, and {two:.2f}"
                    assert says(page, words)
    for found, words in (
        (limits["tiny_openfold"], "half the batch takes {} % of the time, sending {} % of"),
        (
            limits["tiny_openfold crop"] + limits["tiny_openfold trunk"],
            "one sample takes {} % of the time of two, sending {} % of",
        ),
    ):
        ends = [
            f"{100 * min(part):.0f} to {100 * max(part):.0f}" for part in zip(*found, strict=True)
        ]
        assert says(page, words.format(*ends))


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
