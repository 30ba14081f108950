"""The figures: what they show of results is in the results, and their text is large."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from conftest import CPU, ROOT, TINY, captured, load
from PIL import ImageFont

from bench import memory_by_purpose
from tools import draw_figures as figures
from tools import sheet, traces

SVG = "{http://www.w3.org/2000/svg}"
COMMITTED = sorted((ROOT / "docs/figures").glob("*.svg"))
FONTS = Path(matplotlib.get_data_path()) / "fonts/ttf"


def words(picture: sheet.Sheet | str) -> str:
    """All text of a figure."""
    return "\n".join(text.text for text in ElementTree.fromstring(str(picture)).iter(f"{SVG}text"))


def box_of(text: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text, in DejaVu Sans."""
    x, y, size = (float(text.get(key, sheet.BODY)) for key in ("x", "y", "font-size"))
    name = "DejaVuSans-Bold.ttf" if text.get("font-weight") == "bold" else "DejaVuSans.ttf"
    width = ImageFont.truetype(FONTS / name, 100).getlength(text.text) * size / 100
    left = x - width * {"middle": 0.5, "end": 1}.get(text.get("text-anchor"), 0)
    return left, y - 0.75 * size, left + width, y + 0.2 * size


@pytest.mark.parametrize("name", figures.FIGURE)
def test_drawn_again_a_figure_is_the_committed_one(name):
    committed = (ROOT / f"docs/figures/{name}.svg").read_text()
    assert str(figures.FIGURE[name]()) == committed, f"python tools/draw_figures.py {name}"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_text_is_large_inside_the_picture_beside_other_text_and_whole_in_each_cut(path):
    svg = ElementTree.parse(path).getroot()
    assert (svg.get("width"), svg.get("font-size")) == (str(sheet.WIDTH), str(sheet.BODY))
    texts = [text for text in svg.iter(f"{SVG}text") if not text.get("transform")]
    assert min(int(text.get("font-size", sheet.BODY)) for text in texts) >= sheet.SMALL
    views = [view.get("viewBox").split() for view in svg.iter(f"{SVG}view")]
    edges = [edge for _, y, _, high in views for edge in (float(y), float(y) + float(high))]
    boxes = [box_of(text) for text in texts]
    for i, (text, (left, top, right, bottom)) in enumerate(zip(texts, boxes, strict=True)):
        assert left >= 0 <= top, text.text
        assert right <= sheet.WIDTH, text.text
        assert bottom <= int(svg.get("height")), text.text
        assert not any(top < edge < bottom for edge in edges), text.text
        for other, (x0, y0, x1, y1) in zip(texts[:i], boxes, strict=False):
            apart = x1 <= left or right <= x0 or y1 <= top or bottom <= y0
            assert apart, (text.text, other.text)


def test_every_picture_is_on_a_page_or_a_slide():
    pages = [p for p in ROOT.rglob("*.md") if ".venv" not in p.parts]
    text = "\n".join(page.read_text() for page in pages)
    assert {path.name for path in COMMITTED} == set(re.findall(r"figures/(\w+\.svg)", text))


def test_a_drawing_has_each_text_that_is_filled_in(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    (tmp_path / "a.svg").write_text('<text id="a" x="1">old</text><text id="b" x="2">old</text>')
    filled = figures.filled("a", b="new")
    assert filled == '<text id="a" x="1">old</text><text id="b" x="2">new</text>'
    with pytest.raises(figures.ToolError, match="no text with the id c"):
        figures.filled("a", c="new")


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
    picture = figures.trunk()
    plot = sheet.Plot(picture, (86, 84, 660, 300), (0, 1700), (0, 110))
    svg = ElementTree.fromstring(str(picture))
    points = {tuple(float(c.get(key)) for key in ("cx", "cy")) for c in svg.iter(f"{SVG}circle")}
    assert points == {
        tuple(round(part, 2) for part in plot.at(ms, mb / 1e3)) for ms, mb in measured.values()
    }
    said = words(picture).splitlines()
    assert "V2" in said
    assert "V3" in said
    assert "V1" not in said, "it did not finish"


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
    for version, moved in (("v1", 8e9), ("v2", 8e9), ("v3", 2e9), ("v4", 2e9)):
        names = dict.fromkeys(("layers.*.input_layernorm", "norm", "layers.* (rest)"), 0)
        names |= {"layers.*.self_attn": 34e11, "layers.*.mlp": 103e10}
        rows = [
            {"module": name, "flop": flop, "bytes": moved, "ms": moved / 3e9}
            for name, flop in names.items()
        ]
        run = {
            "config": {"seq_len": 256, "hidden_dim": 4096, "num_layers": 8},
            "training": {"batch_size": 8},
            "ceilings": {"precision": "bfloat16", "gemm_tflops": 800, "copy_gb_per_s": 3000},
            "modules": rows,
        }
        (tmp_path / f"roofline/bf16/tiny_llama_{version}_flops.json").write_text(json.dumps(run))
    drawn = []
    at = sheet.Plot.at
    monkeypatch.setattr(sheet.Plot, "at", lambda *point: drawn.append(point[1:]) or at(*point))
    figures.roofline()
    flop = 5 * 8 * 256 * 4096 * 17  # two norms a layer and a last one
    assert (pytest.approx(flop / 24e9), pytest.approx(flop / 24e9 * 3)) in drawn
    assert (pytest.approx(1700), pytest.approx(5100)) in drawn


def run_of(folder: Path, graph: bool) -> Path:
    """The trace of a run: three steps of five layers, each a norm, a GEMM and an addition."""
    events, correlation = [], 0

    def add(cat: str, name: str, ts: float, dur: float, **args: object) -> None:
        when = {"ts": ts, "dur": dur, "pid": 1, "tid": 1, "args": args}
        events.append({"ph": "X", "cat": cat, "name": name, **when})

    def launch(time: float, gpu: float, kernel: str, name: str = "cudaLaunchKernel") -> None:
        nonlocal correlation
        correlation += 1
        add("cuda_runtime", name, time, 4, correlation=correlation)
        add("kernel", kernel, gpu, 2, correlation=correlation, stream=7, **{"Input Dims": [[1]]})
        for ph, ts in (("s", time), ("f", gpu)):
            arrow = {"ph": ph, "cat": "ac2g", "id": correlation, "pid": 1, "tid": 1, "ts": ts}
            events.append(arrow)

    for step in range(3):
        time = 10_000.0 * step
        add("user_annotation", "data", time, 1)
        launch(time + 5, time + 50, "embedding")
        for layer in range(5):
            begin = time + 100 + 100 * layer
            if not graph:
                add("user_annotation", f"layers.{layer}", begin, 90)
                add("user_annotation", f"layers.{layer}.input_layernorm", begin, 2)
            names = "rms_norm_forward_kernel", "cutlass_gemm", "elementwise_kernel"
            for place, name in enumerate(names):
                late = 100_000 if (step, layer, place) == (1, 4, 2) else 0  # the step's last kernel
                launch(begin + 20 * place, begin + 20 * place + 6 + late, name)
    whole = {"traceEvents": events, "host_name": "secret", "traceName": "/secret"}
    folder.mkdir()
    packed = gzip.compress(json.dumps(whole).encode())
    (folder / "tiny_llama_v3_trace.json.gz").write_bytes(packed)
    return folder


def test_one_step_of_a_trace_has_its_kernels_and_nothing_of_the_machine(tmp_path):
    output = tmp_path / "step.json.gz"
    argv = [str(run_of(tmp_path / "eager", False)), str(output)]
    status, out, errors = captured(traces.main, argv)
    assert (status, errors) == (0, "")
    assert "16 kernels" in out
    content = gzip.decompress(output.read_bytes()).decode()
    assert "secret" not in content
    assert "Input Dims" not in content
    events = json.loads(content)["traceEvents"]
    found = [e["args"] for e in events if e["cat"] == "kernel"]
    assert found == [{"correlation": number, "stream": 7} for number in range(17, 33)]
    assert sum(e["cat"] == "ac2g" for e in events) == 2 * 16
    assert min(e["ts"] for e in events) == 0


def test_two_layers_of_an_eager_step_and_the_same_kernels_of_a_graph(tmp_path):
    files = {"eager": tmp_path / "eager.json.gz", "graph": tmp_path / "graph.json.gz"}
    for mode, file in files.items():
        run = run_of(tmp_path / mode, mode == "graph")
        assert captured(traces.main, [str(run), str(file)])[0] == 0
    launches, kernels = traces.two_layers(files["eager"])
    assert [kernel[0] for kernel in kernels] == ["norm", "GEMM", "element-wise"] * 2
    assert launches[0][:3] == ("launch", 0.0, 4)
    assert [kernel[1] for kernel in kernels] == [6, 26, 46, 106, 126, 146]  # the GPU waits
    none, same = traces.two_layers(files["graph"], files["eager"])
    assert none == []
    assert [kernel[0] for kernel in same] == [kernel[0] for kernel in kernels]
    assert same[0][1] == 0
