# Copied from common/launch.py by tools/sync_common.py: edit it there.
OVERRIDES: dict[str, dict[str, int]] = {}  # what --blocks replaces, for this run


def read_blocks(text: str) -> str:
    """Check "kernel:NAME=number,..." of --blocks, and return it (an argparse type)."""
    wrong, (kernel, _, settings) = argparse.ArgumentTypeError, text.partition(":")
    if kernel not in BLOCKS:
        raise wrong(f"no kernel {kernel!r}; there are {', '.join(BLOCKS)}")
    names = {"num_warps": 4, "num_stages": 3, **BLOCKS[kernel]["any"]}
    for name, _, value in (pair.partition("=") for pair in settings.split(",")):
        if name not in names:
            raise wrong(f"{kernel} has no {name!r}; it has {', '.join(names)}")
        low = 16 if name.startswith("BLOCK") else 1
        if not value.isdecimal() or int(value).bit_count() != 1 or int(value) < low:
            raise wrong(f"{kernel}: {name}={value} is not a power of two from {low}")
    return text


def use_settings(args: argparse.Namespace) -> None:
    """Apply this run's process-wide settings: the block sizes of --blocks, of each the last one."""
    OVERRIDES.clear()
    for part in args.blocks.split() if args.blocks != ModelConfig.blocks else ():
        kernel, _, settings = part.partition(":")
        pairs = (pair.split("=") for pair in settings.split(","))
        OVERRIDES.setdefault(kernel, {}).update((name, int(value)) for name, value in pairs)


def blocks(kernel: str, dtype: torch.dtype | None = None) -> dict[str, int]:
    """Return block sizes and warps of a kernel that multiplies matrices of this type."""
    applies = {
        "hip_float32": BACKEND == "hip" and dtype == torch.float32,
        "hip": BACKEND == "hip",
        "tf32": dot_precision(dtype) == "tf32",
        "float32": dtype == torch.float32,
        "any": True,
    }
    cases = BLOCKS[kernel]
    special = next(sizes for case, sizes in cases.items() if applies[case])
    chosen = {"num_warps": 4, **cases["any"], **special}
    if INTERPRETED and "TILE" in chosen:
        chosen["TILE"] = 1 << 16  # its time goes by programs, not by elements
    return chosen | OVERRIDES.get(kernel, {})


def dot_precision(dtype: torch.dtype) -> str:
    """Return how Triton multiplies float32 matrices; TF32 exists on NVIDIA's GPUs only."""
    if BACKEND != "cuda" or dtype != torch.float32:
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


class Interpreted:
    """Launch a kernel in Triton's interpreter by `[grid](TENSOR, ..., NAME=value, ...)`.

    A launch is an operator of the kernel's name, which counters and profilers see; PyTorch's
    wrap_triton takes compiled kernels only. Nothing runs for FakeTensors, with which torch.compile
    asks for shapes.
    """

    def __init__(self, kernel: Callable):
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *tensors: Tensor | None, **arguments) -> None:
        arguments |= zip(self.kernel.arg_names, tensors, strict=False)
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors.values()):
            sizes = {name: value for name, value in arguments.items() if name not in tensors}
            told = json.dumps([grid, list(tensors), sizes])
            interpreting_operator(self.kernel)(list(tensors.values()), told)


@cache
def interpreting_operator(kernel: Callable) -> Callable:
    """Return an operator of a kernel's name, which gets its tensors, and all else as JSON.

    Triton 3's interpreter silently multiplies bfloat16 as integers: the kernel gets float32 copies,
    and results are rounded.
    """

    def interpret(tensors: list[Tensor], told: str) -> None:
        grid, names, sizes = json.loads(told)
        narrow = [tensor for tensor in tensors if tensor.dtype == torch.bfloat16]
        copies = (torch.empty_strided(t.shape, t.stride()).copy_(t) for t in narrow)
        wide = dict(zip(map(id, narrow), copies, strict=True))  # of the same strides
        inputs = (wide.get(id(tensor), tensor) for tensor in tensors)
        kernel[tuple(grid)](**dict(zip(names, inputs, strict=True)), **sizes)
        for tensor in narrow:
            # Unseen by autograd, which the inputs among them belong to.
            tensor.data.copy_(wide[id(tensor)])

    script = re.sub(r"\W|^(?=\d)", "_", Path(__file__).stem, flags=re.ASCII)
    name, schema = f"{script}::{kernel.__name__}", "(Tensor[] tensors, str told) -> ()"
    return torch.library.custom_op(name, interpret, mutates_args=(), schema=schema)


def row_launch(kernel: str, x: Tensor, whole: bool = True) -> tuple[int, int, dict[str, int]]:
    """Return how many rows x [..., C] has, how many programs share them, and their block sizes.

    A block has the rows that fit into TILE elements. A longer row is one block with more warps if
    it must be `whole`, else several blocks.
    """
    chosen, dim = blocks(kernel), x.shape[-1]
    tile, width = chosen.pop("TILE"), triton.next_power_of_2(dim)
    if whole and width > tile:
        chosen["num_warps"] = min(16, chosen["num_warps"] * (width // tile))
    width = width if whole else min(width, tile)
    rows, tile_rows = x.numel() // dim, max(1, tile // width)
    programs = triton.cdiv(rows, tile_rows)
    if "PROGRAMS" in chosen:
        most = max(chosen["PROGRAMS"], triton.cdiv(programs, 16))
        programs = chosen["PROGRAMS"] = min(programs, most)
    return rows, programs, {"C": dim, "BLOCK_C": width, "ROWS": tile_rows, **chosen}


def leave_to_pytorch(args: argparse.Namespace, reasons: dict[str, str]) -> None:
    """Turn off the fusions that these reasons are about, each with one line."""
    for flag, name, _ in FUSIONS:
        if name in reasons and getattr(args, name):
            setattr(args, name, False)
            say("note", f"{flag} is off, PyTorch's own operations run: {reasons[name]}")
