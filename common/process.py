# Copied from common/process.py by tools/sync_common.py: edit it there.
# This process: what torchrun says of it, its devices and settings, signals, the other processes.


def launched(name: str, otherwise: int = 0) -> int:
    """Return a number that torchrun sets; check_environment refuses what is none."""
    text = os.getenv(name, "")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else otherwise


LAUNCHED = "RANK" in os.environ  # a plain run is the only process
RANK, WORLD_SIZE = launched("RANK"), launched("WORLD_SIZE", 1)


def check_environment() -> None:
    """Refuse what torchrun would not set: half of it, or what another launcher has left."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    texts = {name: os.environ[name] for name in names if name in os.environ}
    numbers = all(launched(name, -1) >= 0 for name in {*names[:2], *texts})
    rank, size = launched("RANK"), launched("WORLD_SIZE")
    fit = rank < size >= launched("LOCAL_WORLD_SIZE", size) > launched("LOCAL_RANK")
    if texts and not (numbers and fit):
        text = ", ".join(f"{name} is {value!r}" for name, value in texts.items())
        fail(f"RANK and WORLD_SIZE must be numbers that fit together: {text}")


def choose_devices(args: argparse.Namespace) -> None:
    """Settle device and number of processes; refuse more than there are GPUs for."""
    gpu = args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not gpu:
        fail("--device cuda: PyTorch finds no GPU here; use --device cpu or auto", 4)
    try:
        gpus = torch.cuda.device_count()
    except (RuntimeError, ValueError) as error:
        fail(f"*_VISIBLE_DEVICES: {error}")
    kinds = ("ROCR", "HIP", "CUDA") if torch.version.hip else ("CUDA",)
    listed = gpu and any(os.getenv(f"{kind}_VISIBLE_DEVICES") for kind in kinds)
    processes = WORLD_SIZE if LAUNCHED else args.num_gpus or (gpus if listed else 1)
    if args.num_gpus not in (None, processes):
        fail(f"--num-gpus {args.num_gpus}, but torchrun started {processes}")
    here = launched("LOCAL_WORLD_SIZE", 1) if LAUNCHED else processes
    if args.device != "cpu" and (gpu or args.num_gpus) and here > max(1, gpus):
        fail(f"{here} GPUs wanted, PyTorch finds {gpus}", 4)
    if gpu and WORLD_SIZE > 1 and launched("LOCAL_RANK", gpus) >= gpus > 1:
        rank = os.getenv("LOCAL_RANK", "not set")
        fail(f"LOCAL_RANK is {rank}, but PyTorch finds {gpus} GPUs", 4)
    args.device, args.num_gpus = "cuda" if gpu else "cpu", processes


def prepare(args: argparse.Namespace) -> torch.device:
    """Apply this run's process-wide settings; return the device."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler writes on stderr
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(args.deterministic)
    torch.set_float32_matmul_precision(args.matmul_precision)
    use_settings(args)
    return torch.empty(0, device=args.device).device


def environment(device: torch.device) -> dict:
    """Return what the numbers are measured on."""
    names = [torch.cuda.get_device_name(device)] if device.type == "cuda" else []
    if (info := Path("/proc/cpuinfo")).exists():
        names += re.findall(r"model name\t: (.+)", info.read_text())
    with_triton = importlib.util.find_spec("triton")
    return {
        "device": device.type,
        "device_name": [*names, os.uname().machine][0],
        "cpu_threads": torch.get_num_threads(),
        "triton": __import__("triton").__version__ if with_triton else None,
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def start_torchrun(processes: int, argv: list[str]) -> NoReturn:
    """Become torchrun, which starts this script so many times."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ["TINY_LAUNCHED"] = "1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    os.execv(sys.executable, [*torchrun, f"--nproc-per-node={processes}", __file__, *argv])


def answer_signals() -> None:
    """Have SIGTERM, as from a time limit, end a run as Ctrl-C does: it keeps what was measured."""

    def interrupt(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a process and its group may both get it
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if WORLD_SIZE == 1:
        return
    signals = {signal.SIGTERM}
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in the background of a shell
        signals.add(signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # or PyTorch's waiting would print a stack

    def watch() -> None:  # in C++, waiting for other processes, the main thread hears no signal
        signal.sigwait(signals)
        _thread.interrupt_main(signal.SIGTERM)
        time.sleep(1)
        if signal.getsignal(signal.SIGTERM) == interrupt:
            say("error", "interrupted")
            os._exit(130)

    threading.Thread(target=watch, daemon=True).start()


def join_processes(args: argparse.Namespace) -> None:
    """Meet the other processes; only rank 0 prints from now on."""
    if args.device == "cuda":
        torch.cuda.set_device(launched("LOCAL_RANK") if torch.cuda.device_count() > 1 else 0)
    warnings.filterwarnings("ignore", ".*(barrier|broadcast_buffers|AccumulateGrad node's stream)")
    if args.cuda_graph:  # says PyTorch; NCCL then sees no lost rank
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    backend = "gloo" if args.device == "cpu" else None  # None: NCCL/RCCL
    try:
        store = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))[0]
        dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD_SIZE)
    except (RuntimeError, ValueError) as error:
        said = f"MASTER_ADDR, MASTER_PORT: {str(error).splitlines()[0]}"
        fail(f"{WORLD_SIZE} processes cannot meet: {said}", 2 if type(error) is ValueError else 1)
    everyone = [{}] * WORLD_SIZE
    dist.all_gather_object(everyone, {"script": SCRIPT, **vars(args), "profile_dir": None})
    for name in everyone[0]:
        values = [theirs.get(name) for theirs in everyone]
        if any(value != values[0] for value in values):
            if RANK:  # rank 0 says it
                raise SystemExit(2)
            fail(f"the ranks were started with --{name.replace('_', '-')} {values}")
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
