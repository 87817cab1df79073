"""Exact draws of precisions, variances and scales given the weights they belong to."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import random
from numpyro.infer.gibbs import latent_sample_sites

from numpyro_bnn._checks import argument_error
from numpyro_bnn._plates import full_trace
from numpyro_bnn.infer.block import Block
from numpyro_bnn.infer.conjugate import Conjugate, draw, independent, read

__all__ = ["PrecisionGibbs", "conjugate_sites"]


class PrecisionGibbs(Block):
    r"""Conjugate updates of precisions, variances and scales of normal sites, found from the model's program.

    A block of :class:`numpyro.infer.Gibbs`. Its sites are drawn from their exact conditionals, one after the other
    where they scale the same normal site. For precisions of weights and noise with Gamma priors these are

    .. math::
        \tau \mid w &\sim \mathrm{Gamma}\big(\alpha + \tfrac n2,\ \beta + \tfrac12 \textstyle\sum_i w_i^2\big), \\
        \tau_y \mid w, D &\sim
            \mathrm{Gamma}\big(\alpha + \tfrac N2,\ \beta + \tfrac12 \textstyle\sum_i (y_i - f_i)^2\big).

    Also drawn: inverse-Gamma, Gamma and exponential variances, half-normal scales (generalized inverse Gaussian), and
    half-Cauchy scales, such as those of a horseshoe, through two inverse Gammas. One site may scale several normal
    sites, and its elements may belong to elements, rows or columns of them. Scales (``handlers.scale``, tempering)
    and masks of the log density count. The normal sites must be *centered*: sample the weight itself.

    Cost: one pass of the model for sites that scale different normal sites.

    :param model: the NumPyro model.
    :raises ValueError: on initialization, for a site without a conjugate conditional, with the reason.

    Reference: Neal (1996), section 3.5; Makalic & Schmidt (2016), equations 9 to 11, for the half-Cauchy.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro.infer import HMC, MCMC, Gibbs
    >>> from numpyro_bnn import models, nn, priors
    >>> x = jnp.linspace(-1, 1, 8)[:, None]
    >>> model = models.regression(nn.MLP([3, 1]), priors.GammaPrecision(centered=True))
    >>> sites = conjugate_sites(model, x, x[:, 0])
    >>> sites[0]
    'net/Dense_0.kernel_precision'
    >>> mcmc = MCMC(Gibbs([(PrecisionGibbs(model), sites), (HMC(model), None)]), num_warmup=5, num_samples=5,
    ...             progress_bar=False)
    >>> mcmc.run(jax.random.key(0), x, x[:, 0])
    >>> mcmc.get_samples()["net/Dense_0.kernel_precision"].shape
    (5,)
    """

    def __init__(self, model: Callable) -> None:
        super().__init__(model)
        self._plan: tuple[Conjugate, ...] = ()

    def _prepare(self, held: set[str], args: tuple, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        names, found, reasons = _survey(self._model, held, args, kwargs)
        if reasons:
            name, reason = next(iter(reasons.items()))
            raise argument_error(
                "infer.PrecisionGibbs",
                "sites",
                f"{name!r}: {reason}",
                "Give it the names that `conjugate_sites(model, ...)` lists, and other sites to another block.",
            )
        self._plan = tuple(found[name] for name in names)
        return names

    def _draw(
        self,
        rng_key: jax.Array,
        z: dict[str, jax.Array],
        held: dict[str, Any],
        args: tuple,
        kwargs: Mapping[str, Any],
    ) -> dict[str, jax.Array]:
        groups = independent(self._plan)
        for group, key in zip(groups, random.split(rng_key, len(groups)), strict=True):
            traced = full_trace(self._model, {**held, **z}, args, kwargs)
            z = z | draw(group, traced, z, key)
        return z


def conjugate_sites(model: Callable, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    """Latent sites that :class:`PrecisionGibbs` can draw, found from the model's program.

    :param model: a NumPyro model.
    :param args: its arguments.
    :param kwargs: its keyword arguments.

    >>> import numpyro, numpyro.distributions as dist
    >>> def model():
    ...     tau = numpyro.sample("tau", dist.Gamma(1.0, 1.0))
    ...     w = numpyro.sample("w", dist.Normal(0.0, tau**-0.5).expand([3]).to_event(1))
    >>> conjugate_sites(model)
    ('tau',)
    """
    names, found, _ = _survey(model, set(), args, kwargs)
    return tuple(name for name in names if name in found)


def _survey(
    model: Callable, held: set[str], args: tuple, kwargs: Mapping[str, Any]
) -> tuple[tuple[str, ...], dict[str, Conjugate], dict[str, str]]:
    """Latent sites that are not held, those that are conjugate, and why others are not."""
    traced = full_trace(model, {}, args, kwargs)
    latent = latent_sample_sites(traced)
    values = {name: jnp.asarray(traced[name]["value"]) for name in latent}
    names = tuple(name for name in latent if name not in held)
    return names, *read(model, values, args, kwargs, names)
