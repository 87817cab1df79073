"""Convergence of the function a network computes, rather than of its weights."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_bnn import _arviz, _checks
from numpyro_bnn._checks import argument_error

__all__ = ["FunctionSpace", "function_space"]


class FunctionSpace(NamedTuple):
    """Convergence of predictions, one value per input (and output).

    :param rhat: (N, ...) rank-normalized split R-hat.
    :param ess_bulk: (N, ...) bulk effective sample size.
    :param ess_tail: (N, ...) tail effective sample size.
    """

    rhat: NDArray[np.float64]
    ess_bulk: NDArray[np.float64]
    ess_tail: NDArray[np.float64]

    @property
    def max_rhat(self) -> float:
        """Largest R-hat of the inputs where it is defined (NaN if it is nowhere)."""
        return max(self.rhat[np.isfinite(self.rhat) | np.isposinf(self.rhat)].flat, default=float("nan"))

    @property
    def min_ess(self) -> float:
        """Smallest effective sample size, bulk or tail, where it is defined (NaN if it is nowhere)."""
        both = np.concatenate([self.ess_bulk.ravel(), self.ess_tail.ravel()])
        return min(both[~np.isnan(both)].flat, default=float("nan"))


def function_space(draws: ArrayLike) -> FunctionSpace:
    """R-hat and effective sample size of predictions at given inputs.

    Weights that differ by a symmetry of the network, such as two hidden units exchanged, give the same function.
    Chains that sit in different copies of a mode therefore look unmixed by their weights, and mixed here.

    :param draws: (C, S, N, ...) draws of predictions, chains first, e.g. ``idata.predictions["y_mean"].values``.
    :return: arrays (N, ...); NaN where a prediction never changes. With one chain, R-hat compares its halves.
    :raises ValueError: for fewer than three axes, NaN or infinity (a diverged chain).

    Reference: Vehtari et al. (2021), *Rank-normalization, folding, and localization*; for functions
    Izmailov et al. (2021), *What are Bayesian neural network posteriors really like?*

    **Example**

    >>> import numpy as np
    >>> draws = np.random.default_rng(0).normal(size=(4, 250, 3))
    >>> draws[0, :, 2] += 3.0
    >>> result = function_space(draws)
    >>> (result.rhat < 1.05).tolist(), bool(result.max_rhat > 1.1)
    ([True, True, False], True)
    """
    array = np.asarray(draws, dtype=np.float64)
    if array.ndim < 3:
        raise argument_error(
            "function_space",
            "draws",
            f"shape {array.shape}",
            "Pass predictions shaped (C, S, N, ...), chains first.",
        )
    _checks.check_finite("function_space", "draws", array)
    return FunctionSpace(_arviz.rhat(array), _arviz.ess(array, "bulk"), _arviz.ess(array, "tail"))
