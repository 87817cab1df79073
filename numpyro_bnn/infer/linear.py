"""Sites that enter a model linearly under normal noise: their marginal likelihood and exact draws of them."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from jax.scipy.linalg import solve_triangular

from numpyro_bnn._distributions import affine_normal
from numpyro_bnn._plates import full_trace

__all__ = [
    "Linear",
    "Parts",
    "Structure",
    "flat_normal",
    "log_density",
    "log_marginal",
    "log_norms",
    "sample",
    "weights",
    "whitened",
]


class Structure(NamedTuple):
    """What stands where in a model that is linear in some of its sites; found by ``linearity.read``.

    :param shapes: of the linear sites, by name, in the order of the model.
    :param collapsed: scalar sites that prior scales, noise or the linear map may depend on.
    :param data: observed normal sites, or held ones, whose means depend on the linear sites.
    :param others: other sites whose density depends on collapsed ones, and those themselves.
    :param fixed: whether the linear map stays when collapsed sites change.
    :param common: the collapsed sites that all prior sds are proportional to, and those that all noise is, where
        collapsed sites do nothing else to the linear model; ``None`` elsewhere.
    """

    shapes: dict[str, tuple[int, ...]]
    collapsed: tuple[str, ...]
    data: tuple[str, ...]
    others: tuple[str, ...]
    fixed: bool
    common: tuple[tuple[str, ...], tuple[str, ...]] | None = None


class Parts(NamedTuple):
    r"""A linear Gaussian model :math:`y \sim N(f + A u, s^2)^\beta`, :math:`u \sim N(0, d^2)^\gamma`, without A.

    :param prior_sd: (P,) d.
    :param prior_weight: (P,) the power of the prior, 1 unless it is scaled.
    :param value: (N,) y.
    :param mean: (N,) f, with all u = 0.
    :param sd: (N,) s.
    :param weight: (N,) the power of each datum: scales of the log density, 0 where masked.
    :param rest: log density of the other sites.
    """

    prior_sd: jax.Array
    prior_weight: jax.Array
    value: jax.Array
    mean: jax.Array
    sd: jax.Array
    weight: jax.Array
    rest: jax.Array


class Linear:
    """A model as a function of the *innovations* u of its linear sites, which are the sites less their prior means.

    Prior means may themselves be linear in other sites of the kernel, as in a hierarchy of locations; innovations are
    independent all the same.

    :param model: a NumPyro model.
    :param structure: what :func:`~numpyro_bnn.infer.linearity.read` found.
    :param held: values of all sites that are not drawn here.
    :param args: positional arguments of the model.
    :param kwargs: its keyword arguments.
    """

    def __init__(
        self,
        model: Callable,
        structure: Structure,
        held: Mapping[str, Any],
        args: tuple,
        kwargs: Mapping[str, Any],
    ) -> None:
        self._model, self._held, self._args, self._kwargs = model, dict(held), args, dict(kwargs)
        self.structure = structure

    def trace(self, hypers: Mapping[str, jax.Array], u: jax.Array) -> dict[str, dict[str, Any]]:
        """The trace of the model.

        :param hypers: values of the collapsed sites.
        :param u: (P,) innovations.
        """
        known, parts = {**self._held, **hypers}, self._split(u)

        def value(site: dict[str, Any]) -> Any:
            if site["name"] not in parts:
                return known.get(site["name"])
            loc, _ = _normal(site)
            return loc + parts[site["name"]].astype(loc.dtype)

        return full_trace(self._model, value, self._args, self._kwargs)

    def values(self, hypers: Mapping[str, jax.Array], u: jax.Array) -> dict[str, jax.Array]:
        """Values of the linear sites."""
        traced = self.trace(hypers, u)
        return {name: traced[name]["value"] for name in self.structure.shapes}

    def mean(self, hypers: Mapping[str, jax.Array], u: jax.Array) -> jax.Array:
        """(N,) means of the data."""
        traced = self.trace(hypers, u)
        return jnp.concatenate([jnp.ravel(_normal(traced[name])[0]) for name in self.structure.data])

    def jacobian(self, hypers: Mapping[str, jax.Array]) -> jax.Array:
        """(N, P) the linear map A."""
        u = self.zeros()
        rows = jax.eval_shape(self.mean, hypers, u).shape[0]
        derivative = jax.jacfwd if u.size <= rows else jax.jacrev
        return derivative(self.mean, argnums=1)(hypers, u)

    def parts(self, hypers: Mapping[str, jax.Array]) -> Parts:
        """All the rest."""
        traced = self.trace(hypers, self.zeros())
        prior, data = (
            [flat_normal(traced[name]) for name in names]
            for names in (self.structure.shapes, self.structure.data)
        )
        _, _, prior_sd, prior_weight = map(jnp.concatenate, zip(*prior, strict=True))
        value, mean, sd, weight = map(jnp.concatenate, zip(*data, strict=True))
        rest = sum((log_density(traced[name]) for name in self.structure.others), jnp.zeros(()))
        return Parts(prior_sd, prior_weight, value, mean, sd, weight, rest)

    def zeros(self) -> jax.Array:
        """(P,) innovations at the prior means."""
        return jnp.zeros(sum(map(prod, self.structure.shapes.values())))

    def _split(self, u: jax.Array) -> dict[str, jax.Array]:
        parts, start = {}, 0
        for name, shape in self.structure.shapes.items():
            parts[name] = u[start : start + prod(shape)].reshape(shape)
            start += prod(shape)
        return parts


# ----------------------------------------------------------------------------------------------------- densities


def whitened(parts: Parts, jacobian: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(N, P) the linear map and (N,) the residuals, in units of noise and prior.

    >>> ones = jnp.ones(1)
    >>> parts = Parts(3 * ones, ones, 5 * ones, ones, 2 * ones, ones, jnp.zeros(()))
    >>> [part.tolist() for part in whitened(parts, jnp.ones((1, 1)))]
    [[[1.5]], [2.0]]
    """
    root = jnp.sqrt(parts.weight) / parts.sd
    residual = jnp.where(parts.weight > 0, root * (parts.value - parts.mean), 0.0)  # masked data may be NaN
    return root[:, None] * jacobian * (parts.prior_sd / jnp.sqrt(parts.prior_weight)), residual


def log_marginal(parts: Parts, jacobian: jax.Array) -> jax.Array:
    r"""Log density of the data with the linear sites integrated out, plus that of the other sites.

    For weights 1, :math:`\log N(y; f, A D A^\top + S)`; in general the log integral over u of
    :math:`N(y; f + A u, S)^\beta N(u; 0, D)^\gamma`.

    :param parts: of the model.
    :param jacobian: (N, P) the linear map A.

    >>> ones = jnp.ones(1)
    >>> parts = Parts(ones, ones, ones, 0 * ones, ones, ones, jnp.zeros(()))
    >>> marginal = log_marginal(parts, jnp.ones((1, 1)))  # y ~ N(0, 2)
    >>> bool(jnp.allclose(marginal, dist.Normal(0.0, 2**0.5).log_prob(1.0)))
    True
    """
    log_det, squares = _Fit(*whitened(parts, jacobian)).marginal()
    return sum(log_norms(parts)) - 0.5 * (log_det + squares) + parts.rest


def log_norms(parts: Parts) -> tuple[jax.Array, jax.Array]:
    """Logs of the constants of the densities of the data and, where it has a power, of the prior.

    >>> half, ones = jnp.full(1, 0.5), jnp.ones(1)
    >>> parts = Parts(ones, ones, ones, ones, half, ones, jnp.zeros(()))
    >>> [round(float(part), 3) for part in log_norms(parts)]
    [-0.226, 0.0]
    """

    def log_norm(sd: jax.Array) -> jax.Array:
        return 0.5 * jnp.log(2 * jnp.pi) + jnp.log(sd)

    gamma = parts.prior_weight
    powered = jnp.sum((1 - gamma) * log_norm(parts.prior_sd) - 0.5 * jnp.log(gamma))
    prior = jnp.where(jnp.all(gamma == 1), 0.0, powered)  # sds may be 0
    return -jnp.sum(parts.weight * log_norm(parts.sd)), prior


def sample(rng_key: jax.Array, parts: Parts, jacobian: jax.Array) -> jax.Array:
    """(P,) innovations drawn from their exact conditional given the data.

    With P <= N from their normal distribution of P dimensions; otherwise in N dimensions, by shifting a draw of the
    prior to where it meets the data, which rounds in units of the prior sd: in single precision that should be below
    10^6 posterior sds.

    :param parts: of the model.
    :param jacobian: (N, P) the linear map A.

    Reference: Bhattacharya, Chakraborty & Mallick (2016), algorithm 1, for P > N.

    >>> ones = jnp.ones(1)
    >>> parts = Parts(ones, ones, ones, 0 * ones, 1e-4 * ones, ones, jnp.zeros(()))
    >>> bool(jnp.allclose(sample(random.key(0), parts, jnp.ones((1, 1))), 1.0, atol=1e-3))
    True
    """
    fit = _Fit(*whitened(parts, jacobian))
    return parts.prior_sd / jnp.sqrt(parts.prior_weight) * fit.sample(rng_key)


class _Fit:
    """r ~ N(R w, I) with w ~ N(0, I): marginal density of r, and draws of w given r.

    Both need a triangular T with T'T = I + R'R, or I + R R' where that is smaller. It comes from a QR decomposition
    of R on top of the identity and not from the Cholesky decomposition of that sum: prior scales of one model may
    differ by many orders of magnitude, and single precision holds a condition number of R, but not its square.

    :param matrix: (N, P) R.
    :param residual: (N,) r.
    """

    def __init__(self, matrix: jax.Array, residual: jax.Array) -> None:
        (n, p), dtype = matrix.shape, matrix.dtype
        self.matrix, self.residual, self.tall = matrix, residual, p <= n
        if (
            self.tall
        ):  # the last column holds the least-squares problem: its solution times T, and what it leaves
            right = jnp.concatenate([residual, jnp.zeros(p, dtype)])
            stacked = jnp.column_stack([jnp.concatenate([matrix, jnp.eye(p, dtype=dtype)]), right])
            whole = jnp.linalg.qr(stacked, mode="r")
            self.triangle, self.projected, self.left = whole[:p, :p], whole[:p, p], whole[p, p]
        else:
            stacked = jnp.concatenate([matrix.T, jnp.eye(n, dtype=dtype)])
            self.triangle = jnp.linalg.qr(stacked, mode="r")

    def marginal(self) -> tuple[jax.Array, jax.Array]:
        """Log determinant of I + R R', and r' (I + R R')^-1 r."""
        log_det = 2 * jnp.sum(jnp.log(jnp.abs(jnp.diagonal(self.triangle))))
        if self.tall:
            return log_det, self.left**2
        return log_det, jnp.sum(solve_triangular(self.triangle, self.residual, trans=1) ** 2)

    def sample(self, rng_key: jax.Array) -> jax.Array:
        """(P,) one draw of w given r."""
        (n, p), dtype = self.matrix.shape, self.matrix.dtype
        noise = random.normal(rng_key, (p if self.tall else p + n,), dtype)
        if self.tall:
            return solve_triangular(self.triangle, self.projected + noise)
        prior, error = noise[:p], noise[p:]
        missed = self.residual - self.matrix @ prior - error
        solved = solve_triangular(self.triangle, solve_triangular(self.triangle, missed, trans=1))
        return prior + self.matrix.T @ solved


# ----------------------------------------------------------------------------------------------------------- sites


def log_density(site: Mapping[str, Any]) -> jax.Array:
    """Log density of a site, with its scale; minus infinity outside of the support.

    >>> density = jax.jit(lambda value: log_density({"fn": dist.Uniform(0.0, 0.5), "value": value, "scale": None}))
    >>> round(float(density(0.25)), 2), float(density(3.0))
    (0.69, -inf)
    """
    fn, value = site["fn"], site["value"]
    log_prob = fn.log_prob(value)
    if not isinstance(fn, dist.Unit):
        log_prob = jnp.where(jnp.all(fn.support(value)), log_prob, -jnp.inf)
    return jnp.sum(log_prob if site["scale"] is None else site["scale"] * log_prob)


def weights(site: Mapping[str, Any]) -> jax.Array:
    """The factor that scales and masks put on the log density of every element of a site of independent elements.

    >>> fn = dist.Normal(jnp.zeros((2, 3)), 1.0).to_event(1).mask(jnp.array([True, False]))
    >>> weights({"fn": fn, "scale": 0.5}).tolist()
    [[0.5, 0.5, 0.5], [0.0, 0.0, 0.0]]
    """
    fn = site["fn"]
    shape = fn.shape()
    scale = 1.0 if site["scale"] is None else site["scale"]
    weight = _over_events(scale, fn)
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution | dist.MaskedDistribution):
        if isinstance(fn, dist.MaskedDistribution):
            weight = weight * jnp.broadcast_to(_over_events(fn._mask, fn), shape)
        fn = fn.base_dist
    return jnp.broadcast_to(weight, shape)


def _over_events(factor: Any, fn: dist.Distribution) -> jax.Array:
    """A factor of the batch shape, over elements of events."""
    batch = jnp.broadcast_to(jnp.asarray(factor), fn.batch_shape)
    return batch.reshape(fn.batch_shape + (1,) * fn.event_dim)


def _normal(site: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    found = affine_normal(site["fn"], masked=True)
    assert found is not None  # linearity.read() has seen it
    return found


def flat_normal(site: Mapping[str, Any]) -> tuple[jax.Array, ...]:
    """Value, mean, sd and weight of every element of a normal site, flat.

    >>> site = {"fn": dist.Normal(1.0, 2.0).expand([2]), "value": jnp.zeros(2), "scale": None}
    >>> [part.tolist() for part in flat_normal(site)]
    [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]
    """
    loc, scale = _normal(site)
    value = jnp.broadcast_to(site["value"], loc.shape)
    dtype = jnp.result_type(float)
    return tuple(jnp.ravel(part).astype(dtype) for part in (value, loc, jnp.abs(scale), weights(site)))
