# Copied from dev/parts/operators.py by dev/sync_parts.py: edit it there.
def operator(function: Callable) -> Callable:
    """Register a function that launches kernels with PyTorch, so that torch.compile sees them."""
    name = f"{NAMESPACE}::{function.__name__}"
    if not INTERPRETED:
        return triton_op(name, function, mutates_args=())
    opaque = torch.library.custom_op(name, function, mutates_args=())
    opaque.register_fake(function)  # for shapes, as torch.compile sees nothing inside
    return opaque
