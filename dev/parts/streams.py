# Copied from dev/parts/streams.py by dev/sync_parts.py: edit it there.
# A forward pass casts its weights together. In a step that is captured as a graph, casts, weight
# gradients and updates overlap the rest.
CASTS: ContextVar[dict[Tensor, Tensor]] = ContextVar("CASTS")  # of parameters, in a forward pass


def side_by_side(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Allocate tensors of these shapes as one piece, each from a multiple of 64 elements on."""
    sizes = [triton.cdiv(t.numel(), 64) * 64 for t in tensors]
    make = torch.zeros if any(t.numel() % 64 for t in tensors) else torch.empty  # gaps are read
    piece = make(sum(sizes), device=tensors[0].device, dtype=dtype)
    parts = zip(piece.split(sizes), tensors, strict=True)
    return [part[: t.numel()].view(t.shape) for part, t in parts]


def cast_of(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter in this type: the cast of cast_weights, else one of its own."""
    cast = CASTS.get({}).get(parameter)
    usable = cast is not None and cast.dtype == dtype
    return cast if usable else parameter.detach().to(dtype).contiguous()


@contextlib.contextmanager
def cast_weights(
    weights: Iterable[Tensor], dtype: torch.dtype, side: SideStreams
) -> Iterator[None]:
    """Cast weights together, in few launches, for the operations inside.

    Each forward pass has casts of its own, which its backward pass keeps: so weights may change in
    any way between two passes.
    """
    weights, casts = [w for w in weights if w.dtype != dtype], []
    if weights:  # on the main stream where a block is computed again in the backward pass
        with torch.no_grad(), side.beside(None if side.written else side.gradients):
            casts = side_by_side(weights, dtype)
            torch._foreach_copy_(casts, weights)
        if side.active:
            side.casts += casts
    token = CASTS.set(CASTS.get({}) | dict(zip(weights, casts, strict=True)))
    try:
        yield
    finally:
        CASTS.reset(token)


class SideStreams:
    """Overlap casts, weight gradients and updates with the main stream of a training step.

    For a step that is captured as a graph: that stores what depends on what, not the order of
    launches, so work on a side stream runs as soon as there is room for it. One step; time goes
    down, and a stream waits where an arrow ends:

        main (forward, backward)        gradients                 updates
        begin_step -------------------> casts of a layer
        forward pass of the layer <---- done
        grad of layer L's input
        weight no longer needed ------> run: its gradient ------> AdamW
        DEPTH pieces of work later,
        or BYTES of inputs <----------- done: its inputs may be freed
        grad of the embedding <-------- join: all of them
        end of optimizer.step <---------------------------------- all of them
    """

    DEPTH, BYTES = 4, 2 * 10**8

    def __init__(self):
        self.streams: tuple[torch.cuda.Stream, ...] = ()
        self.begin_step(False)

    def __reduce__(self) -> tuple:
        return SideStreams, ()  # a copy of a model or parameter has no optimizer

    def begin_step(self, overlap: bool) -> None:
        """Start a step at its forward pass; `overlap` has an effect while a graph is captured."""
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        self.active = overlap and capturing
        self.joined = not self.active
        self.gradients = self.updates = None  # the main stream
        # cleared here, as a failed capture does not end its step
        self.pending = collections.deque()  # of events, and what the work before them reads
        self.casts: list[Tensor] = []  # their memory must not be a later layer's in this step
        self.written: dict[Tensor, tuple] = {}  # event, address and version of a gradient
        self.return_workspaces()
        if self.active:
            self.main = torch.cuda.current_stream()
            self.streams = self.streams or (torch.cuda.Stream(), torch.cuda.Stream())
            self.gradients, self.updates = self.streams
            for stream in self.streams:  # a graph may only wait for streams that belong to it
                stream.wait_stream(self.main)

    def return_workspaces(self) -> None:
        """Give memory back that GEMMs keep for each stream and thread; two streams need more."""
        if self.active:
            torch._C._cuda_clearCublasWorkspaces()

    @contextlib.contextmanager
    def beside(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Launch what is inside on this stream; what follows waits for it."""
        with torch.cuda.stream(stream):
            yield
        if stream:
            torch.cuda.current_stream().wait_stream(stream)

    def run(self, work: Callable, grads: dict[Tensor, Tensor], inputs: Sequence[Tensor]) -> None:
        """Run work that writes gradients of parameters; until then its inputs are not freed."""
        current = torch.cuda.current_stream()
        self.gradients.wait_stream(current)
        with torch.cuda.stream(self.gradients):
            work()
        done = self.gradients.record_event()
        self.written |= {p: (done, grad.data_ptr(), grad._version) for p, grad in grads.items()}
        self.pending.append((done, sum(tensor.nbytes for tensor in inputs), inputs))
        while len(self.pending) > self.DEPTH or sum(n for _, n, _ in self.pending) > self.BYTES:
            current.wait_event(self.pending[0][0])
            self.pending.popleft()

    def changed(self, parameter: Tensor) -> bool:
        """Tell whether its gradient is not, or no longer, what the side stream writes."""
        now = parameter.grad.data_ptr(), parameter.grad._version
        return now != self.written.get(parameter, (None,))[1:]

    def wait_for(self, parameters: Sequence[Tensor]) -> None:
        """Let the current stream wait for these gradients; else for all of the main stream."""
        if self.active:
            known = not any(map(self.changed, parameters))
            events = {self.written[p][0] for p in parameters} if known else ()
            for event in events or [self.main.record_event()]:
                torch.cuda.current_stream().wait_event(event)

    def join(self, *unused) -> None:
        """Let the main stream wait for all gradients; later work of this step runs on it.

        Raises RuntimeError if autograd changed a gradient while a side stream computed it.
        """
        if not self.joined:
            self.joined = True
            torch.cuda.current_stream().wait_stream(self.gradients)
            self.pending.clear()
            self.casts.clear()
            if any(p.grad is not None and self.changed(p) for p in self.written):
                wrong = "a weight got more than one gradient in a backward pass"
                raise RuntimeError(f"overlap: {wrong}: use --disable-overlap")


def gradients_of(
    groups: Sequence[Sequence[Tensor]], compute: Callable[..., None], *inputs: Tensor,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of groups of parameters, which `compute` makes of these inputs.

    `compute` gets a tensor [elements] for each group, and writes the gradients of the group's
    parameters into it, one after the other. Call this last: in a graph a parameter may be updated
    as soon as its gradient is there. Nothing overlaps where autograd or a hook reads a gradient.
    """
    parameters = [p for group in groups for p in group]
    sizes = [[p.numel() for p in group] for group in groups]
    outs = [parameters[0].new_empty(sum(group), dtype=dtype) for group in sizes]
    parts = (part for out, group in zip(outs, sizes, strict=True) for part in out.split(group))
    grads = {p: part.view_as(p) for p, part in zip(parameters, parts, strict=True)}
    side = getattr(parameters[0], "side", None)
    overlaps = side is not None and not side.joined
    for p in parameters:
        if p.is_leaf and p.grad is not None:  # autograd adds the second gradient, in float32
            p.grad = p.grad.to(p.dtype)
            overlaps = False
        overlaps &= not (p._backward_hooks or p._post_accumulate_grad_hooks)
    if overlaps:
        side.run(partial(compute, *outs), grads, inputs)
    else:
        compute(*outs)
    return list(grads.values())


WIDE_RESULTS = "dtype_out" in torch.ops.aten.mm.overloads()  # from PyTorch 2.8 on


def matmul_out(grad: Tensor, x: Tensor, out: Tensor, direct: bool) -> None:
    """Write grad^T x [N, K] of grad [T, N] and x [T, K] into out; `direct`: without a cast."""
    if out.dtype == x.dtype:
        torch.mm(grad.t(), x, out=out)
    elif direct and WIDE_RESULTS and x.is_cuda:
        torch.mm(grad.t(), x, out_dtype=out.dtype, out=out)
    else:
        out.copy_(grad.t() @ x)
