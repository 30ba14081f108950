"""The figures: drawn again they are the committed ones, their numbers are those of the files,
their text is large."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import CPU, ROOT, TINY, captured, load

from bench import memory_by_purpose
from tools import draw_figures as figures
from tools import timeline, trace_step

COMMITTED = sorted((ROOT / "docs/figures").glob("*.svg"))


def elements(path: Path) -> list[tuple[str, str]]:
    """What a picture says and where, coordinates to a tenth of a pixel.

    Nothing that another matplotlib may change.
    """
    found = []
    for element in ElementTree.parse(path).iter():
        kind = element.tag.rpartition("}")[2]
        if kind == "text":
            found.append((kind, " ".join(element.itertext()).strip()))
        elif kind in ("path", "use") and "d" in element.attrib:
            numbers = re.findall(r"-?\d+(?:\.\d+)?", element.attrib["d"])
            found.append((kind, " ".join(f"{float(number):.1f}" for number in numbers)))
    return found


def words(sheet: figures.Sheet) -> str:
    """All text of a figure."""
    texts = [text for axes in sheet.figure.axes for text in axes.texts]
    return "\n".join(text.get_text() for text in texts)


def test_drawn_again_the_figures_are_the_committed_ones(tmp_path):
    status, _, left_out = captured(figures.main, ["--output", str(tmp_path)])
    assert status == 0
    drawn = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert drawn == [path.name for path in COMMITTED]
    assert len(drawn) + left_out.count("is left out") == len(figures.FIGURES_BY_NAME)
    for path in COMMITTED:
        assert elements(tmp_path / path.name) == elements(path), "python tools/draw_figures.py"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_text_is_large_inside_the_picture_and_beside_other_text(path):
    sheet = figures.FIGURES_BY_NAME[path.stem]()
    texts = [text for axes in sheet.figure.axes for text in axes.texts if text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= figures.SMALL
    boxes = [text.get_window_extent() for text in texts]
    for i, (text, box) in enumerate(zip(texts, boxes, strict=True)):
        corners = [(box.x0, box.y0), (box.x1, box.y1)]
        assert sheet.figure.bbox.count_contains(corners) == 2, text.get_text()
        before = zip(texts[:i], boxes, strict=False)
        assert not [other.get_text() for other, its in before if box.overlaps(its)]
    assert f">{texts[0].get_text()}</text>" in path.read_text()  # it can be searched and selected


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_cut_for_a_slide_halves_no_text(path):
    sheet = figures.FIGURES_BY_NAME[path.stem]()
    texts = [text for axes in sheet.figure.axes for text in axes.texts]
    for axis in (axis for axes in sheet.figure.axes[1:] for axis in (axes.xaxis, axes.yaxis)):
        texts += [axis.label, *axis.get_ticklabels()]
    for name, (top, bottom) in sheet.cuts.items():
        for text in (text for text in texts if text.get_text()):
            box = text.get_window_extent()
            scale = sheet.height / sheet.figure.bbox.height
            high, low = (sheet.height - edge * scale for edge in (box.y1, box.y0))
            for edge in (top, bottom):
                assert not high + 2 < edge < low - 2, (name, text.get_text())


def test_residual_norm_draws_as_many_trips_as_were_counted():
    rows = figures.read(figures.H100 / "exercises_v3/rms_norm.json")["rows"]
    moved = {row["what"]: row["bytes"] for row in rows}
    trips = round(moved["the formula, as in V1"] / (moved["V3"] / 2))
    assert sum(len(kinds) for _, kinds in figures.NORM) == trips


def test_libraries_are_drawn_in_the_order_of_their_time(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "H100", tmp_path)
    same = {"shape": "N=256", "precision": "bf16"}
    for study, times in {
        "attention": {"triton": 300.0, "SDPA": 900.0, "FlexAttention, own layout": 250.0},
        "triangle": {"triton": 400.0, "cuEquivariance, bf16 parameters": 450.0, "V2": None},
    }.items():
        rows = [{**same, "side": side, "us": us} for side, us in times.items()]
        (tmp_path / f"{study}.json").write_text(json.dumps({"rows": rows}))
    said = words(figures.libraries())
    order = ["FlexAttention", "250", "V3", "300", "SDPA", "900", "V3", "400", "cuEquivariance"]
    places = [said.index(order[0])]
    for word in order[1:]:
        places.append(said.index(word, places[-1]))
    assert "V2" not in said, "it did not finish"


def test_the_trunk_shows_each_side_that_finished_where_it_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "H100", tmp_path)
    measured = {
        ("V3", False): (221.0, 42e3),
        ("V3", True): (290.0, 5e3),
        ("V2", True): (640.0, 7e3),
    }
    ends = {side: {"status": "oom"} for side in (("V2", False), ("V1", False), ("V1", True))}
    ends |= {side: {"batch_ms": ms, "peak_mb": mb} for side, (ms, mb) in measured.items()}
    rows = [
        {"shape": "128 x 256", "side": name, "checkpointed": checkpointed, **row}
        for (name, checkpointed), row in ends.items()
    ]
    (tmp_path / "trunk.json").write_text(json.dumps({"rows": rows}))
    axes = figures.trunk().figure.axes[1]
    points = {tuple(line.get_xydata()[0]) for line in axes.lines if line.get_marker() == "o"}
    assert points == {(ms, mb / 1e3) for ms, mb in measured.values()}
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "^"] == [640.0]
    assert [text.get_text() for text in axes.texts] == ["V2", "V3"]


def test_what_is_kept_is_told_apart_by_what_it_is_for():
    argv = [*TINY["llama"], "--device", "cpu", "--use-amp"]
    measure = memory_by_purpose.measure
    rows = {v: measure(load(f"tiny_llama_{v}"), argv)["parts"] for v in ("v1", "v2")}
    args = load("tiny_llama_v1").parse_args(argv)
    parameters = [*load("tiny_llama_v1").build_model(args, CPU).parameters()]
    scores = 4 * args.batch_size * args.num_heads * args.seq_len**2 * args.num_layers
    for row in rows.values():
        assert row["moments"] >= 8 * sum(p.numel() for p in parameters)
        assert row["weight_copies"] == 2 * sum(p.numel() for p in parameters if p.dim() == 2)
        assert row["rest"] == row["triangle"] == 0  # on a CPU nobody asks the allocator
    assert rows["v1"]["attention"] - rows["v2"]["attention"] > scores  # and bf16 copies of them
    # masks
    assert rows["v1"]["weights"] - rows["v2"]["weights"] == args.num_layers * args.seq_len**2 * 4


def test_modules_move_under_the_roof_by_their_bytes_and_times(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "H100", tmp_path)
    (tmp_path / "roofline/bf16").mkdir(parents=True)
    for version, moved in (("v1", 4e8), ("v4", 1e8)):
        names = dict.fromkeys(("layers.*.input_layernorm", "norm", "layers.* (rest)"), 0)
        names["layers.*.self_attn"] = 34e9
        rows = [
            {"module": name, "flop": flop, "bytes": moved, "ms": moved / 3e9}
            for name, flop in {**names, "layers.*.mlp": 103e9}.items()
        ]
        run = {
            "config": {"seq_len": 256, "hidden_dim": 512, "num_layers": 8},
            "training": {"batch_size": 8},
            "ceilings": {"precision": "bfloat16", "gemm_tflops": 800, "copy_gb_per_s": 3000},
            "environment": {"device_name": "NVIDIA H100 80GB HBM3"},
            "modules": rows,
        }
        (tmp_path / f"roofline/bf16/tiny_llama_{version}_flops.json").write_text(json.dumps(run))
    lines = [line.get_xydata()[0] for line in figures.roofline().figure.axes[1].lines[1:]]
    norm, attention = (lines[0], lines[1]), (lines[2], lines[3])
    flop = 5 * 8 * 256 * 512 * 17  # two norms a layer and a last one
    assert norm[0] == pytest.approx([flop / 12e8, flop / (12e8 / 3e9) / 1e9])
    assert attention[1] == pytest.approx([340, 34e9 / (1e8 / 3e9) / 1e9])


def trace(folder: Path, launch_every: float, graph: bool) -> Path:
    """A run's trace and result file: two steps of five layers, each a norm, a GEMM and an
    addition."""
    events, correlation = [], 0
    folder.mkdir()

    def add(cat: str, name: str, ts: float, dur: float, **args: object) -> None:
        when = {"ts": ts, "dur": dur, "pid": 1, "tid": 1, "args": args}
        events.append({"ph": "X", "cat": cat, "name": name, **when})

    for step in range(3):
        time = 10_000.0 * step
        add("user_annotation", "data", time, 1)
        gpu = time + 50
        if graph:
            correlation += 1
            add("cuda_runtime", "cudaGraphLaunch", time + 5, 9, correlation=correlation)
        for layer in range(5):
            begin = time = time + 10
            for name in ("rms_norm_forward_kernel", "cutlass_gemm", "elementwise_kernel"):
                if not graph:
                    correlation += 1
                    add("cuda_runtime", "cudaLaunchKernel", time, 4, correlation=correlation)
                    gpu = max(gpu, time + 6)
                    time += launch_every
                add("kernel", name, gpu, 2, correlation=correlation)
                gpu += 2.5
            if not graph:
                add("user_annotation", f"layers.{layer}", begin - 1, time - begin)
                add("user_annotation", f"layers.{layer}.input_layernorm", begin - 1, 2)
    packed = gzip.compress(json.dumps({"traceEvents": events}).encode())
    (folder / "tiny_llama_v3_trace.json.gz").write_bytes(packed)
    summary = {"environment": {"device_name": "GPU"}, "config": {}}
    summary["training"] = {"cuda_graph": graph}
    (folder / "tiny_llama_v3_summary.json").write_text(json.dumps(summary))
    return folder


def test_the_timeline_keeps_two_layers_of_eager_steps_and_the_same_kernels_of_a_graph(
    tmp_path, monkeypatch
):
    runs = [trace(tmp_path / "eager", 20, False), trace(tmp_path / "graph", 20, True)]
    argv = [str(tmp_path / "timeline.json"), *map(str, runs)]
    status, table, errors = captured(timeline.main, argv)
    assert (status, errors) == (0, "")
    eager, graph = json.loads((tmp_path / "timeline.json").read_text())["traces"]
    assert [len(eager["launches"]), len(graph["launches"])] == [6, 0]
    assert [kernel[0] for kernel in eager["kernels"]] == ["norm", "GEMM", "element-wise"] * 2
    assert eager["launches"][0] == ["launch", 0.0, 4.0]
    assert eager["kernels"][0][1] == 6.0  # the GPU begins after the launch
    assert eager["kernels"][-1][1] == 116.0  # and waits for each
    assert [kernel[0] for kernel in graph["kernels"]] == [kernel[0] for kernel in eager["kernels"]]
    assert [kernel[1] for kernel in graph["kernels"]] == [2.5 * i for i in range(6)]
    assert "V3, graph" in table
    monkeypatch.setattr(figures, "H100", tmp_path)
    assert "One launch for the whole step" in words(figures.launch_timeline())


def test_one_step_of_a_trace_has_its_kernels_and_nothing_of_the_machine(tmp_path):
    run = trace(tmp_path / "eager", 20, False)
    path = run / "tiny_llama_v3_trace.json.gz"
    whole = json.loads(gzip.decompress(path.read_bytes()))
    launches = [e for e in whole["traceEvents"] if e["cat"] == "cuda_runtime"]
    kernels = [e for e in whole["traceEvents"] if e["cat"] == "kernel"]
    kernels[29]["ts"] += 100_000  # the last of the second step runs late
    for number, (launch, kernel) in enumerate(zip(launches, kernels, strict=True)):
        for ph, event in (("s", launch), ("f", kernel)):
            arrow = {key: event[key] for key in ("pid", "tid", "ts")}
            whole["traceEvents"].append({"ph": ph, "cat": "ac2g", "id": number, **arrow})
        kernel["args"] |= {"Input Dims": [[1]], "stream": 7}
    whole |= {"host_name": "secret", "traceName": "/secret"}
    path.write_bytes(gzip.compress(json.dumps(whole).encode()))
    output = tmp_path / "step.json.gz"
    status, out, errors = captured(trace_step.main, [str(run), str(output)])
    assert (status, errors) == (0, "")
    assert "15 kernels" in out
    content = gzip.decompress(output.read_bytes()).decode()
    assert "secret" not in content
    events = json.loads(content)["traceEvents"]
    found = [e for e in events if e["cat"] == "kernel"]
    assert [e["ts"] for e in found] == [e["ts"] - 10_000 for e in kernels[15:30]]
    assert found[0]["args"] == {"correlation": 16, "stream": 7}
    assert sum(e["cat"] == "ac2g" for e in events) == 2 * 15
    assert min(e["ts"] for e in events) == 0
