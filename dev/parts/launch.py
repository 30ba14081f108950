# Copied from dev/parts/launch.py by dev/sync_parts.py: edit it there.
def read_blocks(text: str) -> str:
    """Check "kernel:NAME=number,..." of --blocks, and return it (an argparse type)."""
    wrong = argparse.ArgumentTypeError
    kernel, _, settings = text.partition(":")
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
    for part in args.blocks.split():
        kernel, _, settings = part.partition(":")
        for name, value in re.findall(r"(\w+)=(\d+)", settings):
            OVERRIDES.setdefault(kernel, {})[name] = int(value)


def blocks(kernel: str, dtype: torch.dtype | None = None) -> Sizes:
    """Return block sizes and warps of a kernel that multiplies matrices of this type."""
    holds = {BACKEND, dot_precision(dtype), str(dtype).removeprefix("torch."), "any"}
    cases = BLOCKS[kernel]  # in the order of block_sizes: the first applies whose words all hold
    special = next(sizes for case, sizes in cases.items() if holds.issuperset(case.split("_")))
    chosen = {"num_warps": 4, **cases["any"], **special}
    if INTERPRETED and "TILE" in chosen:
        chosen["TILE"] = 1 << 16  # its time goes by programs, not by elements
    return chosen | OVERRIDES.get(kernel, {})


def dot_precision(dtype: torch.dtype) -> str:
    """Return how Triton multiplies float32 matrices; TF32 exists on NVIDIA's GPUs only."""
    if BACKEND != "cuda" or dtype != torch.float32:
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@cache
class Interpreted:
    """Launches a kernel in Triton's interpreter, as an operator that counters and profilers see."""

    def __init__(self, kernel: Callable):
        self.kernel = kernel
        name = f"{NAMESPACE}::{kernel.__name__}"
        schema = "(int[] grid, Dict(str, Any) named) -> ()"
        self.launch = torch.library.custom_op(name, self.interpret, mutates_args=(), schema=schema)
        self.launch.register_fake(lambda grid, named: None)  # torch.compile asks for shapes

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        """Return what launches the kernel on this grid by `(TENSOR, ..., NAME=value, ...)`."""
        names = self.kernel.arg_names
        return lambda *args, **more: self.launch(grid, dict(zip(names, args, strict=False), **more))

    def interpret(self, grid: list[int], named: dict) -> None:
        # float32 copies, as the interpreter silently multiplies bfloat16 as integers
        narrow = [v for v in named.values() if getattr(v, "dtype", None) == torch.bfloat16]
        wide = {id(t): torch.empty_strided(t.shape, t.stride()).copy_(t) for t in narrow}
        self.kernel[tuple(grid)](**{name: wide.get(id(v), v) for name, v in named.items()})
        for tensor in narrow:
            tensor.data.copy_(wide[id(tensor)])  # unseen by autograd, which inputs belong to


def row_launch(kernel: str, x: Tensor, whole: bool = True) -> tuple[int, int, Sizes]:
    """Return how many rows x [..., C] has, how many programs share them, and their block sizes."""
    dim = x.shape[-1]
    rows = x.numel() // dim
    chosen = blocks(kernel)
    tile = chosen.pop("TILE")
    width = triton.next_power_of_2(dim)
    if width > tile and whole:  # the row is one block with more warps
        chosen["num_warps"] = min(16, chosen["num_warps"] * (width // tile))
    elif width > tile:  # the row is several blocks
        width = tile
    tile_rows = max(1, tile // width)
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
