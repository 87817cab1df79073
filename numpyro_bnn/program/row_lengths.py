"""Refuse arrays that the indices of a plate do not fit: JAX repeats the last row, and surplus rows are never read."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import Messenger

from numpyro_bnn._checks import argument_error
from numpyro_bnn._jaxprs import indexed_lengths
from numpyro_bnn.program.compiled import NEEDS_VALUES
from numpyro_bnn.program.plates import prior_trace, random_indices


def check_plates(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Refuse subsample sizes that are no counts of rows, by one reading of the model."""
    with suppress(*NEEDS_VALUES):
        jax.eval_shape(lambda: [None for _ in prior_trace(random_indices(model), 0, args, kwargs)])


class _given_indices(Messenger):
    """Run plates on these indices, or on all of their own, and note their sizes."""

    def __init__(self, fn: Callable, indices: Mapping[str, jax.Array], sizes: dict[str, int]) -> None:
        self.indices, self.sizes = indices, sizes
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            size = self.sizes[msg["name"]] = msg["args"][0]
            msg["args"], msg["value"] = (size, size), self.indices.get(msg["name"], jnp.arange(size))


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
    sizes: dict[str, int] = {}

    def densities(indices: Mapping[str, jax.Array]) -> list[jax.Array]:
        sites = prior_trace(_given_indices(model, indices, sizes), 0, args, kwargs or {}).values()
        return [site["fn"].log_prob(site["value"]) for site in sites if site["type"] == "sample"]

    with suppress(*NEEDS_VALUES):
        jax.eval_shape(densities, {})
        for name, size in dict(sizes).items():
            reached = indexed_lengths(lambda i, at=name: densities({at: i}), jnp.arange(size))  # type: ignore[misc]
            unlike = sorted(reached & lengths - {size})
            if unlike:
                got = f"an array of {unlike[0]} rows that plate {name!r} of size {size} indexes"
                raise argument_error(call, "args", got, "Pass one row per data point in each array.")
