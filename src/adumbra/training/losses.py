"""Losses, one number an example, and what they become where labels were randomised.

Every loss here is affine in the label up to a term without the model, so the debiased loss of 000 §4 is the same loss
at an unbiased estimate of the label: with p the probability that a label is kept,

    [L(1 − ŷ) − p ΣL(y')] / (1 − 2p) = L(ỹ)        ỹ = (ŷ − (1 − p)) / (2p − 1)

The estimate lies outside the labels' range, so the loss is unbounded below: a model that memorises examples drives it
to −∞. The label phase guards against that.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus

Loss = Callable[[Tensor, Tensor], Tensor]


def binary_cross_entropy(logit_B: Tensor, label_B: Tensor) -> Tensor:
    return softplus(logit_B) - label_B * logit_B


def poisson(log_mean_B: Tensor, count_B: Tensor) -> Tensor:
    """exp(f) − y f (002, eq. 1): the negative log-likelihood but for a term without the model."""
    return torch.exp(log_mean_B) - count_B * log_mean_B


def squared(value_B: Tensor, label_B: Tensor) -> Tensor:
    """f² − 2 y f: the squared error but for y²."""
    return value_B.square() - 2 * label_B * value_B


LOSSES: dict[str, Loss] = {"binary-cross-entropy": binary_cross_entropy, "poisson": poisson, "squared": squared}
SUITS = {"binary": "binary-cross-entropy", "count": "poisson", "real": "squared"}
"""The loss for each kind of label."""
