# Copied from dev/parts/optimizer.py by dev/sync_parts.py: edit it there.
# AdamW is a kernel, which reads weights and gradients where they lie.


@block_sizes({"BLOCK": 1024, "PROGRAMS": 1024})
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


class Options(dict):
    """The optimizer's options: a learning rate that is assigned goes to where a graph reads it."""

    def __setitem__(self, name: str, value: object) -> None:
        super().__setitem__(name, self["lr"].fill_(value) if name == "lr" else value)

    def update(self, *others: dict, **more: object) -> None:
        for name, value in dict(*others, **more).items():
            self[name] = value


class FusedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019): one launch for each of `groups`, which lie side by side.

    Parameters that have been given other memory are updated there, one by one. `side`: the model's
    streams. On several GPUs it replaces DistributedDataParallel: call average_gradients before
    every step.
    """

    _step_supports_amp_scaling = True  # the kernel divides by GradScaler's scale and skips a step
    averaged = False  # over several GPUs

    def __init__(
        self, groups: Iterable[list[nn.Parameter]], lr: float, side: SideStreams | None = None
    ):  # fmt: skip
        self.groups, self.side = list(groups), side or SideStreams()
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        super().__init__([p for group in self.groups for p in group], defaults)
        self.parameters = self.param_groups[0]["params"]
        self.steps = self.parameters[0].new_zeros(len(self.parameters), dtype=torch.float64)
        rate = self.steps.new_tensor(lr)
        self.param_groups = [Options(self.param_groups[0], lr=rate)]
        self.counts = dict.fromkeys(self.parameters, 0)  # the same on the host, skipped ones too
        pieces = (side_by_side(self.parameters, torch.float32) for _ in range(3))
        for p, *own in zip(self.parameters, *pieces, self.steps, strict=True):
            weight, average, square, step = own
            p.data, p.side = weight.copy_(p.detach()), self.side
            self.state[p] = {"step": step, "exp_avg": average.zero_(), "exp_avg_sq": square.zero_()}
        for group in self.groups:
            self.side.groups |= dict.fromkeys(group, group)
        if dist.is_initialized():  # one seed gives equal weights on equal machines only
            dist.broadcast(as_one(self.parameters), 0)

    def __getstate__(self) -> dict:
        raise TypeError("FusedAdamW: copy or save its state_dict, not the optimizer")

    def add_param_group(self, param_group: dict) -> None:
        if self.param_groups:
            raise ValueError("FusedAdamW: build a new one for more parameters")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict) -> None:
        """Copy options and state to where the kernel reads them; ValueError if they do not fit."""
        loaded, own = state_dict["state"], self.state_dict()["state"]
        shapes = [{i: v["exp_avg"].shape for i, v in state.items()} for state in (loaded, own)]
        if shapes[0] != shapes[1]:
            wrong = "the state is of other parameters, or in another order"
            raise ValueError(f"{wrong}, such as that of PyTorch's AdamW")
        options = {**state_dict["param_groups"][0], "params": self.parameters}
        self.param_groups[0].update(options)
        for i, p in enumerate(self.parameters):
            self.counts[p] = int(loaded[i]["step"])
            for name, value in self.state[p].items():
                value.copy_(loaded[i][name])

    def collect(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return gradients that lie side by side: copies if they do not."""
        grads = [p.grad for p in parameters]
        if as_one(grads) is not None:
            return grads
        copies = side_by_side(grads, torch.float32)
        torch._foreach_copy_(copies, grads)
        return copies

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients over all processes; a single process returns at once.

        Call it before a gradient scaler reads them, so that all skip the same steps. Raises
        RuntimeError if a parameter that needs a gradient has none, for which others would wait.
        """
        if not dist.is_initialized():
            return
        self.side.join()
        if any(p.grad is None and p.requires_grad for p in self.parameters):
            raise RuntimeError("FusedAdamW: on several GPUs each parameter needs a gradient")
        averages = {}
        with self.side.beside(self.side.updates):
            for group in reversed(self.groups):
                if present := [p for p in group if p.grad is not None]:
                    self.side.wait_for(present)
                    parts = self.collect(present)
                    dist.all_reduce(one := as_one(parts))
                    one /= dist.get_world_size()
                    averages |= zip(present, parts, strict=True)
        for p, average in averages.items():  # what reads the gradients has been waited for
            p.grad = average
        self.averaged = True

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient; in a graph with overlap as soon as it can."""
        if dist.is_initialized() and not self.averaged:
            raise RuntimeError("FusedAdamW: on several GPUs, call average_gradients before step")
        self.averaged = False
        self.side.join()
        present = [p for p in self.parameters if p.grad is not None]
        if not present:
            return
        for p in present:
            self.counts[p] += 1
            if (p.dtype, p.device) != (torch.float32, self.steps.device):
                raise TypeError(f"FusedAdamW: a parameter is {p.dtype} on {p.device} by now")
        skipped = getattr(self, "found_inf", None)
        with self.side.beside(self.side.updates):
            one = 1
            if skipped is not None:
                self.side.wait_for([])
                one = 1 - skipped
            whole = len(present) == len(self.parameters)
            for steps in [self.steps] if whole else [self.state[p]["step"] for p in present]:
                steps += one
            powers = [beta**self.steps for beta in self.param_groups[0]["betas"]]
            for group in reversed(self.groups):
                if present := [p for p in group if p.grad is not None]:
                    self.side.wait_for(present)
                    self.update(present, powers)

    def update(self, group: list[nn.Parameter], powers: list[Tensor]) -> None:
        """Update parameters by one launch if they lie side by side, else each where it lies."""
        weights = as_one(group) if len({self.counts[p] for p in group}) == 1 else None
        if weights is None and len(group) > 1:
            for p in group:
                self.update([p], powers)
            return
        memory = group[0].contiguous() if weights is None else weights
        states = [self.state[p] for p in group]
        moments = [as_one([state[name] for state in states]) for name in ("exp_avg", "exp_avg_sq")]
        powers = [power[states[0]["step"].storage_offset()] for power in powers]
        tensors = memory, as_one(self.collect(group)), *moments, *powers
        options, chosen, size = self.param_groups[0], blocks("adamw"), moments[0].numel()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        tensors += options["lr"], scale, found_inf
        shares = (1 - beta for beta in options["betas"])
        most = triton.next_power_of_2(triton.cdiv(size, chosen["BLOCK"]))
        programs = chosen["PROGRAMS"] = min(chosen["PROGRAMS"], most)
        launch = wrap_triton(adamw_kernel)[(programs,)]
        launch(*tensors, size, *shares, options["eps"], options["weight_decay"], **chosen)
        if weights is None:
            group[0].copy_(memory)
        torch.autograd.graph.increment_version(group)  # no kernel does
