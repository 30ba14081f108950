# Copied from dev/parts/blocks.py by dev/sync_parts.py: edit it there.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # the kernels run on the CPU, in Python
BACKEND = "interpreter" if INTERPRETED else "hip" if torch.version.hip else "cuda"
NAMESPACE = re.sub(r"\W|^(?=\d)", "_", Path(__file__).stem, flags=re.ASCII)  # of our operators
Sizes = dict[str, int]
BLOCKS: dict[str, dict[str, Sizes]] = {}  # the sizes of each kernel in each case
OVERRIDES: dict[str, Sizes] = {}  # what --blocks replaces, for this run


def block_sizes(
    sizes: Sizes, *, hip_float32: Sizes | None = None, hip: Sizes | None = None,
    tf32: Sizes | None = None, float32: Sizes | None = None,
) -> Callable[[Callable], Callable]:  # fmt: skip
    """Give the kernel below its block sizes, warps (4 if not here) and stages.

    `sizes` are for 16 bits on NVIDIA's GPUs. The first of the other cases that applies says what
    differs. TILE: elements of a block of rows. PROGRAMS share the rows, more of them where each
    would have more than 16 blocks. --blocks replaces any of these.
    """
    cases = {"hip_float32": hip_float32, "hip": hip, "tf32": tf32, "float32": float32, "any": sizes}

    def register(kernel: Callable) -> Callable:
        name = kernel.__name__.removesuffix("_kernel")
        BLOCKS[name] = {case: sizes for case, sizes in cases.items() if sizes is not None}
        return kernel

    return register
