"""Training of ad-prediction models when some features are public and the rest, with the label, are protected.

import adumbra as ad

schema = ad.Schema.from_toml("recipe.toml")
data = ad.prepare(schema, "train.csv", out="store")
run = ad.fit(data, ad.Hybrid(epsilon=8, split=0.25), model=ad.FactorizationMachine(dim=32))
print(run.evaluate("test"), run.statement)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adumbra.api import (
        DNN,
        FFN,
        MLP,
        FactorizationMachine,
        Hybrid,
        LabelDP,
        Logistic,
        NonPrivate,
        Run,
        Schema,
        Store,
        fit,
        prepare,
    )
    from adumbra.api import DPSGD as DPSGD
    from adumbra.training.clip import clipped_gradients

__all__ = [
    "DNN",
    "DPSGD",
    "FFN",
    "MLP",
    "FactorizationMachine",
    "Hybrid",
    "LabelDP",
    "Logistic",
    "NonPrivate",
    "Run",
    "Schema",
    "Store",
    "clipped_gradients",
    "fit",
    "prepare",
]


def __getattr__(name: str) -> Any:
    """What the package offers is imported when it is first asked for: `import adumbra` costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'adumbra' has no attribute '{name}'")
    if name == "clipped_gradients":
        from adumbra.training.clip import clipped_gradients

        return clipped_gradients
    from adumbra import api

    return getattr(api, name)
