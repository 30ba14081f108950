# Copied from common/operators.py by tools/sync_common.py: edit it there.
def operator(function: Callable) -> Callable:
    """Make a function that launches kernels an operator; torch.compile sees the kernels in it."""
    script = re.sub(r"\W|^(?=\d)", "_", Path(__file__).stem, flags=re.ASCII)  # a copy of any name
    name = f"{script}::{function.__name__}"
    if not INTERPRETED:
        return triton_op(name, function, mutates_args=())
    opaque = torch.library.custom_op(name, function, mutates_args=())
    opaque.register_fake(function)
    return opaque
