# Copied from common/counts.py by tools/sync_common.py: edit it there.
# What extra steps count and record: kernels, operations, memory, profiles.
NO_WORK = ("_unsafe_view", "empty", "new_empty", "_record_function")  # and views move no data


class OperatorCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts ATen operators inside that move data."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.calls += not (function.is_view or name.startswith(NO_WORK))
        return function(*args, **(kwargs or {}))


def count_kernels(trainer: Trainer) -> dict:
    """Count the kernels of a step, on a CPU its operators; {} where none are seen."""
    if not trainer.gpu:  # of two samples: of a single one some copies are views
        two = argparse.Namespace(**{**vars(trainer.args), "batch_size": 2 * WORLD_SIZE})
        trainer = Trainer(two, trainer.device)
        trainer.step()
        batch = trainer.next_batch()
        with OperatorCounter() as counter:
            trainer.compute(batch)
        remark = "; operator calls, counted on a CPU"
        return {"unit": "operator calls", "per_step": counter.calls, "remark": remark}
    trainer.step()  # the first one does more
    events = trainer.profile()[1]["traceEvents"]
    kernels = sum(event.get("cat") == "kernel" for event in events)
    calls = [e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = sum("Launch" in name for name in calls)
    counts = {"unit": "kernels", "per_step": kernels, "remark": "", "host_launches": launches}
    return counts if kernels else {}  # a profiler without permission sees none


def count_all_off(args: argparse.Namespace) -> int | None:
    """Count the kernels with everything off; None where memory runs out."""
    progress("counting kernels with all fusions off")
    torch.compiler.reset()  # lets go of its graphs
    gc.collect()
    try:
        return count_kernels(Trainer(off := all_off(args), prepare(off)))["per_step"]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def count_flops(args: argparse.Namespace, batch: dict[str, Tensor]) -> int:
    """Count the floating-point operations of a step of the unfused model."""
    model = build_model(all_off(args, checkpoint_blocks=False), torch.device("meta"))
    with FlopCounterMode(display=False) as counter:
        model(**{name: value.to("meta") for name, value in batch.items()}).backward()
    return counter.get_total_flops()


def memory_of_a_step(trainer: Trainer) -> float:
    """Return the peak bytes of tensors in a step; a flag writes their course."""
    gc.collect()  # what is freed in the step was allocated in it
    events = trainer.profile(profile_memory=True)[1]["traceEvents"]
    tensors = [*trainer.model.parameters(), *trainer.model.buffers(), *trainer.inputs.values()]
    tensors += [t for state in trainer.optimizer.state.values() for t in state.values()]
    used = sum(tensor.nbytes for tensor in tensors)  # between two steps
    events = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    events = [e for e in events if e["args"]["Device Type"] == int(trainer.gpu)]
    course = [(e["ts"] - events[0]["ts"], used := used + e["args"]["Bytes"]) for e in events]
    if trainer.args.enable_memory_profiling:
        rows = ["time_us,bytes\n", *(f"{time:.3f},{used:.0f}\n" for time, used in course)]
        (trainer.args.profile_dir / f"{SCRIPT}_memory_timeline.csv").write_text("".join(rows))
    return max((used for _, used in course), default=used)  # a graph allocates nothing


def gpu_memory(device: torch.device, statistic: str = "memory_allocated") -> int:
    """Return bytes by this statistic, with the pools that graphs keep; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    torch._C._cuda_clearCublasWorkspaces()  # which any run may have made
    pools = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    used = getattr(torch.cuda, statistic)()
    return used + sum(s["total_size"] - s["allocated_size"] for s in pools)


def write_profile(trainer: Trainer) -> None:
    """Write tables of operators by time, and a trace, of three steps."""
    start = trainer.args.profile_dir / SCRIPT
    profile, trace = trainer.profile(steps=3, record_shapes=True)
    for clock in ("cpu", "device") if trainer.gpu else ("cpu",):
        table = profile.key_averages().table(f"self_{clock}_time_total", row_limit=40)
        path = Path(f"{start}_operators_by_{clock}_time.txt")
        path.write_text(table.replace("time total", "total"))
    with gzip.open(f"{start}_trace.json.gz", "wt") as file:
        json.dump(trace, file)


@contextlib.contextmanager
def recorded_region(trainers: list[Trainer]) -> Iterator[None]:
    """Have a profiler record what these run inside, in ranges (cudaProfilerStart, ROCTx)."""
    with contextlib.ExitStack() as at_end:
        if trainers:
            at_end.enter_context(torch.cuda.profiler.profile())
        if trainers and torch.version.hip:
            try:
                roctx = ctypes.CDLL("librocprofiler-sdk-roctx.so")
            except OSError as error:
                fail(f"--enable-rocm-profiling needs ROCm's rocprofiler-sdk-roctx: {error}", 4)
            roctx.roctxProfilerResume(0)
            at_end.callback(roctx.roctxProfilerPause, 0)
        for trainer in trainers:
            at_end.enter_context(trainer.ranges(torch.cuda.nvtx.range))
        yield
