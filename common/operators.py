# Copied from common/operators.py by tools/sync_common.py: edit it there.
def operator(function: Callable, changes: tuple[str, ...] = ()) -> Callable:
    """Make a function that launches kernels an operator; torch.compile sees the kernels in it.

    It allocates its results, or writes into its arguments `changes` and returns nothing.
    """
    name = f"{NAMESPACE}::{function.__name__}"
    if not INTERPRETED:
        return triton_op(name, function, mutates_args=changes)
    opaque = torch.library.custom_op(name, function, mutates_args=changes)
    opaque.register_fake(function)
    return opaque
