"""Outputs, loss and gradients of a version by their names, as one side of a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def take_gradients(model: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """Gradients by the names of state_dict(), where nothing is fused; and the parameters without one, which get zeros.

    The model's weights are lost.
    """
    import torch

    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    for parameter in model.parameters():  # state_dict then gives gradients, split where weights are fused
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return model.state_dict(), missing


def values_of(trainer) -> tuple[dict[str, dict], list[str]]:
    """Outputs, loss and gradients by their names, in float64 on the host; and the parameters without a gradient.

    The trainer is of no use afterwards.
    """
    import torch

    batch, model = trainer.next_batch(), trainer.model
    with torch.no_grad(), trainer.autocast():
        outputs = trainer.forward(**{name: value for name, value in batch.items() if name not in model.TARGETS})
    with trainer.autocast():  # anew: PyTorch 2.6 would reuse the weights that it cast without gradients
        loss = trainer.forward(**batch)
    loss.backward()
    gradients, missing = take_gradients(model)
    found = {"outputs": dict(outputs) if isinstance(outputs, dict) else {"outputs": outputs}}
    found |= {"loss": {"loss": loss}, "gradients": gradients}
    wide = {what: {k: v.detach().double().cpu() for k, v in values.items()} for what, values in found.items()}
    return wide, missing
