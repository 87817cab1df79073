"""Exact draws of sites that enter linearly, and of scales with those integrated out."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import random

from numpyro_bnn._checks import argument_error
from numpyro_bnn.infer.block import Block
from numpyro_bnn.infer.linear import Linear, Structure, log_marginal, sample
from numpyro_bnn.infer.linearity import check_names, read
from numpyro_bnn.infer.rotated import log_marginal_at, rotate
from numpyro_bnn.infer.slice import slice_sweep

__all__ = ["GaussianGibbs"]

CALL = "infer.GaussianGibbs"


class GaussianGibbs(Block):
    r"""Draw sites that enter linearly from their exact normal conditional, jointly; scales with them integrated out.

    For data and weights

    .. math:: y \sim N(f + A w,\ S), \qquad w \sim N(m, D)

    where f, A, m, S and D may depend on all other sites, the weights are drawn jointly from their normal conditional,
    in P or in N dimensions, whichever is less. Regression coefficients, the last layer of a network given the layers
    below, and effects of groups are such sites.

    Given the weights, a scale common to all of them hardly moves. Such sites are named as ``collapsed``. Each is
    updated first, by a slice sampler on its logarithm, with the weights integrated out: on the density

    .. math:: N(y;\ f + A m,\ A D A^\top + S)

    times that of the other sites that depend on it. The weights are drawn next, given the new scales: together an
    exact update of both. A kernel by itself, where it draws all sites, or a block of ``numpyro.infer.Gibbs``.

    Scales (``handlers.scale``, tempering) and masks of the log density weigh the precision of data.

    Cost of a sweep: A, by P directional derivatives of the model or N gradients, and a QR decomposition,
    :math:`O(N P \min(N, P))`, for the weights and for each of about five evaluations per collapsed site. Where all
    prior sds and all noise are proportional to collapsed sites, as they are to global scales, these evaluations share
    one decomposition and cost :math:`O(\min(N, P)^3)`.

    :param model: the NumPyro model.
    :param sites: names of sites w with independent normal priors.
    :param collapsed: names of scalar positive sites.
    :raises ValueError: on initialization, where the model is not linear in w, noise or prior are not normal, scales
        depend on w, or no kernel draws some other site.
    :raises TypeError: for names that are no sequence of strings.

    Reference: Bhattacharya, Chakraborty & Mallick (2016), algorithm 1, for P > N; Johndrow, Orenstein & Bhattacharya
    (2020) for the blocks; van Dyk & Park (2008) for their order.

    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> def model(x, y):
    ...     tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    ...     sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    ...     w = numpyro.sample("w", dist.Normal(0.0, tau).expand([2]).to_event(1))
    ...     numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)
    >>> x = jnp.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [2.0, 1.0]])
    >>> mcmc = MCMC(GaussianGibbs(model, ["w"], collapsed=["tau", "sigma"]), num_warmup=5, num_samples=5,
    ...             progress_bar=False)
    >>> mcmc.run(jax.random.key(0), x, x @ jnp.array([1.0, -1.0]))
    >>> {name: draws.shape for name, draws in sorted(mcmc.get_samples().items())}
    {'sigma': (5,), 'tau': (5,), 'w': (5, 2)}
    """

    def __init__(self, model: Callable, sites: Sequence[str], *, collapsed: Sequence[str] = ()) -> None:
        super().__init__(model)
        self._sites = check_names(CALL, "sites", sites, least=1)
        self._collapsed = check_names(CALL, "collapsed", collapsed)
        both = set(self._sites).intersection(self._collapsed)
        if both:
            raise argument_error(
                CALL, "collapsed", sorted(both), "A site is either drawn given the scales or one of them."
            )
        self._structure: Structure | None = None

    def _prepare(self, held: set[str], args: tuple, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        self._structure = read(CALL, self._model, self._sites, self._collapsed, held, args, kwargs)
        return (*self._sites, *self._collapsed)

    def _draw(
        self,
        rng_key: jax.Array,
        z: dict[str, jax.Array],
        held: dict[str, Any],
        args: tuple,
        kwargs: Mapping[str, Any],
    ) -> dict[str, jax.Array]:
        assert self._structure is not None  # set by init
        linear = Linear(self._model, self._structure, held, args, kwargs)
        key_scales, key_weights = random.split(rng_key)
        hypers = {name: z[name] for name in self._collapsed}
        # One linear map for all values of the scales where it does not depend on them.
        fixed = linear.jacobian(hypers) if self._structure.fixed else None
        jacobian = linear.jacobian if fixed is None else lambda _: fixed
        if hypers:
            hypers = _update(key_scales, linear, hypers, jacobian)
        u = sample(key_weights, linear.parts(hypers), jacobian(hypers))
        return {**hypers, **linear.values(hypers, u)}


def _update(
    rng_key: jax.Array, linear: Linear, hypers: dict[str, jax.Array], jacobian: Callable
) -> dict[str, jax.Array]:
    """New values of the collapsed sites given all but the linear ones."""
    names = tuple(hypers)

    def named(logs: jax.Array) -> dict[str, jax.Array]:
        return dict(zip(names, jnp.exp(logs), strict=True))

    marginal = _marginal(linear, hypers, jacobian)

    # Traced once for all the loops of the sampler.
    @partial(jax.jit, inline=True)
    def log_density(logs: jax.Array) -> jax.Array:
        return marginal(named(logs)) + jnp.sum(logs)

    start = jnp.log(jnp.stack([hypers[name] for name in names]))
    logs, _ = slice_sweep(rng_key, log_density, start)
    return named(logs)


def _marginal(linear: Linear, start: dict[str, jax.Array], jacobian: Callable) -> Callable:
    """Log density of collapsed sites without the linear ones, in the cheapest form there is."""
    common = linear.structure.common
    if common is None:
        return lambda at: log_marginal(linear.parts(at), jacobian(at))
    rotated = rotate(linear.parts(start), jacobian(start))

    def log_factor(at: dict[str, jax.Array], names: tuple[str, ...]) -> jax.Array:
        return sum((jnp.log(at[name] / start[name]) for name in names), jnp.zeros(()))

    def marginal(at: dict[str, jax.Array]) -> jax.Array:
        prior, noise = (log_factor(at, names) for names in common)
        return log_marginal_at(rotated, prior, noise) + linear.parts(at).rest

    return marginal
