# Copied from common/launch.py by tools/sync_common.py: edit it there.
OVERRIDES: dict[str, dict[str, int]] = {}  # what --blocks replaces, for this run


def read_blocks(text: str) -> tuple[str, dict[str, int]]:
    """Parse "kernel:NAME=number,..." of --blocks (an argparse type): the kernel, its new sizes."""
    kernel, _, settings = text.partition(":")
    pairs = [pair.partition("=")[::2] for pair in settings.split(",")]
    kernels = [name for name in BLOCKS if " " not in name]
    if kernel not in kernels:
        raise argparse.ArgumentTypeError(f"no kernel {kernel!r}; there are {', '.join(kernels)}")
    names = block_sizes(BLOCKS[kernel])
    if wrong := [name for name, _ in pairs if name not in {"num_stages", *names}]:
        message = f"{kernel} has no {wrong[0]!r}; it has {', '.join(names)}"
        raise argparse.ArgumentTypeError(message)
    for name, value in pairs:
        low = 16 if name.startswith("BLOCK") else 1
        if not value.isdecimal() or int(value).bit_count() != 1 or int(value) < low:
            message = f"{kernel}: {name}={value} is not a power of two from {low}"
            raise argparse.ArgumentTypeError(message)
    return kernel, block_sizes(settings)


@cache  # a launch asks for them each time
def block_sizes(settings: str) -> dict[str, int]:
    """Parse "NAME=number,..."."""
    pairs = (pair.split("=") for pair in settings.split(","))
    return {name: int(value) for name, value in pairs}


def use_blocks(text: str) -> None:
    """Make these the block sizes of the process: ModelConfig.blocks, which --blocks fills."""
    OVERRIDES.clear()
    if text != ModelConfig.blocks:
        OVERRIDES.update(read_blocks(part) for part in text.split())


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
    """Return how Triton multiplies float32 matrices; other types have no choice.

    TF32 exists on NVIDIA's GPUs only.
    """
    if BACKEND != "cuda" or dtype != torch.float32:
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def operator(function: Callable, changes: tuple[str, ...] = ()) -> Callable:
    """Make a function that launches kernels an operator; torch.compile sees the kernels in it.

    It allocates its results, or writes into those of its arguments that `changes` names and
    returns nothing.
    """
    script = re.sub(r"\W|^(?=\d)", "_", Path(__file__).stem, flags=re.ASCII)  # a copy of any name
    name = f"{script}::{function.__name__}"
    if not INTERPRETED:
        return triton_op(name, function, mutates_args=changes)
    opaque = torch.library.custom_op(name, function, mutates_args=changes)
    opaque.register_fake(function)
    return opaque


if INTERPRETED:

    class wrap_triton:  # PyTorch's takes compiled kernels only
        """Run a kernel by `wrap_triton(kernel)[grid](NAME=value, ...)`.

        Where torch.compile only asks for shapes nothing runs. Triton 3 multiplies bfloat16 as
        integers here, without a word: so the kernel gets float32, and its results are rounded.
        """

        def __init__(self, kernel: Callable):
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable:
            def run(**arguments) -> None:
                tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
                if isinstance(tensors[0], FakeTensor):
                    return
                narrow = [tensor for tensor in tensors if tensor.dtype == torch.bfloat16]
                wide = {id(tensor): self.widened(tensor) for tensor in narrow}
                given = {name: wide.get(id(value), value) for name, value in arguments.items()}
                self.kernel[grid](**given)
                for tensor in narrow:
                    # Unseen by autograd, which the inputs among them belong to.
                    tensor.data.copy_(wide[id(tensor)])

            return run

        @staticmethod
        def widened(tensor: Tensor) -> Tensor:
            """Copy to float32 with the same strides."""
            wide = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.float32)
            return wide.copy_(tensor)


def check_not_empty(kernel: str, x: Tensor) -> None:
    """Raise ValueError for an empty batch, for which there is nothing to launch."""
    if not x.numel():
        raise ValueError(f"{kernel} needs at least one row, not {[*x.shape]}")


def row_launch(kernel: str, x: Tensor, whole: bool = True) -> tuple[int, int, dict[str, int]]:
    """Return how many rows x [..., C] has, how many programs share them, and their block sizes.

    A block is a TILE of rows. A row longer than that is a block with more warps if it must be
    whole, else several.
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


def shared_memory() -> int:
    """Return the bytes of shared memory, AMD's LDS, that a program can have on this GPU."""
    if INTERPRETED or not torch.cuda.device_count():
        return 2**31
    utils, device = triton.runtime.driver.active.utils, torch.cuda.current_device()
    return utils.get_device_properties(device)["max_shared_mem"]  # as Triton asks at a launch


def leave_to_pytorch(args: argparse.Namespace, reasons: dict[str, str]) -> None:
    """Turn off the fusions that these reasons are about, each with one line."""
    for flag, name, _ in FUSIONS:
        if name in reasons and getattr(args, name):
            setattr(args, name, False)
            say("note", f"{flag} is off, PyTorch's own operations run: {reasons[name]}")
