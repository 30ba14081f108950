# Copied from common/process.py by tools/sync_common.py: edit it there.
# This process among those of a run: what torchrun says of it, signals, and the others.


def launched(name: str, otherwise: int = 0) -> int:
    """Return a number that torchrun sets; check_environment refuses what is none."""
    text = os.getenv(name, "")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else otherwise


LAUNCHED = "RANK" in os.environ  # a plain run is the only process
RANK, WORLD_SIZE = launched("RANK"), launched("WORLD_SIZE", 1)


def check_environment() -> None:
    """Refuse what torchrun would not set: half of it, or what another launcher has left."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = {name: os.environ[name] for name in names if name in os.environ}
    for name, text in found.items():
        if not re.fullmatch("[0-9]{1,9}", text):
            fail(f"{name} is {text!r}, not a whole number")
        for other in names[:2]:
            if other not in found:
                fail(f"{name} is {text}, but {other} is not set")
    rank, size, local_rank = launched("RANK"), launched("WORLD_SIZE", 1), launched("LOCAL_RANK")
    local_size = launched("LOCAL_WORLD_SIZE", size)
    if rank >= size:
        fail(f"RANK is {rank}, but WORLD_SIZE is {size}")
    if local_size > size:
        fail(f"LOCAL_WORLD_SIZE is {local_size}, but WORLD_SIZE is {size}")
    if local_rank >= local_size:
        limit = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in found else "WORLD_SIZE"
        fail(f"LOCAL_RANK is {local_rank}, but {limit} is {local_size}")
    for name, good in (("MASTER_ADDR", r"\S+"), ("MASTER_PORT", "[1-9][0-9]{,4}")):
        if size > 1 and not re.fullmatch(good, text := os.getenv(name, "")):
            fail(f"{name} is {text!r}, but WORLD_SIZE is {size}")


def check_devices(args: argparse.Namespace, gpu: bool, processes: int) -> None:
    """Refuse a run for which there are too few GPUs here, or where it is open which is whose."""
    if args.device == "cuda" and not gpu:
        fail("--device cuda: PyTorch finds no GPU here; use --device cpu or auto", 4)
    found = visible_gpus()
    here = launched("LOCAL_WORLD_SIZE", 1) if LAUNCHED else processes
    if args.device != "cpu" and (gpu or args.num_gpus) and here > max(1, found):
        fail(f"{here} GPUs wanted, PyTorch finds {found}", 4)
    if gpu and WORLD_SIZE > 1 and found > 1:  # who sees one GPU takes that
        if "LOCAL_RANK" not in os.environ:
            fail(f"LOCAL_RANK is not set, and PyTorch finds {found} GPUs")
        if launched("LOCAL_RANK") >= found:
            fail(f"LOCAL_RANK is {launched('LOCAL_RANK')}, but PyTorch finds {found} GPUs", 4)


def visible_gpus() -> int:
    """Count the GPUs that PyTorch finds, as it reads *_VISIBLE_DEVICES."""
    try:
        return torch.cuda.device_count()
    except (RuntimeError, ValueError) as error:
        fail(f"*_VISIBLE_DEVICES: {error}")


def named_gpus() -> int:
    """Count the GPUs of a run that no argument and no torchrun gives any: those named, or one."""
    kinds = ("ROCR", "HIP", "CUDA") if torch.version.hip else ("CUDA",)
    return visible_gpus() if any(os.getenv(f"{kind}_VISIBLE_DEVICES") for kind in kinds) else 1


def start_torchrun(processes: int, argv: list[str]) -> NoReturn:
    """Become torchrun, which starts this script so many times."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ["TINY_LAUNCHED"] = "1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    os.execv(sys.executable, [*torchrun, f"--nproc-per-node={processes}", __file__, *argv])


def interrupt(*_: object) -> NoReturn:
    """Handle the first signal: a process and its group may both get it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def answer_signals() -> None:
    """Have SIGTERM, as from a time limit, end a run as Ctrl-C does: it keeps what was measured.

    One of several processes waits for the others in C++, where Python hears no signal. So a thread
    ends what does not answer. It also takes the signals, or PyTorch's waiting would print a stack.
    """
    signal.signal(signal.SIGTERM, interrupt)
    if WORLD_SIZE == 1:
        return
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in the background of a shell
        signal.signal(signal.SIGINT, interrupt)
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)

    def watch() -> None:
        os.read(heard, 1)
        time.sleep(1)
        if signal.getsignal(signal.SIGTERM) == interrupt:
            say("error", "interrupted")
            os._exit(130)

    threading.Thread(target=watch, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # of this thread


def join_processes(args: argparse.Namespace) -> None:
    """Meet the other processes; only rank 0 prints from now on."""
    if args.device == "cuda":
        torch.cuda.set_device(launched("LOCAL_RANK") if visible_gpus() > 1 else 0)
    warnings.filterwarnings("ignore", ".*(barrier|broadcast_buffers|AccumulateGrad node's stream)")
    if args.cuda_graph:  # says PyTorch; NCCL then sees no lost rank
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    backend = "gloo" if args.device == "cpu" else None  # None: NCCL/RCCL
    try:
        store = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))[0]
        dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD_SIZE)
    except (RuntimeError, ValueError) as error:
        fail(f"the {WORLD_SIZE} processes cannot meet: {str(error).splitlines()[0]}", 1)
    everyone = [{}] * WORLD_SIZE
    dist.all_gather_object(everyone, {"script": SCRIPT, **vars(args), "profile_dir": None})
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs.get(name) != value:
                if not RANK:
                    option = f"{name.replace('_', '-')} {theirs.get(name)}"
                    say("error", f"rank {rank} was started with {option}, rank 0 with {value}")
                raise SystemExit(2)
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
