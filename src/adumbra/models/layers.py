"""The two layers that torch.nn lacks, a bare offset and a bare factor: no module need own a parameter itself."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from adumbra.errors import InputError


class Bias(nn.Module):
    """x + bias, the bias repeated over the batch and any dimensions between."""

    def __init__(self, shape: int | Sequence[int] = ()) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        _check_trailing(x, self.bias)
        return x + self.bias


class Scale(nn.Module):
    """x * scale, the scale repeated over the batch and any dimensions between."""

    def __init__(self, shape: int | Sequence[int] = ()) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        _check_trailing(x, self.scale)
        return x * self.scale


def _check_trailing(x: Tensor, parameter: Tensor) -> None:
    """The parameter may not reach the batch dimension: its gradient would then mix examples."""
    n = parameter.dim()
    if x.dim() <= n or x.shape[x.dim() - n :] != parameter.shape:
        raise InputError(
            f"a Bias or Scale of shape {tuple(parameter.shape)} got {tuple(x.shape)}: "
            "its shape must equal the last dimensions of what follows the batch dimension"
        )
