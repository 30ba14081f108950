# Copied from common/launch.py by tools/sync_common.py: edit it there.
OVERRIDES: dict[str, dict[str, int]] = {}  # what --blocks replaces, for this run


def read_blocks(text: str) -> str:
    """Check "kernel:NAME=number,..." of --blocks, and return it (an argparse type)."""
    wrong, (kernel, _, settings) = argparse.ArgumentTypeError, text.partition(":")
    kernels = [name for name in BLOCKS if " " not in name]
    if kernel not in kernels:
        raise wrong(f"no kernel {kernel!r}; there are {', '.join(kernels)}")
    names = block_sizes(BLOCKS[kernel])
    for name, _, value in (pair.partition("=") for pair in settings.split(",")):
        if name not in {"num_stages", *names}:
            raise wrong(f"{kernel} has no {name!r}; it has {', '.join(names)}")
        low = 16 if name.startswith("BLOCK") else 1
        if not value.isdecimal() or int(value).bit_count() != 1 or int(value) < low:
            raise wrong(f"{kernel}: {name}={value} is not a power of two from {low}")
    return text


@cache  # a launch asks for them each time
def block_sizes(settings: str) -> dict[str, int]:
    """Parse "NAME=number,..."."""
    pairs = (pair.split("=") for pair in settings.split(","))
    return {name: int(value) for name, value in pairs}


def use_settings(args: argparse.Namespace) -> None:
    """Apply this run's process-wide settings: the block sizes of --blocks, of each the last one."""
    OVERRIDES.clear()
    for part in args.blocks.split() if args.blocks != ModelConfig.blocks else ():
        kernel, _, settings = part.partition(":")
        OVERRIDES[kernel] = OVERRIDES.get(kernel, {}) | block_sizes(settings)


def blocks(kernel: str, dtype: torch.dtype | None = None) -> dict[str, int]:
    """Return block sizes and warps of a kernel that multiplies matrices of this type."""
    precisions = [" float32", ""] if dtype == torch.float32 else [""]
    if dot_precision(dtype) == "tf32":
        precisions = [" TF32", *precisions]
    lines = [f"{kernel}{on}{precision}" for on in (f" {BACKEND}", "") for precision in precisions]
    chosen = block_sizes(next(BLOCKS[line] for line in lines if line in BLOCKS))
    if INTERPRETED and "TILE" in chosen:
        chosen = chosen | {"TILE": 1 << 16}  # its time goes by programs, not by elements
    return chosen | OVERRIDES.get(kernel, {})


def dot_precision(dtype: torch.dtype) -> str:
    """Return how Triton multiplies float32 matrices; TF32 exists on NVIDIA's GPUs only."""
    if BACKEND != "cuda" or dtype != torch.float32:
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


if INTERPRETED:

    class wrap_triton:  # PyTorch's takes compiled kernels only
        """Run a kernel by `wrap_triton(kernel)[grid](TENSOR, ..., NAME=value, ...)`.

        A launch is an operator of the kernel's name, which counters and profilers see. Nothing runs
        for FakeTensors, with which torch.compile asks for shapes. Triton 3's interpreter silently
        multiplies bfloat16 as integers: the kernel gets float32 copies, and results are rounded.
        """

        def __init__(self, kernel: Callable):
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable:
            return partial(self.launch, grid)

        def launch(self, grid: tuple[int, ...], *tensors: Tensor | None, **arguments) -> None:
            arguments |= zip(self.kernel.arg_names, tensors, strict=False)
            tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
            if isinstance(tensors[0], FakeTensor):
                return

            def run() -> None:
                narrow = [tensor for tensor in tensors if tensor.dtype == torch.bfloat16]
                copies = (torch.empty_strided(t.shape, t.stride()).copy_(t) for t in narrow)
                wide = dict(zip(map(id, narrow), copies, strict=True))  # of the same strides
                inputs = {name: wide.get(id(value), value) for name, value in arguments.items()}
                self.kernel[grid](**inputs)
                for tensor in narrow:
                    # Unseen by autograd, which the inputs among them belong to.
                    tensor.data.copy_(wide[id(tensor)])

            wrap_triton.run = run
            self.operator(self.kernel.__name__)(tensors)
            del wrap_triton.run  # autograd would copy a gradient that it still refers to

        @staticmethod
        @cache
        def operator(name: str) -> Callable:
            """Return an operator of this name, which runs the launch in `wrap_triton.run`."""
            script = re.sub(r"\W|^(?=\d)", "_", Path(__file__).stem, flags=re.ASCII)
            name, schema = f"{script}::{name}", "(Tensor[] tensors) -> ()"
            run = torch.library.custom_op(name, mutates_args=(), schema=schema)
            return run(lambda tensors: wrap_triton.run())


def check_not_empty(kernel: str, x: Tensor) -> None:
    """Raise ValueError for an empty batch, for which there is nothing to launch."""
    if not x.numel():
        raise ValueError(f"{kernel} needs at least one row, not {[*x.shape]}")


def row_launch(kernel: str, x: Tensor, whole: bool = True) -> tuple[int, int, dict[str, int]]:
    """Return how many rows x [..., C] has, how many programs share them, and their block sizes.

    A block has the rows that fit into TILE elements. A longer row is one block with more warps if
    it must be `whole`, else several blocks.
    """
    check_not_empty(kernel, x)
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
