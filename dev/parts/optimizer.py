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


class FusedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019): one launch for each of `groups`, which lie side by side.

    Parameters stay in the memory where it lays them, and each needs a gradient in every step:
    anything else is refused. `side`: the model's streams. On several GPUs it replaces
    DistributedDataParallel: call average_gradients before every step.
    """

    _step_supports_amp_scaling = True  # the kernel divides by GradScaler's scale and skips a step
    averaged = False  # over several GPUs

    def __init__(
        self, groups: Iterable[list[nn.Parameter]], lr: float, side: SideStreams | None = None
    ):  # fmt: skip
        self.groups = list(groups)
        self.side = side or SideStreams()
        parameters = [p for group in self.groups for p in group]
        self.steps = parameters[0].new_zeros((), dtype=torch.float64)
        self.rate = self.steps.new_tensor(lr)  # a graph reads it here
        defaults = {"lr": self.rate, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        super().__init__(parameters, defaults)
        pieces = [side_by_side(parameters, torch.float32) for _ in range(3)]
        for p, weight, average, square in zip(parameters, *pieces, strict=True):
            p.data = weight.copy_(p.detach())
            p.side = self.side
            moments = {"exp_avg": average.zero_(), "exp_avg_sq": square.zero_()}
            self.state[p] = {"step": self.steps, **moments}
        for group in self.groups:
            self.side.groups |= dict.fromkeys(group, group)
        if dist.is_initialized():  # one seed gives equal weights on equal machines only
            dist.broadcast(as_one(parameters), 0)

    def load_state_dict(self, state_dict: dict) -> None:
        """Copy options and state to where the kernel reads them; ValueError if they do not fit."""
        loaded = state_dict["state"]
        own = self.state_dict()["state"]
        shapes = [{i: v["exp_avg"].shape for i, v in state.items()} for state in (loaded, own)]
        if shapes[0] != shapes[1] or len({float(v["step"]) for v in loaded.values()}) > 1:
            wrong = "the state is of other parameters, in another order, or of different steps"
            raise ValueError(f"FusedAdamW: {wrong}")
        for i, values in own.items():
            for name, value in values.items():
                value.copy_(loaded[i][name])
        options = state_dict["param_groups"][0]
        group = self.param_groups[0]
        group |= {**options, "lr": self.rate.fill_(options["lr"]), "params": group["params"]}

    def check(self) -> None:
        """Raise RuntimeError where a step would not update all parameters."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if as_one(parameters) is None:
            wrong = "a parameter was added, moved or converted: build a new optimizer"
            raise RuntimeError(f"FusedAdamW: {wrong}")
        if any(p.grad is None for p in parameters):
            wrong = "each parameter needs a gradient; --disable-fused-optimizer has PyTorch's AdamW"
            raise RuntimeError(f"FusedAdamW: {wrong}")

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

        Call it before a gradient scaler reads them, so that all skip the same steps.
        """
        if not dist.is_initialized():
            return
        self.side.join()
        self.check()
        averages = {}
        with self.side.beside(self.side.updates):
            for group in reversed(self.groups):
                self.side.wait_for(group)
                parts = self.collect(group)
                one = as_one(parts)
                dist.all_reduce(one)
                one /= dist.get_world_size()
                averages |= zip(group, parts, strict=True)
        for p, average in averages.items():  # what reads the gradients has been waited for
            p.grad = average
        self.averaged = True

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters; in a graph with overlap each group as soon as it can."""
        if dist.is_initialized() and not self.averaged:
            raise RuntimeError("FusedAdamW: on several GPUs, call average_gradients before step")
        self.averaged = False
        self.side.join()
        self.check()
        options = self.param_groups[0]
        if options["lr"] is not self.rate:  # it was assigned
            options["lr"] = self.rate.fill_(options["lr"])
        skipped = getattr(self, "found_inf", None)
        with self.side.beside(self.side.updates):
            if skipped is None:
                self.steps += 1
            else:
                self.side.wait_for([])
                self.steps += 1 - skipped
            powers = [beta**self.steps for beta in options["betas"]]
            for group in reversed(self.groups):
                self.side.wait_for(group)
                self.update(group, powers)

    def update(self, group: list[nn.Parameter], powers: list[Tensor]) -> None:
        """Update a group of parameters by one launch."""
        states = [self.state[p] for p in group]
        moments = [as_one([state[name] for state in states]) for name in ("exp_avg", "exp_avg_sq")]
        options = self.param_groups[0]
        scale = getattr(self, "grad_scale", None)  # a gradient scaler sets both
        found_inf = getattr(self, "found_inf", None)
        tensors = (as_one(group), as_one(self.collect(group)), *moments, *powers, self.rate)
        tensors += (scale, found_inf)
        size = moments[0].numel()
        shares = (1 - beta for beta in options["betas"])
        chosen = blocks("adamw")
        most = triton.next_power_of_2(triton.cdiv(size, chosen["BLOCK"]))
        programs = chosen["PROGRAMS"] = min(chosen["PROGRAMS"], most)
        launch = wrap_triton(adamw_kernel)[(programs,)]
        launch(*tensors, size, *shares, options["eps"], options["weight_decay"], **chosen)
        torch.autograd.graph.increment_version(group)  # no kernel does
