"""Guides that cut the sites into blocks by themselves: one per layer of a network, one per kernel."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from numpyro_bnn._checks import argument_error
from numpyro_bnn.guides.base import AutoBlocks
from numpyro_bnn.guides.blocks import Family, Patterns
from numpyro_bnn.guides.families import FullRank, MatrixNormal
from numpyro_bnn.guides.summaries import is_identity

__all__ = ["AutoMatrixNormal", "AutoStructured"]

PARAMETERS = ("kernel", "bias", "scale", "weight", "embedding")  # of a network that is one layer


class AutoStructured(AutoBlocks):
    r"""Structured mean field: one joint Gaussian per layer of a network, or per block the user names.

    .. math:: q(\theta) = \prod_{l} N(\theta_l; m_l, S_l) \prod_j N(\theta_j; \mu_j, \sigma_j^2)

    A layer is what sites share up to the last dot of their names: ``net/Dense_0`` for ``net/Dense_0.kernel`` (or its
    non-centered ``_base``) and ``net/Dense_0.bias``; a site without a dot in its name is a layer of its own.
    Hyper-sites, such as ``net/Dense_0.kernel_scale``, and other sites with a limited support stay mean field, as do
    local latent sites.

    :param model: a NumPyro model.
    :param family: of every layer, e.g. :class:`LowRank` for wide ones.
    :param blocks: instead of layers, a list of patterns (or tuples of patterns), each a block with this family, or a
        dictionary from patterns to families as in :class:`AutoBlocks`.
    :param include_scales: put hyper-sites into the block of their layer.
    :param settings: ``init_scale``, ``init_loc_fn``, ``condition_on_scales``, ``prefix``, ``create_plates`` of
        :class:`AutoBlocks`.
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

    def __init__(
        self,
        model: Callable,
        family: Family | None = None,
        *,
        blocks: Mapping[Any, Family] | Sequence[Patterns] | None = None,
        include_scales: bool = False,
        **settings: Any,
    ) -> None:
        family = FullRank() if family is None else family
        if not isinstance(family, Family):
            instead = "Pass a family, e.g. `guides.FullRank()` or `guides.LowRank(10)`."
            raise argument_error("guides.AutoStructured", "family", family, instead, TypeError)
        self._family, self._by_layer, self._include_scales = family, blocks is None, include_scales
        chosen: Any = blocks or ()
        if not isinstance(chosen, Mapping):
            chosen = [(patterns, family) for patterns in ([chosen] if isinstance(chosen, str) else chosen)]
        super().__init__(model, chosen, **settings)

    def _choose_blocks(self) -> Sequence[tuple[str, tuple[str, ...], Family]]:
        if not self._by_layer:
            return super()._choose_blocks()
        weights = _weights(self)
        layers: dict[str, list[str]] = {_layer(name): [] for name in weights}
        for name in self._latent():
            if name in weights or (self._include_scales and name not in self._local_sites):
                layers.get(_layer(name), []).append(name)
        if not layers:
            raise _no_weights(self._call, list(self._latent()), "a real site")
        return [(layer, tuple(names), self._family) for layer, names in layers.items()]


class AutoMatrixNormal(AutoBlocks):
    """A matrix normal for every kernel, with a covariance of its inputs and one of its outputs; the rest mean field.

    See :class:`MatrixNormal` for the density. A kernel is any real site of at least two axes.

    :param model: a NumPyro model.
    :param diagonal: one scale per input and one per output instead of two covariances.
    :param settings: ``init_scale``, ``init_loc_fn``, ``condition_on_scales``, ``prefix``, ``create_plates`` of
        :class:`AutoBlocks`.
    :raises ValueError: when first called, for a model without a kernel, and for one too wide for two covariances.

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
    >>> from numpyro.infer import SVI, Trace_ELBO
    >>> from numpyro_bnn import guides
    >>> def model(x, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
    ...     numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)
    >>> guide = guides.AutoMatrixNormal(model)
    >>> svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    >>> params = svi.get_params(svi.init(jax.random.key(0), jnp.ones((5, 3)), jnp.ones((5, 2))))
    >>> {name: value.shape for name, value in sorted(params.items())}
    {'auto_w_column': (2, 2), 'auto_w_loc': (6,), 'auto_w_row': (3, 3)}
    """

    def __init__(
        self,
        model: Callable,
        *,
        diagonal: bool = False,
        **settings: Any,
    ) -> None:
        self._family = MatrixNormal(diagonal)
        super().__init__(model, **settings)

    def _choose_blocks(self) -> Sequence[tuple[str, tuple[str, ...], Family]]:
        kernels = [name for name in _weights(self) if jnp.ndim(self._init_locs[name]) > 1]
        if not kernels:
            raise _no_weights(self._call, list(self._latent()), "a real site of at least two axes")
        return [(name, (name,), self._family) for name in kernels]


def _weights(guide: AutoBlocks) -> list[str]:
    """Real sites of which not every data point has its own."""
    latent = [name for name in guide._latent() if name not in guide._local_sites]
    return [name for name in latent if is_identity(guide._transforms[name])]


def _layer(name: str) -> str:
    """``net/Dense_0`` of ``net/Dense_0.kernel``, ``net`` of ``net/kernel``, else the name."""
    before, _, leaf = name.rpartition("/")
    if "." in leaf:
        return name.rpartition(".")[0]
    return before if before and leaf.startswith(PARAMETERS) else name


def _no_weights(call: str, names: list[str], wanted: str) -> Exception:
    got = f"no site to make a block of (latent sites: {', '.join(names)})"
    return argument_error(
        call, "model", got, f"It needs {wanted}; use `guides.AutoMeanField` for this model."
    )
