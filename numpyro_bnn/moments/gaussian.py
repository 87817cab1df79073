"""The quantity that moments are carried for: elementwise independent means and variances."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from numpyro_bnn._checks import argument_error

__all__ = ["Gaussian", "as_gaussian", "is_gaussian"]


class Gaussian(NamedTuple):
    """Mean and variance of every element of an array; the elements are taken as independent.

    :param mean: any shape, floating.
    :param var: the same shape, not negative; 0 stands for a number that is known.
    """

    mean: Any
    var: Any


def is_gaussian(value: Any) -> bool:
    """Whether a node of a tree is a :class:`Gaussian`."""
    return isinstance(value, Gaussian)


def as_gaussian(value: Gaussian) -> Gaussian:
    """The same with JAX arrays, refused where the two do not fit together."""
    mean, var = jnp.asarray(value.mean), jnp.asarray(value.var)
    if mean.shape != var.shape:
        raise argument_error(
            "moments.Gaussian",
            "var",
            f"shape {var.shape}",
            f"Pass one variance per element of the mean, {mean.shape}.",
        )
    for name, array in (("mean", mean), ("var", var)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise argument_error(
                "moments.Gaussian", name, f"dtype {array.dtype}", "Pass floating numbers.", TypeError
            )
    dtype = jnp.result_type(mean, var)
    return Gaussian(mean.astype(dtype), var.astype(dtype))
