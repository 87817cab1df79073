"""Refuse arrays that the indices of a plate do not fit: JAX repeats the last row, and surplus rows are never read."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn._checks import argument_error
from numpyro_bnn._jaxprs import indexed_lengths
from numpyro_bnn.program.reading import Reading


def check_row_lengths(call: str, model: Callable, args: tuple, kwargs: Mapping[str, Any] | None) -> None:
    """Refuse an argument that a plate indexes and that has more or fewer rows than the plate.

    Only a model whose arguments have different lengths is read.

    >>> import numpyro, numpyro.distributions as dist
    >>> def model(x, y):
    ...     with numpyro.plate("data", len(x)) as i:
    ...         numpyro.sample("y", dist.Normal(x[i], 1.0), obs=y[i])
    >>> check_row_lengths("guides.fit", model, (jnp.ones(3), jnp.ones(4)), None)
    Traceback (most recent call last):
    ValueError: guides.fit: argument `args` got an array of 4 rows that plate 'data' of size 3 indexes. ...
    """
    arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if hasattr(leaf, "dtype") and np.ndim(leaf)]
    lengths = {np.shape(leaf)[0] for leaf in arrays}
    if len(lengths) < 2:
        return
    reading = Reading(model, args, kwargs)

    def densities(indices: Mapping[str, jax.Array]) -> list[jax.Array]:
        sites = reading.at(indices).values()
        return [site["fn"].log_prob(site["value"]) for site in sites if site["type"] == "sample"]

    for name, site in reading.sites.items():
        if site["type"] == "plate":
            size = site["args"][0]
            reached = indexed_lengths(lambda i, at=name: densities({at: i}), jnp.arange(size))  # type: ignore[misc]
            unlike = sorted(reached & lengths - {size})
            if unlike:
                got = f"an array of {unlike[0]} rows that plate {name!r} of size {size} indexes"
                raise argument_error(call, "args", got, "Pass one row per data point in each array.")
