"""Exact draws of precisions, variances and scales given the normal sites that they
scale.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, random
from numpyro.distributions.util import is_identically_one
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.util import identity, is_prng_key

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import unwrapped, weights
from numpyro_bnn._keys import split
from numpyro_bnn._options import Model, checked
from numpyro_bnn._types import Arrays, Kwargs, PyTree, Scalar, Sites
from numpyro_bnn.infer.conjugacy import ConjugateSite, read
from numpyro_bnn.infer.linear_structure import flat_normal
from numpyro_bnn.infer.model_arguments import DataVersion, ModelKernel, Start
from numpyro_bnn.program.arguments import as_arrays
from numpyro_bnn.program.plates import sites_of_type
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.symmetry.gig import log_gig


class PrecisionGibbsState(NamedTuple):
    """State of :class:`PrecisionGibbs`: constrained values of its sites, the key of the
    next sweep, and how often data had changed in place (no array).
    """

    z: dict[str, Array]
    rng_key: Array
    data: DataVersion = DataVersion()


def held_values(
    model_kwargs: Kwargs | None,
) -> tuple[dict, dict]:
    """Split the keyword arguments of a ``Gibbs`` block into values held by other blocks
    and those of the model.
    """
    kwargs = dict(model_kwargs or {})
    return dict(kwargs.pop(GIBBS_SITES_KWARG, {})), kwargs


class PrecisionGibbs(ModelKernel):
    r"""Gibbs updates of precisions, variances and scales of normal sites, where the
    model makes them conjugate.

    A block of :class:`numpyro.infer.Gibbs`. It finds in the model's program which sites
    scale which normal sites, and draws each from its exact conditional given everything
    else. For precisions of weights and noise with Gamma priors these are

    .. math::
        \tau \mid w &\sim \mathrm{Gamma}\big(\alpha + \tfrac n2,\
            \beta + \tfrac12 \textstyle\sum_i w_i^2\big), \\
        \tau_y \mid w, D &\sim \mathrm{Gamma}\big(\alpha + \tfrac N2,\
            \beta + \tfrac12 \textstyle\sum_i (y_i - f_i)^2\big).

    It also draws inverse-Gamma, Gamma and exponential variances, half-normal scales
    (generalized inverse Gaussian), and half-Cauchy scales, such as those of a
    horseshoe, through two inverse Gammas. One site may scale several normal sites, with
    one element per element, row or column of them. Scales of the log density of both
    (``handlers.scale``, tempering) and masks of the normal sites are respected. The
    normal sites must be *centered*: sample the weight itself. Their sds must be
    products of powers everywhere, without ``where`` or ``clip``.

    A sweep runs what was read of the model, not its code: once for all sites that scale
    different normal sites, and once more for each other site.

    :param model: the NumPyro model.
    :raises ValueError: on initialization, for a site without a conjugate conditional;
        the message gives the reason.

    Reference: Neal (1996), section 3.5; Makalic & Schmidt (2016), equations 9 to 11,
    for the half-Cauchy.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro.infer import HMC, MCMC, Gibbs
    >>> from numpyro_bnn import models, nn, priors
    >>> x = jnp.linspace(-1, 1, 8)[:, None]
    >>> model = models.regression(nn.MLP([3, 1]), priors.GammaPrecision(centered=True))
    >>> block = PrecisionGibbs(model)
    >>> sites = block.conjugate_sites(x, x[:, 0])
    >>> sites[0]
    'net/Dense_0.kernel_precision'
    >>> kernel = Gibbs([(block, sites), (HMC(model), None)])
    >>> mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), x, x[:, 0])
    >>> mcmc.get_samples()["net/Dense_0.kernel_precision"].shape
    (5,)
    """

    sample_field = "z"

    @checked("infer.{}")
    def __init__(self, model: Model) -> None:
        self._model = model
        self._plan: tuple[ConjugateSite, ...] = ()
        self._sample_fn: Callable | None = None

    @property
    def model(self) -> Callable:
        return self._model

    def conjugate_sites(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Latent sites that the kernel can draw, found from the model's program.

        :param args: positional arguments of the model.
        :param kwargs: its keyword arguments.

        >>> import numpyro, numpyro.distributions as dist
        >>> def model():
        ...     tau = numpyro.sample("tau", dist.Gamma(1.0, 1.0))
        ...     w = numpyro.sample(
        ...         "w", dist.Normal(0.0, tau**-0.5).expand([3]).to_event(1)
        ...     )
        >>> PrecisionGibbs(model).conjugate_sites()
        ('tau',)
        """
        conditionals = read(
            Posterior(self._model, *as_arrays(args, kwargs)), (), PRIORS
        )
        return tuple(
            name for name, site in conditionals.items() if not isinstance(site, str)
        )

    def _begin(self, start: Start) -> PrecisionGibbsState:
        conditioned, kwargs = held_values(start.kwargs)
        reading = Posterior(self._model, start.args, kwargs)
        conditionals = read(reading, conditioned, PRIORS)
        plan = []
        for name, site in conditionals.items():
            if isinstance(site, str):
                instead = (
                    "Pass what `conjugate_sites` returns; give other sites to another "
                    "block of `Gibbs`."
                )
                raise argument_error(
                    "infer.PrecisionGibbs", "sites", f"{name!r}: {site}", instead
                )
            plan.append(site)
        self._plan = tuple(plan)
        self._program = reading.without_data()
        keys = split(start.rng_key)

        def drawn_from(reading: Posterior, key: Array, conditioned: Arrays) -> Arrays:
            def start_chain(key: Array) -> Arrays:
                sites = reading.at(conditioned, key, conditionals).items()
                return {name: jnp.asarray(site["value"]) for name, site in sites}

            return start_chain(key) if is_prng_key(key) else jax.vmap(start_chain)(key)

        drawn, z = reading.run(drawn_from, keys[0], conditioned), {}
        for name in conditionals:
            value = (start.init_params or {}).get(name, drawn[name])
            z[name] = jnp.asarray(value, drawn[name].dtype)
        self._sample_fn = self._transition
        return PrecisionGibbsState(z, keys[1], self._arguments.version)

    def _transition(
        self,
        state: PrecisionGibbsState,
        model_args: tuple,
        model_kwargs: Kwargs | None,
    ) -> PrecisionGibbsState:
        conditioned, kwargs = held_values(model_kwargs)
        rng_key, key = random.split(state.rng_key)
        z, groups = dict(state.z), _independent(self._plan)
        keys = random.split(key, len(groups))
        reading = self.posterior(model_args, kwargs)
        for group, group_key in zip(groups, keys, strict=True):
            traced = reading.at({**conditioned, **z})
            z |= _draw(group, traced, z, group_key)
        for name, value in state.z.items():
            z[name] = z[name].astype(value.dtype)
        return state._replace(z=z, rng_key=rng_key)

    def refresh(
        self,
        state: PrecisionGibbsState,
        model_args: tuple,
        model_kwargs: Kwargs | None,
    ) -> PrecisionGibbsState:
        """Return the state: nothing is cached."""
        return state

    def get_constrain_fn(
        self, model_args: tuple, model_kwargs: Kwargs | None
    ) -> Callable:
        """Return the identity: values are constrained."""
        return identity

    def postprocess_fn(
        self, model_args: tuple, model_kwargs: Kwargs | None
    ) -> Callable:
        """Return a function that adds the deterministic sites to the
        values of a draw.
        """
        model_args, model_kwargs = self._arguments.restored(model_args, model_kwargs)
        conditioned, kwargs = held_values(model_kwargs)
        reading = self.posterior(model_args, kwargs)

        def replay(z: Arrays) -> Arrays:
            traced = reading.at({**conditioned, **z})
            values = dict(z)
            for name, site in sites_of_type(traced, "deterministic").items():
                values[name] = site["value"]
            return values

        return replay

    def wrap_model(self, wrapper: Callable) -> "PrecisionGibbs":
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        return kernel


class GIG(NamedTuple):
    """The generalized inverse Gaussian: density of t > 0 proportional to t^(p - 1)
    exp(-(a t + b / t) / 2).
    """

    p: PyTree
    a: PyTree
    b: PyTree


def _half_cauchy(
    fn: dist.Distribution, t: Array, weight: Scalar, rng_key: Array
) -> GIG:
    r"""t = s^2 is GIG(-1/2, 0, 2 r) given r, which is redrawn given t each time.

    The factor of :math:`(1 + t / A^2)^{-w} \propto t^{-w} \int r^{w-1} \exp\{-r (1/t +
    1/A^2)\}\,dr` of weight w.
    """
    if isinstance(weight, float):  # 1
        # compiles faster than a gamma
        gamma = random.exponential(rng_key, t.shape, t.dtype)
    else:
        gamma = random.gamma(rng_key, weight, t.shape, t.dtype)
    return GIG(-0.5, 0.0, 2 * gamma / (fn.scale**-2.0 + 1 / t) / weight)


# (distribution, whether t is the square of the value) -> prior of t; a new hyperprior
# is a new row.
PRIORS: Mapping[tuple[type, bool], Callable[..., GIG]] = {
    (dist.Gamma, False): lambda fn, *_: GIG(fn.concentration, 2 * fn.rate, 0.0),
    (dist.Chi2, False): lambda fn, *_: GIG(fn.concentration, 2 * fn.rate, 0.0),
    (dist.Exponential, False): lambda fn, *_: GIG(1.0, 2 * fn.rate, 0.0),
    (dist.InverseGamma, False): lambda fn, *_: GIG(-fn.concentration, 0.0, 2 * fn.rate),
    (dist.HalfNormal, True): lambda fn, *_: GIG(0.5, fn.scale**-2.0, 0.0),
    (dist.HalfCauchy, True): _half_cauchy,
}


def _independent(sites: Sequence[ConjugateSite]) -> list[list[ConjugateSite]]:
    """Group sites without common children: within a group they are independent given
    everything else.
    """
    groups: list[list[ConjugateSite]] = []
    scaled: set[str] = set()  # by the last group
    for site in sites:
        children = {child.name for child in site.children}
        if not groups or scaled & children:
            groups.append([])
            scaled = set()
        groups[-1].append(site)
        scaled |= children
    return groups


def _draw(
    group: Sequence[ConjugateSite],
    traced: Sites,
    values: Arrays,
    rng_key: Array,
) -> Arrays:
    r"""One exact draw of scale sites that are independent given everything else.

    With t = value^k, k = 2 \|power\|, elements x_m of the children with sd
    :math:`c_m\,t^{\pm 1/2}` and weights :math:`\omega_m` (scales and masks of the log
    density), :math:`n = \sum \omega_m` and :math:`S = \sum \omega_m (x_m - \mu_m)^2 /
    c_m^2`, the prior (p, a, b) of t becomes (p - n/2, a, b + S) for a scale or a
    variance and (p + n/2, a + S, b) for a precision. A prior of weight :math:`\omega`
    is first raised to this power: :math:`(\omega (p - 1/k) + 1/k,\ \omega a,\ \omega
    b)`.
    """
    key, *keys = random.split(rng_key, 1 + len(group))
    gigs = []
    for site, site_key in zip(group, keys, strict=True):
        gigs.append(_conditional(site, traced, values[site.name], site_key))
    # One call for all of them: the sampler's loop dominates compile time.
    log_t = log_gig(key, *map(jnp.concatenate, zip(*gigs, strict=True)))
    drawn, first = {}, 0
    for site in group:
        value = jnp.asarray(values[site.name])
        log_values = log_t[first : first + value.size] / (2 * abs(site.power))
        drawn[site.name] = jnp.exp(log_values).reshape(value.shape).astype(value.dtype)
        first += value.size
    return drawn


def _conditional(
    site: ConjugateSite,
    traced: Sites,
    value: PyTree,
    rng_key: Array,
) -> GIG:
    """Conditional of t, flat, given everything else."""
    flat = jnp.ravel(value)
    number, squares = jnp.zeros_like(flat), jnp.zeros_like(flat)
    for child in site.children:
        observed, mean, sd, weight = flat_normal(traced[child.name])
        weight = jnp.where(child.follows, weight, 0.0)
        square = ((observed - mean) / sd) ** 2
        # square is in units of the sd
        powers = jnp.take(flat, child.owner) ** (2 * site.power)
        number = number.at[child.owner].add(weight)
        squares = squares.at[child.owner].add(
            jnp.where(weight > 0, weight * square * powers, 0.0)
        )
    k = 2 * abs(site.power)
    base = unwrapped(traced[site.name]["fn"])
    fn = jax.tree.map(
        lambda leaf: jnp.ravel(jnp.broadcast_to(leaf, jnp.shape(value))), base
    )
    t = jnp.maximum(flat**k, jnp.finfo(flat.dtype).tiny)
    # A scale of the log density is a power of the density of the value, not of t.
    scale = traced[site.name]["scale"]
    prior_weight: Scalar = 1.0
    if not (scale is None or is_identically_one(scale)):
        prior_weight = jnp.ravel(weights(traced[site.name]))
    p, a, b = PRIORS[type(base), k == 2](fn, t, prior_weight, rng_key)
    p, a, b = prior_weight * (p - 1 / k) + 1 / k, prior_weight * a, prior_weight * b
    if site.power > 0:
        gig = p - number / 2, a, b + squares
    else:
        gig = p + number / 2, a + squares, b
    return GIG(*(jnp.broadcast_to(parameter, flat.shape) for parameter in gig))
