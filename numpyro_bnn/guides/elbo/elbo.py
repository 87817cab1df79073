"""Evidence lower bounds with a separate draw of the weights for every row of data."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.infer.elbo import ELBO

from numpyro_bnn._checks import check_count
from numpyro_bnn.guides.elbo.row_independence import WeightUses, find_uses
from numpyro_bnn.guides.elbo.terms import Terms, read_terms
from numpyro_bnn.guides.elbo.weight_uses import RandomWeight, draw_noise, run


class _RowwiseELBO(ELBO):
    local: bool

    def __init__(self, num_particles: int = 1, vectorize_particles: Any = True) -> None:
        num_particles = check_count(self._call, "num_particles", num_particles)
        super().__init__(num_particles, vectorize_particles)
        self._warned = False

    @property
    def _call(self) -> str:
        return f"guides.{type(self).__name__}"

    def loss_with_mutable_state(
        self, rng_key: jax.Array, param_map: dict, model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Minus the estimate of the bound; see :meth:`numpyro.infer.elbo.ELBO.loss`."""

        def particle(key: jax.Array) -> jax.Array:
            run_key, noise_key = jax.random.split(key)
            return self._estimate(noise_key, read_terms(run_key, param_map, model, guide, args, kwargs, self._call))

        if self.num_particles == 1:
            bound = particle(rng_key)
        else:
            bound = jnp.mean(self.vectorize_particles_fn(particle, jax.random.split(rng_key, self.num_particles)))
        return {"loss": -bound, "mutable_state": None}

    def report(
        self, model: Callable, guide: Callable, params: Mapping[str, jax.Array], *args: Any, **kwargs: Any
    ) -> dict[str, str]:
        """How each latent site of the model is drawn; nothing is computed.

        :param params: parameters of the guide, e.g. ``svi.get_params(state)``.
        :return: by site ``"local reparameterization"``, ``"flipout"``, or ``"plain: "`` and the reason.
        """
        methods: dict[str, str] = {}

        def read() -> None:
            terms = read_terms(jax.random.key(0), params, model, guide, args, kwargs, self._call)
            methods.update(self._methods(terms, self._uses(terms)))

        jax.eval_shape(read)
        return methods

    def _uses(self, terms: Terms) -> WeightUses:
        sizes = {name: value.size for name, value in terms.values.items()}
        return find_uses(terms.program, terms.needed, sizes, terms.normals, self._call)

    def _methods(self, terms: Terms, found: WeightUses) -> dict[str, str]:
        methods = {name: f"plain: {why}" for name, why in (terms.plain | found.plain).items()}
        for name, use in found.uses.items():
            methods[name] = "local reparameterization" if self.local and use.local else "flipout"
        return {name: methods[name] for name in terms.sites}

    def _estimate(self, rng_key: jax.Array, terms: Terms) -> jax.Array:
        found = self._uses(terms)
        if not found.uses:
            self._warn(self._methods(terms, found))
        weights = {name: RandomWeight(name, *terms.normals[name]) for name in found.uses}
        values = [weights.get(name, value) for name, value in terms.values.items()]
        outputs = run(terms.program, values, terms.needed, draw_noise(rng_key, found.uses, self.local), self._call)
        return sum((jnp.sum(term) for term in outputs if term is not None), start=terms.rest)

    def _warn(self, methods: Mapping[str, str]) -> None:
        if not self._warned:
            self._warned = True
            listed = "; ".join(f"{name!r} {why}" for name, why in methods.items())
            why = "every site is drawn once for all rows, as `Trace_ELBO` does."
            warnings.warn(f"{self._call}: {why} {listed}", stacklevel=4)


class TraceLocalReparam_ELBO(_RowwiseELBO):
    r"""ELBO with low-variance gradients by local reparameterization: draws pre-activations per row, not weights.

    Where independent normal weights w_ij ~ N(m_ij, s_ij^2) meet activations x (B, D) in a matrix product, the output
    (B, H) is drawn:

    .. math:: y_{bj} = \sum_i x_{bi} m_{ij} + \sqrt{\textstyle\sum_i x_{bi}^2 s_{ij}^2}\ \epsilon_{bj},
              \qquad \epsilon_{bj} \sim N(0, 1).

    A bias, or any vector that is repeated over rows or looked up by them, is drawn for each row. The model may be any
    NumPyro function: its program is read, and each site whose guide is independent normals is traced to the place
    where it enters. Each term of the likelihood still sees weights with the distribution of the guide, so the bound
    and its gradient have the same expectation as with :class:`numpyro.infer.Trace_ELBO`; their variance is smaller,
    because rows no longer share one error.

    That holds only as long as rows do not interact. The random numbers of every row are traced through the program;
    if they mix before the likelihood (batch normalization, attention over an axis), rows along that axis share one
    draw.
    A site is drawn once for all rows, as in ``Trace_ELBO``, if it is used in two places, if it is a matrix that is
    neither multiplied with data (``dot_general``, ``conv_general_dilated``) nor indexed by it, if it enters a loop or
    a branch (``scan``, ``while``, ``cond``), or if other sites of the guide or priors depend on it. If outputs of one
    row share weights (convolutions, a dense layer at several positions), independent draws of them would be wrong;
    a kernel then gets flipout (:class:`TraceFlipout_ELBO`). :meth:`report` says how each site is drawn.

    KL(q || p) of a latent site is exact, instead of estimated from the draw, if there is a formula (two normals, or a
    pair in ``numpyro.distributions.kl``), the prior depends on no site that the guide draws given this one, and both
    sites have the same scale. This is read from the programs, whatever the order of the sites.

    :param num_particles: number of draws to average.
    :param vectorize_particles: as in :class:`numpyro.infer.Trace_ELBO`.

    :raises ValueError: for a model with ``numpyro.mutable`` state, or with latent sites the guide lacks.

    A :class:`UserWarning` is given once if every site has to be drawn once for all rows.

    Reference: Kingma, Salimans & Welling (2015), equation 6.

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import SVI
    >>> from numpyro.infer.autoguide import AutoNormal
    >>> from numpyro_bnn.guides import TraceLocalReparam_ELBO
    >>> def model(x, y):
    ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
    ...     b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     with numpyro.plate("data", 5):
    ...         numpyro.sample("y", dist.Normal(jnp.tanh(x @ w + b).sum(-1), 0.1), obs=y)
    >>> data, guide, elbo = (jnp.ones((5, 3)), jnp.ones(5)), AutoNormal(model), TraceLocalReparam_ELBO()
    >>> svi = SVI(model, guide, numpyro.optim.Adam(1e-2), elbo)
    >>> state = svi.init(jax.random.key(0), *data)
    >>> elbo.report(model, guide, svi.get_params(state), *data)
    {'w': 'local reparameterization', 'b': 'local reparameterization'}
    >>> bool(svi.evaluate(state, *data) > 0)
    True
    """

    local = True


class TraceFlipout_ELBO(_RowwiseELBO):
    r"""ELBO with low-variance gradients by flipout: every row of data gets its own perturbation of the weights.

    With one draw of the perturbation ``s_ij eps_ij`` and, for each row b, random signs r_bi of the inputs and t_bj of
    the outputs, a product of activations x (B, D) and weights w_ij ~ N(m_ij, s_ij^2) gives (B, H)

    .. math:: y_{bj} = \sum_i x_{bi} m_{ij} + t_{bj} \sum_i x_{bi} r_{bi} s_{ij} \epsilon_{ij}.

    In a convolution a row is an image and the signs belong to channels: all positions of an image see the same
    weights. Since eps is symmetric, each row sees weights with the distribution of the guide, so the bound and its
    gradient have the same expectation as with :class:`numpyro.infer.Trace_ELBO`, while the errors of different rows
    are uncorrelated. The cost is a second product; where a row has more positions than a weight has inputs, each row
    gets its own weight matrix, and the cost is that of one product. A bias has a sign for each row.

    Which sites are drawn this way, and everything else, is as in :class:`TraceLocalReparam_ELBO`.

    :param num_particles: number of draws to average.
    :param vectorize_particles: as in :class:`numpyro.infer.Trace_ELBO`.

    :raises ValueError: for a model with ``numpyro.mutable`` state, or with latent sites the guide lacks.

    Reference: Wen, Vicol, Ba, Tran & Grosse (2018), equations 3-4.

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import SVI
    >>> from numpyro_bnn import nn, priors, random_network
    >>> from numpyro_bnn.guides import AutoMeanField, TraceFlipout_ELBO
    >>> def model(x, y):
    ...     net = random_network("net", nn.MLP([4, 1], "tanh"), x.shape[1:], priors.Normal())
    ...     with numpyro.plate("data", 5):
    ...         numpyro.sample("y", dist.Normal(net(x)[..., 0], 0.1), obs=y)
    >>> data, guide, elbo = (jnp.ones((5, 3)), jnp.ones(5)), AutoMeanField(model), TraceFlipout_ELBO()
    >>> svi = SVI(model, guide, numpyro.optim.Adam(1e-2), elbo)
    >>> state = svi.init(jax.random.key(0), *data)
    >>> set(elbo.report(model, guide, svi.get_params(state), *data).values())
    {'flipout'}
    """

    local = False
