"""Two layers of a step out of a trace in results/DEVICE/traces, for figures. Each file has one step
of a run with --enable-pytorch-profiler, without shapes and names of the machine."""

from itertools import compress
from pathlib import Path

from fusion_lab.cli import ToolError
from fusion_lab.profile.kernels import category, complete, load_trace, ranges_of

KINDS = {"normalisation": "norm", "GEMM": "GEMM", "attention": "attention"}
KINDS["element-wise"] = "element-wise"  # in figures; all else is "other"


def launches_of(events: list[dict]) -> dict[int, dict]:
    """The host's calls that launch something, by the number that their kernels have, too."""
    calls = complete(events, "cuda_runtime", "cuda_driver")
    return {call["args"]["correlation"]: call for call in calls if "Launch" in call["name"]}


Event = tuple[str, float, float, str]  # kind, start and duration in microseconds, name


def two_layers(path: Path, eager: Path | None = None) -> tuple[list[Event], list[Event]]:
    """Launches and kernels of the forward pass of layers 2 and 3 in a trace of one step.

    What a norm's module launched is a norm, whatever it is called. A graph has no modules: there
    the kernels are the first that follow each other as in `eager`, the same step without a graph,
    and there are no launches.
    """
    events = load_trace(path)
    launches, calls = launches_of(events), []
    kernels = sorted(complete(events, "kernel"), key=lambda kernel: kernel["ts"])
    categories = [category(kernel["name"]) for kernel in kernels]
    if eager:
        same = two_layers(eager)[1]
        kinds, wanted = [kind for kind, *_ in same], [category(name) for *_, name in same]
        places = range(len(kernels) - len(wanted) + 1)
        first = next((i for i in places if categories[i : i + len(wanted)] == wanted), None)
        if first is None:
            raise ToolError(f"{path}: no kernels in it that follow each other as in {eager}")
        kernels = kernels[first : first + len(wanted)]
    else:
        layers = ranges_of(events, ["layers.2", "layers.3"])
        calls = [launches[kernel["args"]["correlation"]] for kernel in kernels]
        inside = [layers[0].start <= call["ts"] < layers[-1].end for call in calls]
        kernels, calls, kinds = (
            [*compress(each, inside)]
            for each in (kernels, calls, [KINDS.get(name, "other") for name in categories])
        )
        names = [f"layers.{i}.{of}_layernorm" for i in (2, 3) for of in ("input", "post_attention")]
        for norm in ranges_of(events, names):
            kinds = [
                "norm" if norm.start <= call["ts"] < norm.end else kind
                for call, kind in zip(calls, kinds, strict=True)
            ]
    zero = (calls or kernels)[0]["ts"]

    def rows(kinds: list[str], events: list[dict]) -> list[Event]:
        return [
            (k, e["ts"] - zero, e["dur"], e["name"]) for k, e in zip(kinds, events, strict=True)
        ]

    return rows(["launch"] * len(calls), calls), rows(kinds, kernels)
