# Copied from dev/parts/operators.py by dev/sync_parts.py: edit it there.
def operator(function: Callable) -> Callable:
    """Make a function that launches kernels an operator; torch.compile sees the kernels in it."""
    name = f"{NAMESPACE}::{function.__name__}"
    if not INTERPRETED:
        return triton_op(name, function, mutates_args=())
    opaque = torch.library.custom_op(name, function, mutates_args=())
    opaque.register_fake(function)
    return opaque
