# Copied from common/optimizer.py by tools/sync_common.py: edit it there.
# Gradients are written where AdamW reads them; in a step that is captured as a graph, this and the
# updates overlap the backward pass. A parameter that FusedAdamW updates has an attribute `slot`.


@dataclass(eq=False)
class Slot:
    """A parameter's place in the buffers of FusedAdamW, as Megatron's `main_grad` is one.

    `begin` and `end` are elements of these buffers; `cast` is the parameter in the type of the
    GEMMs, as it was at its `version`, or None for float32.
    """

    buffer: GradientBuffer
    begin: int
    end: int
    cast: Tensor | None
    version: int = -1  # not written yet


def cached_cast(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter in this type, as the optimizer wrote it.

    It is cast here where the optimizer did not, or where others changed the parameter since.
    """
    slot = getattr(parameter, "slot", None)
    if slot is None or slot.cast is None or slot.cast.dtype != dtype:
        return parameter.detach().to(dtype)
    if slot.version != parameter._version:
        slot.cast.copy_(parameter.detach())
        slot.version = parameter._version
    return slot.cast


def renew_casts(module: nn.Module, *unused) -> None:
    """Cast parameters that were loaded anew, as load_state_dict's hook: a graph would not look."""
    for parameter in module.parameters():
        slot = getattr(parameter, "slot", None)
        if slot and slot.cast is not None:
            cached_cast(parameter, slot.cast.dtype)


class SideStreams:
    """Overlap gradients of parameters, averages and updates with the chain of a training step.

    For a step that is captured as a graph: a graph keeps what depends on what, not the order of the
    launches, so work on a side stream runs where there is room for it. A step, time goes down, an
    arrow is a wait:

        chain (forward, backward)       gradients                 updates
        begin_step -------------------------------------------->  corrections of the moments
        token ids -------------------->  run: sort them
        grad of layer L's output ----->  run: its weight gradient
        grad of its input
        weight no longer needed -------------- finish (both) --->  AdamW, cast of this weight
        DEPTH pieces of work later,
        or DEPTH_BYTES of inputs <------  done: its inputs may go
        ... next layer                  ...                       ...
        grad of the embedding <--------  join: all of them
        end of optimizer.step <---------------------------------  all of them

    On several GPUs a third stream averages the gradients of a buffer over them in between: it
    waits as an update does here, the update waits for it, and so does the chain before
    optimizer.step.

    What work on a side stream reads must stay as it is until the chain has waited for that work:
    `pending` keeps it from being freed. Autograd may not add to a gradient on its way from a side
    stream to its parameter: join raises RuntimeError.
    """

    DEPTH, DEPTH_BYTES = 4, 2 * 10**8

    def __init__(self):
        self.streams: tuple[torch.cuda.Stream, ...] = ()
        self.pending: collections.deque[tuple[torch.cuda.Event, tuple]] = collections.deque()
        self.begin_step(False)

    def __deepcopy__(self, memo: dict) -> SideStreams:
        """Return new ones: a copy of a model has no optimizer."""
        return SideStreams()

    def begin_step(self, overlap: bool) -> None:
        """Begin a forward pass, of which work overlaps if it is captured."""
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        self.active = overlap and capturing
        self.joined = not self.active
        # a capture that failed leaves some
        self.written: dict[Tensor, int] = {}  # the address of each parameter's gradient
        self.used: set[Tensor] = set()  # parameters that this step no longer needs
        self.finished: dict[GradientBuffer, tuple[Tensor, int, list[torch.cuda.Event]]] = {}
        if self.active:
            # GEMMs on two streams need two workspaces; eager steps give theirs back.
            torch._C._cuda_clearCublasWorkspaces()
            self.chain = torch.cuda.current_stream()
            self.begun = self.chain.record_event()

    def stream(self, number: int) -> torch.cuda.Stream | None:
        """Return the stream of gradients (0), of updates (1), of averages (2); None: the chain.

        The last one goes first, as the chain does: nothing hides what is late there.
        """
        make = torch.cuda.Stream
        if self.active:
            self.streams = self.streams or (make(), make(), make(priority=-1))
        return self.streams[number] if self.active else None

    def run(self, work: Callable, *inputs: Tensor) -> object:
        """Return the result of the work, which reads these inputs, from the stream of gradients."""
        if self.joined:
            return work()
        chain, stream = torch.cuda.current_stream(), self.stream(0)
        stream.wait_stream(chain)
        with torch.cuda.stream(stream):
            result = work()
            self.pending.append((stream.record_event(), inputs))
        while len(self.pending) > self.DEPTH or self.pending_bytes() > self.DEPTH_BYTES:
            chain.wait_event(self.pending.popleft()[0])
        return result

    def pending_bytes(self) -> int:
        """Count the bytes that work in progress reads."""
        return sum(tensor.nbytes for _, inputs in self.pending for tensor in inputs)

    def finish(self, parameter: Tensor) -> None:
        """Note that this step no longer needs a parameter, whose gradient is on its way."""
        buffer = parameter.slot.buffer
        if not (self.active and buffer.written):
            return
        self.used.add(parameter)
        if self.used.issuperset(buffer.parameters):  # with norms it waits for all of the chain
            self.note(buffer, torch.cuda.current_stream(), self.stream(0))

    def note(self, buffer: GradientBuffer, *streams: torch.cuda.Stream) -> None:
        """Note that these streams have done by now what an update of the buffer waits for."""
        events = [stream.record_event() for stream in streams]
        self.finished[buffer] = buffer.tensor, buffer.tensor._version, events

    def wait_for(self, buffer: GradientBuffer) -> None:
        """Let this stream wait for the gradients in a buffer, and the last use of their weights.

        If they were changed since that was noted, it waits for the chain as it is now.
        """
        if not self.active:
            return
        tensor, version, events = self.finished.pop(buffer, (None, 0, []))
        if tensor is not buffer.tensor or version != tensor._version:
            events = [self.chain.record_event()]
        for event in events:
            torch.cuda.current_stream().wait_event(event)

    def join(self) -> None:
        """Let the chain wait for all gradients, and take what follows.

        Raises RuntimeError if one was added to.
        """
        if self.joined:
            return
        self.joined = True
        torch.cuda.current_stream().wait_stream(self.stream(0))
        self.pending.clear()
        if any(p.grad is not None and p.grad.data_ptr() != at for p, at in self.written.items()):
            wrong = "a weight got more than one gradient in a backward pass"
            raise RuntimeError(f"overlap: {wrong}: use --disable-overlap")

    def average(self, buffer: GradientBuffer) -> None:
        """Average a buffer over the processes, as soon as its gradients are there."""
        with torch.cuda.stream(self.stream(2)):
            self.wait_for(buffer)
            buffer.average()
            if self.active:
                self.note(buffer, self.stream(2))

    def begin_updates(self, after_chain: bool) -> None:
        """Let this stream wait for the begin of the forward pass, or for the chain until now."""
        if self.active:
            begun = self.chain.record_event() if after_chain else self.begun
            torch.cuda.current_stream().wait_event(begun)

    def wait_here(self, number: int) -> None:
        """Let the chain wait for a stream."""
        if self.active:
            self.chain.wait_stream(self.stream(number))


class JoinSideStreams(torch.autograd.Function):
    """Pass tensors on; in the backward pass the chain waits here for the stream of gradients."""

    @staticmethod
    def forward(ctx, side: SideStreams, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.side = side
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        ctx.side.join()
        return None, *grads


class GradientBuffer:
    """Hold the gradients of some parameters where the optimizer reads them, in one tensor.

    The tensor lives from the first gradient of a step to the end of the update. A parameter's first
    gradient in a step is written here, in `dtype`; autograd adds others to it, in float32.
    """

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, side: SideStreams):
        self.parameters, self.side = parameters, side
        self.clear()
        self.set_dtype(dtype)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Have gradients in this type from now on."""
        self.dtype = dtype
        for parameter in self.parameters:
            if dtype != (getattr(parameter, "grad_dtype", None) or parameter.dtype):
                grad, parameter.grad = parameter.grad, None
                parameter.grad_dtype = dtype  # or autograd would cast it
                parameter.grad = grad if grad is None else grad.to(dtype)

    def clear(self) -> None:
        """Let go of the gradients."""
        self.tensor, self.written = None, set()

    def claim(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """Return the part [elements] for the first gradients in a step of these parameters.

        None for later ones, and where the parameters do not lie side by side.
        """
        if any(p.grad is not None or p in self.written for p in parameters):
            if self.dtype != torch.float32:
                self.set_dtype(torch.float32)
            return None
        ends = [p.slot.begin + p.numel() for p in parameters]
        if ends[:-1] != [p.slot.begin for p in parameters[1:]]:
            return None
        self.written.update(parameters)
        return self.elements(parameters[0].slot.begin, ends[-1])

    def elements(self, begin: int, end: int) -> Tensor:
        """Return elements of the tensor, by their place in all of the optimizer's buffers."""
        first, last = self.parameters[0].slot.begin, self.parameters[-1].slot.end
        if self.tensor is None:
            filled = sum(p.numel() for p in self.parameters)
            make = torch.zeros if self.parameters[1:] and last - first > filled else torch.empty
            self.tensor = make(last - first, device=self.parameters[0].device, dtype=self.dtype)
        return self.tensor[begin - first : end - first]

    def part(self, parameter: nn.Parameter) -> Tensor:
        """Return the part for a parameter, in its shape."""
        begin = parameter.slot.begin
        return self.elements(begin, begin + parameter.numel()).view_as(parameter)

    def collect(self) -> bool:
        """Bring gradients here that are elsewhere; return whether there are any.

        Those that autograd added up are elsewhere, and those of PyTorch's own operators.
        """
        present = [p for p in self.parameters if p.grad is not None]
        elsewhere = [p for p in present if p.grad.data_ptr() != self.part(p).data_ptr()]
        if any(p in self.written for p in elsewhere):
            self.tensor, elsewhere = None, present  # what torch.autograd.grad returned may be there
        if elsewhere:
            torch._foreach_copy_([self.part(p) for p in elsewhere], [p.grad for p in elsewhere])
        return bool(present)

    def average(self) -> None:
        """Average all gradients over the processes; from then on they are here, nowhere else."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = self.part(parameter)
        if self.tensor.is_cuda:
            dist.all_reduce(self.tensor, dist.ReduceOp.AVG)
        else:  # gloo can only add up
            dist.all_reduce(self.tensor)
            self.tensor /= dist.get_world_size()


def gradients_into_buffer(
    groups: Sequence[Sequence[Tensor]], compute: Callable[..., None], *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of groups of parameters, which `compute` makes of these inputs.

    `compute` gets a tensor [elements] for each group, and writes the gradients of its parameters
    there side by side. That is where the optimizer reads them, unless there are gradients that
    these are to be added to.
    """
    parameters = [parameter for group in groups for parameter in group]
    slots = [getattr(parameter, "slot", None) for parameter in parameters]
    buffer = slots[0].buffer if all(slots) else None
    places = [buffer.claim(group) if buffer else None for group in groups]

    def work() -> tuple[Tensor, ...]:
        outs, grads = [], []
        for place, group in zip(places, groups, strict=True):
            sizes = [p.numel() for p in group]
            out = torch.empty(sum(sizes), device=group[0].device) if place is None else place
            outs.append(out)
            grads += [part.view_as(p) for part, p in zip(out.split(sizes), group, strict=True)]
        compute(*outs)
        return tuple(grads)

    if buffer is None or any(place is None for place in places):
        return work()  # autograd may add them to others at once
    grads = buffer.side.run(work, *inputs)
    if not buffer.side.joined:
        addresses = [grad.data_ptr() for grad in grads]
        buffer.side.written |= zip(parameters, addresses, strict=True)
    return grads


WIDE_RESULTS = "dtype_out" in torch.ops.aten.mm.overloads()  # from PyTorch 2.8 on
# From PyTorch 2.10 on the gradient of a float32 parameter may have another type.
NARROW_GRADIENTS = hasattr(Tensor, "grad_dtype")


def matmul_out(grad: Tensor, x: Tensor, out: Tensor, direct: bool) -> None:
    """Write grad^T x [N, K] of grad [T, N] and x [T, K] into out; `direct`: without a cast."""
    if out.dtype == x.dtype:
        torch.mm(grad.t(), x, out=out)
    elif direct and WIDE_RESULTS and x.is_cuda:
        torch.mm(grad.t(), x, out_dtype=out.dtype, out=out)
    else:
        out.copy_(grad.t() @ x)


def weight_gradient(weight: Tensor, grad: Tensor, x: Tensor, direct: bool) -> Tensor:
    """Compute the gradient dW = dy^T x of a weight [N, K] from grad [T, N] and x [T, K]."""

    def compute(out: Tensor) -> None:
        matmul_out(grad, x, out.view_as(weight), direct)

    (gradient,) = gradients_into_buffer(((weight,),), compute, grad, x)
    return gradient


@triton.jit
def adamw_kernel(
    WEIGHTS, CASTS, GRADS, AVERAGES, SQUARES, CORRECTIONS, LR, SCALE, FOUND_INF, size,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, DECAY: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Update weights w from their gradients g, and write them in the type of the GEMMs, too.

        m += (1 - beta1) * (g - m);  v += (1 - beta2) * (g^2 - v)
        w = w * (1 - lr * decay) - lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)

    WEIGHTS, CASTS (or None), GRADS, AVERAGES (m), SQUARES (v) [size]. CORRECTIONS [2] are
    c = 1 - beta^steps; LR [] is the learning rate. Of a gradient scaler, or None: gradients are
    divided by SCALE [], and FOUND_INF [] leaves the step out. A program owns every PROGRAMS-th
    block of BLOCK elements.
    """
    if FOUND_INF is not None:
        size = tl.where(tl.load(FOUND_INF) > 0, 0, size)
    lr = tl.load(LR).to(tl.float32)
    root_of_correction = tl.sqrt(tl.load(CORRECTIONS + 1)).to(tl.float32)
    rate = lr / tl.load(CORRECTIONS).to(tl.float32)
    for start in range(tl.program_id(0) * BLOCK, size, PROGRAMS * BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        inside = at < size
        grad = tl.load(GRADS + at, mask=inside, other=0.0).to(tl.float32)
        if SCALE is not None:
            grad /= tl.load(SCALE)
        average = tl.load(AVERAGES + at, mask=inside, other=0.0)
        average += (1 - BETA1) * (grad - average)
        square = tl.load(SQUARES + at, mask=inside, other=0.0)
        square += (1 - BETA2) * (grad * grad - square)
        weight = tl.load(WEIGHTS + at, mask=inside, other=0.0) * (1 - lr * DECAY)
        weight -= rate * average / (tl.sqrt(square) / root_of_correction + EPS)
        tl.store(AVERAGES + at, average, mask=inside)
        tl.store(SQUARES + at, square, mask=inside)
        tl.store(WEIGHTS + at, weight, mask=inside)
        if CASTS is not None:
            tl.store(CASTS + at, weight, mask=inside)


class Options(dict):
    """Hold the options of the optimizer, of which only the learning rate may change.

    The kernel reads the learning rate from the device, and is compiled for the others. So a
    learning rate that is assigned, as some schedulers do, is written there, where a graph of the
    step finds it. Another value for one of the others raises ValueError.
    """

    def __setitem__(self, name: str, value: object) -> None:
        if name == "lr" and name in self:
            self[name].fill_(value)
        elif name in ("betas", "eps", "weight_decay") and value != self.get(name, value):
            wrong = f"{name} was {self[name]} when it was made and cannot become {value}"
            raise ValueError(f"FusedAdamW: {wrong}")
        else:
            super().__setitem__(name, value)


class FusedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with all parameters in one buffer, and one kernel for it.

    Weights, their casts to `dtype` for the GEMMs and moments are parts of buffers of the same
    order, so the kernel needs no list of addresses. It is launched once for each of `groups`, which
    share a buffer of gradients; that of a single parameter is in `grad_dtype`. Gradients are
    written anew in every step: there is nothing to clear. `side`: what runs beside the model.

    On several GPUs it takes the place of DistributedDataParallel, which would copy each gradient to
    a buffer of its own: average_gradients comes before every step.
    """

    _step_supports_amp_scaling = True  # the kernel divides by GradScaler's scale and skips a step

    def __init__(
        self, groups: Iterable[list[nn.Parameter]], lr: float, dtype: torch.dtype,
        grad_dtype: torch.dtype = torch.float32, side: SideStreams | None = None,
    ):  # fmt: skip
        groups, self.side = list(groups), side or SideStreams()
        parameters = [parameter for group in groups for parameter in group]
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        super().__init__(parameters, defaults)
        # each parameter begins at a multiple of 128 bytes
        sizes = [triton.cdiv(p.numel(), 64) * 64 for p in parameters]
        spans = itertools.pairwise([0, *itertools.accumulate(sizes)])
        size, device = sum(sizes), parameters[0].device
        rate = torch.full((), lr, device=device, dtype=torch.float64)
        self.param_groups = [Options(self.param_groups[0], lr=rate)]
        names = ("weight", "exp_avg", "exp_avg_sq")
        self.buffers = {name: torch.zeros(size, device=device) for name in names}
        if dtype != torch.float32:
            self.buffers["cast"] = torch.zeros(size, device=device, dtype=dtype)
        self.steps = torch.zeros(len(parameters), 1, device=device)
        self.together = True  # all parameters have taken as many steps
        self.betas = torch.tensor(self.defaults["betas"], device=device, dtype=torch.float64)
        self.gradients, steps = [], iter(self.steps)
        for group in groups:
            own_dtype = grad_dtype if len(group) == 1 else torch.float32
            self.gradients.append(GradientBuffer(group, own_dtype, self.side))
            for parameter in group:
                begin, end = next(spans)
                # .data: or a change of one part would count as a change of all
                views = {
                    name: buffer[begin:][: parameter.numel()].view_as(parameter).data
                    for name, buffer in self.buffers.items()
                }
                parameter.data = views.pop("weight").copy_(parameter.detach())
                parameter.slot = Slot(self.gradients[-1], begin, end, views.get("cast"))
                self.state[parameter] = {"step": next(steps)[0], **views}
        self.averaged = False  # over several GPUs
        self.with_gradient: list[list[bool]] = []  # of each process, which parameters had one
        if dist.is_initialized():
            # One seed gives one set of weights on equal machines; this makes sure.
            dist.broadcast(self.buffers["weight"], 0)

    def load_state_dict(self, state_dict: dict) -> None:
        """Take options, moments and numbers of steps to where the kernel reads them.

        Raises ValueError if they are in another order.
        """
        loaded, own = state_dict["state"], self.state_dict()["state"]
        shapes = [
            {index: values["exp_avg"].shape for index, values in state.items()}
            for state in (loaded, own)
        ]
        if shapes[0] != shapes[1]:
            wrong = "the state is of other parameters, or in another order"
            raise ValueError(f"{wrong}, such as that of PyTorch's AdamW")
        for name, value in state_dict["param_groups"][0].items():
            if name != "params":
                self.param_groups[0][name] = value
        for index, values in own.items():  # they share memory with the optimizer's
            for name in ("step", "exp_avg", "exp_avg_sq"):
                values[name].copy_(loaded[index][name])
        self.together = bool((self.steps == self.steps[0]).all())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the gradients."""
        super().zero_grad(set_to_none)
        self.averaged = False
        for buffer in self.gradients if set_to_none else ():
            buffer.clear()

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients over all processes; of one process they are what they should be.

        It comes before a gradient scaler looks at them: an infinity of one process has reached all
        by then, so all skip the same steps. No backward pass may follow before step. Raises
        RuntimeError where not all have gradients of the same parameters, in every step.
        """
        if not dist.is_initialized():
            return
        self.side.join()
        present = [p.grad is not None for p in self.param_groups[0]["params"]]
        if not self.with_gradient:
            self.with_gradient = [present] * dist.get_world_size()
            dist.all_gather_object(self.with_gradient, present)
        if any(present != theirs for theirs in self.with_gradient):
            wrong = "all processes need gradients of the same parameters, in every step"
            raise RuntimeError(f"FusedAdamW: {wrong}")
        for buffer in reversed(self.gradients):
            if buffer.collect():  # of all processes or of none
                self.side.average(buffer)
        self.side.wait_here(2)
        self.averaged = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient.

        In a graph with overlap each group is updated as soon as it can be.
        """
        if dist.is_initialized() and not self.averaged:
            raise RuntimeError("FusedAdamW: average_gradients comes before step on several GPUs")
        self.side.join()
        skipped = getattr(self, "found_inf", None)
        buffers = [buffer for buffer in reversed(self.gradients) if buffer.collect()]
        with torch.cuda.stream(self.side.stream(1)):
            self.side.begin_updates(after_chain=skipped is not None)
            taken = 1 if skipped is None else 1 - skipped
            self.steps += taken
            parameters = self.param_groups[0]["params"]
            for parameter in parameters:
                if parameter.grad is None:
                    self.state[parameter]["step"] -= taken
                    self.together = False
            corrections = dict(zip(parameters, 1 - self.betas**self.steps, strict=True))
            for buffer in buffers:
                self.side.wait_for(buffer)
                alone = [[p] for p in buffer.parameters if p.grad is not None]
                for some in [buffer.parameters] if self.together else alone:
                    self.update(some, corrections[some[0]])
        self.side.wait_here(1)
        for buffer in self.gradients:
            buffer.clear()
        self.averaged = False

    def update(self, parameters: list[nn.Parameter], corrections: Tensor) -> None:
        """Update these parameters, which lie side by side and have taken as many steps."""
        begin, end = parameters[0].slot.begin, parameters[-1].slot.end
        parts = {name: buffer[begin:end] for name, buffer in self.buffers.items()}
        parts["gradient"] = parameters[0].slot.buffer.elements(begin, end)
        names = ("weight", "cast", "gradient", "exp_avg", "exp_avg_sq")
        options, chosen = self.param_groups[0], blocks("adamw")
        tensors = *map(parts.get, names), corrections, options["lr"]
        tensors += getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        constants = dict(zip(("BETA1", "BETA2"), options["betas"], strict=True))
        constants |= {"EPS": options["eps"], "DECAY": options["weight_decay"]}
        most = triton.next_power_of_2(triton.cdiv(end - begin, chosen["BLOCK"]))
        chosen["PROGRAMS"] = min(chosen["PROGRAMS"], most)
        grid = (chosen["PROGRAMS"],)
        wrap_triton(adamw_kernel)[grid](*tensors, size=end - begin, **constants, **chosen)
