"""How far draws of a classifier disagree before the softmax, where certain predictions still differ."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_bnn import _checks
from numpyro_bnn._checks import argument_error

__all__ = ["relative_logit_variance"]


def relative_logit_variance(logits: ArrayLike) -> NDArray[np.float64]:
    r"""Variance of the logits over draws of the weights, relative to the square of their mean.

    .. math:: \frac{\frac1S \sum_s |c_s - \bar c|^2}{|\bar c|^2}, \qquad
        c_{sk} = l_{sk} - \frac1K \sum_j l_{sj}, \quad \bar c = \frac1S \sum_s c_s

    A softmax saturates: where all draws are sure of a class, entropies and mutual information are near 0 however
    much the draws differ. Logits do not, and this ratio is free of their scale and of the shift common to all
    classes.

    :param logits: (S, N, K) or (C, S, N, K) draws of logits, any shift of all K of a row being the same prediction.
    :return: (N,) ratios; a score for :func:`auroc`. Infinite where the mean logits are all equal and draws differ.
    :raises ValueError: for other ranks, a single draw or class, NaN or infinity.

    **Example**

    >>> draws = [[[2.0, 0.0], [1.0, 0.0]], [[2.0, 0.0], [3.0, 0.0]]]
    >>> relative_logit_variance(draws).tolist()
    [0.0, 0.25]
    """
    call, array = "relative_logit_variance", np.asarray(logits, dtype=np.float64)
    if array.ndim not in (3, 4):
        raise argument_error(
            call, "logits", f"shape {array.shape}", "Pass logits shaped (S, N, K) or (C, S, N, K)."
        )
    draws = array.reshape(-1, *array.shape[-2:])
    if min(draws.shape[0], draws.shape[2]) < 2 or draws.shape[1] == 0:
        raise argument_error(
            call, "logits", f"shape {array.shape}", "Pass at least two draws, a row and two classes."
        )
    _checks.check_finite(call, "logits", array)
    centered = draws - draws.mean(axis=-1, keepdims=True)
    variance, square = centered.var(axis=0).sum(axis=-1), (centered.mean(axis=0) ** 2).sum(axis=-1)
    with np.errstate(divide="ignore"):
        return np.divide(variance, square, out=np.zeros_like(variance), where=variance > 0)
