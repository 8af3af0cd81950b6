"""Per-example clipping without per-example gradients, from one forward and one backward.

The forward records each supported layer's inputs a and *taps* its output: the backward then stops at the tap for the
output gradient δ, and never computes a parameter's gradient. From (a, δ) follow the exact norms, and from them

    Σ_groups min(1, C / |g|) g        g = (Σ_{i in group} gradient_i) / divisor

No gradient can pass by the clip: parameters require no gradient while their own layer runs, and whatever else reaches
one (a functional call, a penalty in the loss) is found in the same backward and refused.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adumbra.errors import InputError
from adumbra.training.contributions import Contribution, Groups, RowSums
from adumbra.training.layers import Call, check_supported, contributions

Loss = Callable[[Any, Tensor], Tensor]  # (outputs, labels) -> [B]: reduction="none"
Names = dict[Tensor, str]  # the trainable parameters
Sums = dict[str, Tensor | RowSums]  # by parameter name; tables as distinct rows
SLACK = 5e-7  # more than what fp32 rounds off a norm: clipped norms stay at or below C


class Clipper:
    """Clipped sums of a model's gradients.

    Guarantee: whatever the data, replacing, adding or removing the examples of one group changes the returned sum by
    what that group contributed, and no group contributes more than `clip_norm` in L2 over all trainable parameters
    together (to fp32 rounding of the sum itself). The sums hold no noise: they are not private.

    The caller must ensure that the model treats examples apart (what flows through gradients is checked on the first
    batch; statistics of a batch that are detached are not), and that groups are whole.

    `divisor`: the clipped thing is a group's summed gradient over this constant. 1 for privacy units (rule 12), B_μ for
    microbatches (rule 11). Parameters with `requires_grad=False` get no gradient, norm or clip.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, clip_norm: float, divisor: int = 1) -> None:
        if not (math.isfinite(clip_norm) and clip_norm > 0):
            raise InputError(f"clip norm is {clip_norm}; it must be a number above 0")
        if divisor < 1:
            raise InputError(f"divisor is {divisor}; it must be at least 1")
        check_supported(model)
        self.model = model
        self.loss = loss
        self.clip_norm = clip_norm
        self.divisor = divisor
        self._examples_are_apart = False

    def __call__(self, inputs: tuple[Any, ...], labels: Tensor, groups: Tensor | int | None = None) -> Sums:
        """The clipped sum of one physical batch. `groups`: None (each example), k (k in a row), or an id an example."""
        names = trainable(self.model)
        partition = Groups.of(len(labels), groups, labels.device)
        sums = self._zeros(names)
        if not len(labels):
            return sums
        uses = self._forward_backward(inputs, labels, names)
        with torch.no_grad():
            given = gather(uses, names, partition)
            square_G = sum_squares(given, partition)
            factor_G = clip_factors(square_G, self.clip_norm, self.divisor)
            bad_G = ~square_G.isfinite()
            if bad_G.any():
                bad_B = bad_G[partition.group_B]
                given = {name: contribution.without(bad_B) for name, contribution in given.items()}
            factor_B = factor_G[partition.group_B]
            with full_precision():
                sums |= {name: contribution.clipped_sum(factor_B) for name, contribution in given.items()}
        return sums

    def accumulate(self, batches: Iterable[tuple[tuple[Any, ...], Tensor, Tensor | int | None]]) -> Sums:
        """The clipped sum of a logical batch that comes as physical ones: (inputs, labels, groups) each.

        A group lies within one physical batch; a group id that comes back is refused.
        """
        total: Sums | None = None
        seen: set[int] = set()
        for inputs, labels, groups in batches:
            if isinstance(groups, Tensor):
                ids = set(groups.unique().tolist())
                if ids & seen:
                    raise InputError("a group is split over two physical batches: its norm would not be whole")
                seen |= ids
            sums = self(inputs, labels, groups)
            total = sums if total is None else {name: add(total[name], part) for name, part in sums.items()}
        return self._zeros(trainable(self.model)) if total is None else total

    def _zeros(self, names: Names) -> Sums:
        tables = {layer.weight for layer in self.model.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))}
        return {name: no_rows(p) if p in tables else torch.zeros_like(p) for p, name in names.items()}

    def _forward_backward(self, inputs: tuple[Any, ...], labels: Tensor, names: Names) -> list["Use"]:
        with torch.enable_grad(), recorded(self.model, names) as (uses, anchor):
            outputs = self.model(*inputs)
            losses = self.loss(outputs, labels)
            if losses.shape[:1] != labels.shape[:1] or losses.numel() != len(labels):
                raise InputError(
                    f"the loss has shape {tuple(losses.shape)} for {len(labels)} examples; "
                    'it must give one number an example (reduction="none")'
                )
            if not losses.requires_grad:
                return []
            losses = losses.reshape(-1)
            if not self._examples_are_apart and len(labels) > 1:
                check_apart(losses, anchor, uses)
                self._examples_are_apart = True
            _, *stray = torch.autograd.grad(losses, [anchor, *names], torch.ones_like(losses), allow_unused=True)
        for name, gradient in zip(names.values(), stray, strict=True):
            if gradient is not None:
                raise InputError(
                    f"parameter '{name}' reaches the loss outside its own layer's call, where its gradient "
                    "cannot be clipped: call the layer itself, and keep penalties on parameters out of the loss"
                )
        return [use for use in uses if use.delta is not None]


def clipped_gradients(
    model: nn.Module,
    inputs: tuple[Any, ...],
    labels: Tensor,
    *,
    clip_norm: float,
    loss: Loss,
    groups: Tensor | int | None = None,
    divisor: int = 1,
) -> dict[str, Tensor]:
    """The *un-noised* clipped sum of per-example gradients, dense, by parameter name: NOT private.

    For tests and studies only: it is computed from protected data and protects nothing until noise is added.
    `inputs` are the forward's arguments, `loss(outputs, labels)` gives one number an example (reduction="none").
    """
    sums = Clipper(model, loss, clip_norm=clip_norm, divisor=divisor)(inputs, labels, groups)
    return {name: part.dense() if isinstance(part, RowSums) else part for name, part in sums.items()}


@dataclass(eq=False)
class Use:
    """One call of a supported layer."""

    layer: nn.Module
    call: Call
    versions: list[int]
    delta: Tensor | None = None


class Tap(torch.autograd.Function):
    """The identity, in place; its backward keeps δ. `anchor` makes the output require a gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, use: Use) -> Tensor:  # noqa: ARG004
        ctx.use = use
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.use.delta = delta
        return delta, None, None


@contextmanager
def recorded(model: nn.Module, names: Names) -> Iterator[tuple[list[Use], Tensor]]:
    """Within, each call of a layer that owns trainable parameters is recorded and tapped."""
    uses: list[Use] = []
    anchor = torch.zeros((), requires_grad=True)

    def before(layer: nn.Module, args: Any) -> None:  # noqa: ARG001
        for parameter in layer.parameters(recurse=False):
            parameter.requires_grad_(False)

    def after(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        for parameter in layer.parameters(recurse=False):
            parameter.requires_grad_(parameter in names)
        if not torch.is_grad_enabled():
            return output
        use = Use(layer, (args, kwargs), versions((args, kwargs)))
        uses.append(use)
        return Tap.apply(output, anchor, use)  # pyright: ignore[reportReturnType]

    layers = [layer for layer in model.modules() if any(p in names for p in layer.parameters(recurse=False))]
    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    hooks += [layer.register_forward_hook(after, with_kwargs=True, prepend=True) for layer in layers]
    buffers = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
    try:
        yield uses, anchor
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in names:
            parameter.requires_grad_(True)
    for name, buffer in model.named_buffers():
        if name not in buffers or buffers[name][0] is not buffer or buffers[name][1] != buffer._version:
            raise InputError(f"the forward changes buffer '{name}', which would leave training without noise")


def trainable(model: nn.Module) -> Names:
    return {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}


def versions(call: Call) -> list[int]:
    """Tensors count their changes in place: a layer's input must still be what the layer saw."""
    args, kwargs = call
    return [x._version for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


def check_apart(losses: Tensor, anchor: Tensor, uses: list[Use]) -> None:
    """The losses of the even examples may send nothing to the odd ones."""
    even_B = torch.zeros_like(losses)
    even_B[::2] = 1
    torch.autograd.grad(losses, anchor, even_B, retain_graph=True, allow_unused=True)
    for use in uses:
        if use.delta is not None and len(use.delta) == len(losses) and (use.delta[1::2].abs() > 0).any():
            raise InputError(
                f"the loss of one example depends on other examples of the batch (seen at a {type(use.layer).__name__})"
                ": no example's gradient can be bounded; the first dimension must be the batch everywhere"
            )
        use.delta = None


def gather(uses: list[Use], names: Names, groups: Groups) -> dict[str, Contribution]:
    """What each trainable parameter was given, all its uses together (tied tables and repeated calls included)."""
    parts: dict[str, list[Contribution]] = {}
    for use in uses:
        assert use.delta is not None
        kind = type(use.layer).__name__
        if use.delta.dim() == 0 or len(use.delta) != len(groups.group_B):
            raise InputError(
                f"a {kind} gave an output of shape {tuple(use.delta.shape)} for {len(groups.group_B)} examples: "
                "the first dimension must be the batch"
            )
        if versions(use.call) != use.versions:
            raise InputError(f"the input of a {kind} is changed in place after it was used; change a copy")
        for parameter, part in contributions(use.layer, use.delta, use.call):
            if parameter is not None and parameter in names:
                parts.setdefault(names[parameter], []).append(part)
    for name, given in parts.items():
        if len({type(part) for part in given}) > 1:
            raise InputError(f"parameter '{name}' is shared by layers of different kinds, whose norms do not add up")
    return {name: type(given[0]).merge(given, groups) for name, given in parts.items()}


def sum_squares(given: Mapping[str, Contribution], groups: Groups) -> Tensor:
    """|Σ_{i in group} gradient_i|² over all parameters, [G]."""
    square_G = torch.zeros(groups.count, dtype=torch.float64, device=groups.group_B.device)
    for contribution in given.values():
        square_G += contribution.square_norms(groups)
    return square_G


def clip_factors(square_G: Tensor, clip_norm: float, divisor: int) -> Tensor:
    """min(1, C / |g|) / divisor for g = (summed gradient) / divisor; 0 where it is not finite (rule 14)."""
    norm_G = square_G.sqrt() / divisor
    factor_G = (clip_norm / (norm_G * (1 + SLACK))).clamp(max=1) / divisor
    return torch.where(square_G.isfinite(), factor_G, 0).float()


def add(a: Tensor | RowSums, b: Tensor | RowSums) -> Tensor | RowSums:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        return a + b
    return a.plus(b)


def no_rows(table: Tensor) -> RowSums:
    return RowSums(
        torch.zeros(0, dtype=torch.long, device=table.device), table.new_zeros(0, table.shape[1]).detach(), table.shape
    )


@contextmanager
def full_precision() -> Iterator[None]:
    """Rule 15: a product that rounds its factors after the norm was taken could exceed C."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
