"""Gaussian guides: independent weights (Bayes by Backprop), or one joint Gaussian per
layer of a network.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Kind, Model, Switch, checked
from numpyro_bnn.guides.auto_blocks import AutoBlocks, is_identity
from numpyro_bnn.guides.blocks import Family, FullRank, Patterns

# names in a network of a single layer
PARAMETERS = ("kernel", "bias", "scale", "weight", "embedding")


class AutoMeanField(AutoBlocks):
    r"""Bayes by Backprop: independent Gaussians over all weights, started like a
    network about to be trained.

    .. math:: q(\theta) = \prod_j N(\theta_j; \mu_j, \sigma_j^2), \qquad \sigma_j =
              \log(1 + e^{\rho_j})

    over the unconstrained latent sites. Means start at fan-in scale
    (:func:`init_to_fan_in`), standard deviations at a tenth of that: NumPyro's
    ``AutoNormal`` starts weights in (-2, 2), where a wide network saturates. Sites are
    plain Normal statements, so that ``TraceMeanField_ELBO`` uses the closed form of
    KL(q(w) || p(w | h)) if the prior given its hyper-sites h is Normal too. This is
    valid because h does not depend on w in this guide.

    Parameters are those of :class:`AutoBlocks`. ``init_scale`` by pattern, such as
    ``{"*.kernel": 0.01}``, controls single sites.

    Reference: Blundell et al. (2015), *Weight uncertainty in neural networks*; Graves
    (2011).

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


class AutoStructured(AutoBlocks):
    r"""Structured mean field: one joint Gaussian per layer of a network, or per
    user-defined block.

    .. math:: q(\theta) = \prod_{l} N(\theta_l; m_l, S_l) \prod_j N(\theta_j; \mu_j,
              \sigma_j^2)

    Sites that share their names up to the last dot form a layer: ``net/Dense_0`` for
    ``net/Dense_0.kernel`` (or its non-centered ``_base``) and ``net/Dense_0.bias``; a
    site without a dot in its name is a layer of its own. Hyper-sites, such as
    ``net/Dense_0.kernel_scale``, and other sites with a constrained support stay mean
    field, and so do local latent sites.

    :param model: a NumPyro model.
    :param family: family of every layer, by default :class:`FullRank`; e.g.
        :class:`LowRank` for wide layers.
    :param blocks: instead of layers, a list of patterns (or tuples of patterns), each a
        block with this family, or a dictionary from patterns to families as in
        :class:`AutoBlocks`.
    :param include_scales: include hyper-sites in the block of their layer.
    :param settings: ``init_scale``, ``init_loc_fn``, ``condition_on_scales``,
        ``prefix``, ``create_plates`` of :class:`AutoBlocks`.
    :raises ValueError: when first called, for a model without such a layer.

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
    >>> from numpyro.infer import SVI, Trace_ELBO
    >>> from numpyro_bnn import guides, nn, random_network
    >>> def model(x, y=None):
    ...     net = random_network("net", nn.MLP([4, 1], "tanh"), x.shape[1:])
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("y", dist.Normal(net(x)[..., 0], 0.1), obs=y)
    >>> guide = guides.AutoStructured(model)
    >>> svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    >>> state = svi.init(jax.random.key(0), jnp.ones((5, 3)), jnp.ones(5))
    >>> [name for name in sorted(svi.get_params(state)) if name.endswith("tril")]
    ['auto_net/Dense_0_scale_tril', 'auto_net/Dense_1_scale_tril']
    """

    @checked("guides.{}")
    def __init__(
        self,
        model: Model,
        family: Annotated[
            Family,
            Kind(
                Family,
                "Pass a family, e.g. `guides.FullRank()` or `guides.LowRank(10)`.",
            ),
        ]
        | None = None,
        *,
        blocks: Mapping[Any, Family] | Sequence[Patterns] | None = None,
        include_scales: Switch = False,
        **settings: Any,
    ) -> None:
        family = FullRank() if family is None else family
        self._family, self._include_scales = family, include_scales
        self._by_layer = blocks is None
        families: Any = blocks or ()
        if isinstance(families, str):
            families = {families: family}
        elif not isinstance(families, Mapping):
            families = [(patterns, family) for patterns in families]
        super().__init__(model, families, **settings)

    def _choose_blocks(self) -> Sequence[tuple[str, tuple[str, ...], Family]]:
        if not self._by_layer:
            return super()._choose_blocks()
        shared = [name for name in self._latent() if name not in self._local_sites]
        weights = [name for name in shared if is_identity(self._transforms[name])]
        layers: dict[str, list[str]] = {_layer(name): [] for name in weights}
        for name in shared:
            if name in weights or self._include_scales:
                layers.get(_layer(name), []).append(name)
        if not layers:
            got = (
                f"no site to make a block of (latent sites: "
                f"{', '.join(self._latent())})"
            )
            instead = "It needs a real site; use `guides.AutoMeanField` for this model."
            raise argument_error(self._call, "model", got, instead)
        return [(layer, tuple(names), self._family) for layer, names in layers.items()]


def _layer(name: str) -> str:
    """``net/Dense_0`` of ``net/Dense_0.kernel``, ``net`` of ``net/kernel``, else the
    name.
    """
    module, _, leaf = name.rpartition("/")
    if "." in leaf:
        return name.rpartition(".")[0]
    return module if module and leaf.startswith(PARAMETERS) else name
