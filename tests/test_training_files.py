"""find_fusions.py on training files as people write them: their packages, command line, devices,
loaders and optimizers."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, captured, finished, strict_json

from fusion_lab.fusions import command as find_fusions

HEAD = """
import copy, pickle, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

D = 16
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("scale", torch.ones(D))
    def forward(self, x):
        return (self.b(torch.tanh(self.a(x.to(self.a.weight.dtype)))) * self.scale).abs().mean()

def loop(net, batches, optimizer=None):
    optimizer, batches = optimizer or torch.optim.AdamW(net.parameters()), iter(batches)
    def take():
        (x,) = next(batches)
        optimizer.zero_grad()
        net(x.to(device)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return take

NET, DATA, FIXED = Net(), TensorDataset(torch.randn(64, D)), [(torch.randn(8, D),)] * 99
OPTIMIZER = torch.optim.AdamW(NET.parameters())
"""


def examined(folder: Path, function: str, *argv: str) -> dict:
    """What the tool finds of a function of training.py there."""
    place = f"{folder / 'training.py'}:{function}"
    words = ["--model", place, "--json", str(folder / "found.json"), *argv]
    status, _, err = captured(find_fusions.main, words)
    assert status == 0, err
    return strict_json((folder / "found.json").read_text())


@pytest.fixture
def write(tmp_path: Path):
    """Write training.py, of these functions behind the head."""

    def writes(text: str) -> Path:
        (tmp_path / "training.py").write_text(HEAD + text)
        return tmp_path

    return writes


# --- as `python training.py` has it

NAMES = ("lab", "tools", "bench", "dev", "analysis_tools", "compare_runs")
COMMAND = "import sys; from fusion_lab.fusions.command import main; sys.exit(main())"


@pytest.mark.parametrize("installed", [False, True])
def test_no_module_of_the_user_is_hidden_by_one_of_ours(installed, tmp_path):
    """Not even a folder without __init__.py, one that is imported in the step, or a class that was
    pickled in a run of the file; from any folder, also where we are installed beside others."""
    site = tmp_path / "site-packages"
    shutil.copytree(ROOT / "fusion_lab", site / "fusion_lab")
    (site / "beside.py").touch()
    environment = {"PYTHONPATH": str(site)} if installed else {}
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "nets.py").write_text(f"NAME = {name!r}\n")
    for name in ("lab", "dev"):  # else Python itself would prefer our dev, where it is on the path
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "late.py").write_text("import lab.nets, tools.nets\nNAME = lab.nets.NAME\n")
    imports = "".join(
        f"import {name}.nets\nassert {name}.nets.NAME == {name!r}\n" for name in NAMES
    )
    text = f"""
{imports}
{"import beside" if installed else ""}
PICKLED = __file__ + ".pickle"
def build():
    with open(PICKLED, "rb") as file:
        net, x = pickle.load(file), torch.randn(8, D)
    assert "compare_runs" not in sys.path[0] and sys.path[0] == {str(tmp_path)!r}
    def take():
        import late
        assert late.NAME == "lab" and sys.modules["__main__"].Net is type(net)
        net(x).backward()
    return take
if __name__ == "__main__":
    with open(PICKLED, "wb") as file:
        pickle.dump(Net(), file)
"""
    (tmp_path / "training.py").write_text(HEAD + text)
    assert finished(tmp_path / "training.py", cwd="/", **environment).returncode == 0
    tool = ["-c", COMMAND] if installed else [ROOT / "analysis_tools/find_fusions.py"]
    place = f"{tmp_path}/training.py:build"
    done = finished(*tool, "--model", place, cwd="/", **environment)
    assert (done.returncode, "tanh" in done.stdout) == (0, True), done.stderr


def test_the_command_line_of_a_file_stands_behind_two_dashes(write):
    """When it is imported and when its function is called; ours is none of it."""
    text = """
import argparse
def arguments():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--json"), parser.add_argument("rest", nargs="*")
    assert sys.argv[0] == __file__ and "--model" not in sys.argv
    return parser.parse_args()
WIDTH = arguments().width
def build():
    assert arguments().width == WIDTH
    return nn.Sequential(nn.Linear(WIDTH, 1, bias=False), nn.Flatten(0), Mean()), {"input": x()}
def x(): return torch.randn(1, WIDTH)
class Mean(nn.Module):
    def forward(self, x): return x.mean()
"""
    before = [*sys.argv]
    found = examined(write(text), "build", "--", "--json", "x.py", "--width", "48", "--", "y")
    assert found["flop"] == 2 * 2 * 48  # forward, and the gradient of the weight
    assert sys.argv == before


def test_a_file_that_ends_the_program_is_said(write):
    folder = write("sys.exit(0)\n")
    status, out, err = captured(find_fusions.main, ["--model", f"{folder}/training.py:build"])
    assert (status, out) == (1, "")
    assert re.search(r"ended the program with status 0 at .*training.py:\d+; its own arg", err)


# --- without values

LOOPS = """
def inside(): return loop(Net().to(device), FIXED)
def optimizer_outside(): return loop(NET.to(device), FIXED, OPTIMIZER)
def optimizer_before():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    return loop(net.to(device, torch.bfloat16), FIXED, optimizer)
def copied(): return loop(copy.deepcopy(NET).to(device), FIXED)
def workers():
    data = random_split(DATA, [32, 32])[0]
    return loop(Net().to(device), DataLoader(data, 8, shuffle=True, num_workers=2))
"""


@pytest.mark.parametrize("way", re.findall(r"def (\w+)", LOOPS))
def test_an_ordinary_loop_is_counted_without_values(way, write):
    """A loader is no part of the step."""
    found = examined(write(LOOPS), way)
    assert found["run"] == "fake"
    assert found["flop"] == 3 * 2 * 2 * 8 * 16**2 - 2 * 8 * 16**2


# --- as a GPU has it

CHOICES = """
def choice(**named):
    def build():
        net = nn.ModuleList([Net(), Net()])
        optimizer = torch.optim.AdamW(net[0].parameters(), **named)
        return loop(nn.Sequential(*net[:1]), FIXED, optimizer)
    return build
default, foreach = choice(), choice(foreach=True)
"""


def test_an_optimizer_takes_all_weights_at_once(write):
    """Clipping, too; the number of steps that it counts is on the host."""
    folder = write(CHOICES)
    default, foreach = (examined(folder, name) for name in ("default", "foreach"))
    assert default["levels"] == foreach["levels"]
    assert default["levels"]["now"]["kernels"] < 40


AUTOCAST = """
half = torch.bfloat16
def cast(*named, **more):
    net = Net()
    def build():
        def take():
            with torch.autocast(*named, **more):
                loss = net(FIXED[0][0])
            loss.backward()
        return take
    return build
cpu, cuda, off = cast("cpu", half), cast("cuda", half), cast("cuda", half, enabled=False)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_autocast_of_a_gpu_is_counted_in_its_type(write):
    folder = write(AUTOCAST)
    cpu, cuda, off = (examined(folder, name) for name in ("cpu", "cuda", "off"))
    assert (cuda["precision"], cuda["levels"]) == ("bf16", cpu["levels"])
    assert off["precision"] == "fp32"


# --- which call

CALLS = """
def accumulated(every):
    def build():
        net, calls = Net(), 0
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        def take():
            nonlocal calls
            net(FIXED[0][0]).backward()
            calls += 1
            if calls % every == 0:
                optimizer.step(), optimizer.zero_grad()
        return take
    return build
second, third = accumulated(2), accumulated(3)
def forward():
    net = Net()
    return lambda: net(FIXED[0][0])
"""


@pytest.mark.parametrize(("name", "idle"), [("second", ""), ("forward", ""), ("third", "SGD")])
def test_a_call_without_the_optimizer_is_said(name, idle, write):
    found = examined(write(CALLS), name)
    remarks = [remark for remark in found["remarks"] if "takes no step" in remark]
    assert len(remarks) == bool(idle)
    assert all(
        each.startswith(f"{idle} takes no step in the recorded call 2: ") for each in remarks
    )
    assert "; call 2 of the step, nothing was run" in find_fusions.report(found, 1).splitlines()[0]
