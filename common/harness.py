# Copied from common/harness.py by tools/sync_common.py: edit it there.
# It knows the model by docstring, VERSION, FUSIONS, TRITON_FUSIONS, add_model_arguments
# (--batch-size), check_model_arguments, without_effect, use_settings, build_model (.config,
# .TARGETS), build_optimizer, make_batches (.next_batch(), .source); these use at_least,
# beside, fail and say.
SCRIPT = Path(__file__).stem
# What runs in place of training: functions of these names, in modules beside this script.
MODES = {"compare_fusion": "lab.modes", "verify_accuracy": "lab.modes"}
FORECAST = Path(__file__).resolve().parent / "lab" / "forecast.py"  # of the time on a CPU
PHASES = ("data", "forward", "backward", "optimizer")
GRAPH_PHASES = ("data", "graph")  # with --enable-cuda-graph
OWN_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile
SETTINGS = ("batch_size", "num_steps", "warmup_steps", "learning_rate", "seed", "deterministic")
SETTINGS += ("use_amp", "amp_dtype", "matmul_precision")
SETTINGS += ("torch_compile", "torch_compile_mode", "cuda_graph")
PATIENCE = 600  # seconds without a step that ends
# A line is printed where all of its values were measured.
REPORT = """\
Residues with coordinates: {data[observed]} of {data[residues]}
Average training speed: {timing[samples_per_sec]:.1f} samples/sec
Average batch time: {timing[batch_ms]:.1f} ms \
(median {timing[batch_median_ms]:.1f}, p95 {timing[batch_p95_ms]:.1f})
Average forward time: {timing[forward_ms]:.1f} ms
Average backward time: {timing[backward_ms]:.1f} ms
Average optimizer time: {timing[optimizer_ms]:.1f} ms
Average graph time: {timing[graph_ms]:.1f} ms (the whole step; its phases cannot be told apart)
Warmup step time: {timing[warmup_first_step_ms]:.1f} ms (first step{compiled})
Compilation overhead: {timing[compilation_overhead_ms]:.1f} ms
Final loss: {loss[final]:.4f} (first step {loss[initial]:.4f})
Peak memory usage: {memory[peak_mb]:.1f} MB
Kernels per step: {kernels[per_step]}{all_off}{kernels[remark]}
Kernel reduction: {kernels[reduction_percent]:.1f} %
Host launches per step: {kernels[host_launches]}
FLOPs per step: {flops[gflop]:.4g} GFLOP, achieved {flops[achieved_tflops]:.3g} TFLOP/s
"""


def say(kind: str, message: str) -> None:
    """Print an "error" of this process, or one "note" for all processes, on stderr."""
    if kind == "error" or (not RANK and "TINY_LAUNCHED" not in os.environ):
        rank = f"rank {RANK}: " if RANK else ""
        print(f"{SCRIPT}.py: {kind}: {rank}{message}", file=sys.stderr)


def fail(message: str, status: int = 2) -> NoReturn:
    """Exit with one line on stderr about what the user can put right."""
    say("error", message)
    raise SystemExit(status)


def beside(module: str, flag: str) -> ModuleType:
    """Import a module of the folders beside this script, which a flag asks for."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = (error.name or module).partition(".")[0]
        if package != module.partition(".")[0]:  # which that file imports
            fail(f"{flag} needs the package {package}: pip install {package}", 4)
        fail(f"{flag} needs {module.replace('.', '/')}.py beside this script ({error})", 4)


def progress(text: str = "") -> None:
    """Say what happens now; on a terminal in one line, which is cleared in the end."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:width]}\033[K", end="", flush=True)
    elif text:
        print(text, flush=True)


def at_least(low: int) -> Callable[[str], int]:
    """Make an argparse type: a whole number from `low` to 32 bits."""

    def whole_number(text: str) -> int:
        if not low <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(f"must be {low} or more, not {text}")
        return int(text)

    return whole_number


def build_parser() -> argparse.ArgumentParser:
    """Build the command line: arguments of the model, and of all versions."""
    description, _, examples = (__doc__ or "").partition("\nExamples:\n")  # python -OO has none
    parser = argparse.ArgumentParser(
        prog=f"{SCRIPT}.py",
        usage=argparse.SUPPRESS,
        description=description,
        epilog="examples:\n" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_arguments(parser)
    switch, default = {"action": "store_true"}, "(default: %(default)s)"

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
    choices = ("default", *OWN_GRAPHS, "max-autotune-no-cudagraphs")
    group.add_argument("--torch-compile-mode", choices=choices, help="compile longer to run faster")

    add = parser.add_argument_group("training").add_argument
    add("--num-steps", type=at_least(1), default=50, help=f"measured steps {default}")
    add("--warmup-steps", type=at_least(0), help="before those, on several GPUs 12 (default: 5)")
    add("--learning-rate", type=float, default=3e-4, help=f"of AdamW {default}")
    add("--use-amp", **switch, help="automatic mixed precision")
    add("--amp-dtype", choices=("bfloat16", "float16"), help="(default: bfloat16)")
    precisions = ("highest", "high", "medium")
    add("--matmul-precision", choices=precisions, default="highest", help=f"of float32 {default}")
    devices = ("auto", "cpu", "cuda")
    add("--device", choices=devices, default="auto", help=f"cuda for AMD's GPUs, too {default}")
    add("--num-gpus", type=at_least(1), help="share the batch (default: 1, or *_VISIBLE_DEVICES)")
    add("--seed", type=at_least(0), default=42, help=f"of weights and data {default}")
    add("--deterministic", **switch, help="the same bits in every run")
    add("--log-interval", type=at_least(1), default=10, help=f"steps between lines {default}")

    add = parser.add_argument_group("profiling").add_argument
    add("--enable-pytorch-profiler", **switch, help="operator tables, trace of 3 steps")
    add("--enable-memory-profiling", **switch, help="memory timeline of one step")
    add("--enable-rocm-profiling", **switch, help="names of phases for a profiler")
    add("--under-profiler", **switch, help="launch nothing but the training steps")
    folder = f"pytorch_profiles_v{VERSION}"
    add("--profile-dir", type=Path, default=folder, metavar="DIR", help=f"for results {default}")

    add = parser.add_argument_group("modes").add_mutually_exclusive_group().add_argument
    add("--compare-fusion", **switch, help="all fusions off and as chosen, in turns")
    add("--verify-accuracy", **switch, help="outputs and gradients as with all off?")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check; what cannot work is one line on stderr and SystemExit (2 or 4)."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = re.findall(r"--[\w-]+", parser.format_help())
        near = difflib.get_close_matches(unknown[0], flags, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    flags = choose_fusions(args)
    check_model_arguments(args, parser)
    check_environment()
    choose_devices(args)
    check_training(args)
    notice_profilers(args)
    args.profile_dir /= f"rank{RANK}" if RANK else ""
    args.without_effect = without_effect(args)
    for flag, name, _ in FUSIONS:
        if name in flags and name in args.without_effect:
            switch = "enable" if flags[name] else "disable"
            say("note", f"--{switch}-{flag} has no effect: {args.without_effect[name]}")
    return args


def choose_fusions(args: argparse.Namespace) -> dict[str, bool]:
    """Turn each fusion on or off: by its own flag, which is returned, else by all-fusion."""
    if not FUSIONS and (args.all_fusion or args.compare_fusion):
        fail(f"--enable-all-fusion and --compare-fusion start with V2, {SCRIPT} has no fusions")
    flags = {name: on for _, name, _ in FUSIONS if (on := getattr(args, name)) is not None}
    if flags and all(flags.values()) and len(flags) < len(FUSIONS) and args.all_fusion is None:
        say("note", "all fusions are on by default; for single ones add --disable-all-fusion")
    for _, name, _ in FUSIONS:
        setattr(args, name, flags.get(name, args.all_fusion is not False))
    return flags


def check_training(args: argparse.Namespace) -> None:
    """Refuse what cannot work together; choose graph and warm-up where no flag does."""
    if args.torch_compile_mode and not args.torch_compile:
        fail(f"--torch-compile-mode {args.torch_compile_mode} needs --enable-torch-compile")
    if args.amp_dtype and not args.use_amp:
        fail(f"--amp-dtype {args.amp_dtype} needs --use-amp")
    if not 0 < args.learning_rate < math.inf:
        fail(f"--learning-rate must be above 0, not {args.learning_rate}")
    if args.batch_size % args.num_gpus:
        fail(f"--batch-size {args.batch_size} is not divisible by {args.num_gpus} GPUs")
    args.torch_compile = bool(args.torch_compile)
    args.amp_dtype = args.amp_dtype or "bfloat16"

    gpu, own_graph = args.device == "cuda", args.torch_compile_mode in OWN_GRAPHS
    least = 12 if gpu and args.num_gpus > 1 else 2  # DDP needs 11 before a capture
    if args.warmup_steps is None:
        args.warmup_steps = max(5, least)
    too_few = args.warmup_steps < least
    if args.cuda_graph is None:
        args.cuda_graph = VERSION > 3 and gpu and not (too_few or own_graph)
    if args.cuda_graph and own_graph:
        fail(f"--enable-cuda-graph: mode {args.torch_compile_mode} makes graphs of its own")
    if args.cuda_graph and not gpu:
        fail("--enable-cuda-graph: this run has no GPU", 4)
    if args.cuda_graph and too_few:
        say("note", f"--warmup-steps {args.warmup_steps} raised to {least} for --enable-cuda-graph")
        args.warmup_steps = least


def notice_profilers(args: argparse.Namespace) -> None:
    """Launch training steps alone where rocprofv3, rocprof-sys, nsys or ncu started the run."""
    signs = "ROCP_TOOL_LIBRARIES NSYS_PROFILING_SESSION_ID NV_NSIGHT_INJECTION_TRANSPORT_TYPE"
    signs = [name for name in signs.split() if name in os.environ]
    signs += re.findall("librocprof[^:]*", os.getenv("LD_PRELOAD", ""))
    if signs and not args.under_profiler:
        say("note", f"a GPU profiler started this run ({signs[0]}): --under-profiler is on")
        args.under_profiler = True
    if args.enable_rocm_profiling and args.device == "cpu":
        say("note", "--enable-rocm-profiling: no GPU here, so nothing is marked")
        args.enable_rocm_profiling = False


def all_off(args: argparse.Namespace, **changes) -> argparse.Namespace:
    """Return these arguments with everything off, and changes."""
    off = {name: False for _, name, _ in FUSIONS}
    off |= {"torch_compile": False, "torch_compile_mode": None, "without_effect": {}}
    return argparse.Namespace(**{**vars(args), **off, **changes})


class Trainer:
    """Model, optimizer and data, and their training step."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device = args, device
        self.gpu = device.type == "cuda"
        self.synchronize = torch.cuda.synchronize if self.gpu else lambda: None
        dtype = getattr(torch, args.amp_dtype)
        self.autocast = partial(torch.autocast, device.type, dtype, enabled=args.use_amp)
        scaled = args.use_amp and dtype == torch.float16
        self.scaler = torch.amp.GradScaler(device.type, 4096, enabled=scaled)  # 65536 may overflow
        self.batches = make_batches(args, torch.device("cpu"), args.seed)
        self.inputs: dict[str, Tensor] = {}  # on a GPU, where batches are copied
        self.model = self.forward = build_model(args, device)
        self.optimizer = build_optimizer(args, self.model)
        self.stream = torch.cuda.Stream(priority=-1) if args.cuda_graph else None  # before others
        if args.torch_compile:
            self.forward = torch.compile(self.model, mode=args.torch_compile_mode)
        self.average = getattr(self.optimizer, "average_gradients", None)  # in place of DDP
        if WORLD_SIZE > 1 and not self.average:
            with torch.cuda.stream(self.stream):  # where autograd adds gradients up
                options = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
                self.forward = nn.parallel.DistributedDataParallel(self.forward, **options)
        self.graph, self.phases = None, PHASES
        self.marks = []  # moments: a first one, and after each phase
        self.named = contextlib.nullcontext  # ranges of phases for a profiler

    def next_batch(self) -> dict[str, Tensor]:
        """Return this process's share of the batch, on the device."""
        share = self.args.batch_size // WORLD_SIZE
        batch = {n: t[RANK * share :][:share] for n, t in self.batches.next_batch().items()}
        if not self.gpu:
            return batch
        for name, value in batch.items():
            if name not in self.inputs:
                self.inputs[name] = torch.empty_like(value, device=self.device)
            self.inputs[name].copy_(value.pin_memory(), non_blocking=True)  # without a wait
        return self.inputs

    def step(self) -> Tensor:
        """Take a step; return the loss of the global batch."""
        with self.phase("data"):
            batch = self.next_batch()
        if not self.graph:
            return self.compute(batch)
        with self.phase("graph"):
            self.graph.replay()
        return self.loss

    def compute(self, batch: dict[str, Tensor]) -> Tensor:
        """Compute what a graph captures."""
        with self.phase("forward"), self.autocast():
            if self.args.torch_compile:
                torch.compiler.cudagraph_mark_step_begin()
            loss = self.forward(**batch)
        with self.phase("backward"):
            self.scaler.scale(loss).backward()
        with self.phase("optimizer"):
            if self.average:  # before a scaler looks
                self.average()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            if WORLD_SIZE > 1:
                loss = loss.detach() / WORLD_SIZE
                dist.all_reduce(loss)
        return loss.detach()

    def capture(self) -> None:
        """Capture the step, replayed from now on; one must have run before."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.loss = self.compute(self.inputs)
        self.graph, self.phases = graph, GRAPH_PHASES

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a phase of the step in a range, with a mark at its end."""
        with self.named(name):
            yield
        self.mark()

    def mark(self) -> None:
        """Note this moment: an event, or on a CPU the time."""
        moment = torch.cuda.Event(enable_timing=True) if self.gpu else time.perf_counter()
        if self.gpu:
            moment.record()
        self.marks.append(moment)

    def done(self) -> Callable[[], bool]:
        """Return a function that tells whether the device has done all its work up to now."""
        return torch.cuda.current_stream().record_event().query if self.gpu else lambda: True

    def times(self, steps: int) -> dict[str, list[float]]:
        """Return milliseconds of each phase in the marked steps."""
        pairs = itertools.pairwise(self.marks[: steps * len(self.phases) + 1])
        gaps = [a.elapsed_time(b) if self.gpu else 1e3 * (b - a) for a, b in pairs]
        return {name: gaps[i :: len(self.phases)] for i, name in enumerate(self.phases)}

    @contextlib.contextmanager
    def ranges(self, named: Callable) -> Iterator[None]:
        """Run phases and modules inside in ranges of their names."""
        modules = [] if self.args.torch_compile else [*self.model.named_modules()][1:]
        for name, module in modules:
            module.forward = named(name)(module.forward)  # a context manager is a decorator, too
        self.named = named
        try:
            yield
        finally:
            self.named = contextlib.nullcontext
            for _, module in modules:
                del module.forward  # that of its class again

    def profile(self, steps: int = 1, **options) -> tuple[torch.profiler.profile, dict]:
        """Take steps under the PyTorch profiler; return it and its Chrome trace."""
        profile = torch.profiler.profile(acc_events=True, **options)
        with profile, self.ranges(torch.profiler.record_function):
            if WORLD_SIZE > 1:  # wait for the others' profilers, without a kernel
                dist.all_reduce(torch.zeros(1))
            for _ in range(steps):
                self.step()
            self.synchronize()
        with tempfile.TemporaryDirectory() as folder:  # the path stands in the file, not escaped
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            return profile, json.loads(path.read_text())


@dataclass(frozen=True)
class Turn:
    """Steps in a row, the device idle before and after."""

    label: str  # the kind of steps
    seconds: float  # of all of them, by the host's clock
    phases: dict[str, list[float]]  # milliseconds of each phase in each step
    losses: list[float]
    peak: int  # bytes of GPU memory

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / len(self.losses)


def timing(turns: list[Turn], batch_size: int) -> dict:
    """Return speed, mean times of a step and its phases, time per step by turn."""
    if not (steps := sum(len(turn.losses) for turn in turns)):
        return {}
    seconds = sum(turn.seconds for turn in turns)
    phases = {name: np.concatenate([t.phases[name] for t in turns]) for name in turns[0].phases}
    totals = sum(phases.values())
    return {
        "steps": steps,
        "wall_s": seconds,
        "samples_per_sec": batch_size * steps / seconds,
        "batch_ms": 1e3 * seconds / steps,
        "turns_ms": [turn.step_ms for turn in turns if turn.losses],
        "batch_median_ms": float(np.median(totals)),
        "batch_p95_ms": float(np.quantile(totals, 0.95, method="higher")),
        **{f"{name}_ms": float(ms.mean()) for name, ms in phases.items()},
    }


class Run:
    """A run: arguments, trainer, results so far."""

    def __init__(self, args: argparse.Namespace, title: str = ""):
        self.args, self.title = args, title
        self.device = prepare(args)
        self.model: dict = {"config": {}, "data": {}}
        self.turns: list[Turn] = []
        self.held = 0  # bytes of GPU memory that it holds between turns
        self.peak = 0  # bytes in a measured step
        self.kernels: dict = {}
        self.flops = 0
        self.status, self.error = 1, "it did not finish"

    def start(self) -> None:
        """Build the trainer, say what it is, warm up."""
        args, before = self.args, gpu_memory(self.device)
        self.trainer = trainer = Trainer(args, self.device)
        self.model = {
            "config": asdict(trainer.model.config),
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "data": trainer.batches.source,
        }
        progress()
        print(self.headline(), flush=True)
        if args.torch_compile:
            progress("compiling in the first step; this can take minutes")
        elif not (trainer.gpu or args.under_profiler) and FORECAST.exists():
            steps = args.warmup_steps + args.num_steps
            beside("lab.forecast", "a CPU").forecast(sys.modules[__name__], trainer, steps)
        self.plan(args.warmup_steps, "warm-up step")
        self.take(args.warmup_steps - args.cuda_graph)
        if args.cuda_graph:
            trainer.capture()
            self.take(1)
        gc.collect()  # compiling leaves cycles that keep tensors
        self.held = gpu_memory(self.device) - before
        self.plan(args.num_steps, "step")

    def headline(self) -> str:
        """Name script, device, sizes, precision and fusions in one line."""
        args, config = self.args, self.model["config"]
        device = environment(self.device)["device_name"]
        device += f" x {WORLD_SIZE}" if WORLD_SIZE > 1 else ""
        sizes = ", ".join(f"{name} {n}" for name, n in config.items() if isinstance(n, int) and n)
        float32 = f"float32 (matmul precision {args.matmul_precision})"
        precision = args.amp_dtype if args.use_amp else float32
        names = (*(name for _, name, _ in FUSIONS), "torch_compile", "cuda_graph")
        on = [n for n in names if getattr(args, n) and n not in args.without_effect]
        fused = ", ".join(on or ["nothing fused"]).replace("_", "-")
        model = f"{self.model['parameters']:,} parameters, batch_size {args.batch_size}, {sizes}"
        return f"{SCRIPT} on {device}: {model}; {precision}; {fused}"

    def plan(self, steps: int, label: str) -> None:
        """Reset the progress counter for `steps` steps."""
        self.goal, self.label, self.done = steps, label, 0
        self.started = time.perf_counter()
        self.shown = self.started  # when progress was

    def take(self, steps: int) -> Turn:
        """Take steps in a row; a turn that is cut short has those until then."""
        prepare(self.args)  # another run may have had a turn
        trainer, losses = self.trainer, []
        trainer.synchronize()
        others = gpu_memory(self.device) - self.held  # by runs whose turn it is not
        if trainer.gpu:
            torch.cuda.reset_peak_memory_stats()
        trainer.marks.clear()
        began = ended = time.perf_counter()
        trainer.mark()
        try:
            for loss in self.losses(steps):
                self.done += 1
                step = f"{self.title}{self.label} {self.done}"
                if not math.isfinite(loss):
                    message = f"the loss became {loss} at {step}; lower --learning-rate"
                    raise FloatingPointError(message)
                losses.append(loss)
                ended = time.perf_counter()
                speed = self.args.batch_size * len(losses) / (ended - began)
                self.show(f"{step}/{self.goal}  loss {loss:.4f}  {speed:.1f} samples/s")
        finally:  # after Ctrl-C, too, without a wait for lost processes
            phases = trainer.times(len(losses))
            peak = gpu_memory(self.device, "max_memory_allocated") - others
            self.turns.append(Turn(self.label, ended - began, phases, losses, peak))
            if self.label == "step":
                self.peak = max(peak, self.peak)
        return self.turns[-1]

    def losses(self, steps: int) -> Iterator[float]:
        """Take steps; yield the loss of each once the host has it, at most 100 steps later."""
        trainer, copied = self.trainer, []  # for each loss on its way: has it arrived?
        values = torch.empty(steps, pin_memory=trainer.gpu)
        for step in range(steps):
            values[step].copy_(trainer.step(), non_blocking=True)
            copied.append(trainer.done())
            most = 100 if step < steps - 1 else 0  # further ahead, signals would wait
            while copied and (len(copied) > most or copied[0]()):
                end = time.perf_counter() + PATIENCE
                while not copied[0]():  # in Python, which hears signals
                    if time.perf_counter() > end:
                        raise TimeoutError(f"no step ended in {PATIENCE} s: is a process lost?")
                copied.pop(0)
                yield float(values[step - len(copied)])

    def show(self, text: str) -> None:
        """Show progress now and then, and the time left until the last of the planned steps."""
        now, terminal = time.perf_counter(), sys.stdout.isatty()
        left = (now - self.started) / self.done * (self.goal - self.done)
        due = now > self.shown + (0.1 if terminal else 60) or not left
        if due or (self.done % self.args.log_interval == 0 and not terminal):
            self.shown = now
            progress(text + (f"  {timedelta(seconds=math.ceil(left))} left" if left else ""))

    def count(self, off: int | None = None) -> None:
        """Count in extra steps, and profile as flags ask; `off`: kernels with all off, if known."""
        prepare(self.args)
        trainer, args = self.trainer, self.args
        if trainer.gpu or not args.torch_compile:  # a loop compiled for a CPU is no operator
            progress(f"{self.title}counting kernels")
            self.kernels = count_kernels(trainer)
        if args.enable_memory_profiling or not trainer.gpu:
            progress(f"{self.title}recording the memory of a step")
            memory = memory_of_a_step(trainer)
            self.peak = self.peak or memory
        if args.enable_pytorch_profiler:
            progress(f"{self.title}profiling 3 steps, and writing tables and trace")
            write_profile(trainer)
        progress(f"{self.title}counting operations")
        self.flops = count_flops(args, trainer.batches.next_batch())
        del trainer, self.trainer  # its memory is wanted for all off
        if self.kernels and args != all_off(args):
            self.kernels["all_off"] = off = off or count_all_off(args)
            if off:
                self.kernels["reduction_percent"] = 100 * (1 - self.kernels["per_step"] / off)

    def result(self) -> dict:
        """Return the results so far."""
        args, flops = self.args, {}
        curve = [loss for turn in self.turns for loss in turn.losses]
        ends = {"initial": curve[0], "final": curve[-1]} if curve else {}
        times = timing([turn for turn in self.turns if turn.label == "step"], args.batch_size)
        if self.turns and (warmup := self.turns[0]).losses:
            times["warmup_first_step_ms"] = sum(ms[0] for ms in warmup.phases.values())
            times["warmup_ms"] = 1e3 * warmup.seconds
            if args.torch_compile and "batch_ms" in times:
                steady_ms = len(warmup.losses) * times["batch_ms"]
                times["compilation_overhead_ms"] = times["warmup_ms"] - steady_ms
        if self.flops:
            rate = self.flops / times["batch_ms"] / 1e9
            flops = {"per_step": self.flops, "gflop": self.flops / 1e9, "achieved_tflops": rate}
        return {
            "schema_version": 1,
            "script": SCRIPT,
            "status": {0: "ok", 3: "oom"}.get(self.status, "failed"),
            "exit_status": self.status,
            "error": self.error,
            "fusions": {name: getattr(args, name) for _, name, _ in FUSIONS},
            "without_effect": args.without_effect,
            "training": {n: getattr(args, n) for n in SETTINGS} | {"processes": WORLD_SIZE},
            "environment": environment(self.device),
            **self.model,
            "timing": times,
            "memory": {"peak_mb": self.peak / 1e6} if self.peak else {},
            "kernels": self.kernels,
            "flops": flops,
            "loss": {"warmup_steps": args.warmup_steps, "curve": curve, **ends},
        }

    def write(self) -> None:
        """Write or replace <profile-dir>/<script>_summary.json, whole or not at all."""
        path = self.args.profile_dir / f"{SCRIPT}_summary.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            unfinished.write_text(json.dumps(self.result(), indent=1, default=str) + "\n")
            unfinished.replace(path)
        except OSError:
            for file in (unfinished, path):
                file.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def recorded(*runs: Run) -> Iterator[None]:
    """Write results, however the block ends; an error that the user can mend ends here, too."""
    directory, end = runs[-1].args.profile_dir, (runs[0].status, runs[0].error)
    for run in runs:
        run.write()  # for a run that is killed
    if WORLD_SIZE > 1:
        dist.barrier()
    try:
        yield
        for run in runs if WORLD_SIZE > 1 else ():
            dist.all_gather_object(peaks := [0.0] * WORLD_SIZE, run.peak)
            run.peak = max(peaks)
        end = 0, None
    except (Exception, KeyboardInterrupt) as error:
        end = 1, str(error)  # of a fault of this program, which explain() raises again
        end = explain(error, directory)
    finally:
        for run in runs:
            run.status, run.error = end
            try:
                run.write()
            except OSError as error:
                run.status, run.error = explain(error, directory)


def train(args: argparse.Namespace) -> dict:
    """Train, measure and count; the result is also in its JSON file."""
    run = Run(args)
    with recorded(run):
        run.start()
        with recorded_region([run.trainer] if args.enable_rocm_profiling else []):
            run.take(args.num_steps)
        if not args.under_profiler:
            run.count()
    return run.result()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether it is, or covers, one: the end of a capture raises an error of its own."""
    if error is None or isinstance(error, MemoryError):
        return error is not None
    match = re.search("out of memory|allocate memory|ALLOC_FAILED", str(error))
    return bool(match) or is_out_of_memory(error.__context__)


def explain(error: BaseException, directory: Path) -> tuple[int, str]:
    """Return exit status and message for an error that the user can mend; raise any other."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if is_out_of_memory(error):
        return 3, f"out of memory: lower --batch-size or --seq-len ({line})"
    compiler = type(error).__module__.startswith(("torch._", "triton.runtime"))
    if compiler or isinstance(error, (FloatingPointError, TimeoutError, BrokenPipeError)):
        return 1, line
    if isinstance(error, OSError) and error.filename is None:
        return 2, f"standard output: {error.strerror}"
    if isinstance(error, (OSError, json.JSONDecodeError)):  # half a trace is no JSON
        places = f"--profile-dir {directory}: cannot write there or in {tempfile.gettempdir()}"
        return 2, f"{places}, is there space left? ({line})"
    raise error


def report(result: dict) -> str:
    """Return the lines of REPORT whose values were measured."""
    acting = {name for name, on in result["fusions"].items() if on} - {*result["without_effect"]}
    triton = acting & {*TRITON_FUSIONS} and result["environment"]["device"] == "cuda"
    compiled = ", includes compilation" if triton or result["training"]["torch_compile"] else ""
    off = result["kernels"].get("all_off", 0)
    all_off = f" (all fusions off: {off or 'out of memory'})" if off != 0 else ""
    text = ""
    for line in REPORT.splitlines(keepends=True):
        if all(key in result[group] for group, key in re.findall(r"{(\w+)\[(\w+)\]", line)):
            text += line.format(**result, all_off=all_off, compiled=compiled)
    return text


def finish(result: dict) -> int:
    """Print report and error of a result; return the exit status."""
    progress()
    print(report(result), end="", flush=True)
    if result["error"]:
        say("error", result["error"])
    return result["exit_status"]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - it was closed
    args = parse_args(argv)
    if args.num_gpus > 1 and not LAUNCHED:
        start_torchrun(args.num_gpus, sys.argv[1:] if argv is None else argv)
    if threading.current_thread() is threading.main_thread():
        answer_signals()
    mode = next((name for name in MODES if getattr(args, name)), None)
    try:
        if WORLD_SIZE > 1:
            join_processes(args)
        if mode:
            module = beside(MODES[mode], f"--{mode}".replace("_", "-"))
            status = getattr(module, mode)(sys.modules[__name__], args)
        else:
            status = finish(train(args))
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError) and error.filename is None:  # what is left goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status, message = explain(error, args.profile_dir)
        if not isinstance(error, BrokenPipeError):  # `... | head` has seen enough
            say("error", message)
    if WORLD_SIZE > 1:
        if status:  # a tidy end could wait for a process that is gone
            os._exit(status)
        gc.collect()  # what refers to the group keeps its threads alive
        dist.destroy_process_group()
    return status
