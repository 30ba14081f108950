# Copied from dev/parts/blocks.py by dev/sync_parts.py: edit it there.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # the kernels run on the CPU, in Python
BACKEND = "interpreter" if INTERPRETED else "hip" if torch.version.hip else "cuda"
NAMESPACE = re.sub(r"\W|^(?=\d)", "_", Path(__file__).stem, flags=re.ASCII)  # of our operators
Sizes = dict[str, int]  # as {"TILE": 4096, "num_warps": 8}
BLOCKS: dict[str, dict[str, Sizes]] = {}  # of each kernel, in each case of block_sizes
OVERRIDES: dict[str, Sizes] = {}  # what --blocks replaces, for this run


def block_sizes(
    sizes: Sizes, *, hip_float32: Sizes | None = None, hip: Sizes | None = None,
    tf32: Sizes | None = None, float32: Sizes | None = None,
) -> Callable[[Callable], Callable]:  # fmt: skip
    """Set the block sizes of the kernel below, and its num_warps and num_stages.

    `sizes` suit 16-bit tensors on NVIDIA's GPUs. Of the other cases, the first that applies (hip:
    AMD) says what differs. TILE: elements of a block of rows (ROWS x BLOCK_C). PROGRAMS: how many
    programs share the blocks, more if one would get over 16. num_warps: groups of 32 or 64 threads
    that run a program (4 if not set). num_stages: rounds of a loop that load at the same time.
    """
    cases = {"hip_float32": hip_float32, "hip": hip, "tf32": tf32, "float32": float32, "any": sizes}

    def register(kernel: Callable) -> Callable:
        name = kernel.__name__.removesuffix("_kernel")
        BLOCKS[name] = {case: sizes for case, sizes in cases.items() if sizes is not None}
        return kernel

    return register
