"""Inclusive KL: fit a guide that covers the posterior, by self-normalized importance sampling."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax
from jax.scipy.special import logsumexp
from numpyro import handlers
from numpyro.infer.elbo import ELBO
from numpyro.infer.util import compute_log_probs
from numpyro.util import check_model_guide_match

from numpyro_bnn._checks import argument_error, check_count
from numpyro_bnn._distributions import unwrapped

CALL = "guides.TraceInclusiveKL_ELBO"

Trace = Mapping[str, dict[str, Any]]


class TraceInclusiveKL_ELBO(ELBO):
    r"""Fit a guide q that covers the posterior: minimize the inclusive KL(p || q) instead of KL(q || p).

    S particles z_s ~ q with weights w_s = p(D, z_s) / q(z_s), normalized to sum to 1, give the gradient

    .. math:: \nabla KL(p \| q) = -E_p[\nabla \log q(z)]
              \approx -\sum_s \frac{w_s}{\sum_r w_r} \nabla \log q(z_s),

    and parameters of the model follow the gradient of log p(D) from the same weights. The value of the loss is
    -log mean_s w_s, minus the importance-weighted bound. Mean field under KL(q || p) makes variances too small; here
    it matches those of the marginals, and with several modes it covers all of them.

    The gradient estimate is consistent but not unbiased: its bias falls with 1/S, and grows with the variance of the
    weights. Use it for few latent variables (hyper-scales, a last layer, one data point): with many, one particle
    takes all the weight; see ``pareto_k`` of :func:`evidence`.

    Plates that enclose every random site (local latents, one set for each data point) have separate weights for each
    index, and may be subsampled. Other subsampled plates are refused: the weights of a minibatch belong to another
    posterior.

    For divergences between the two, and for the importance-weighted bound itself, NumPyro has
    :class:`~numpyro.infer.elbo.RenyiELBO`.

    :param num_particles: S, at least 2.
    :param vectorize_particles: as in :class:`~numpyro.infer.elbo.Trace_ELBO`.
    :raises ValueError: for fewer than two particles or, when it is used, a subsampled plate around some sites only.

    Reference: Bornschein & Bengio (2015), *Reweighted wake-sleep*, section 2.

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import SVI
    >>> from numpyro.infer.autoguide import AutoNormal
    >>> covariance = jax.numpy.array([[1.0, 0.9], [0.9, 1.0]])
    >>> def model():
    ...     numpyro.sample("z", dist.MultivariateNormal(0.0, covariance))
    >>> svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), TraceInclusiveKL_ELBO(num_particles=100))
    >>> scale = svi.run(jax.random.key(0), 1000, progress_bar=False).params["z_auto_scale"]
    >>> bool((scale > 0.8).all())                             # KL(q || p) would give sqrt(1 - 0.9^2) = 0.44
    True
    """

    def __init__(self, num_particles: int = 10, vectorize_particles: Any = True) -> None:
        num_particles = check_count(CALL, "num_particles", num_particles, 2)
        super().__init__(num_particles=num_particles, vectorize_particles=vectorize_particles)

    def loss(
        self, rng_key: jax.Array, param_map: dict, model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> jax.Array:
        """The negative importance-weighted bound, with the gradients of the class.

        :param rng_key: key of the particles and of the minibatch that they share.
        :param param_map: values of parameters by site.
        :param model: a NumPyro model.
        :param guide: a NumPyro guide.
        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        """
        plate_key, rng_key = jax.random.split(rng_key)
        hidden = ["sample", "prng_key", "control_flow"]
        model, guide = (handlers.seed(fn, plate_key, hide_types=hidden) for fn in (model, guide))
        scales: list[float] = []

        def particle(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            joint, guided, scale = _log_densities(model, guide, param_map, args, kwargs, key)
            scales.append(scale)
            return joint, guided

        keys = jax.random.split(rng_key, self.num_particles)
        log_joint, log_guide = self.vectorize_particles_fn(particle, keys)
        log_weights = lax.stop_gradient(log_joint - log_guide)
        bound = logsumexp(log_weights, axis=0) - jnp.log(self.num_particles)
        weights = jax.nn.softmax(log_weights, axis=0)
        # Zero in value; its gradient is the weighted one.
        score = jnp.where(weights > 0, log_guide + log_joint, 0.0)
        surrogate = jnp.sum(weights * (score - lax.stop_gradient(score)), axis=0)
        return -jnp.sum(bound + surrogate) * scales[0]


def _log_densities(
    model: Callable, guide: Callable, params: Mapping[str, Any], args: tuple, kwargs: Mapping, key: jax.Array
) -> tuple[jax.Array, jax.Array, float]:
    """log p(D, z) and log q(z) at a draw that carries no gradient, one for each index of the common plates.

    :return: also the factor by which subsampling of common plates scales them, already divided out.
    """
    guide_key, model_key = jax.random.split(key)
    fixed = {name: lax.stop_gradient(value) for name, value in params.items()}
    seeded = handlers.seed(handlers.substitute(guide, data=fixed), guide_key)
    drawn = handlers.trace(seeded).get_trace(*args, **kwargs)
    batch = {name: site["value"] for name, site in drawn.items() if site["type"] == "plate"}
    unknown = [name for name, site in drawn.items() if site["type"] == "sample" and not site["is_observed"]]
    latent = {name: lax.stop_gradient(drawn[name]["value"]) for name in unknown}
    # A Delta site is recomputed from the other draws: rounding could make its own value impossible.
    values = {name: value for name, value in latent.items() if not _is_delta(drawn[name])}
    log_q, guide_trace = _log_probs(guide, {**params, **batch, **values}, args, kwargs, guide_key)
    log_p, model_trace = _log_probs(model, {**params, **batch, **latent}, args, kwargs, model_key)
    check_model_guide_match(model_trace, guide_trace)
    dims, scale = _common_plates(model_trace)
    sums = (sum((_by_index(v, dims) for v in log.values()), start=jnp.array(0.0)) for log in (log_p, log_q))
    joint, guided = (total / scale for total in sums)
    shape = jnp.broadcast_shapes(joint.shape, guided.shape)
    return jnp.broadcast_to(joint, shape), jnp.broadcast_to(guided, shape), scale


def _log_probs(fn: Callable, values: dict, args: tuple, kwargs: Any, key: jax.Array) -> tuple[dict, Trace]:
    return compute_log_probs(handlers.seed(fn, key), args, kwargs, values, sum_log_prob=False)


def _common_plates(trace: Trace) -> tuple[set[int], float]:
    """Dimensions of the plates around every sample site, and N/B of those that are subsampled."""
    stacks = [set(site["cond_indep_stack"]) for site in trace.values() if site["type"] == "sample"]
    common = set.intersection(*stacks)
    scale = 1.0
    for frame in set.union(*stacks):
        size = trace[frame.name]["args"][0]
        if size == frame.size:
            continue
        if frame not in common:
            got = f"a subsampled plate {frame.name!r} that does not enclose every site"
            instead = "Weights of a minibatch belong to another posterior: use all the data, or `Trace_ELBO`."
            raise argument_error(CALL, "model", got, instead)
        scale *= size / frame.size
    return {frame.dim for frame in common}, scale


def _by_index(log_prob: jax.Array, dims: set[int]) -> jax.Array:
    """Sum over all dimensions except those of the common plates."""
    others = tuple(axis for axis in range(log_prob.ndim) if axis - log_prob.ndim not in dims)
    return jnp.sum(log_prob, axis=others, keepdims=True) if dims else jnp.sum(log_prob)


def _is_delta(site: Mapping[str, Any]) -> bool:
    return isinstance(unwrapped(site["fn"], masked=True), dist.Delta)
