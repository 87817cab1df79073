"""Measure whether a model really has a symmetry."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn._checks import argument_error
from numpyro_bnn.symmetry.base import Symmetry, as_symmetries
from numpyro_bnn.symmetry.prior import log_likelihoods
from numpyro_bnn.symmetry.survey import in_latent, survey

__all__ = ["TOLERANCE", "Invariance", "check", "invariance"]

SEEDS = (0, 1, 2)
TOLERANCE = 1e-6


class Invariance(NamedTuple):
    r"""How well a symmetry holds, over draws and group elements.

    .. math:: \mathrm{error} = \max \frac{|\Delta \log p(y_n)|}{1 + |\log p(y_n)|}
    """

    symmetry: Symmetry
    error: float


def invariance(
    model: Callable, symmetries: Sequence[Symmetry], args: tuple = (), kwargs: Mapping[str, Any] | None = None
) -> list[Invariance]:
    """Measure the change of the log likelihood under random group elements at draws from the prior, in float64.

    :param model: a NumPyro model, with its data among the arguments.
    :param symmetries: symmetries of its parameter sites.
    :return: one entry per symmetry.

    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro_bnn import symmetry
    >>> def model(y):
    ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     numpyro.sample("y", dist.Normal(w[0] / w[1], 1.0), obs=y)
    >>> bool(invariance(model, [symmetry.Scale("w")], (0.3,))[0].error < 1e-9)
    True
    """
    symmetries = as_symmetries("symmetry.invariance", symmetries)
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        args, kwargs = _doubled((args, dict(kwargs or {})))
        found = survey(model, args, kwargs, SEEDS)
        moving = [in_latent(symmetry, found) for symmetry in symmetries]
        changes = jax.jit(lambda values, key: _changes(model, moving, key, values, args, kwargs))
        errors = np.array([changes(values, jax.random.key(i)) for i, values in enumerate(found.draws)])
        return [Invariance(s, float(e)) for s, e in zip(symmetries, errors.max(0, initial=0.0), strict=True)]


def check(
    model: Callable,
    symmetries: Sequence[Symmetry],
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    tolerance: float = TOLERANCE,
) -> list[Invariance]:
    """Refuse symmetries that the model does not have; see :func:`invariance` for what is measured.

    :param model: a NumPyro model, with its data among the arguments.
    :param symmetries: symmetries of its parameter sites.
    :param args: positional arguments of the model.
    :param kwargs: its keyword arguments.
    :param tolerance: largest error of a symmetry; a model that computes in float32 by itself needs about 1e-3.
    :raises ValueError: for a symmetry with a larger error, with the error.

    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro_bnn import symmetry
    >>> def model(y):
    ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     numpyro.sample("y", dist.Normal(w[0] / (w[1] ** 2 + 1e-5) ** 0.5, 1.0), obs=y)
    >>> check(model, [symmetry.Scale("w")], (0.3,))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: symmetry.check: argument `symmetries` got Scale(w), under which the log likelihood changes ...
    """
    found = invariance(model, symmetries, args, kwargs)
    for entry in found:
        if not entry.error <= tolerance:
            raise argument_error(
                "symmetry.check",
                "symmetries",
                f"{entry.symmetry.name}, under which the log likelihood changes by {entry.error:.1e} (relative)",
                f"Allowed is {tolerance:.0e}. Leave it out, take the epsilon out of the normalization, or pass"
                " `exact=False` to OrbitMoves, which then evaluates the likelihood.",
            )
    return found


def _doubled(tree: Any) -> Any:
    return jax.tree.map(
        lambda a: (
            jnp.asarray(a, jnp.float64)
            if hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jnp.floating)
            else a
        ),
        tree,
    )


def _changes(
    model: Callable,
    moving: Sequence[Symmetry],
    rng_key: jax.Array,
    values: dict,
    args: tuple,
    kwargs: Mapping,
) -> jax.Array:
    """Largest relative change of a pointwise log likelihood, by symmetry."""
    points = [values]
    for i, symmetry in enumerate(moving):
        g = symmetry.random(jax.random.fold_in(rng_key, i), symmetry.units(values))
        points.append({**values, **symmetry.act(values, g)})
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *points)
    logs = jax.vmap(lambda point: _pointwise(model, point, args, kwargs))(stacked)
    return jnp.max(jnp.abs(logs[1:] - logs[0]) / (1 + jnp.abs(logs[0])), axis=1, initial=0.0)


def _pointwise(model: Callable, values: Mapping, args: tuple, kwargs: Mapping[str, Any]) -> jax.Array:
    """Log likelihood of all observed sites, element by element (N,)."""
    logs = [jnp.ravel(log) for log in log_likelihoods(model, values, args, kwargs)]
    return jnp.concatenate(logs) if logs else jnp.zeros(0)
