# Copied from common/optimizer.py by tools/sync_common.py: edit it there.
# The backward pass writes gradients where AdamW reads them. In a step that is captured as a graph,
# weight gradients and updates overlap it. A parameter of FusedAdamW has an attribute `slot`.


@dataclass(eq=False)
class Slot:
    """A parameter's place in the buffers of FusedAdamW, from element `begin` to `end`.

    `cast` is the parameter in the type of the GEMMs, up to date if `version` is the parameter's;
    None for float32. (Megatron attaches its `main_grad` to a parameter in the same way.)
    """

    buffer: GradientBuffer
    begin: int
    end: int
    cast: Tensor | None
    version: int = -1  # not written yet


def cached_cast(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter in this type, from the optimizer's cast if it has one.

    The cast is renewed first if something else has changed the parameter since.
    """
    slot = getattr(parameter, "slot", None)
    if slot is None or slot.cast is None or slot.cast.dtype != dtype:
        return parameter.detach().to(dtype)
    if slot.version != parameter._version:
        slot.cast.copy_(parameter.detach())
        slot.version = parameter._version
    return slot.cast


def renew_casts(module: nn.Module, *unused) -> None:
    """Renew the casts of loaded parameters (load_state_dict's hook): a graph would not do it."""
    for parameter in module.parameters():
        slot = getattr(parameter, "slot", None)
        if slot and slot.cast is not None:
            cached_cast(parameter, slot.cast.dtype)


class SideStreams:
    """Overlap weight gradients, averages and updates with the main stream of a training step.

    For a step that is captured as a graph: that stores what depends on what, not the order of
    launches, so work on a side stream runs as soon as there is room for it. One step; time goes
    down, and a stream waits where an arrow ends:

        main (forward, backward)        gradients                 updates
        begin_step -------------------------------------------->  corrections of the moments
        grad of layer L's output ----->  run: its weight gradient
        grad of its input
        weight no longer needed --- release: waits for both ---->  AdamW, cast of this weight
        DEPTH pieces of work later,
        or BYTES of inputs <------------  done: its inputs may be freed
        ... next layer                  ...                       ...
        grad of the embedding <--------  join: all of them
        end of optimizer.step <---------------------------------  all of them

    Only TinyLlama releases weights early; TinyOpenFold's are one group, updated at the end.

    On several GPUs a third stream averages the gradients of a buffer over them: it waits as an
    update does here, and both the update and the main stream before optimizer.step wait for it.

    What work on a side stream reads must not change before the main stream has waited for that
    work; `pending` holds it, so that it is not freed. Nor may autograd add to a gradient before
    then: join raises RuntimeError if it did.
    """

    DEPTH, BYTES = 4, 2 * 10**8

    def __init__(self):
        self.streams: tuple[torch.cuda.Stream, ...] = ()
        self.pending = collections.deque()  # of events, and what the work before them reads
        self.begin_step(False)

    def __deepcopy__(self, memo: dict) -> SideStreams:
        """Return new ones: a copy of a model has no optimizer."""
        return SideStreams()

    def begin_step(self, overlap: bool) -> None:
        """Start a step at its forward pass; `overlap` has an effect while a graph is captured."""
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        self.active = overlap and capturing
        self.joined = not self.active
        # cleared here, as a failed capture does not end its step
        self.addresses: dict[Tensor, int] = {}  # of the parameters' gradients
        self.released: set[Tensor] = set()  # parameters that this step no longer needs
        # of a buffer: its tensor and version, and the events that an update waits for
        self.ready: dict[GradientBuffer, tuple[Tensor, int, list[torch.cuda.Event]]] = {}
        self.return_workspaces()
        if self.active:
            self.main = torch.cuda.current_stream()
            self.begun = self.main.record_event()
            # a graph may only wait for streams that belong to it, also where one gets no work
            self.stream(0).wait_event(self.begun)

    def return_workspaces(self) -> None:
        """Give memory back that GEMMs keep for each stream and thread; two streams need more."""
        if self.active:
            torch._C._cuda_clearCublasWorkspaces()

    def stream(self, number: int) -> torch.cuda.Stream | None:
        """Return the stream of gradients (0), of updates (1), of averages (2); None: the main one.

        Averages have the main stream's priority: nothing hides a late one.
        """
        make = torch.cuda.Stream
        if self.active:
            self.streams = self.streams or (make(), make(), make(priority=-1))
        return self.streams[number] if self.active else None

    def run(self, work: Callable, *inputs: Tensor) -> object:
        """Run work on the stream of gradients, and return its result.

        The inputs are all tensors that it reads and that are freed after the caller's work.
        """
        if self.joined:
            return work()
        current, stream = torch.cuda.current_stream(), self.stream(0)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = work()
            self.pending.append((stream.record_event(), inputs))
        while len(self.pending) > self.DEPTH or self.pending_bytes() > self.BYTES:
            current.wait_event(self.pending[0][0])
            self.pending.popleft()
        return result

    def pending_bytes(self) -> int:
        return sum(tensor.nbytes for _, inputs in self.pending for tensor in inputs)

    def release(self, parameter: Tensor) -> None:
        """Record that this step no longer needs a parameter whose gradient has been launched."""
        buffer = parameter.slot.buffer
        if self.active and buffer.written:
            self.released.add(parameter)
            if self.released.issuperset(buffer.parameters):  # norms are never released
                self.record(buffer, torch.cuda.current_stream(), self.stream(0))

    def record(self, buffer: GradientBuffer, *streams: torch.cuda.Stream) -> None:
        """Have an update of this buffer wait for what these streams have been given so far."""
        events = [stream.record_event() for stream in streams]
        self.ready[buffer] = buffer.tensor, buffer.tensor._version, events

    def wait_for(self, buffer: GradientBuffer) -> None:
        """Let the current stream wait for a buffer's gradients and the last use of their weights.

        If the gradients have changed since that was recorded, it waits for the main stream.
        """
        if not self.active:
            return
        tensor, version, events = self.ready.pop(buffer, (None, 0, []))
        if tensor is not buffer.tensor or version != tensor._version:
            events = [self.main.record_event()]
        for event in events:
            torch.cuda.current_stream().wait_event(event)

    def join(self) -> None:
        """Let the main stream wait for all gradients; later work of this step runs on it.

        Raises RuntimeError if autograd added to a gradient that a side stream computes.
        """
        if self.joined:
            return
        self.joined = True
        torch.cuda.current_stream().wait_stream(self.stream(0))
        self.pending.clear()
        if any(p.grad is not None and p.grad.data_ptr() != at for p, at in self.addresses.items()):
            wrong = "a weight got more than one gradient in a backward pass"
            raise RuntimeError(f"overlap: {wrong}: use --disable-overlap")

    def average(self, buffer: GradientBuffer) -> None:
        """Average a buffer over the processes, as soon as its gradients are there."""
        with torch.cuda.stream(self.stream(2)):
            self.wait_for(buffer)
            buffer.average()
            if self.active:
                self.record(buffer, self.stream(2))

    def main_waits_for(self, number: int) -> None:
        """Let the main stream wait for a side stream."""
        if self.active:
            self.main.wait_stream(self.stream(number))


class JoinSideStreams(torch.autograd.Function):
    """Return the tensors; in the backward pass, join the stream of gradients here."""

    @staticmethod
    def forward(ctx, side: SideStreams, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.side = side
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        ctx.side.join()
        return None, *grads


class GradientBuffer:
    """One tensor with the gradients of some parameters, which the optimizer reads.

    It exists from the first gradient of a step to the end of the update. A parameter's first
    gradient in a step is written here, in `dtype`; autograd adds later ones to it, in float32.
    """

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, side: SideStreams):
        self.parameters, self.side = parameters, side
        self.clear()
        self.set_dtype(dtype)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Set the type of the gradients, also of those that exist."""
        self.dtype = dtype
        for parameter in self.parameters:
            if dtype != (getattr(parameter, "grad_dtype", None) or parameter.dtype):
                grad, parameter.grad = parameter.grad, None
                parameter.grad_dtype = dtype  # else autograd would cast the gradient
                parameter.grad = grad if grad is None else grad.to(dtype)

    def clear(self) -> None:
        """Drop the gradients."""
        self.tensor, self.written = None, set()

    def claim(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """Return the part [elements] for the first gradients in a step of these parameters.

        None for later gradients, or if the parameters are not neighbours in the buffer.
        """
        if any(p.grad is not None or p in self.written for p in parameters):
            if self.dtype != torch.float32:
                self.set_dtype(torch.float32)  # for sums
            return None
        ends = [p.slot.begin + p.numel() for p in parameters]
        if ends[:-1] != [p.slot.begin for p in parameters[1:]]:
            return None
        self.written.update(parameters)
        return self.elements(parameters[0].slot.begin, ends[-1])

    def elements(self, begin: int, end: int) -> Tensor:
        """Return elements of the tensor, counted as in the optimizer's buffers."""
        first, last = self.parameters[0].slot.begin, self.parameters[-1].slot.end
        if self.tensor is None:
            filled = sum(p.numel() for p in self.parameters)  # gaps are read, too: zeros
            make = torch.zeros if self.parameters[1:] and last - first > filled else torch.empty
            self.tensor = make(last - first, device=self.parameters[0].device, dtype=self.dtype)
        return self.tensor[begin - first : end - first]

    def part(self, parameter: nn.Parameter) -> Tensor:
        """Return the part for a parameter, in its shape."""
        begin = parameter.slot.begin
        return self.elements(begin, begin + parameter.numel()).view_as(parameter)

    def collect(self) -> bool:
        """Copy gradients that are elsewhere into the tensor; return whether there are gradients.

        Sums that autograd has made are elsewhere, and gradients of PyTorch's own operators.
        """
        present = [p for p in self.parameters if p.grad is not None]
        elsewhere = [p for p in present if p.grad.data_ptr() != self.part(p).data_ptr()]
        if any(p in self.written for p in elsewhere):
            # The caller of torch.autograd.grad may have the tensor.
            self.tensor, elsewhere = None, present
        if elsewhere:
            torch._foreach_copy_([self.part(p) for p in elsewhere], [p.grad for p in elsewhere])
        return bool(present)

    def average(self) -> None:
        """Average the gradients over the processes, and make each `.grad` a part of the tensor."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = self.part(parameter)
        if self.tensor.is_cuda:
            dist.all_reduce(self.tensor, dist.ReduceOp.AVG)
        else:  # gloo has no AVG
            dist.all_reduce(self.tensor)
            self.tensor /= dist.get_world_size()


def gradients_into_buffer(
    groups: Sequence[Sequence[Tensor]], compute: Callable[..., None], *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of groups of parameters, which `compute` makes of these inputs.

    `compute` gets a tensor [elements] for each group, and writes the gradients of the group's
    parameters into it, one after the other. It is the optimizer's buffer, unless the parameters
    have gradients already, to which autograd will add these.
    """
    parameters = [parameter for group in groups for parameter in group]
    slots = [getattr(parameter, "slot", None) for parameter in parameters]
    buffer = slots[0].buffer if all(slots) else None
    outs, grads, overlaps = [], [], buffer is not None
    for group in groups:
        sizes, out = [p.numel() for p in group], buffer.claim(group) if buffer else None
        if out is None:  # autograd may add to it as soon as this function returns
            out, overlaps = torch.empty(sum(sizes), device=group[0].device), False
        outs.append(out)
        grads += [part.view_as(p) for part, p in zip(out.split(sizes), group, strict=True)]
    if not overlaps:
        compute(*outs)
        return tuple(grads)
    buffer.side.run(partial(compute, *outs), *inputs)
    if not buffer.side.joined:
        addresses = [grad.data_ptr() for grad in grads]
        buffer.side.addresses |= zip(parameters, addresses, strict=True)
    return tuple(grads)


WIDE_RESULTS = "dtype_out" in torch.ops.aten.mm.overloads()  # from PyTorch 2.8 on


def matmul_out(grad: Tensor, x: Tensor, out: Tensor, direct: bool) -> None:
    """Write grad^T x [N, K] of grad [T, N] and x [T, K] into out; `direct`: without a cast."""
    if out.dtype == x.dtype:
        torch.mm(grad.t(), x, out=out)
    elif direct and WIDE_RESULTS and x.is_cuda:
        torch.mm(grad.t(), x, out_dtype=out.dtype, out=out)
    else:
        out.copy_(grad.t() @ x)


@block_sizes({"BLOCK": 1024, "PROGRAMS": 1024})
@triton.jit
def adamw_kernel(
    WEIGHTS, CASTS, GRADS, AVERAGES, SQUARES, CORRECTIONS, LR, SCALE, FOUND_INF, size,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, DECAY: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Update weights w from their gradients g, and cast them to the type of the GEMMs.

        m += (1 - beta1) * (g - m);  v += (1 - beta2) * (g^2 - v)
        w = w * (1 - lr * decay) - lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)

    WEIGHTS, CASTS (or None), GRADS, AVERAGES (m), SQUARES (v) [size]. CORRECTIONS [2] are
    c = 1 - beta^steps; LR [] is the learning rate. SCALE [] and FOUND_INF [] are a gradient
    scaler's, or None: gradients are divided by SCALE, and nothing is updated if FOUND_INF. A
    program owns every PROGRAMS-th block of BLOCK elements.
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
    """The optimizer's options, of which only the learning rate may change.

    The kernel reads the learning rate from the device. Assigning it, as some schedulers do, writes
    it there, so that a captured graph follows. The kernel is compiled for the other options:
    another value for one raises ValueError.
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
    """AdamW (Loshchilov and Hutter 2019) as one kernel over all parameters in one buffer.

    Weights, their casts to `dtype` for the GEMMs and moments are in buffers of the same order, so
    the kernel needs no list of addresses. It is launched once for each of `groups`. A group has a
    GradientBuffer, in `grad_dtype` for a single parameter, else in float32. `side`: the streams on
    which the model computes gradients.

    On several GPUs it replaces DistributedDataParallel, which would copy each gradient to another
    buffer: call average_gradients before every step.
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
        self.steps = torch.zeros((), device=device)  # of all parameters
        self.betas = torch.tensor(self.defaults["betas"], device=device, dtype=torch.float64)
        self.gradients = []
        for group in groups:
            buffer_dtype = grad_dtype if len(group) == 1 else torch.float32
            self.gradients.append(GradientBuffer(group, buffer_dtype, self.side))
            for parameter in group:
                begin, end = next(spans)
                # .data: views would share one version counter
                views = {
                    name: buffer[begin:][: parameter.numel()].view_as(parameter).data
                    for name, buffer in self.buffers.items()
                }
                parameter.data = views.pop("weight").copy_(parameter.detach())
                parameter.slot = Slot(self.gradients[-1], begin, end, views.get("cast"))
                self.state[parameter] = {"step": self.steps, **views}
        self.averaged = False  # over several GPUs
        if dist.is_initialized():
            # One seed gives one set of weights on equal machines; this makes sure.
            dist.broadcast(self.buffers["weight"], 0)

    def load_state_dict(self, state_dict: dict) -> None:
        """Copy options, moments and numbers of steps to where the kernel reads them.

        Raises ValueError if they are in another order, or have not taken equally many steps.
        """
        loaded, own = state_dict["state"], self.state_dict()["state"]
        shapes = [{i: v["exp_avg"].shape for i, v in state.items()} for state in (loaded, own)]
        if shapes[0] != shapes[1]:
            wrong = "the state is of other parameters, or in another order"
            raise ValueError(f"{wrong}, such as that of PyTorch's AdamW")
        if len({float(values["step"]) for values in loaded.values()}) > 1:
            raise ValueError("FusedAdamW: the parameters have not taken equally many steps")
        for name, value in state_dict["param_groups"][0].items():
            if name != "params":
                self.param_groups[0][name] = value
        for index, values in own.items():  # they share memory with the optimizer's
            for name in ("step", "exp_avg", "exp_avg_sq"):
                values[name].copy_(loaded[index][name])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        super().zero_grad(set_to_none)
        self.averaged = False
        for buffer in self.gradients if set_to_none else ():
            buffer.clear()

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients over all processes; a single process returns at once.

        Call it before a gradient scaler reads the gradients: an infinity of one process has reached
        all by then, so all skip the same steps. No backward pass may follow before step. Raises
        RuntimeError if a parameter that needs a gradient has none, for which others would wait.
        """
        if not dist.is_initialized():
            return
        self.side.join()
        if any(p.grad is None and p.requires_grad for p in self.param_groups[0]["params"]):
            raise RuntimeError("FusedAdamW: on several GPUs each parameter needs a gradient")
        for buffer in reversed(self.gradients):
            if buffer.collect():
                self.side.average(buffer)
        self.side.main_waits_for(2)
        self.averaged = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient.

        In a graph with overlap each group is updated as soon as it can be. The steps are those of
        the optimizer: a parameter that had no gradient in some is corrected for these, too.
        """
        if dist.is_initialized() and not self.averaged:
            raise RuntimeError("FusedAdamW: on several GPUs, call average_gradients before step")
        self.side.join()
        skipped = getattr(self, "found_inf", None)
        buffers = [buffer for buffer in reversed(self.gradients) if buffer.collect()]
        with torch.cuda.stream(self.side.stream(1)):
            if self.side.active:
                begun = self.side.begun if skipped is None else self.side.main.record_event()
                torch.cuda.current_stream().wait_event(begun)
            self.steps += 1 if skipped is None else 1 - skipped
            corrections = 1 - self.betas**self.steps
            for buffer in buffers:
                self.side.wait_for(buffer)
                present = [[p] for p in buffer.parameters if p.grad is not None]
                whole = len(present) == len(buffer.parameters)
                for part in [buffer.parameters] if whole else present:
                    self.update(part, corrections)
        self.side.main_waits_for(1)
        for buffer in self.gradients:
            buffer.clear()
        self.averaged = False

    def update(self, parameters: list[nn.Parameter], corrections: Tensor) -> None:
        """Update neighbours in the buffers."""
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
        programs = chosen["PROGRAMS"] = min(chosen["PROGRAMS"], most)
        wrap_triton(adamw_kernel)[(programs,)](*tensors, size=end - begin, **constants, **chosen)
