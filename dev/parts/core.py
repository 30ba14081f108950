# Copied from dev/parts/core.py by dev/sync_parts.py: edit it there.
# Read `measure` first, the loop; then Trainer.compute, the step; `main` is at the end.
SCRIPT = Path(__file__).stem
RANK = int(os.getenv("RANK", "0"))  # of this process among those that torchrun started
WORLD_SIZE = int(os.getenv("WORLD_SIZE", "1"))
PROFILES = ("enable_pytorch_profiler", "enable_memory_profiling", "enable_rocm_profiling")
UNFINISHED = (1, "it did not finish")  # exit status and error of a run until its end


def measure(*sides: Trainer) -> list[dict]:
    """Train these (two in alternating turns); leave a record of each, however it ends."""
    args = sides[-1].args
    turns = 1 if len(sides) == 1 else min(10, args.num_steps)
    region = contextlib.nullcontext()
    end = UNFINISHED
    try:
        if any(getattr(args, name) for name in PROFILES):
            from fusion_lab.profile.steps import profiled_region  # before time is spent on training

            region = profiled_region(sys.modules[__name__], sides)
        for side in sides:
            side.write(end)  # for a run that is killed
        for side in sides:
            side.start()
        with region:
            for turn, steps in enumerate(np.array_split(range(args.num_steps), turns)):
                for side in sides if turn % 2 == 0 else reversed(sides):
                    side.take(len(steps))
        if not args.under_profiler:
            for side in sides:
                side.count(sides[0].groups["kernels"].get("per_step"))  # of two, the first: all off
        end = (0, None)
    except (Exception, KeyboardInterrupt) as error:
        end = explain(error, args)
    finally:
        for side in sides:
            side.write(end)
    return [side.summary() for side in sides]


class StaleGraph(RuntimeError):
    """A parameter is no longer where a captured graph changes it."""


class Trainer:
    """Model, optimizer, data and their training step; and what was measured of it."""

    def __init__(self, args: argparse.Namespace, title: str = ""):
        self.args = args
        self.title = title  # before lines of progress
        self.gpu = args.device == "cuda"
        self.losses: list[float] = []
        self.turns_ms: list[float] = []  # mean time of a step in each turn
        self.phases: dict[str, list[float]] = {}  # milliseconds of each phase in each step
        self.peak = 0  # bytes
        self.end = UNFINISHED
        # parts of the result, as far as they are known
        self.groups = {name: {} for name in ("data", "timing", "kernels", "flops")}
        self.groups["config"] = asdict(config_of(args))

    def build(self) -> Trainer:
        """Build model, optimizer and data; return self."""
        args = self.args
        self.device = prepare(args)
        dtype = getattr(torch, args.amp_dtype)
        self.autocast = lambda: torch.autocast(args.device, dtype, enabled=args.use_amp)
        scaled = args.use_amp and dtype == torch.float16
        self.scaler = torch.amp.GradScaler(args.device, 4096, enabled=scaled)  # 65536 may overflow
        self.batches = make_batches(args, torch.device("cpu"), args.seed)
        self.inputs: dict[str, Tensor] = {}  # where each batch is copied to
        self.model = build_model(args, self.device)
        self.forward = self.model
        self.addresses = lambda: [parameter.data_ptr() for parameter in self.model.parameters()]
        self.optimizer = build_optimizer(args, self.model)
        self.average = getattr(self.optimizer, "average_gradients", None)  # in place of DDP
        self.stream = torch.cuda.Stream(priority=-1) if args.cuda_graph else None
        self.graph = None
        self.marks: list[tuple] = []  # phases of a turn, and the moments of their ends
        if args.torch_compile:
            self.forward = torch.compile(self.model, mode=args.torch_compile_mode)
        if WORLD_SIZE > 1 and not self.average:
            options = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
            with torch.cuda.stream(self.stream):  # autograd will add gradients up on it
                self.forward = nn.parallel.DistributedDataParallel(self.forward, **options)
        return self

    def compute(self, batch: dict[str, Tensor]) -> Tensor:
        """Compute what a graph captures: forward pass, backward pass, optimizer."""
        if self.args.torch_compile:
            torch.compiler.cudagraph_mark_step_begin()
        with self.autocast():
            loss = self.forward(**batch)
        self.mark("forward")
        self.scaler.scale(loss).backward()
        self.mark("backward")
        if self.average:  # before the scaler looks for inf
            self.average()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss.detach()
        if WORLD_SIZE > 1:
            loss = loss / WORLD_SIZE
            dist.all_reduce(loss)
        self.mark("optimizer")
        return loss

    def step(self) -> Tensor:
        """Take a step; return the loss of the global batch."""
        batch = self.next_batch()
        self.mark("data")
        if not self.graph:
            return self.compute(batch)
        if self.addresses() != self.captured_addresses:
            raise StaleGraph("a parameter moved in memory: the captured graph writes the old place")
        self.graph.replay()
        self.mark("graph")
        return self.loss

    def next_batch(self) -> dict[str, Tensor]:
        """Return this process's share of the next batch, in the device tensors of the last."""
        share = self.args.batch_size // WORLD_SIZE
        for name, value in self.batches.next_batch().items():
            own = value[RANK * share :][:share]
            if name not in self.inputs:
                self.inputs[name] = torch.empty_like(own, device=self.device)
            # from pinned memory, so that the host does not wait
            self.inputs[name].copy_(own.pin_memory() if self.gpu else own, non_blocking=True)
        return self.inputs

    def capture(self) -> None:
        """Capture the step as a graph that `step` replays; a step must have run before."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.loss = self.compute(self.inputs)
        self.captured_addresses = self.addresses()
        self.graph = graph

    def mark(self, phase: str) -> None:
        """Note the moment at which a phase ends, without a wait; on a CPU in seconds."""
        now = torch.cuda.Event(enable_timing=True) if self.gpu else time.perf_counter()
        if self.gpu:
            now.record()
        self.marks.append((phase, now))

    def start(self) -> None:
        """Build, say what runs, warm up, and see how much memory a step needs."""
        args = self.args
        before = torch.cuda.memory_allocated() if self.gpu else 0
        if self.gpu:
            torch._C._cuda_clearCublasWorkspaces()  # of another run
        self.build()
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.groups |= {"parameters": parameters, "data": self.batches.source}
        print(headline(args, self.groups["config"], parameters), flush=True)
        progress(f"{self.title}{'compiling in' if args.torch_compile else 'taking'} the first step")
        warmup_ms = []
        for step in range(1, args.warmup_steps + 1):
            if self.gpu and step == 2:
                torch.cuda.reset_peak_memory_stats()  # the first step needs more than the others
            if args.cuda_graph and step == args.warmup_steps:
                torch.cuda.reset_peak_memory_stats()  # a capture allocates, and no replay does
                self.capture()
            warmup_ms.append(self.take(1, measured=False))
        if warmup_ms:
            timing = {"warmup_first_step_ms": warmup_ms[0], "warmup_ms": sum(warmup_ms)}
            self.groups["timing"] = timing
        if self.gpu:
            peak = torch.tensor(torch.cuda.max_memory_allocated() - before, device=self.device)
            if WORLD_SIZE > 1:
                dist.all_reduce(peak, dist.ReduceOp.MAX)
            self.peak = int(peak)
        gc.collect()  # compiling leaves cycles that keep tensors

    def take(self, steps: int, measured: bool = True) -> float:
        """Take some steps, a turn; return milliseconds of a step. Ctrl-C keeps what is done."""
        prepare(self.args)  # another side may have had a turn
        synchronize = torch.cuda.synchronize if self.gpu else lambda: None
        losses = torch.empty(steps, pin_memory=self.gpu)  # on the host, which does not wait
        done = 0
        synchronize()
        began = time.perf_counter()
        self.marks = []
        self.mark("start")
        try:
            for step in range(steps):
                first_mark = len(self.marks)
                losses[step].copy_(self.step(), non_blocking=True)
                done = step + 1
                if measured and step:  # show the step before, while a GPU takes this one
                    self.show(losses, step, began, self.marks[first_mark][1])
        finally:
            synchronize()
            ms = 1e3 * (time.perf_counter() - began) / max(1, done)
            values = losses[:done].tolist()
            self.losses += filter(math.isfinite, values)
            if measured and done:
                self.show(losses, done, began, self.marks[-1][1])
                self.turns_ms.append(ms)
                for (_, start), (phase, end) in zip(self.marks, self.marks[1:], strict=False):
                    phase_ms = start.elapsed_time(end) if self.gpu else 1e3 * (end - start)
                    self.phases.setdefault(phase, []).append(phase_ms)
        if not all(map(math.isfinite, values)):
            raise FloatingPointError("the loss is no number any more; lower --learning-rate")
        return ms

    def show(self, losses: Tensor, done: int, began: float, end: object) -> None:
        """Show the loss after so many steps of a turn, if a line is due; wait for their end."""
        args = self.args
        step = len(self.phases.get("data", ())) + done  # with those of earlier turns
        if step % args.log_interval:
            return
        if self.gpu:
            end.synchronize()
        seconds = (time.perf_counter() - began) / done
        left = (args.num_steps - step) * seconds
        pace = f"{args.batch_size / seconds:.1f} samples/s  {left:.0f} s left"
        progress(f"{self.title}step {step}/{args.num_steps}  loss {losses[done - 1]:.4f}  {pace}")

    def count(self, all_off_kernels: int | None) -> None:
        """Count in extra steps; the number of kernels with all fusions off may be known."""
        args = self.args
        prepare(args)
        progress(f"{self.title}counting kernels, memory and floating-point operations")
        kernels = self.groups["kernels"]
        if self.gpu or not args.torch_compile:  # loops compiled for a CPU cannot be counted
            kernels |= count_kernels(self)
        if not self.gpu:
            self.peak = max(used for _, used in memory_of_a_step(self))
        self.groups["flops"]["per_step"] = count_flops(args, self.batches.next_batch())
        self.graph = None  # frees its memory
        fused = args.torch_compile or any(getattr(args, name) for _, name, _ in FUSIONS)
        if not (kernels and fused):
            return
        if not all_off_kernels:
            progress(f"{self.title}counting kernels with all off")
            torch.compiler.reset()  # lets go of its graphs
            gc.collect()
            with contextlib.suppress(torch.OutOfMemoryError):
                all_off_kernels = count_kernels(Trainer(all_off(args)).build())["per_step"]
        kernels["all_off"] = all_off_kernels
        if all_off_kernels:
            kernels["reduction_percent"] = 100 * (1 - kernels["per_step"] / all_off_kernels)

    def summary(self) -> dict:
        """Return what is known of the run, as its JSON file has it."""
        args = self.args
        timing = self.groups["timing"]
        flops = self.groups["flops"]
        loss = {"warmup_steps": args.warmup_steps, "curve": self.losses}
        if self.losses:
            loss |= {"initial": self.losses[0], "final": self.losses[-1]}
        if self.turns_ms:
            ms = np.median(self.turns_ms)  # most runs have a single turn
            steps = zip(*self.phases.values(), strict=False)  # Ctrl-C may cut the last one short
            steps_ms = [sum(step) for step in steps]
            timing |= {"steps": len(steps_ms), "batch_ms": ms, "turns_ms": self.turns_ms}
            timing |= {f"{phase}_ms": np.mean(times) for phase, times in self.phases.items()}
            timing["samples_per_sec"] = 1e3 * args.batch_size / ms
            timing["batch_median_ms"] = np.median(steps_ms)
            timing["batch_p95_ms"] = np.quantile(steps_ms, 0.95, method="higher")
            if args.torch_compile and args.warmup_steps:
                timing["compilation_overhead_ms"] = timing["warmup_ms"] - args.warmup_steps * ms
            if flops:
                flops["gflop"] = flops["per_step"] / 1e9
                flops["achieved_tflops"] = flops["gflop"] / ms
        status, error = self.end
        training = {n: v for n, v in vars(args).items() if isinstance(v, float | int | str | None)}
        return {
            "schema_version": 1,
            "script": SCRIPT,
            "status": {0: "ok", 3: "oom"}.get(status, "failed"),
            "exit_status": status,
            "error": error,
            "fusions": {name: getattr(args, name) for _, name, _ in FUSIONS},
            "without_effect": args.without_effect,
            "training": training | {"processes": WORLD_SIZE},
            "environment": environment(torch.device(args.device)),
            "memory": {"peak_mb": self.peak / 1e6} if self.peak else {},
            "loss": loss,
            **self.groups,
        }

    def write(self, end: tuple[int, str | None]) -> None:
        """Write <profile-dir>/<script>_summary.json, whole or not at all."""
        self.end = end
        if RANK:
            return
        path = self.args.profile_dir / f"{SCRIPT}_summary.json"
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_text(json.dumps(self.summary(), indent=1, default=str) + "\n")
            if path.exists() and '"samples_per_sec"' in path.read_text():  # another run's
                number = 1
                while (kept := path.with_suffix(f".{number}.json")).exists():
                    number += 1
                path.rename(kept)
                say("note", f"{path} was there; it is {kept.name} now")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)  # where the disk is full


NO_WORK = ("_unsafe_view", "empty", "new_empty", "_record_function")  # like views, move no data


class OperatorCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the operators inside that move data."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.calls += not (function.is_view or name.startswith(NO_WORK))
        return function(*args, **(kwargs or {}))


def trace_of_a_step(trainer: Trainer, **options: bool) -> list[dict]:
    """Return the events of one more step, as PyTorch's profiler writes them."""
    trainer.step()  # the first one of a new Trainer does more
    gc.collect()  # what is freed in the step was allocated in it
    with torch.profiler.profile(acc_events=True, **options) as profile:
        trainer.step()
        if trainer.gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        return json.loads(Path(folder, "trace.json").read_bytes())["traceEvents"]


def count_kernels(trainer: Trainer) -> dict:
    """Count the kernels of a step, on a CPU its operators; {} where none are seen."""
    if not trainer.gpu:  # of two samples: of a single one some copies are views
        batch = {n: torch.cat((t, t))[:2] for n, t in trainer.next_batch().items()}
        trainer.compute(batch)  # the first one of a new Trainer does more
        with OperatorCounter() as counter:
            trainer.compute(batch)
        return {"unit": "operator calls", "per_step": counter.calls}
    events = trace_of_a_step(trainer)
    kernels = sum(event.get("cat") == "kernel" for event in events)
    calls = [e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = sum("Launch" in name for name in calls)
    if not kernels:  # a profiler without permission sees none
        return {}
    return {"unit": "kernels", "per_step": kernels, "host_launches": launches}


def memory_of_a_step(trainer: Trainer) -> list[tuple[float, float]]:
    """Return the course of the device's tensor memory in a step: microseconds and bytes."""
    tensors = [*trainer.model.parameters(), *trainer.model.buffers(), *trainer.inputs.values()]
    tensors += [t for state in trainer.optimizer.state.values() for t in state.values()]
    used = sum(tensor.nbytes for tensor in tensors)  # between two steps
    events = [e for e in trace_of_a_step(trainer, profile_memory=True) if e["name"] == "[memory]"]
    events = [e for e in events if e["args"]["Device Type"] == int(trainer.gpu)]
    events.sort(key=lambda event: event["ts"])
    course = []
    for event in events:
        used += event["args"]["Bytes"]
        course.append((event["ts"] - events[0]["ts"], used))
    return course


def count_flops(args: argparse.Namespace, batch: dict[str, Tensor]) -> int:
    """Count the floating-point operations of a step of the unfused model."""
    model = build_model(all_off(args, checkpoint_blocks=False), torch.device("meta"))
    with FlopCounterMode(display=False) as counter:
        model(**{name: value.to("meta") for name, value in batch.items()}).backward()
    return counter.get_total_flops()


LINES = """\
Average training speed: {timing[samples_per_sec]:.1f} samples/sec
Average batch time: {timing[batch_ms]:.1f} ms (median {timing[batch_median_ms]:.1f}, \
p95 {timing[batch_p95_ms]:.1f})
Average forward time: {timing[forward_ms]:.1f} ms
Average backward time: {timing[backward_ms]:.1f} ms
Average optimizer time: {timing[optimizer_ms]:.1f} ms
Average graph time: {timing[graph_ms]:.1f} ms (its phases cannot be told apart)
Warmup step time: {timing[warmup_first_step_ms]:.1f} ms (first step, includes any compilation)
Compilation overhead: {timing[compilation_overhead_ms]:.1f} ms
Final loss: {loss[final]:.4f} (first step {loss[initial]:.4f})
Peak memory usage: {memory[peak_mb]:.1f} MB
Kernels per step: {kernels[per_step]}{off}{operators}
Kernel reduction: {kernels[reduction_percent]:.1f} %
Host launches per step: {kernels[host_launches]}
FLOPs per step: {flops[gflop]:.4g} GFLOP, achieved {flops[achieved_tflops]:.3g} TFLOP/s
"""  # of the report, from values of the result


def report(result: dict) -> str:
    """Return the lines whose values were measured."""
    kernels = result["kernels"]
    remarks = {"off": "", "operators": ""}
    if "all_off" in kernels:
        remarks["off"] = f" (all fusions off: {kernels['all_off'] or 'out of memory'})"
    if kernels.get("unit") == "operator calls":
        remarks["operators"] = "; operator calls, counted on a CPU"
    lines = []
    for line in LINES.splitlines():
        with contextlib.suppress(KeyError):
            lines.append(line.format(**result, **remarks))
    return "\n".join(lines)


def comparison(before: dict, after: dict) -> str:
    """Return a table of both sides, and what the ratios of their turns show."""
    lines = [f"\n{'':24}{'all off':>12}{'as chosen':>12}{'ratio':>9}"]
    for label, group, key, digits in (
        ("batch time, ms", "timing", "batch_ms", 2),
        ("peak memory, MB", "memory", "peak_mb", 1),
        (f"{after['kernels'].get('unit')} per step", "kernels", "per_step", 0),
        ("final loss", "loss", "final", 4),
    ):
        if key in before[group] and key in after[group]:
            off = before[group][key]
            on = after[group][key]
            ratio = f"{off / on:8.2f}x" if key != "final" else ""
            lines.append(f"{label:24}{off:12.{digits}f}{on:12.{digits}f}{ratio}")
    turns = zip(before["timing"]["turns_ms"], after["timing"]["turns_ms"], strict=True)
    ratios = [off / on for off, on in turns]
    low, high, median = np.round([min(ratios), max(ratios), np.median(ratios)], 2)
    verdict = "all turns agree" if high <= 1.25 * low else "all turns agree on which is faster"
    if low <= 1 <= high:
        verdict = "no difference seen"
    far = low > 0 and max(low, 1 / high) > (high / low) ** 3
    if len(ratios) < (3 if far else 5):
        verdict = "too few turns to tell"
    spread = f"from {low:.2f}x to {high:.2f}x ({verdict})"
    lines.append(f"Batch time ratio in {len(ratios)} turns: {median:.2f}x, {spread}")
    return "\n".join(lines)


def environment(device: torch.device) -> dict:
    """Return what the numbers are measured on."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = text.partition("model name\t: ")[2].partition("\n")[0] or os.uname().machine
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name() if device.type == "cuda" else name,
        "cpu_threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "triton": getattr(sys.modules.get("triton"), "__version__", None),
    }


def headline(args: argparse.Namespace, config: dict, parameters: int) -> str:
    """Name script, device, sizes, precision and fusions in one line."""
    device = environment(torch.device(args.device))["device_name"]
    device += f" x {WORLD_SIZE}" if WORLD_SIZE > 1 else ""
    sizes = {"batch_size": args.batch_size, **config}.items()
    sizes = ", ".join(f"{name} {size}" for name, size in sizes if type(size) is int)
    float32 = f"float32 (matmul precision {args.matmul_precision})"
    precision = args.amp_dtype if args.use_amp else float32
    names = [*(name for _, name, _ in FUSIONS), "torch_compile", "cuda_graph"]
    on = [name for name in names if getattr(args, name) and name not in args.without_effect]
    fused = ", ".join(on or ["nothing fused"]).replace("_", "-")
    return f"{SCRIPT} on {device}: {parameters:,} parameters, {sizes}; {precision}; {fused}"


LATEST = {"text": "", "moment": 0.0}  # what `progress` said, and when


def progress(text: str = "", since: str = "") -> None:
    """Say what happens, and since when if it takes long; a terminal has it in one line."""
    if not since:
        LATEST.update(text=text, moment=time.monotonic())
    terminal = sys.stderr.isatty()
    if not RANK and (text or terminal):
        print(text + since, end="\033[K\r" if terminal else "\n", file=sys.stderr, flush=True)


def repeat_progress(end: threading.Event) -> None:
    """Say every five seconds what takes so long, in a thread of its own until the end."""
    while not end.wait(5):
        seconds = time.monotonic() - LATEST["moment"]
        if LATEST["text"] and seconds > 4:
            progress(LATEST["text"], f" (for {seconds:.0f} s)")


def say(kind: str, message: str) -> None:
    """Print an "error", or a "note" once for all processes, on stderr."""
    if kind == "error" or not (RANK or "TINY_LAUNCHED" in os.environ):
        print(f"{SCRIPT}.py: {kind}: {message}", file=sys.stderr)


def fail(message: str, status: int = 2) -> None:
    """End the program with one line about what the user can put right."""
    say("error", message)
    raise SystemExit(status)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether it is, or covers, one: the end of a capture raises an error of its own."""
    signs = ("MemoryError", "out of memory", "allocate memory", "ALLOC_FAILED")
    covers = error is not None and is_out_of_memory(error.__context__)
    return covers or any(sign in repr(error) for sign in signs)


def explain(error: BaseException, args: argparse.Namespace) -> tuple[int, str]:
    """Return exit status and line for what a user can mend; raise any other error."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if is_out_of_memory(error):
        return 3, f"out of memory: lower --batch-size or --seq-len ({line})"
    if isinstance(error, OSError):
        return 2, f"cannot write {error.filename or 'output or --profile-dir'}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError) and error.name.partition(".")[0] == "fusion_lab":
        name = next(name for name in ("verify_accuracy", *PROFILES) if getattr(args, name))
        flag = f"--{name.replace('_', '-')}"
        return 4, f"{flag} needs the folder fusion_lab of this repository beside this script"
    if isinstance(error, ImportError):
        return 4, line
    library = type(error).__module__.startswith(("torch.", "triton"))
    if library or isinstance(error, (FloatingPointError, StaleGraph)):
        return 1, line
    raise error


def at_least(low: int) -> Callable[[str], int]:
    """Make an argparse type: a whole number from `low`."""

    def number(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) < 2**31):
            raise argparse.ArgumentTypeError(f"must be {low} to {2**31 - 1}, not {text}")
        return int(text)

    return number


OWN_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile
COMPILE_MODES = ("default", *OWN_GRAPHS, "max-autotune-no-cudagraphs")
ARGUMENTS = {  # of every version: flag; type, choices, or bool for a switch; default; help
    "training": (
        ("num-steps", at_least(1), 50, "measured steps"),
        ("warmup-steps", at_least(0), None, "before those (default: 5, on several GPUs 12)"),
        ("learning-rate", float, 3e-4, "of AdamW"),
        ("use-amp", bool, None, "automatic mixed precision"),
        ("amp-dtype", ("bfloat16", "float16"), None, "(default: bfloat16)"),
        ("matmul-precision", ("highest", "high", "medium"), "highest", "of float32"),
        ("torch-compile-mode", COMPILE_MODES, None, "compile longer to run faster"),
        ("device", ("auto", "cpu", "cuda"), "auto", "cuda for AMD's GPUs, too"),
        ("num-gpus", at_least(1), None, "share the batch (default: 1, or *_VISIBLE_DEVICES)"),
        ("seed", at_least(0), 42, "of weights and data"),
        ("deterministic", bool, None, "the same bits in every run"),
        ("log-interval", at_least(1), 10, "steps between lines"),
    ),
    "profiling": (
        ("enable-pytorch-profiler", bool, None, "operator tables, trace of 3 steps"),
        ("enable-memory-profiling", bool, None, "memory timeline of one step"),
        ("enable-rocm-profiling", bool, None, "names of phases for a profiler"),
        ("under-profiler", bool, None, "launch nothing but the training steps"),
        ("profile-dir", Path, Path(f"pytorch_profiles_v{VERSION}"), "for results"),
    ),
    "modes": (
        ("compare-fusion", bool, None, "all fusions off and as chosen, in turns"),
        ("verify-accuracy", bool, None, "compare outputs and gradients with all off"),
    ),
}


def build_parser() -> argparse.ArgumentParser:
    """Build the command line: the arguments of the model, and those of every version."""
    description, _, examples = (__doc__ or "").partition("\nExamples:\n")
    parser = argparse.ArgumentParser(f"{SCRIPT}.py", argparse.SUPPRESS, description)
    parser.epilog = "examples:\n" + examples
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    add_model_arguments(parser)
    group = parser.add_argument_group("fusions", "Single flags win over all-fusion.")
    for flag, attribute, text in (
        ("all-fusion", "all_fusion", "all (the default) but torch-compile and cuda-graph"),
        *FUSIONS,
        ("torch-compile", "torch_compile", "torch.compile of the model"),
        ("cuda-graph", "cuda_graph", "the step as one graph (the default of V4)"),
    ):
        add = group.add_mutually_exclusive_group().add_argument
        add(f"--enable-{flag}", dest=attribute, action="store_const", const=True, help=text)
        add(f"--disable-{flag}", dest=attribute, action="store_const", const=False)
    for title, rows in ARGUMENTS.items():
        add = parser.add_argument_group(title).add_argument
        for flag, kind, default, text in rows:
            text += "" if default is None else " (default: %(default)s)"
            takes = "choices" if isinstance(kind, tuple) else "type"
            options = {takes: kind, "default": default}
            if kind is bool:
                options = {"action": "store_true"}
            add(f"--{flag}", help=text, **options)
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check; what cannot work is one line on stderr and SystemExit (2 or 4)."""
    parser = build_parser()
    args = parser.parse_args(argv)
    flags = {name: getattr(args, name) for _, name, _ in FUSIONS}
    for name, on in flags.items():  # a flag of its own wins over all-fusion
        setattr(args, name, args.all_fusion is not False if on is None else on)
    check_model_arguments(args, parser)
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    needed = args.device == "cuda" or args.cuda_graph or (args.num_gpus and args.device != "cpu")
    launched = "RANK" in os.environ
    if args.num_gpus is None:
        listed = any(os.getenv(f"{kind}_VISIBLE_DEVICES") for kind in ("ROCR", "HIP", "CUDA"))
        args.num_gpus = WORLD_SIZE if launched else max(1, gpus if listed else 1)
    if needed and gpus < (1 if launched else args.num_gpus):
        fail(f"{args.num_gpus} GPUs wanted, PyTorch finds {gpus}", 4)
    args.device = "cuda" if gpus else "cpu"
    mode = args.torch_compile_mode
    if args.warmup_steps is None:
        args.warmup_steps = 12 if args.num_gpus > 1 else 5
    if args.cuda_graph is None:
        args.cuda_graph = VERSION > 3 and gpus > 0 and args.warmup_steps > 1
    graph = args.cuda_graph
    least = 12 if args.num_gpus > 1 else 2  # DDP needs 11 before a capture
    for wrong, message in (
        (RANK >= WORLD_SIZE, f"RANK {RANK} is not below WORLD_SIZE {WORLD_SIZE}"),
        (launched and args.num_gpus != WORLD_SIZE, f"--num-gpus is not WORLD_SIZE {WORLD_SIZE}"),
        (args.batch_size % args.num_gpus, f"--batch-size must divide by {args.num_gpus} GPUs"),
        (not FUSIONS and (args.all_fusion or args.compare_fusion), "V1 has nothing to compare"),
        (args.compare_fusion and args.verify_accuracy, "--verify-accuracy is a run of its own"),
        (mode and not args.torch_compile, "--torch-compile-mode needs --enable-torch-compile"),
        (args.amp_dtype and not args.use_amp, "--amp-dtype needs --use-amp"),
        (not 0 < args.learning_rate < math.inf, "--learning-rate must be above 0"),
        (graph and mode in OWN_GRAPHS, f"--enable-cuda-graph: mode {mode} makes its own graphs"),
        (graph and args.warmup_steps < least, f"a graph needs --warmup-steps {least} or more"),
    ):
        if wrong:
            fail(message)
    args.amp_dtype = args.amp_dtype or "bfloat16"
    args.torch_compile = bool(args.torch_compile)
    if {"NSYS_PROFILING_SESSION_ID", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE"} & {*os.environ}:
        say("note", "nsys or ncu started this run: --under-profiler is on")
        args.under_profiler = True
    chosen = [f"--enable-{flag}" for flag, name, _ in FUSIONS if flags[name]]
    if chosen and args.all_fusion is not False:
        say("note", f"{chosen[0]} changes nothing: all are on without --disable-all-fusion")
    args.without_effect = without_effect(args)
    for flag, name, _ in FUSIONS:
        if flags[name] is not None and name in args.without_effect:
            switch = "enable" if flags[name] else "disable"
            say("note", f"--{switch}-{flag} has no effect: {args.without_effect[name]}")
    return args


def config_of(args: argparse.Namespace) -> ModelConfig:
    """Return the sizes that these arguments ask for."""
    sizes = {name: getattr(args, name) for name in ModelConfig.__dataclass_fields__ if name in args}
    return ModelConfig(**sizes)


def all_off(args: argparse.Namespace, **changes) -> argparse.Namespace:
    """Return these arguments with all fusions and the compiler off, and changes."""
    off = dict.fromkeys((name for _, name, _ in FUSIONS), False)
    off |= {"torch_compile": False, "torch_compile_mode": None, "without_effect": {}}
    return argparse.Namespace(**{**vars(args), **off, **changes})


def prepare(args: argparse.Namespace) -> torch.device:
    """Apply this run's process-wide settings; return the device."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler writes on stderr
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(args.deterministic)
    torch.set_float32_matmul_precision(args.matmul_precision)
    use_settings(args)
    return torch.empty(0, device=args.device).device


def join_processes(args: argparse.Namespace) -> None:
    """Meet the other processes that torchrun started; only the first prints from now on."""
    if args.device == "cuda":
        torch.cuda.set_device(int(os.getenv("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if args.cuda_graph:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # as PyTorch asks
    warnings.filterwarnings("ignore", ".*(broadcast_buffers|AccumulateGrad node's stream)")
    try:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        fail(f"{WORLD_SIZE} processes cannot meet: {str(error).splitlines()[0]}")
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def train(args: argparse.Namespace) -> dict:
    """Train, measure and count; the result is in its JSON file, too."""
    return measure(Trainer(args))[0]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = parse_args(argv)
    if args.num_gpus > 1 and "RANK" not in os.environ:
        os.environ["TINY_LAUNCHED"] = "1"  # notes have been printed
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(args.num_gpus), __file__]
        os.execv(sys.executable, torchrun + (sys.argv[1:] if argv is None else argv))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # from a scheduler: as Ctrl-C
    end = threading.Event()
    threading.Thread(target=repeat_progress, args=[end], daemon=True).start()
    sides = [Trainer(args, "as chosen: " if args.compare_fusion else "")]
    if args.compare_fusion:
        off = all_off(args, profile_dir=args.profile_dir / "baseline")
        sides.insert(0, Trainer(off, "all off: "))
    try:
        if WORLD_SIZE > 1:
            join_processes(args)
        if args.verify_accuracy:
            from fusion_lab.modes import verify_accuracy

            return verify_accuracy(sys.modules[__name__], args)
        measure(*sides)
        status, message = sides[-1].end
    except (Exception, KeyboardInterrupt) as error:
        status, message = explain(error, args)
    finally:  # also of a run whose result found no room on the disk
        end.set()
        progress()
        results = [side.summary() for side in sides]
        whole = all(result["timing"].get("steps") == args.num_steps for result in results)
        text = comparison(*results) if sides[1:] and whole else report(results[-1])
        if text:
            print(text)
    if message:
        say("error", message)
    if WORLD_SIZE > 1:
        sys.stdout.flush()
        os._exit(status)  # a tidy end could wait for a process that is gone
    return status
