# Copied from dev/parts/streams.py by dev/sync_parts.py: edit it there.
# A forward pass casts its weights together, and gradients are written where AdamW reads them. In a
# step that is captured as a graph, casts, weight gradients and updates overlap the rest.
CASTS: ContextVar[dict[Tensor, Tensor]] = ContextVar("CASTS")  # of parameters, in a forward pass


def side_by_side(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Allocate tensors of these shapes as one piece, each from a multiple of 64 elements on."""
    sizes = [triton.cdiv(t.numel(), 64) * 64 for t in tensors]
    gaps = any(t.numel() % 64 for t in tensors)
    make = torch.zeros if gaps and INTERPRETED else torch.empty  # which warns of large numbers
    piece = make(sum(sizes), device=tensors[0].device, dtype=dtype)
    parts = zip(piece.split(sizes), tensors, strict=True)
    return [part[: t.numel()].view(t.shape) for part, t in parts]


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that lie as side_by_side allocates them as one [elements]; None for others.

    It has the gaps between them, too, in which is anything.
    """
    first = tensors[0]
    last = tensors[-1]
    size = 0
    for t in tensors:
        place = first.data_ptr() + size * first.element_size()
        if t.data_ptr() != place or t.dtype != first.dtype or not t.is_contiguous():
            return None
        size += triton.cdiv(t.numel(), 64) * 64
    one = first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    return first.detach().as_strided((size - -last.numel() % 64,), (1,)) if one else None


def cast_of(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter in this type: the cast of cast_weights, else one of its own."""
    cast = CASTS.get({}).get(parameter)
    usable = cast is not None and cast.dtype == dtype
    return cast if usable else parameter.detach().to(dtype).contiguous()


@contextlib.contextmanager
def cast_weights(
    weights: Iterable[Tensor], dtype: torch.dtype, side: SideStreams | None = None
) -> Iterator[None]:
    """Cast weights for the operations inside, in one launch if they lie side by side.

    Each forward pass has casts of its own, which its backward pass keeps: so weights may change in
    any way between two passes. Give no `side` where it may be a backward pass that needs them
    again: on the side stream they could get memory that the main stream still reads.
    """
    known = CASTS.get({})
    weights = [w for w in weights if w.dtype != dtype and w not in known]
    casts = []
    if weights:
        side = side or SideStreams()
        with torch.no_grad(), side.beside(side.gradients):
            casts = side_by_side(weights, dtype)
            one = as_one(weights)
            if one is None:
                torch._foreach_copy_(casts, weights)
            else:
                as_one(casts).copy_(one)
    token = CASTS.set(known | dict(zip(weights, casts, strict=True)))
    try:
        yield
    finally:
        CASTS.reset(token)


def capturing() -> bool:
    """Tell whether a graph is captured now."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


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

    DEPTH = 4
    BYTES = 2 * 10**8

    def __init__(self):
        self.streams: tuple[torch.cuda.Stream, ...] = ()
        self.groups: dict[Tensor, list[Tensor]] = {}  # the optimizer's, of each parameter
        self.begin_step(False)

    def __reduce__(self) -> tuple:
        return SideStreams, ()  # a copy of a model or parameter has no optimizer

    def begin_step(self, overlap: bool) -> None:
        """Start a step at its forward pass; `overlap` has an effect while a graph is captured."""
        self.active = overlap and capturing()
        self.joined = not self.active
        self.gradients = self.updates = None  # the main stream
        # cleared here, as a failed capture does not end its step
        self.pending = collections.deque()  # of events, and what the work before them reads
        self.written: dict[Tensor, tuple] = {}  # event, address and version of a gradient
        self.places: dict[Tensor, Tensor | None] = {}  # for gradients; None once it is taken
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

    def place(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Return where AdamW reads these gradients [elements]; None where a copy is needed."""
        for group in (self.groups[p] for p in parameters if p not in self.places):
            self.places |= zip(group, side_by_side(group, torch.float32), strict=True)
        places = [self.places[p] for p in parameters]
        if any(place is None for place in places):
            return None
        self.places |= dict.fromkeys(parameters)
        one = as_one(places)
        whole = one is not None and len(one) == sum(p.numel() for p in parameters)
        return one.data if whole else None  # .data: views would share one version counter

    def changed(self, parameter: Tensor) -> bool:
        """Tell whether its gradient is not, or no longer, what the side stream writes."""
        now = parameter.grad.data_ptr(), parameter.grad._version
        return now != self.written.get(parameter, (None,))[1:]

    def wait_for(self, parameters: Sequence[Tensor]) -> None:
        """Let the current stream wait for these gradients; else for all of the main stream."""
        if self.active:
            waits = {*parameters}
            events = [event for p, (event, *_) in self.written.items() if p in waits]
            if not events or any(map(self.changed, parameters)):
                events = [self.main.record_event()]
            torch.cuda.current_stream().wait_event(events[-1])  # of one stream: after the others

    def join(self, *unused) -> None:
        """Let the main stream wait for all gradients; later work of this step runs on it.

        Raises RuntimeError if autograd changed a gradient while a side stream computed it.
        """
        if not self.joined:
            self.joined = True
            torch.cuda.current_stream().wait_stream(self.gradients)
            self.pending.clear()
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
    side = getattr(parameters[0], "side", None)
    overlaps = side is not None and not side.joined
    placed = side is not None and dtype == torch.float32
    for p in parameters:
        if p.is_leaf and p.grad is not None:  # autograd adds the second gradient, in float32
            p.grad = p.grad.to(p.dtype)
            overlaps = placed = False
        overlaps &= not (p._backward_hooks or p._post_accumulate_grad_hooks)
    outs = []
    grads = {}
    for group in groups:
        sizes = [p.numel() for p in group]
        out = side.place(group) if placed else None
        outs.append(parameters[0].new_empty(sum(sizes), dtype=dtype) if out is None else out)
        parts = zip(group, outs[-1].split(sizes), strict=True)
        grads |= {p: part.view_as(p) for p, part in parts}
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
