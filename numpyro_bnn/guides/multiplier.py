"""The multiplicative variables z of one kernel: their distribution q(z), and r(z | w) that undoes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import ndtr, ndtri
from numpyro.distributions import constraints
from numpyro.distributions.transforms import ComposeTransform

from numpyro_bnn._checks import unknown_name
from numpyro_bnn.guides.blocks import Block
from numpyro_bnn.guides.flows.families import Coupling, SplineCoupling, placed
from numpyro_bnn.nn import Shape

__all__ = ["REVERSES", "Multiplier", "mixture_quantiles"]

REVERSES = ("conjugate", "outer")
NODES = 64  # of the distribution of one z in quantiles
BISECTIONS = 22


@dataclass(frozen=True)
class Multiplier:
    """One z for each position along an axis of a kernel: w = z m + s eps.

    :param site: the kernel's site.
    :param prefix: of the guide; m and s are the parameters ``<site>_<prefix>_loc`` and ``_scale``.
    :param shape: of the kernel.
    :param axis: that z runs along.
    :param flow: of q(z), and another like it of r(z | w).
    :param reverse: form of r(z | w).
    :param scale: first sd of z, around 1.
    """

    site: str
    prefix: str
    shape: Shape
    axis: int
    flow: Coupling | SplineCoupling
    reverse: str
    scale: float

    @property
    def name(self) -> str:
        """Of the site of z, and prefix of its parameters."""
        return f"{self.site}_{self.prefix}_z"

    @property
    def size(self) -> int:
        return self.shape[self.axis]

    def expand(self, z: jax.Array) -> jax.Array:
        """(..., size) -> (..., 1, ..., size, ..., 1), to be multiplied with kernels."""
        behind = len(self.shape) - self.axis - 1
        return jnp.reshape(z, (*z.shape[:-1], *(1,) * self.axis, self.size, *(1,) * behind))

    def reduce(self, kernel: jax.Array) -> jax.Array:
        """Sum a kernel over all axes but that of z."""
        return jnp.sum(kernel, [axis for axis in range(kernel.ndim) if axis != self.axis])

    def _flow(self, name: str) -> list[Any]:
        return self.flow.transforms(name, self.size) if self.size > 1 else []

    # -- q(z) ------------------------------------------------------------------------------------------

    def posterior(self) -> dist.Distribution:
        """Declare the parameters of q(z): z = a + c f(eps), f the flow."""
        start = jnp.full((self.size,), self.scale)
        block = Block(self.name, {self.name: (self.size,)}, jnp.ones(self.size), start)
        return placed(block, self._flow(self.name))

    # -- r(z | w) --------------------------------------------------------------------------------------

    def log_reverse(self, seen: Mapping[str, jax.Array]) -> jax.Array:
        """Declare the parameters of r, and evaluate log r(z | w).

        With u = (z - a) / c, and g another flow: log N(g(u); mean(w), sd(w)^2) + log|det g'(u)| - sum log c.

        :param seen: values of the sites and parameters of the guide up to here.
        """
        center, scale = seen[f"{self.name}_loc"], seen[f"{self.name}_scale"]
        flow = ComposeTransform(self._flow(f"{self.name}_reverse"))
        u = (seen[self.name] - center) / scale
        v = flow(u) if flow.parts else u
        log_det = flow.log_abs_det_jacobian(u, v) if flow.parts else 0.0
        mean, sd = self._conjugate(seen, flow) if self.reverse == "conjugate" else self._outer(seen)
        return dist.Normal(mean, sd).log_prob(v).sum() + log_det - jnp.log(scale).sum()

    def _declare(self, field: str, start: Any, **options: Any) -> jax.Array:
        return numpyro.param(f"{self.name}_reverse_{field}", start, **options)

    def _conjugate(
        self, seen: Mapping[str, jax.Array], flow: ComposeTransform
    ) -> tuple[jax.Array, jax.Array]:
        """Posterior of u_i ~ N(b_i, d_i^2) given the weights that z_i multiplies, w_ij ~ N(z_i m_ij, s_ij^2)."""
        loc, sd = (seen[f"{self.site}_{self.prefix}_{field}"] for field in ("loc", "scale"))
        center, scale = seen[f"{self.name}_loc"], seen[f"{self.name}_scale"]
        z = seen[self.name]
        ratio = loc / sd
        precision = self.reduce(jnp.square(ratio))
        # As the density of w computes it, so that a compiler does it once.
        noise = (seen[self.site] - self.expand(z) * loc) / sd
        residual = scale * self.reduce(ratio * noise) + scale * (z - center) * precision
        precision = jnp.square(scale) * precision
        # The estimate of u from w alone. Where the weights say nothing its factor in the mean, precision, is 0.
        estimate = residual / jnp.maximum(precision, 1e-6)
        mean = self._declare("loc", jnp.zeros(self.size))
        spread = self._declare("scale", jnp.ones(self.size), constraint=constraints.softplus_positive)
        prior = jnp.square(spread) ** -1
        at = flow(estimate) if flow.parts else estimate
        return (prior * mean + precision * at) / (prior + precision), (prior + precision) ** -0.5

    def _outer(self, seen: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Equations 8 to 10 of the paper: the mean over j of the outer product of b and tanh(c^T w)_j."""
        kernel = jnp.moveaxis(seen[self.site], self.axis, 0).reshape(self.size, -1)
        fan = self.size**-0.5
        c = self._declare("c", lambda key: fan * jax.random.normal(key, (self.size,)))
        pooled = jnp.mean(jnp.tanh(c @ kernel))
        loc, rho = (self._declare(f"b{i}", jnp.zeros(self.size)) for i in (1, 2))
        mean = self._declare("loc", jnp.zeros(self.size))
        spread = self._declare("scale", jnp.ones(self.size), constraint=constraints.softplus_positive)
        return mean + loc * pooled, spread * jnp.exp(rho * pooled)

    # -- summaries -------------------------------------------------------------------------------------

    def quantiles(self, z: jax.Array, loc: jax.Array, sd: jax.Array, q: jax.Array) -> jax.Array:
        """Quantiles (Q, *shape) of the marginals of w, the mixtures over z of N(z m, s^2).

        :param z: (S, size) draws.
        """
        nodes = jnp.quantile(z, (jnp.arange(NODES) + 0.5) / NODES, axis=0).T
        rows = [jnp.moveaxis(part, self.axis, 0).reshape(self.size, -1) for part in (loc, sd)]

        def of_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            return mixture_quantiles(row[0], row[1], row[2], q)

        found = jax.lax.map(of_row, (nodes, rows[0], rows[1]))  # (size, Q, other axes)
        others = tuple(n for axis, n in enumerate(self.shape) if axis != self.axis)
        return jnp.moveaxis(jnp.moveaxis(found, 1, 0).reshape(len(q), self.size, *others), 1, self.axis + 1)


def mixture_quantiles(nodes: jax.Array, loc: jax.Array, sd: jax.Array, q: jax.Array) -> jax.Array:
    """Quantiles (Q, R) of mixtures of K equally likely normals N(nodes_k loc_r, sd_r^2), by bisection.

    :param nodes: (K,).
    :param loc: (R,).
    :param sd: (R,).
    :param q: (Q,) probabilities.

    >>> nodes, one = jnp.array([-1.0, 1.0]), jnp.ones(1)
    >>> abs(float(mixture_quantiles(nodes, 3 * one, one, jnp.array([0.5]))[0, 0])) < 1e-4
    True
    """
    means = nodes[:, None] * loc
    # The quantile of a mixture lies between those of its components.
    width = sd * ndtri(q)[:, None]
    low, high = width + means.min(0), width + means.max(0)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) / 2
        below = ndtr((middle[:, None] - means) / sd).mean(1) < q[:, None]
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    low, high = jax.lax.fori_loop(0, BISECTIONS, halve, (low, high))
    return (low + high) / 2


def check_reverse(call: str, reverse: Any) -> None:
    """Refuse an unknown form of r(z | w)."""
    if reverse not in REVERSES:
        raise unknown_name(call, "reverse", reverse, REVERSES)
