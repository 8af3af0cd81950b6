"""The factor on the base learning rate at each step."""

import math


def factor(kind: str, step: int, steps: int, warmup: float = 0.0) -> float:
    """`cosine` falls from 1 to 0 (Loshchilov and Hutter 2017); `warmup` is the share of steps that rise to it."""
    rising = warmup * steps
    if step < rising:
        return (step + 1) / rising
    if kind == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1.0, steps - rising)))
