"""dev/bench/versions.py: what its measurements write, and the tables from it."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, call, load, relative_difference, words

from dev.bench import operations as kernels
from dev.bench import versions as benchmark
from dev.bench import whole_steps
from dev.bench.sizes import Shape
from fusion_lab import turns
from fusion_lab.files import read_json
from fusion_lab.profile.ceilings import Ceilings

SMALL = words("--hidden-dim 32 --num-layers 1 --num-heads 1 --seq-len 8 --batch-size 2")
SMALL += words("--vocab-size 50 --warmup-steps 2")


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(turns, "TURN_MS", 1)


def sides_in(path: Path) -> dict[str, dict]:
    """The rows of a study by the names of their sides."""
    return {row["side"]: row for row in json.loads(path.read_text())["rows"]}


def test_headline_compares_all_versions_turn_by_turn(tmp_path, monkeypatch):
    order = []
    for version in benchmark.VERSIONS:
        script = benchmark.importlib.import_module(benchmark.script_of("tiny_llama", version))

        def take(trainer, steps: int, measured: bool = True, version: str = version) -> float:
            turn = len(trainer.turns_ms)  # 0 is the trial
            ms = {"V1": 30.0, "V2": 20.0, "V3": 10.0}[version] * (1 + (turn - 1) ** 2)
            if measured:
                trainer.turns_ms.append(ms)
                order.extend([version] * (turn > 0))
            return ms

        monkeypatch.setattr(script.Trainer, "take", take)
    shapes = {"tiny_llama, small": Shape("tiny_llama", SMALL)}
    monkeypatch.setattr(benchmark, "SHAPES", shapes)
    argv = words("--rounds 3 --only fp32 eager")
    assert benchmark.main(["headline", str(tmp_path), *argv]) == 0
    assert order == [*benchmark.VERSIONS, *reversed(benchmark.VERSIONS), *benchmark.VERSIONS]
    sides = sides_in(tmp_path / "headline.json")
    found = {name: row["batch_ms"] for name, row in sides.items()}
    assert found == {"V1": 60.0, "V2": 40.0, "V3": 20.0}
    keys = words("model version shape precision mode batch_size seq_len")
    what = [sides["V2"][key] for key in keys]
    assert what == ["tiny_llama", "V2", "tiny_llama, small", "fp32", "eager", 2, 8]
    assert sides["V2"]["fusions"] == [flag for flag, _, _ in load("tiny_llama_v2").FUSIONS]
    table = benchmark.table(tmp_path)
    assert re.search(r"\| tiny_llama, small, fp32 \| +60.00 \| +40.00 \| +20.00 \|", table)
    assert f" {sides['V2']['per_step']} |" in table


def test_the_trunk_has_a_row_for_each_side_with_and_without_checkpoints(tmp_path, monkeypatch):
    """Where memory ends, too; a change of blocks is undone."""
    monkeypatch.setattr(benchmark, "TRUNKS", {"small": Shape("tiny_openfold", TINY["openfold"])})
    v1 = load("tiny_openfold_v1")
    build_model, start = v1.build_model, v1.Trainer.start

    def start_if_checkpointed(trainer) -> None:
        if not trainer.args.checkpoint_blocks:
            raise MemoryError("no room")
        start(trainer)

    monkeypatch.setattr(v1.Trainer, "start", start_if_checkpointed)
    argv = words("--rounds 1 --only V1")
    assert benchmark.main(["trunk", str(tmp_path), *argv]) == 0
    assert v1.build_model is build_model
    rows = json.loads((tmp_path / "trunk.json").read_text())["rows"]
    found = {(row["side"], row["checkpointed"]): row for row in rows}
    assert found["V1", False]["status"] == "oom"
    assert found["V1", True]["argv"].count("--checkpoint-blocks") == 1
    ms = f"{found['V1', True]['batch_ms']:.0f}"
    assert re.search(rf"\| small, V1 +\| +out of memory \| +{ms} \|", benchmark.table(tmp_path))


# dev/bench/operations.py


def triangle_attention(q, k, v, bias, mask=None):
    """cuEquivariance's formula and argument shapes: q, k, v [B, N, H, S, D], bias [B, 1, H, S,
    S]."""
    assert mask is None, "no mask where none is needed"
    return (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v


def triangle_multiplicative_update(x, **w):
    """cuEquivariance's formula, outgoing; the names of the arguments say the rest."""
    linear, norm, dim = torch.nn.functional.linear, torch.nn.functional.layer_norm, x.shape[-1:]
    x = norm(x, dim, w["norm_in_weight"], w["norm_in_bias"])
    gate = linear(x, w["g_in_weight"], w["g_in_bias"]).sigmoid()
    a, b = (gate * linear(x, w["p_in_weight"], w["p_in_bias"])).chunk(2, dim=-1)
    product = torch.einsum("bikc,bjkc->bijc", a, b)
    product = norm(product, product.shape[-1:], w["norm_out_weight"], w["norm_out_bias"])
    gate = linear(x, w["g_out_weight"], w["g_out_bias"]).sigmoid()
    return gate * linear(product, w["p_out_weight"], w["p_out_bias"])


def turbo_attention(q, k, v, res_mask=None, pair_bias=None):
    """TurboPairFormer's formula and argument shapes, those above; the result is [B, N, S, H, D]."""
    return triangle_attention(q, k, v, pair_bias, res_mask).transpose(2, 3)


def triton_evoformer(q, k, v, mask, bias):
    """openfold3's formula: q, k, v and the result [B, N, S, H, D], mask [B, N, 1, 1, S]."""
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))
    return triangle_attention(q, k, v, bias + mask).transpose(2, 3)


STAND_INS = {  # for libraries that need an NVIDIA GPU
    "cuequivariance_torch": SimpleNamespace(
        triangle_attention=triangle_attention,
        triangle_multiplicative_update=triangle_multiplicative_update,
    ),
    "turbopairformer": SimpleNamespace(turbo_attention=turbo_attention),
    "openfold3.core.kernels.triton.evoformer": SimpleNamespace(TritonEvoformer=triton_evoformer),
}
SAME = {  # sizes for a CPU and for a GPU
    "attention": ((2, 2, 4, 1, 8), (1, 256, 256, 4, 32)),
    "triangle": ((1, 3), (1, 256)),
}


@pytest.mark.parametrize("study", SAME)
def test_all_sides_of_a_study_compute_the_same(study: str, monkeypatch):
    """The result and the gradient of the first input; the rest depends on what is merged. On a GPU
    in bfloat16, with the libraries that are installed, elsewhere with stand-ins for them."""

    def slope(t: torch.Tensor, **_: object) -> torch.Tensor:
        return torch.linspace(-1, 1, t.numel(), device=t.device).view(t.shape).to(t.dtype)

    gpu = torch.cuda.is_available()
    monkeypatch.setattr(torch, "randn_like", slope)  # the same gradient on all sides
    if not gpu:
        for module, operations in STAND_INS.items():
            monkeypatch.setitem(sys.modules, module, operations)
        monkeypatch.setattr(torch, "compile", lambda function, **mode: function)
    dtype, limit = (torch.bfloat16, 5e-2) if gpu else (torch.float32, 1e-5)
    steps = kernels.STUDIES[study][1](SAME[study][gpu], dtype)
    ours = steps.pop("V3")()
    assert {"V4", "torch.compile", "cuEquivariance"} <= {*steps}
    for name, step in steps.items():
        if name.endswith(("own layout", "no biases")):
            continue
        try:
            theirs = step()
        except ImportError:
            assert gpu, name
            continue
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            assert relative_difference(a, b) < limit, name


def test_a_study_writes_its_turns_and_only_a_kernel_of_ours_that_fails_fails_it(
    tmp_path, monkeypatch
):
    def no_room(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB\nand more")

    def measured() -> tuple[int, dict, str]:
        status, _, err = call(
            kernels, "attention", tmp_path, *words("--precisions fp32 --rounds 2")
        )
        return status, sides_in(tmp_path / "attention.json"), err

    shapes = {"N=4": SAME["attention"][0]}
    monkeypatch.setitem(kernels.STUDIES, "attention", (shapes, kernels.STUDIES["attention"][1]))
    monkeypatch.setattr(torch, "compile", lambda function, **mode: function)
    monkeypatch.setitem(sys.modules, "cuequivariance_torch", None)  # not installed
    monkeypatch.setattr(kernels, "library_attention", no_room)
    status, row, err = measured()
    assert (status, row["V3"]["shape"], row["V3"]["precision"]) == (0, "N=4", "fp32")
    assert row["V3"]["us"] == pytest.approx(sum(row["V3"]["turns_us"]) / 2)
    assert row["SDPA"]["status"] == "oom"
    assert "note: SDPA: OutOfMemoryError: CUDA out of memory. Tried to allocate 8 GiB\n" in err
    table = call(kernels, "table", tmp_path)[1]
    assert re.search(r"\| N=4, fp32 +\| +\d+ \|", table)
    times = {side: found["us"] for side, found in row.items() if "us" in found}
    best = min(times.keys() - {"V3", "V4"}, key=times.get)
    assert re.search(rf"\| attention, N=4, fp32 +\|.+ {times[best]:.0f} \| {best} ", table)
    assert "out of memory" in table and "not installed" in table

    (tmp_path / "attention.json").unlink()
    monkeypatch.setattr(load("tiny_openfold_v3"), "attention_forward", None)
    status, row, err = measured()
    assert (status, "not callable" in err.splitlines()[-1]) == (1, True)
    assert row["torch.compile"]["us"] > 0, "what was measured is not lost"


def test_the_whole_step_has_its_parts_and_its_reference(tmp_path, monkeypatch):
    shapes = {"tiny_llama, tiny": Shape("tiny_llama", SMALL)}
    monkeypatch.setattr(whole_steps, "SHAPES", shapes)
    ceilings = Ceilings("bfloat16", 64, gemm_tflops=0.5, copy_bytes=1, copy_gb_per_s=2.0)
    monkeypatch.setattr(whole_steps, "measure_ceilings", lambda *given: ceilings)
    assert call(kernels, "step", tmp_path, "--rounds", "2")[0] == 0
    (row,) = read_json(tmp_path / "step.json")["rows"]
    assert (row["shape"], row["script"]) == ("tiny_llama, tiny", "tiny_llama_v4")
    reference = row["bytes"] / 2e9 * 1e3 + row["flop"] / 0.5e12 * 1e3
    assert row["over_reference"] == pytest.approx(row["batch_ms"] / reference)
    calls = {part["name"].rpartition("::")[2]: part["calls"] for part in row["kernels"]}
    # the operator's or the kernel's
    rms_norm = next(name for name in calls if name.startswith("rms_norm_backward"))
    assert calls[rms_norm] == 3, "two in the layer and one after it"
    steps, categories, longest = call(kernels, "table", tmp_path)[1].split("\n\n")
    assert re.search(rf"\| tiny_llama, tiny, bf16 +\| +{row['batch_ms']:.2f} \|", steps)
    assert all(f"| {name}" in categories for name in ("GEMM", "attention", "normalisation"))
    assert row["kernels"][0]["name"] in longest.splitlines()[2]
