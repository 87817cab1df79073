"""How much of the targets a result explains at the training rows, and how much a linear
model does.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from numpyro_bnn.metrics._inputs import spread

# At most so many rows, and draws of a mean, are read.
ROWS, DRAWS = 500, 100
# A linear model is fitted to at least so many rows for each of its coefficients.
ROWS_PER_COEFFICIENT = 3


class Losses(NamedTuple):
    """Of one observed site at some rows.

    :param rows: (n,) positions in the data; ``targets``: (n, ...) what was observed.
    :param by_chain: (C, n) squared errors of each chain's mean, or errors (0, 1) of its
        most probable class.
    :param of_constant: (n,) the same of the mean, or of the most frequent class.
    :param classes: whether the targets are classes.
    """

    rows: np.ndarray
    targets: np.ndarray
    by_chain: np.ndarray
    of_constant: np.ndarray
    classes: bool

    def share(self, losses: np.ndarray) -> np.ndarray:
        """How much is explained where losses (..., n) are left: 1 for all, 0 for as
        much as by a constant.
        """
        with np.errstate(all="ignore"):
            return 1 - losses.mean(axis=-1) / self.of_constant.mean()


class Explained(NamedTuple):
    """How much of an observed site is explained at the training rows.

    :param share: by each chain, as :meth:`Losses.share`.
    :param line: by a linear model, each row predicted from the others; ``None`` where
        there is none.
    :param behind_line: how much less than it each chain explains, two standard errors
        taken off.
    """

    share: Sequence[float]
    line: float | None
    behind_line: Sequence[float]

    @classmethod
    def of(cls, losses: Losses, tables: Sequence[np.ndarray]) -> "Explained":
        """From losses, and inputs (N, D) of the data."""
        share = losses.share(losses.by_chain).tolist()
        of_line = None
        if tables:
            x = np.column_stack(tables)[losses.rows].astype(np.float64)
            if np.isfinite(x).all():
                of_line = losses_of_linear_model(x, losses.targets, losses.classes)
        if of_line is None:
            return cls(share, None, [np.nan] * len(share))
        with np.errstate(all="ignore"):
            more = (losses.by_chain - of_line) / losses.of_constant.mean()
        error = more.std(axis=1, ddof=1) / more.shape[1] ** 0.5
        behind = more.mean(axis=1) - 2 * error
        return cls(share, float(losses.share(of_line)), behind.tolist())


def losses_by_site(
    means: Mapping[str, np.ndarray], observed: Mapping[str, np.ndarray]
) -> dict[str, Losses]:
    """The losses of each site whose draws of means, or of class probabilities, fit its
    targets.

    :param means: (C, S, N, ...) by variable, ``<site>_mean`` or ``<site>_probs``.
    :param observed: targets by site; rows that are not finite are left out.
    """
    losses = {}
    for name, draws in means.items():
        site, suffix = name.rsplit("_", 1)
        classes = suffix == "probs"
        y = observed.get(site)
        if y is None or not y.ndim or draws.shape[2 : draws.ndim - classes] != y.shape:
            continue
        finite = np.flatnonzero(np.isfinite(y).reshape(len(y), -1).all(axis=1))
        if not finite.size:
            continue
        rows = finite[spread(len(finite), ROWS)]
        mean = draws[:, spread(draws.shape[1], DRAWS)[:, None], rows].mean(
            axis=1, dtype=np.float64
        )
        targets = y[rows]
        if classes:
            labels, counts = np.unique(targets, return_counts=True)
            wrong = mean.argmax(axis=-1) != targets
            wrong_constant = targets != labels[counts.argmax()]
        else:
            wrong = (mean - targets) ** 2
            center = targets.mean(axis=0, dtype=np.float64)
            wrong_constant = (targets - center) ** 2
        losses[site] = Losses(
            rows=rows,
            targets=targets,
            by_chain=wrong.reshape(len(wrong), len(rows), -1).mean(axis=2),
            of_constant=wrong_constant.reshape(len(rows), -1).mean(axis=1),
            classes=classes,
        )
    return losses


def losses_of_linear_model(
    x: np.ndarray, y: np.ndarray, classes: bool
) -> np.ndarray | None:
    """Losses (n,) of least squares on inputs x (n, D), each row predicted from all
    others; ``None`` for fewer than three rows for each coefficient.

    With the leverage h of a row the residual that it has when it is left out is
    (y - fitted) / (1 - h).
    """
    targets = y.reshape(len(y), -1).astype(np.float64)
    if classes:
        targets = (y.reshape(-1, 1) == np.unique(y)).astype(np.float64)
    sd = x.std(axis=0)
    scaled = (x - x.mean(axis=0)) / np.where(sd > 0, sd, 1.0)
    design = np.column_stack([np.ones(len(x)), scaled])
    basis, singular, _ = np.linalg.svd(design, full_matrices=False)
    basis = basis[:, singular > 1e-6 * singular[0]]
    if basis.shape[1] * ROWS_PER_COEFFICIENT > len(x):
        return None
    leverage = (basis**2).sum(axis=1, keepdims=True)
    residual = targets - basis @ (basis.T @ targets)
    left_out = residual / np.maximum(1 - leverage, 1e-6)
    if classes:
        scores = targets - left_out
        return (scores.argmax(axis=1) != targets.argmax(axis=1)).astype(np.float64)
    return (left_out**2).mean(axis=1)
