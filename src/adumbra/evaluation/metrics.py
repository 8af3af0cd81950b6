"""Metrics as pure functions of a `Tally`, a state that batches and parts of a log add up to.

A metric that is not defined is None: no rows; AUC and normalised entropy where all labels are of one class;
calibration where the mean label is 0.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from adumbra.errors import InputError, WorkError
from adumbra.evaluation.histogram import LIMIT, Histogram

Kind = Literal["binary", "count", "real"]
"""What a label is; the recipe's `label.kind`."""
_ROWS, _POSITIVES, _LABELS, _PREDICTIONS = range(4)


def predictions(logits: np.ndarray, kind: Kind) -> np.ndarray:
    """What the logits predict: a probability (binary), a mean (count), the value itself (real)."""
    logits = np.asarray(logits, np.float64)
    if kind == "binary":
        small = np.exp(-np.abs(logits))
        return np.where(logits >= 0, 1.0, small) / (1 + small)
    with np.errstate(over="ignore"):
        return np.exp(logits) if kind == "count" else logits


def losses(logits: np.ndarray, labels: np.ndarray, kind: Kind) -> np.ndarray:
    """Each row's loss: log loss (binary), Poisson log loss exp(f) - y f (count; 002 eq. 1), squared error (real)."""
    logits, labels = np.asarray(logits, np.float64), np.asarray(labels, np.float64)
    with np.errstate(over="ignore"):
        match kind:
            case "binary":  # log(1 + exp(f)) - y f
                return np.maximum(logits, 0) - labels * logits + np.log1p(np.exp(-np.abs(logits)))
            case "count":
                return np.exp(logits) - labels * logits
            case "real":
                return np.square(logits - labels)


@dataclass(frozen=True)
class Tally:
    """What a part of a log adds to every metric: `Tally.of(…) + Tally.of(…)` is the tally of both parts."""

    kind: Kind
    loss: float
    histogram: Histogram = field(repr=False)

    @staticmethod
    def of(logits: Any, labels: Any, kind: Kind = "binary", limit: int = LIMIT) -> "Tally":
        """Of one batch; arrays, lists or CPU tensors. AUC takes the logits as float32, the rest as float64."""
        if kind not in get_args(Kind):
            raise InputError(f"a label is of kind {', '.join(get_args(Kind))}, not '{kind}'")
        logits, labels = np.asarray(logits, np.float64), np.asarray(labels, np.float64)
        if logits.ndim != 1 or logits.shape != labels.shape:
            raise InputError(
                f"logits of shape {logits.shape} and labels of {labels.shape}: one of each is needed a row"
            )
        if not np.isfinite(logits).all():
            wrong = np.count_nonzero(~np.isfinite(logits))
            raise WorkError(f"the model's output is NaN or infinite for {wrong:,} of {len(logits):,} rows: it diverged")
        _check_labels(labels, kind)
        ones = np.ones(len(labels))
        summands = [ones, (labels > 0).astype(np.float64), labels, predictions(logits, kind)]
        return Tally(kind, float(losses(logits, labels, kind).sum()), Histogram.of(logits, summands, limit))

    @staticmethod
    def empty(kind: Kind = "binary", limit: int = LIMIT) -> "Tally":
        return Tally.of([], [], kind, limit)

    def __add__(self, other: "Tally") -> "Tally":
        if self.kind != other.kind:
            raise InputError(f"tallies of {self.kind} and of {other.kind} labels do not add up")
        return Tally(self.kind, self.loss + other.loss, self.histogram + other.histogram)

    @property
    def rows(self) -> int:
        return int(self.histogram.sums[_ROWS].sum())

    @property
    def positives(self) -> int:
        """How many labels are above 0."""
        return int(self.histogram.sums[_POSITIVES].sum())

    @property
    def mean_label(self) -> float | None:
        return self._mean(_LABELS)

    @property
    def mean_prediction(self) -> float | None:
        return self._mean(_PREDICTIONS)

    def _mean(self, which: int) -> float | None:
        return float(self.histogram.sums[which].sum()) / self.rows if self.rows else None


def _check_labels(labels: np.ndarray, kind: Kind) -> None:
    if kind == "binary" and not ((labels == 0) | (labels == 1)).all():
        raise InputError("labels of kind binary are 0 or 1, and here are others; what does the recipe's label say?")
    if kind == "count" and not ((labels >= 0) & (labels == np.floor(labels)) & np.isfinite(labels)).all():
        raise InputError("labels of kind count are 0, 1, 2, …, and here are others; what does the recipe's label say?")
    if kind == "real" and not np.isfinite(labels).all():
        raise InputError("labels of kind real are finite, and here are others")


def auc(tally: Tally) -> float | None:
    """The probability that a row with a label above 0 has a higher logit than one with 0; a tie counts half."""
    if tally.kind == "real" or tally.positives in (0, tally.rows):
        return None
    sums = tally.histogram.sums
    positive = sums[_POSITIVES]
    zero = sums[_ROWS] - positive
    below = np.cumsum(zero) - zero / 2
    return float(positive @ below / (positive.sum() * zero.sum()))


def auc_loss(tally: Tally) -> float | None:
    """1 - AUC."""
    return None if (value := auc(tally)) is None else 1 - value


def mean_loss(tally: Tally) -> float | None:
    return tally.loss / tally.rows if tally.rows else None


def normalized_entropy(tally: Tally) -> float | None:
    """The log loss over that of the best constant: the entropy of the share of positives."""
    loss, rate = mean_loss(tally), tally.mean_label
    if tally.kind != "binary" or loss is None or rate is None or not 0 < rate < 1:
        return None
    return float(loss / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def calibration(tally: Tally) -> float | None:
    """Mean prediction / mean label."""
    prediction, label = tally.mean_prediction, tally.mean_label
    return prediction / label if prediction is not None and label else None


def summary(tally: Tally) -> dict[str, int | float | None]:
    """What `evaluate --json` says. For counts AUC is that of y > 0; a number beyond all bounds is null, as JSON has
    none."""
    loss = mean_loss(tally)
    values = {
        "auc": auc(tally),
        "auc_loss": auc_loss(tally),
        "log_loss": loss if tally.kind == "binary" else None,
        "normalized_entropy": normalized_entropy(tally),
        "calibration": calibration(tally),
        "mean_prediction": tally.mean_prediction,
        "mean_label": tally.mean_label,
        **({"poisson_log_loss": loss} if tally.kind == "count" else {}),
        **({"squared_error": loss} if tally.kind == "real" else {}),
    }
    return {"rows": tally.rows} | {key: v if v is not None and np.isfinite(v) else None for key, v in values.items()}


def reliability(tally: Tally, bins: int = 20) -> list[dict[str, float]]:
    """Rows sorted by their logit in `bins` equal parts: mean prediction and mean label of each. Rows of one logit stay
    together, so parts may be unequal, or fewer."""
    if not tally.rows:
        return []
    sums = tally.histogram.sums
    middle = np.cumsum(sums[_ROWS]) - sums[_ROWS] / 2
    part = np.minimum(middle / tally.rows * bins, bins - 1).astype(np.int64)
    starts = np.flatnonzero(np.diff(part, prepend=-1))
    return [
        {"rows": int(rows), "prediction": float(prediction / rows), "label": float(label / rows)}
        for rows, _, label, prediction in np.add.reduceat(sums, starts, axis=1).T
    ]


def relative_auc_loss(auc: float | None, baseline: float | None) -> float | None:
    """(1 - AUC) / (1 - AUC of the baseline) - 1 (000 §5.4); None where either is missing or the baseline is perfect."""
    return None if auc is None or baseline is None or baseline == 1 else (1 - auc) / (1 - baseline) - 1


def rank_auc(scores: Any, positive: Any) -> float | None:
    """AUC by ranks, in float64 and whole: for what fits in memory."""
    scores, positive = np.asarray(scores, np.float64), np.asarray(positive) > 0
    if np.isnan(scores).any():
        raise WorkError(f"{np.count_nonzero(np.isnan(scores)):,} of {len(scores):,} scores are NaN")
    zeros, ones = np.sort(scores[~positive]), scores[positive]
    if not len(zeros) or not len(ones):
        return None
    wins = np.searchsorted(zeros, ones, "left").sum() + np.searchsorted(zeros, ones, "right").sum()
    return float(wins / (2 * len(zeros) * len(ones)))
