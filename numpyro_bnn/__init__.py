"""Bayesian neural networks for NumPyro: networks, priors, kernels, guides, results for
ArviZ.
"""

from importlib import import_module
from typing import Any

from numpyro_bnn import (
    datasets,
    guides,
    infer,
    infinite,
    metrics,
    models,
    moments,
    nn,
    plots,
    priors,
    results,
    runs,
    symmetry,
)
from numpyro_bnn.networks import random_network
from numpyro_bnn.results import predict, to_inference_data

__version__ = "0.2.0"

__all__ = [
    "random_network",
    "to_inference_data",
    "predict",
    "nn",
    "priors",
    "infer",
    "symmetry",
    "guides",
    "infinite",
    "moments",
    "models",
    "metrics",
    "plots",
    "results",
    "runs",
    "datasets",
]


def __getattr__(name: str) -> Any:
    if name == "estimators":  # the only room that needs scikit-learn
        return import_module("numpyro_bnn.estimators")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
