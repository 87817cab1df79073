"""Smooth convolution filters: a Gaussian process over the positions of the filter."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Choice, Kind, Positive, Switch
from numpyro_bnn.nn.base import Shape
from numpyro_bnn.priors.base import NonCentered, Prior, Scale
from numpyro_bnn.priors.independent import Normal
from numpyro_bnn.priors.layouts import layout

# Stationary covariances as functions of distance over length scale: a new one is a new
# row.
COVARIANCES = {
    "rbf": lambda r: jnp.exp(-0.5 * r**2),
    "matern12": lambda r: jnp.exp(-r),
    "matern32": lambda r: (1 + 3**0.5 * r) * jnp.exp(-(3**0.5) * r),
    "matern52": lambda r: (1 + 5**0.5 * r + 5 / 3 * r**2) * jnp.exp(-(5**0.5) * r),
}


def filter_covariance(
    window: tuple[int, int], covariance: str, length_scale: float | Array
) -> Array:
    """Correlation matrix (h*w, h*w) of the positions of a filter, row-major, distances
    in pixels.
    """
    grid = jnp.stack(
        jnp.meshgrid(*(jnp.arange(n) for n in window), indexing="ij"), axis=-1
    ).reshape(-1, 2)
    return COVARIANCES[covariance](
        jnp.sqrt(jnp.sum((grid[:, None] - grid[None]) ** 2, axis=-1)) / length_scale
    )


class _CholeskyFilter(Transform):
    """z -> L z over the two grid axes of a kernel (h, w, in, out)."""

    domain = constraints.independent(constraints.real, 4)
    codomain = constraints.independent(constraints.real, 4)

    def __init__(self, cholesky: Array) -> None:
        self.cholesky = cholesky

    def __call__(self, x: Array) -> Array:
        return jnp.einsum("pq,...qio->...pio", self.cholesky, self._grid(x)).reshape(
            x.shape
        )

    def _inverse(self, y: Array) -> Array:
        grid = self._grid(y)
        flat = jnp.moveaxis(grid, -3, 0).reshape(grid.shape[-3], -1)
        solved = jax.scipy.linalg.solve_triangular(self.cholesky, flat, lower=True)
        filters = solved.reshape((grid.shape[-3], *grid.shape[:-3], *grid.shape[-2:]))
        return jnp.moveaxis(filters, 0, -3).reshape(y.shape)

    def log_abs_det_jacobian(self, x, y, intermediates=None):
        channels = x.shape[-1] * x.shape[-2]
        return jnp.broadcast_to(
            channels * jnp.sum(jnp.log(jnp.diagonal(self.cholesky))), x.shape[:-4]
        )

    def tree_flatten(self):
        return (self.cholesky,), (("cholesky",), {})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CholeskyFilter) and bool(
            jnp.array_equal(self.cholesky, other.cholesky)
        )

    def _grid(self, x: Array) -> Array:
        return x.reshape((*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:]))


@dataclass(frozen=True)
class GPFilters(Prior):
    """Smooth convolution filters, a Gaussian process over pixels: w[:, :, i, o] ~ N(0,
    (a^2 / fan_in) K).

    ``K[p, p'] = k(|p - p'| / l)`` over the grid of the filter, the same for every pair
    of channels. Every other parameter (dense kernels, biases, gains) gets ``other``.

    :param amplitude: a, a number, or a distribution on (0, inf) (then site
        ``<kernel>_amplitude``).
    :param length_scale: l in pixels, a number, or a distribution (then site
        ``<kernel>_length_scale``).
    :param covariance: ``"rbf"``, ``"matern12"``, ``"matern32"`` or ``"matern52"``.
    :param other: prior of all other parameters; by default ``Normal`` with the
        ``fan_in_scaling``, ``bias_scale`` and ``gain_scale`` given here, which
        ``other`` replaces.
    :param jitter: relative variance added to the diagonal; with a long length scale the
        RBF matrix is singular.
    :param centered: sample w itself instead of independent normals.

    Reference: Fortuin et al. (2022), section 3.2; Rasmussen & Williams (2006),
    equations 4.9-4.17.

    >>> prior = GPFilters(length_scale=2.0)("Conv2d_0.kernel", (3, 3, 1, 4))
    >>> prior.event_shape
    (3, 3, 1, 4)
    """

    amplitude: Scale = 1.0
    length_scale: Scale = 1.0
    covariance: Annotated[str, Choice(COVARIANCES)] = "rbf"
    other: (
        Annotated[Prior, Kind(Prior, "Pass a prior such as `priors.Normal()`.")] | None
    ) = None
    jitter: Positive = 1e-5
    centered: Switch = False

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        axes = layout(name, shape)
        window = set(range(len(shape))) - {*axes.inputs, *axes.outputs}
        if len(shape) != 4 or len(window) != 2:
            return self.bias(name, shape)
        if window != {0, 1}:
            instead = "It takes Flax kernels (h, w, in, out), not Equinox ones."
            raise argument_error("priors.GPFilters", "name", repr(name), instead)
        amplitude = _value(f"{name}_amplitude", self.amplitude)
        correlation = filter_covariance(
            shape[:2],
            self.covariance,
            _value(f"{name}_length_scale", self.length_scale),
        )
        # The diagonal stays 1, so that a weight has the requested variance.
        correlation = (correlation + self.jitter * jnp.eye(correlation.shape[0])) / (
            1 + self.jitter
        )
        sd = amplitude * self.fan_in_factor(name, shape)
        transform = _CholeskyFilter(sd * jnp.linalg.cholesky(correlation))
        unit = dist.Normal(0.0, 1.0).expand(shape).to_event(4)
        family = dist.TransformedDistribution if self.centered else NonCentered
        return family(unit, transform)

    def bias(self, name: str, shape: Shape) -> dist.Distribution:
        usual = Normal(
            fan_in_scaling=self.fan_in_scaling,
            bias_scale=self.bias_scale,
            gain_scale=self.gain_scale,
        )
        return (self.other or usual)(name, shape)

    gain = bias


def _value(site: str, prior: float | dist.Distribution) -> Array | float:
    return (
        numpyro.sample(site, prior) if isinstance(prior, dist.Distribution) else prior
    )
