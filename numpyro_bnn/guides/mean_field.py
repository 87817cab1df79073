"""AutoMeanField: Bayes by Backprop."""

from collections.abc import Callable
from typing import Any

from numpyro_bnn.guides.base import AutoBlocks
from numpyro_bnn.guides.starting import init_to_fan_in

__all__ = ["AutoMeanField"]


class AutoMeanField(AutoBlocks):
    r"""Bayes by Backprop: independent Gaussians that start as a network is started that is to be trained.

    .. math:: q(\theta) = \prod_j N(\theta_j; \mu_j, \sigma_j^2), \qquad \sigma_j = \log(1 + e^{\rho_j})

    over the unconstrained latent sites. Means start at fan-in scale (:func:`init_to_fan_in`), standard deviations at
    a tenth of that: NumPyro's ``AutoNormal`` starts weights in (-2, 2), where a wide network saturates. Sites are
    plain Normal statements, so that ``TraceMeanField_ELBO`` takes KL(q(w) || p(w | h)) in closed form where the prior
    given its hyper-sites h is Normal too. Its condition holds: h does not depend on w in this guide.

    :param model: a NumPyro model.
    :param init_scale: see :class:`AutoBlocks`; by pattern, e.g. ``{"*.kernel": 0.01}``, for control of single sites.
    :param init_loc_fn: strategy for the first means.
    :param condition_on_scales: let weights with centered hierarchical priors follow their scales.
    :param prefix: of the parameters ``<site>_<prefix>_loc`` and ``<site>_<prefix>_scale``.
    :param create_plates: as in :class:`~numpyro.infer.autoguide.AutoGuide`, for minibatches.

    Reference: Blundell et al. (2015), *Weight uncertainty in neural networks*; Graves (2011).

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
    >>> from numpyro.infer import SVI, TraceMeanField_ELBO
    >>> from numpyro_bnn import guides
    >>> def model(x, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)
    >>> guide = guides.AutoMeanField(model, init_scale={"w": 0.01})
    >>> svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    >>> state = svi.init(jax.random.key(0), jnp.ones((5, 3)), jnp.ones(5))
    >>> guide.median(svi.get_params(state))["w"].shape
    (3,)
    """

    def __init__(
        self,
        model: Callable,
        *,
        init_scale: Any = 0.1,
        init_loc_fn: Callable = init_to_fan_in,
        condition_on_scales: bool = False,
        prefix: str = "auto",
        create_plates: Callable | None = None,
    ) -> None:
        super().__init__(
            model,
            init_scale=init_scale,
            init_loc_fn=init_loc_fn,
            condition_on_scales=condition_on_scales,
            prefix=prefix,
            create_plates=create_plates,
        )
