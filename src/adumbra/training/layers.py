"""The supported layers: what each gives its parameters, and the refusal of all others by name."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adumbra.errors import InputError
from adumbra.models.layers import Bias, Scale
from adumbra.training.contributions import Contribution, Products, Rows, Vectors

Call = tuple[tuple[Any, ...], dict[str, Any]]
Given = Iterator[tuple[Tensor | None, Contribution]]


def linear(layer: nn.Linear, delta: Tensor, call: Call) -> Given:
    a_BTI, delta_BTO = inner(wide(argument(call, 0, "input"))), inner(delta)
    yield layer.weight, Products(a_BTI, delta_BTO)
    yield layer.bias, Vectors(inner_sum(delta_BTO), torch.Size([layer.out_features]))


def layer_norm(layer: nn.LayerNorm, delta: Tensor, call: Call) -> Given:
    shape = torch.Size(layer.normalized_shape)
    a = F.layer_norm(wide(argument(call, 0, "input")), list(shape), eps=layer.eps)
    yield layer.weight, Vectors(inner_sum((delta * a).reshape(len(delta), -1, shape.numel())), shape)
    yield layer.bias, Vectors(inner_sum(delta.reshape(len(delta), -1, shape.numel())), shape)


def bias(layer: Bias, delta: Tensor, call: Call) -> Given:  # noqa: ARG001
    yield layer.bias, Vectors(inner_sum(delta.reshape(len(delta), -1, layer.bias.numel())), layer.bias.shape)


def scale(layer: Scale, delta: Tensor, call: Call) -> Given:
    v = delta * wide(argument(call, 0, "x"))
    yield layer.scale, Vectors(inner_sum(v.reshape(len(v), -1, layer.scale.numel())), layer.scale.shape)


def embedding(layer: nn.Embedding, delta: Tensor, call: Call) -> Given:
    ids_BT = argument(call, 0, "input").reshape(len(delta), -1)
    values_MD = delta.reshape(-1, layer.embedding_dim)
    source_N = torch.arange(ids_BT.numel(), device=ids_BT.device)
    example_N = source_N // max(ids_BT.shape[1], 1)
    yield layer.weight, rows(layer, ids_BT.flatten(), example_N, source_N, None, values_MD)


def embedding_bag(layer: nn.EmbeddingBag, delta: Tensor, call: Call) -> Given:
    ids = argument(call, 0, "input")
    offsets = argument(call, 1, "offsets")
    weights = argument(call, 2, "per_sample_weights")
    size_B = len(delta)
    if ids.dim() == 2:
        bag_N = torch.arange(size_B, device=ids.device).repeat_interleave(ids.shape[1])
    else:
        end_B = F.pad(offsets[1:], (0, 0 if layer.include_last_offset else 1), value=len(ids))
        bag_N = torch.arange(size_B, device=ids.device).repeat_interleave(end_B - offsets[:size_B])
    ids_N = ids.flatten()[: len(bag_N)]
    weight_N = None if weights is None else wide(weights).flatten()[: len(bag_N)]
    if layer.mode == "mean":  # the mean of what is not padding
        present_N = torch.ones_like(bag_N) if layer.padding_idx is None else (ids_N != layer.padding_idx).long()
        size = torch.zeros(size_B, dtype=torch.long, device=ids.device).index_add_(0, bag_N, present_N)
        weight_N = 1 / size.clamp(min=1).to(delta.dtype)[bag_N]
    yield layer.weight, rows(layer, ids_N, bag_N, bag_N, weight_N, delta)


def rows(
    layer: nn.Embedding | nn.EmbeddingBag,
    ids_N: Tensor,
    example_N: Tensor,
    source_N: Tensor,
    weight_N: Tensor | None,
    values_MD: Tensor,
) -> Rows:
    """The padding row has no gradient: its entries are dropped."""
    given = Rows(ids_N.long(), example_N, source_N, weight_N, values_MD, layer.weight.shape)
    if layer.padding_idx is None:
        return given
    kept_N = given.ids_N != layer.padding_idx
    return given if kept_N.all() else given.at(kept_N)


def argument(call: Call, position: int, name: str) -> Any:
    args, kwargs = call
    return args[position] if position < len(args) else kwargs.get(name)


def inner(x: Tensor) -> Tensor:
    """[B, N] or [B, …, N] as [B, T, N]."""
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


def inner_sum(x_BTN: Tensor) -> Tensor:
    return x_BTN.squeeze(1) if x_BTN.shape[1] == 1 else x_BTN.sum(1)


def wide(x: Tensor) -> Tensor:
    """Sums and norms are never taken in less than fp32 (rule 15)."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


SUPPORTED: dict[type[nn.Module], tuple[Callable[..., Given], set[str]]] = {
    nn.Linear: (linear, {"weight", "bias"}),
    nn.LayerNorm: (layer_norm, {"weight", "bias"}),
    nn.Embedding: (embedding, {"weight"}),
    nn.EmbeddingBag: (embedding_bag, {"weight"}),
    Bias: (bias, {"bias"}),
    Scale: (scale, {"scale"}),
}


def contributions(layer: nn.Module, delta: Tensor, call: Call) -> Given:
    return SUPPORTED[type(layer)][0](layer, wide(delta), call)


def check_supported(model: nn.Module) -> None:
    """Refuses by name every layer whose per-example norm is not known, or that mixes or remembers examples."""
    for name, layer in model.named_modules():
        reason = refusal(layer)
        if reason:
            raise InputError(f"layer '{name or 'model'}' ({type(layer).__name__}) {reason}")


def refusal(layer: nn.Module) -> str | None:
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return "mixes the examples of a batch, so no example's gradient can be bounded; use LayerNorm"
    if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:
        return "keeps running statistics of protected data; use LayerNorm"
    own = {name for name, parameter in layer._parameters.items() if parameter is not None}
    if own and not (type(layer) in SUPPORTED and own <= SUPPORTED[type(layer)][1]):
        known = ", ".join(sorted(kind.__name__ for kind in SUPPORTED))
        return f"owns parameters ({', '.join(sorted(own))}) whose per-example norm is not known; supported: {known}"
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        if layer.max_norm is not None:
            return "has max_norm, which changes rows that examples touch without noise; leave it out"
        if layer.scale_grad_by_freq:
            return "has scale_grad_by_freq, which mixes the examples of a batch; leave it out"
        if isinstance(layer, nn.EmbeddingBag) and layer.mode == "max":
            return "has mode 'max'; use 'sum' or 'mean'"
    return None
