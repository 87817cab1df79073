"""How much of its most effort a table needs: ``effort=None``."""

import numpy as np
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

from numpyro_bnn.estimators.process import one_blas_thread

MAX_KERNEL_ROWS, MAX_TREE_ROWS = 500, 2000  # of the quick look
RIDGES = tuple(10.0**power for power in range(-4, 2))
NUM_TREES, MIN_ROWS_OF_LEAF, MAX_SPLIT_COLUMNS = 100, 2, 50
# What rows say of the function, and the effort from there on. On nine tables that say
# little, a quarter of the gradients scored as well as all of them. On three that say
# more than the last, it lost two to three tenths of a nat.
EFFORTS = ((0.0, 0.25), (1250.0, 0.5), (5000.0, 1.0))


def needed_effort(x: np.ndarray, y: np.ndarray) -> float:
    """The share of all gradients that chains around an ensemble need.

    The more the rows say of the function, the narrower is its posterior, and the
    shorter are the steps of a chain. N rows that explain a share R^2 of the targets say
    about N R^2 / (1 - R^2). R^2 is that of a quick look: of rows out of the bag of a
    random forest, or left out of a kernel ridge regression. Of classes it is the share
    of the errors of the most frequent one that the forest avoids.

    :param x: (N, D) standardized inputs.
    :param y: (N,) or (N, K) targets, or (N,) codes of classes. NaN are left out.

    >>> rng = np.random.default_rng(0)
    >>> x, noise = rng.normal(size=(2, 200, 1))
    >>> [needed_effort(x, np.sin(x) + sd * noise) for sd in (1.0, 0.2, 0.01)]
    [0.25, 0.5, 1.0]

    Classes, and columns, of which the look sees one value only say nothing:

    >>> rare = np.arange(10_000) == 7
    >>> needed_effort(x[np.arange(10_000) % 200], rare.astype(int))
    0.25
    >>> needed_effort(rare[:, None] * 1.0, rare * 1.0)
    0.25
    """
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    if y.dtype.kind != "f":
        information = len(x) * _odds(_explained_by_trees(x, y))
    else:
        information = 0.0
        for column in y.reshape(len(y), -1).T:
            known = np.isfinite(column)
            information = max(information, _information(x[known], column[known]))
    return max(effort for least, effort in EFFORTS if information >= least)


def _information(x: np.ndarray, y: np.ndarray) -> float:
    y = (y - y.mean()) / (y.std() or 1.0)
    with one_blas_thread():
        explained = max(_explained_by_kernel(x, y), _explained_by_trees(x, y))
    return len(y) * _odds(explained)


def _odds(share: float) -> float:
    share = min(max(share, 0.0), 1 - 1e-9)
    return share / (1 - share)


def _explained_by_kernel(x: np.ndarray, y: np.ndarray) -> float:
    """By each row from the others, with the best ridge."""
    x, y = x[:MAX_KERNEL_ROWS], y[:MAX_KERNEL_ROWS]
    if np.ptp(y) == 0 or not np.ptp(x, axis=0).any():
        return 0.0
    squares = np.sum(x**2, axis=1)
    distances = np.maximum(squares[:, None] + squares - 2 * x @ x.T, 0.0)
    typical = np.median(distances[distances > 0])
    values, vectors = np.linalg.eigh(np.exp(-0.5 * distances / typical))
    errors = []
    for ridge in RIDGES:
        inverse = 1 / (np.maximum(values, 0.0) + ridge)
        left_out = (vectors * inverse) @ (vectors.T @ y) / (vectors**2 @ inverse)
        errors.append(np.mean(left_out**2))
    return 1 - min(errors) / y.var()


def _explained_by_trees(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x[:MAX_TREE_ROWS], y[:MAX_TREE_ROWS]
    if np.ptp(y) == 0:
        return 0.0
    are_numbers = y.dtype.kind == "f"
    kind = RandomForestRegressor if are_numbers else RandomForestClassifier
    forest = kind(
        NUM_TREES,
        min_samples_leaf=MIN_ROWS_OF_LEAF,
        max_features=min(0.5, MAX_SPLIT_COLUMNS / x.shape[1]),
        oob_score=True,
        random_state=0,
    ).fit(x, y)
    if are_numbers:
        return forest.oob_score_
    wrong = 1 - np.unique(y, return_counts=True)[1].max() / len(y)
    return 1 - (1 - forest.oob_score_) / wrong
