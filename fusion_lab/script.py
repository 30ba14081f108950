"""Version scripts: find one, load it, and read its arguments."""

import argparse
import ast
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from fusion_lab.cli import Parser, ToolError, documented_parser, note
from fusion_lab.files import ROOT

DEFAULT_SCRIPT = "tiny_llama_v2.py"  # that of the sheets which name a program without a script
INTERFACE = ("build_parser", "parse_args", "build_model", "make_batches", "train", "main")
MODES = ("compare_fusion", "verify_accuracy", "under_profiler")


class Default(str):
    """A script that no argument names: load_script says that it is taken."""


def add_script(
    parser: argparse.ArgumentParser | argparse._MutuallyExclusiveGroup, default: str
) -> None:
    script = {"default": Default(default), "metavar": "FILE"}
    parser.add_argument("--script", **script, help="(default: %(default)s)")


def parser_around(
    prog: str, documentation: str | None, example: str, scripts: str = "the script"
) -> Parser:
    """A documented parser of a program that hands what it does not know to scripts."""
    usage = f"%(prog)s [arguments] [arguments of {scripts}]"
    note = f"Every other argument goes to {scripts}: python {example} --help lists them.\n\n"
    return documented_parser(prog, documentation, usage, note)


def tool_parser(prog: str, documentation: str | None) -> Parser:
    """The parser of a program around one script, with --script and --profile-dir."""
    parser = parser_around(prog, documentation, DEFAULT_SCRIPT)
    add_script(parser, DEFAULT_SCRIPT)
    results = "for results (default: the script's own)"
    parser.add_argument("--profile-dir", metavar="DIR", help=results)
    return parser


def model_and_version(script: str) -> tuple[str, str | None]:
    """'tiny_llama_v4' as 'tiny_llama' and 'V4'; other scripts have no version, or are a model."""
    found = re.fullmatch(r"(tiny_[a-z]+)_(?:v(\d+)|\w+)", script)
    return (found[1], found[2] and f"V{found[2]}") if found else (script, None)


def precision_of(training: Mapping) -> str:
    """The type of the matrix products as studies name it, from the arguments of a script or its
    result's `training`."""
    if training.get("use_amp"):
        return {"float16": "fp16"}.get(training.get("amp_dtype"), "bf16")
    how = training.get("matmul_precision") or "highest"
    return {"highest": "fp32", "high": "TF32"}.get(how, "medium fp32")


def mode_of(training: Mapping) -> str:
    """How a step is launched, from the arguments of a script or its result's `training`."""
    graph, compiled = training.get("cuda_graph"), training.get("torch_compile")
    return " ".join(["compiled"] * bool(compiled) + ["graph"] * bool(graph)) or "eager"


def named_run(script: str, training: Mapping) -> dict:
    """What a run of a script is, as rows of studies name it; `training` are its arguments or its
    result's. A script that is no version of a model has no `version`."""
    model, version = model_and_version(script)
    names = {"model": model, "version": version, "script": script}
    names |= {"precision": precision_of(training), "mode": mode_of(training)}
    return {key: value for key, value in names.items() if value}


def find_script(name: str) -> Path:
    """The version script of this name, in the current directory or else in the repository."""
    path = next((path for path in (Path(name), ROOT / name) if path.is_file()), None)
    if path is None:
        raise ToolError(f"{name}: no such file here or in {ROOT}")
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise ToolError(f"{name}: not a Python script ({error})") from error
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if missing := [function for function in INTERFACE if function not in defined]:
        raise ToolError(f"{name}: not a version script, it has no {missing[0]}()")
    return path.resolve()


def interpret_without_gpu() -> None:
    """Without a GPU have Triton run kernels in its interpreter, as V3 and V4 do: before any script
    imports Triton."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def import_file(path: Path, *names: str) -> ModuleType:
    """Import a Python file under its own name or these: in sys.modules from the start, as Triton
    wants it, and no longer if the import fails."""
    names = names or (path.stem,)
    spec = importlib.util.spec_from_file_location(names[0], path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.update(dict.fromkeys(names, module))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for name in names:
            sys.modules.pop(name, None)
        raise
    return module


def load_script(name: str) -> ModuleType:
    """Import a version script by its path. It is looked at before, so nothing else is ever run."""
    path = find_script(name)
    if isinstance(name, Default):
        note(f"no --script is given, {name} is taken")
    interpret_without_gpu()
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    try:
        return import_file(path)
    except ImportError as error:
        reason = f"it needs a package that is not there ({error})"
        raise ToolError(f"--script {name}: {reason}", status=4) from error


def script_named(name: str) -> ModuleType:
    """The version script of this name, such as tiny_llama_v1: as loaded, else from its file."""
    return sys.modules[name] if name in sys.modules else load_script(f"{name}.py")


def script_arguments(
    module: ModuleType, argv: Sequence[str], profile_dir: str | None
) -> tuple[list[str], argparse.Namespace]:
    """The script's command line with --profile-dir, and what it parses it to, which must be no mode
    that measures something else; for other mistakes the script ends the program."""
    argv = [*argv, *(["--profile-dir", profile_dir] if profile_dir else [])]
    args = module.parse_args(argv)
    given = [f"--{mode.replace('_', '-')}" for mode in MODES if getattr(args, mode)]
    if given:
        raise ToolError(f"{given[0]} does not fit here: run {module.SCRIPT}.py itself for it")
    return argv, args


def measured_with(
    module: ModuleType, args: argparse.Namespace, config: object, device: object
) -> dict:
    """What a program that measures a script's model notes of it: see `Written` of records.py."""
    training = ("batch_size", "use_amp", "amp_dtype", "matmul_precision")
    return {
        "script": module.SCRIPT,
        "config": asdict(config),
        "fusions": {attribute: getattr(args, attribute) for _, attribute, _ in module.FUSIONS},
        "training": {key: getattr(args, key) for key in training},
        "environment": module.environment(device),
    }
