"""What torch.optim lacks."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adumbra.errors import InputError

CHUNK = 1 << 18  # elements updated at once on a CPU: a chunk and its temporaries stay in cache


class Yogi(Optimizer):
    """Yogi (Zaheer et al. 2018): Adam whose second moment moves by a bounded amount.

        m ← β1 m + (1 − β1) g
        v ← v − (1 − β2) sign(v − g²) g²
        w ← w − lr · m̂ / (√v̂ + eps)

    with m̂ = m / (1 − β1^t) and v̂ = v / (1 − β2^t) as in optax, v starting at `initial_accumulator` as there, m at zero.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-3,
        initial_accumulator: float = 1e-6,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "initial_accumulator": initial_accumulator}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["m"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            state["v"] = torch.full_like(parameter, group["initial_accumulator"], memory_format=torch.contiguous_format)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        rate = group["lr"] / (1 - beta1 ** state["step"])
        root = (1 - beta2 ** state["step"]) ** 0.5
        tensors = [parameter.view(-1), parameter.grad.reshape(-1), state["m"].view(-1), state["v"].view(-1)]  # pyright: ignore[reportOptionalMemberAccess]
        chunk = CHUNK if parameter.device.type == "cpu" else max(parameter.numel(), 1)
        for w, g, m, v in zip(*(tensor.split(chunk) for tensor in tensors), strict=True):
            m.lerp_(g, 1 - beta1)
            square = g * g
            v.addcmul_(torch.sign(v - square), square, value=beta2 - 1)
            w.addcdiv_(m, v.sqrt().div_(root).add_(group["eps"]), value=-rate)


def make(
    name: str, parameters: Iterable[Tensor], *, learning_rate: float, momentum: float, weight_decay: float
) -> Optimizer:
    """An optimizer by its name. Weight decay depends on no example: it is applied to what comes in already noised."""
    parameters = list(parameters)
    match name:
        case "sgd":
            return torch.optim.SGD(parameters, learning_rate, weight_decay=weight_decay)
        case "momentum":
            return torch.optim.SGD(parameters, learning_rate, momentum=momentum, weight_decay=weight_decay)
        case "adam":
            return torch.optim.Adam(parameters, learning_rate, weight_decay=weight_decay, fused=True)
        case "adamw":
            return torch.optim.AdamW(parameters, learning_rate, weight_decay=weight_decay, fused=True)
        case "adagrad":
            return torch.optim.Adagrad(parameters, learning_rate, weight_decay=weight_decay)
        case "rmsprop":
            return torch.optim.RMSprop(parameters, learning_rate, weight_decay=weight_decay)
        case "yogi" if weight_decay == 0:
            return Yogi(parameters, learning_rate)
        case "yogi":
            raise InputError("yogi has no weight decay here: set weight_decay = 0, or use adam or adamw")
    raise InputError(f"no optimizer '{name}': sgd, momentum, adam, adamw, yogi, adagrad or rmsprop")
