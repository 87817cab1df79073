"""Results for tests of figures: it is known what they should show, and nothing is
fitted.
"""

from typing import Any

import numpy as np
from helpers import results
from numpy.typing import NDArray

SIGMA = 0.15
SAMPLE = ("chain", "draw", "data")


def example_results(
    num_points: int = 120, num_chains: int = 4, num_samples: int = 250, seed: int = 0
) -> Any:
    r"""Results like those of ``to_inference_data``, of a regression on fixed features;
    nothing is fitted.

    .. math:: y_n \sim N(\phi(x_n)^\top w, 0.15^2), \quad w \sim N(0, I)

    Gaussian bumps :math:`\phi`, 60 training points with a gap between -0.5 and 0.7,
    independent draws of the exact posterior, and ``num_points`` test points with
    targets.
    """
    rng = np.random.default_rng(seed)
    centers = np.linspace(-3.0, 3.0, 13)
    x = np.sort(
        np.concatenate([rng.uniform(-2.0, -0.5, 30), rng.uniform(0.7, 2.0, 30)])
    )
    x_new = np.linspace(-2.5, 2.5, num_points)
    y, y_new = (
        _truth(inputs) + SIGMA * rng.normal(size=inputs.size) for inputs in (x, x_new)
    )
    phi, phi_new = _bumps(x, centers), _bumps(x_new, centers)
    covariance = np.linalg.inv(phi.T @ phi / SIGMA**2 + np.eye(centers.size))
    root = np.linalg.cholesky(covariance)
    w = (
        covariance @ phi.T @ y / SIGMA**2
        + rng.normal(size=(num_chains, num_samples, centers.size)) @ root.T
    )
    groups = {"posterior": {"w": (("chain", "draw", "w_dim_0"), w)}}
    for name, features in (("posterior_predictive", phi), ("predictions", phi_new)):
        mean = w @ features.T
        draws = mean + SIGMA * rng.normal(size=mean.shape)
        groups[name] = {"y": (SAMPLE, draws), "y_mean": (SAMPLE, mean)}
    data = ("data",)
    groups["observed_data"] = {"y": (data, y)}
    groups["constant_data"] = {"x": (data, x)}
    groups["predictions_constant_data"] = {"x": (data, x_new), "y": (data, y_new)}
    return results(groups)


def example_classes(
    num_points: int = 500, num_classes: int = 3, spread: float = 1.0, seed: int = 0
) -> Any:
    r"""Results like those of ``to_inference_data``, of a classifier that is calibrated
    by construction.

    .. math:: l_s = m + \sigma e_s, \quad m \sim N(0, 4), \quad e_s \sim N(0, 1), \quad
              s = 0, 1, ..., S

    Labels are drawn with the logits :math:`l_0`, which no draw knows; :math:`l_1, ...,
    l_S` are the draws, in two chains of 100.
    """
    rng = np.random.default_rng(seed)
    middle = 2.0 * rng.normal(size=(num_points, num_classes))
    logits = middle + spread * rng.normal(size=(1 + 200, num_points, num_classes))
    # The largest of logits with Gumbel noise is a draw of the label.
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=-1)
    odds = np.exp(logits[1:])
    probs = (odds / odds.sum(axis=-1, keepdims=True)).reshape(
        2, 100, num_points, num_classes
    )
    drawn = {"y": (SAMPLE, labels[1:].reshape(2, 100, num_points))}
    groups = {
        "predictions": {**drawn, "y_probs": ((*SAMPLE, "y_probs_dim_1"), probs)},
        "predictions_constant_data": {"y": (("data",), labels[0])},
    }
    return results(groups)


def _truth(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sin(2 * x) + 0.3 * x


def _bumps(x: NDArray[np.float64], centers: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(-0.5 * ((x[:, None] - centers) / 0.5) ** 2)
