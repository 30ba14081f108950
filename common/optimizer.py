# Copied from common/optimizer.py by tools/sync_common.py: edit it there.
# A forward pass casts its weights together. AdamW is a kernel, which reads gradients where they
# lie. In a step that is captured as a graph, weight gradients and updates overlap the rest.
CASTS: ContextVar[dict[Tensor, Tensor]] = ContextVar("CASTS")  # of parameters, in a forward pass


def capturing() -> bool:
    """Tell whether a graph is captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def side_by_side(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Allocate tensors of these shapes as one piece, each from a multiple of 64 elements on."""
    sizes = [triton.cdiv(t.numel(), 64) * 64 for t in tensors]
    make = torch.zeros if any(t.numel() % 64 for t in tensors) else torch.empty  # gaps are read
    piece = make(sum(sizes), device=tensors[0].device, dtype=dtype)
    parts = zip(piece.split(sizes), tensors, strict=True)
    return [part[: t.numel()].view(t.shape) for part, t in parts]


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that lie as side_by_side allocates them as one [elements]; None for others."""
    first, last, size = tensors[0], tensors[-1], 0
    for t in tensors:
        place = first.data_ptr() + size * first.element_size()
        if t.data_ptr() != place or t.dtype != first.dtype or not t.is_contiguous():
            return None
        size += triton.cdiv(t.numel(), 64) * 64
    if first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return None
    return first.as_strided((size - -last.numel() % 64,), (1,))


def cast_of(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter in this type: the cast of cast_weights, else one of its own."""
    cast = CASTS.get({}).get(parameter)
    usable = cast is not None and cast.dtype == dtype
    return cast if usable else parameter.detach().to(dtype).contiguous()


@contextlib.contextmanager
def cast_weights(
    parameters: Iterable[Tensor], dtype: torch.dtype, side: SideStreams
) -> Iterator[None]:
    """Cast parameters together, in few launches, for the operations inside.

    Each forward pass has casts of its own, which its backward pass keeps: so parameters may change
    in any way between two passes.
    """
    parameters = [p for p in parameters if p.dtype != dtype]
    casts = []
    if parameters:
        with torch.no_grad(), side.ahead():
            casts = side_by_side(parameters, dtype)
            torch._foreach_copy_(casts, parameters)
    token = CASTS.set(CASTS.get({}) | dict(zip(parameters, casts, strict=True)))
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
        begin_step -------------------> ahead: casts of a layer
        forward pass of the layer <---- done
        grad of layer L's input
        weight no longer needed ------> run: its gradient ------> AdamW
        DEPTH pieces of work later,
        or BYTES of inputs <----------- done: its inputs may be freed
        ... next layer                  ...                       ...
        grad of the embedding <-------- join: all of them
        end of optimizer.step <---------------------------------- all of them

    A group of AdamW waits for all of its gradients, TinyOpenFold's only one for the embedding's. On
    several GPUs averages are launched where updates are, and these wait for all of them.
    """

    DEPTH, BYTES = 4, 2 * 10**8

    def __init__(self):
        self.streams: tuple[torch.cuda.Stream, ...] = ()
        self.begin_step(False)

    def __reduce__(self) -> tuple:
        return SideStreams, ()  # a copy of a model or parameter has no optimizer

    def begin_step(self, overlap: bool) -> None:
        """Start a step at its forward pass; `overlap` has an effect while a graph is captured."""
        self.active = overlap and capturing()
        self.joined = not self.active
        self.gradients = self.updates = None  # the main stream
        # Cleared here, as a failed capture does not end its step.
        self.pending = collections.deque()  # of events, and what the work before them reads
        self.written: dict[Tensor, tuple] = {}  # event, address and version of a gradient
        self.return_workspaces()
        if self.active:
            self.main = torch.cuda.current_stream()
            self.begun = self.main.record_event()
            self.streams = self.streams or (torch.cuda.Stream(), torch.cuda.Stream())
            self.gradients, self.updates = self.streams
            for stream in self.streams:  # a graph may only wait for streams that belong to it
                stream.wait_event(self.begun)

    def return_workspaces(self) -> None:
        """Give memory back that GEMMs keep for each stream and thread; two streams need more."""
        if self.active:
            torch._C._cuda_clearCublasWorkspaces()

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Launch what is inside, and needs nothing of this step, beside the forward pass."""
        stream = None if self.written else self.gradients  # a block may be computed again
        with torch.cuda.stream(stream):
            yield
        if stream:
            torch.cuda.current_stream().wait_stream(stream)

    def run(self, work: Callable, grads: dict[Tensor, Tensor], *inputs: Tensor) -> None:
        """Run work that writes gradients of parameters on their stream.

        The inputs are all tensors that it reads and that are freed after the caller's work.
        """
        current = torch.cuda.current_stream()
        self.gradients.wait_stream(current)
        with torch.cuda.stream(self.gradients):
            work()
        done = self.gradients.record_event()
        self.written |= {p: (done, grad.data_ptr(), grad._version) for p, grad in grads.items()}
        self.pending.append((done, inputs))
        while len(self.pending) > self.DEPTH or self.BYTES < sum(
            tensor.nbytes for _, inputs in self.pending for tensor in inputs
        ):
            current.wait_event(self.pending.popleft()[0])

    def changed(self, parameter: Tensor) -> bool:
        """Tell whether a gradient is not, or no longer, what a side stream writes."""
        grad = parameter.grad
        return (grad.data_ptr(), grad._version) != self.written.get(parameter, (None,))[1:]

    def wait_for(self, parameters: Sequence[Tensor]) -> None:
        """Let the current stream wait for gradients, or for all that the main stream does."""
        if self.active:
            changed = any(map(self.changed, parameters))
            events = {self.written[p][0] for p in parameters} if not changed else set()
            for event in events or {self.main.record_event()}:
                torch.cuda.current_stream().wait_event(event)

    def wait_for_main(self) -> None:
        """Let the stream of updates wait for all that the main stream does."""
        if self.active:
            self.updates.wait_event(self.main.record_event())

    def finish(self) -> None:
        """Let the main stream wait for that of updates, and forget what gradients were."""
        if self.active:
            self.main.wait_stream(self.updates)
            self.written.clear()

    def join(self, *unused) -> None:
        """Let the main stream wait for all gradients; later work of this step runs on it.

        Raises RuntimeError if autograd changed a gradient while a side stream computed it.
        """
        if self.joined:
            return
        self.joined = True
        torch.cuda.current_stream().wait_stream(self.gradients)
        self.pending.clear()
        if any(p.grad is not None and self.changed(p) for p in self.written):
            wrong = "a weight got more than one gradient in a backward pass"
            raise RuntimeError(f"overlap: {wrong}: use --disable-overlap")


def gradients_of(
    groups: Sequence[Sequence[Tensor]],
    compute: Callable[..., None],
    *inputs: Tensor,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return the gradients of groups of parameters, which `compute` makes of these inputs.

    `compute` gets a tensor [elements] for each group, and writes the gradients of the group's
    parameters into it, one after the other. Call this last: in a graph a parameter may be updated
    as soon as its gradient is there. Nothing overlaps where autograd or a hook reads a gradient.
    """
    parameters = [parameter for group in groups for parameter in group]
    outs, grads = [], []
    for group in groups:
        sizes = [p.numel() for p in group]
        outs.append(torch.empty(sum(sizes), device=group[0].device, dtype=dtype))
        grads += outs[-1].split(sizes)
    grads = {p: grad.view_as(p) for p, grad in zip(parameters, grads, strict=True)}
    side, used_at_once = getattr(parameters[0], "side", None), False
    for p in parameters:
        if p.is_leaf and p.grad is not None:
            p.grad = p.grad.to(p.dtype)  # to which autograd adds
            used_at_once = True
        used_at_once |= bool(p._backward_hooks or p._post_accumulate_grad_hooks)
    if side is None or side.joined or used_at_once:
        compute(*outs)
    else:
        side.run(partial(compute, *outs), grads, *inputs)
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


@triton.jit
def adamw_kernel(
    WEIGHTS, GRADS, AVERAGES, SQUARES, POWER1, POWER2, LR, SCALE, FOUND_INF, size,
    share1, share2, eps, decay, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Update weights w from their gradients g.

        m += (1 - beta1) * (g - m);  v += (1 - beta2) * (g^2 - v);  c = 1 - beta^steps
        w = w * (1 - lr * decay) - lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)

    WEIGHTS, GRADS, AVERAGES (m), SQUARES (v) [size]; share is 1 - beta, POWER [] beta^steps, LR []
    the learning rate. SCALE [] and FOUND_INF [] are a gradient scaler's, or None: gradients are
    divided by SCALE, and nothing is updated if FOUND_INF. A program owns every PROGRAMS-th block of
    BLOCK elements.
    """
    if FOUND_INF is not None:
        size = tl.where(tl.load(FOUND_INF) > 0, 0, size)
    lr = tl.load(LR).to(tl.float32)
    root_of_correction = tl.sqrt(1 - tl.load(POWER2)).to(tl.float32)
    rate = lr / (1 - tl.load(POWER1)).to(tl.float32)
    for start in range(tl.program_id(0) * BLOCK, size, PROGRAMS * BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        inside = at < size
        grad = tl.load(GRADS + at, mask=inside, other=0.0).to(tl.float32)
        if SCALE is not None:
            grad /= tl.load(SCALE)
        average = tl.load(AVERAGES + at, mask=inside, other=0.0)
        average += share1 * (grad - average)
        square = tl.load(SQUARES + at, mask=inside, other=0.0)
        square += share2 * (grad * grad - square)
        weight = tl.load(WEIGHTS + at, mask=inside, other=0.0) * (1 - lr * decay)
        weight -= rate * average / (tl.sqrt(square) / root_of_correction + eps)
        tl.store(AVERAGES + at, average, mask=inside)
        tl.store(SQUARES + at, square, mask=inside)
        tl.store(WEIGHTS + at, weight, mask=inside)


class FusedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019): one launch for each of `groups`, which lie side by side.

    Parameters that have been given other memory are updated there, one by one. The gradient of a
    group of one may have another type; if so, `narrow`. `side`: the model's streams. On several
    GPUs it replaces DistributedDataParallel: call average_gradients before every step.
    """

    _step_supports_amp_scaling = True  # the kernel divides by GradScaler's scale and skips a step
    averaged = False  # over several GPUs

    def __init__(
        self, groups: Iterable[list[nn.Parameter]], lr: float, side: SideStreams | None = None,
        narrow: bool = False,
    ):  # fmt: skip
        groups, self.side = list(groups), side or SideStreams()
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        super().__init__([p for group in groups for p in group], defaults)
        self.device, self.groups = groups[0][0].device, groups
        self.rate()
        steps = self.number(0)  # of all that have been updated equally often
        for group in groups:
            pieces = [side_by_side(group, torch.float32) for _ in range(3)]
            for p, weight, average, square in zip(group, *pieces, strict=True):
                p.data, p.side = weight.copy_(p.detach()), self.side
                moments = {"exp_avg": average.zero_(), "exp_avg_sq": square.zero_()}
                self.state[p] = {"step": steps, **moments}
            if narrow and len(group) == 1:
                p.grad_dtype = None  # any type
            if dist.is_initialized():  # one seed gives equal weights on equal machines
                dist.broadcast(as_one(group).detach(), 0)

    def __getstate__(self) -> dict:
        raise TypeError("FusedAdamW: copy or save its state_dict, not the optimizer")

    def add_param_group(self, param_group: dict) -> None:
        if self.param_groups:
            raise ValueError("FusedAdamW: build a new one for more parameters")
        super().add_param_group(param_group)

    def number(self, value: float | Tensor) -> Tensor:
        """Return a new number on the device; a graph would make it again in every replay."""
        if capturing():
            raise RuntimeError("FusedAdamW: take such a step before the capture")
        return torch.as_tensor(value, dtype=torch.float64, device=self.device).clone()

    def rate(self) -> Tensor:
        """Return the learning rate: where a graph reads it and schedulers write it."""
        options = self.param_groups[0]
        if not isinstance(options["lr"], Tensor):  # assigned
            options["lr"] = self.number(options["lr"])
        return options["lr"]

    def split(self, key: Callable[[Tensor], object]) -> None:
        """Split groups, and the numbers of steps that they share, where keys differ."""
        runs = (itertools.groupby(group, key) for group in self.groups)
        self.groups = [list(run) for group in runs for _, run in group]
        numbers: dict[Tensor, dict[object, Tensor]] = collections.defaultdict(dict)
        for p in self.param_groups[0]["params"]:
            steps = self.state[p]["step"]
            shared = numbers[steps]
            if key(p) not in shared:
                shared[key(p)] = self.number(steps) if shared else steps
            self.state[p]["step"] = shared[key(p)]

    def load_state_dict(self, state_dict: dict) -> None:
        """Copy options, moments and numbers of steps to where the kernel reads them.

        Raises ValueError if they are of other parameters, or in another order.
        """
        loaded, own = state_dict["state"], self.state_dict()["state"]
        shapes = [{i: v["exp_avg"].shape for i, v in state.items()} for state in (loaded, own)]
        if shapes[0] != shapes[1]:
            wrong = "the state is of other parameters, or in another order"
            raise ValueError(f"{wrong}, such as that of PyTorch's AdamW")
        options = {**state_dict["param_groups"][0], "lr": self.rate()}
        options["lr"].fill_(state_dict["param_groups"][0]["lr"])
        self.param_groups[0] |= {**options, "params": self.param_groups[0]["params"]}
        states = dict(zip(self.param_groups[0]["params"], map(loaded.get, own), strict=True))
        self.split(lambda p: float(states[p]["step"]))
        for p, values in states.items():
            for name, value in self.state[p].items():
                value.copy_(values[name])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        super().zero_grad(set_to_none)
        self.averaged = False

    def collect(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the gradients as one tensor [elements], copied side by side if need be."""
        grads = [p.grad for p in parameters]
        if as_one(grads) is None:
            parts = side_by_side(grads, torch.float32)
            torch._foreach_copy_(parts, grads)
            for p, part in zip(parameters, parts, strict=True):
                p.grad = part
        return as_one([p.grad for p in parameters])

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients over all processes; a single process returns at once.

        Call it before a gradient scaler reads them, so that all skip the same steps. Raises
        RuntimeError if a parameter that needs a gradient has none, for which others would wait.
        """
        if not dist.is_initialized():
            return
        self.side.join()
        if any(p.grad is None and p.requires_grad for p in self.param_groups[0]["params"]):
            raise RuntimeError("FusedAdamW: on several GPUs each parameter needs a gradient")
        for group in reversed(self.groups):
            present = [p for p in group if p.grad is not None]
            if present:
                with torch.cuda.stream(self.side.updates):
                    self.side.wait_for(present)
                    grads = self.collect(present)
                    dist.all_reduce(grads)
                    grads /= dist.get_world_size()
        self.side.finish()
        self.averaged = True

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient; in a graph with overlap as soon as it can."""
        if dist.is_initialized() and not self.averaged:
            raise RuntimeError("FusedAdamW: on several GPUs, call average_gradients before step")
        self.side.join()
        self.split(lambda p: p.grad is None)
        groups = [group for group in reversed(self.groups) if group[0].grad is not None]
        for p in itertools.chain(*groups):
            if (p.dtype, p.device) != (torch.float32, self.device):
                raise TypeError(f"FusedAdamW: a parameter is {p.dtype} on {p.device}")
        skipped, rate = getattr(self, "found_inf", None), self.rate()
        with torch.cuda.stream(self.side.updates):
            if skipped is not None:
                self.side.wait_for_main()
            powers = {}
            for steps in {self.state[group[0]]["step"] for group in groups}:
                steps += 1 if skipped is None else 1 - skipped
                powers[steps] = [beta**steps for beta in self.param_groups[0]["betas"]]
            for group in groups:
                self.side.wait_for(group)
                self.update(group, powers[self.state[group[0]]["step"]], rate)
        self.side.finish()
        self.averaged = False

    def update(self, group: list[nn.Parameter], powers: list[Tensor], rate: Tensor) -> None:
        """Update a group by one launch, or each where it lies now."""
        weights = as_one(group)
        if weights is None and len(group) > 1:
            for p in group:
                self.update([p], powers, rate)
            return
        memory = group[0].contiguous() if weights is None else weights
        moments = [
            as_one([self.state[p][name] for p in group]) for name in ("exp_avg", "exp_avg_sq")
        ]
        tensors = memory, self.collect(group), *moments, *powers, rate
        tensors += getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        options, chosen, size = self.param_groups[0], blocks("adamw"), moments[0].numel()
        shares = {f"share{i}": 1 - beta for i, beta in enumerate(options["betas"], 1)}
        settings = {"size": size, **shares, "eps": options["eps"], "decay": options["weight_decay"]}
        most = triton.next_power_of_2(triton.cdiv(size, chosen["BLOCK"]))
        programs = chosen["PROGRAMS"] = min(chosen["PROGRAMS"], most)
        wrap_triton(adamw_kernel)[(programs,)](*tensors, **settings, **chosen)
        if weights is None:
            group[0].copy_(memory)
        torch.autograd.graph.increment_version(group)  # which no kernel does
