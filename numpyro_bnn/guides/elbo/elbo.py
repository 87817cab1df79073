"""Evidence lower bounds with a separate draw of the weights for every row of data."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.extend.core import ClosedJaxpr
from numpyro import handlers
from numpyro.distributions.kl import kl_divergence
from numpyro.distributions.util import scale_and_mask
from numpyro.infer.elbo import ELBO
from numpyro.util import check_model_guide_match

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import (
    affine_normal,
    is_affine_normal,
    is_latent,
    unwrapped,
)
from numpyro_bnn._jaxprs.slices import dependence, program_dependence
from numpyro_bnn._jaxprs.walk import SiteImage
from numpyro_bnn._options import PositiveInt, Switch, checked
from numpyro_bnn._types import Arrays, Operand, PyTree, Site, Sites, Trees
from numpyro_bnn.guides.elbo.row_independence import WeightUses, find_uses
from numpyro_bnn.guides.elbo.weight_uses import draw_noise, run
from numpyro_bnn.program.plates import check_observations


class Terms(NamedTuple):
    """An evidence lower bound as a program."""

    # closed jaxpr from the values of the latent sites, in the order of ``values``, to
    # terms that add up, with ``guide_terms``, to the bound
    program: ClosedJaxpr
    values: dict[str, Array]  # one draw of every latent site of the guide
    sites: list[str]  # latent sites of the model, in the order of the guide
    # loc and scale of sites that may be drawn for each row
    normals: dict[str, tuple[Array, Array]]
    plain: dict[str, str]  # why the other sites are drawn once
    guide_terms: Array  # terms of the guide alone


class _RowwiseELBO(ELBO):
    local: bool

    @checked("guides.{}")
    def __init__(
        self,
        num_particles: PositiveInt = 1,
        vectorize_particles: Switch | Callable = True,
    ) -> None:
        super().__init__(num_particles, vectorize_particles)
        self._warned = False

    @property
    def _call(self) -> str:
        return f"guides.{type(self).__name__}"

    def loss_with_mutable_state(
        self,
        rng_key: Array,
        param_map: dict,
        model: Callable,
        guide: Callable,
        *args: Any,
        **kwargs: Any,
    ) -> Trees:
        """Minus the estimate of the bound; see :meth:`numpyro.infer.elbo.ELBO.loss`."""

        def particle(key: Array) -> Array:
            run_key, noise_key = jax.random.split(key)
            return self._estimate(
                noise_key,
                read_terms(run_key, param_map, model, guide, args, kwargs, self._call),
            )

        if self.num_particles == 1:
            bound = particle(rng_key)
        else:
            bound = jnp.mean(
                self.vectorize_particles_fn(
                    particle, jax.random.split(rng_key, self.num_particles)
                )
            )
        return {"loss": -bound, "mutable_state": None}

    def report(
        self,
        model: Callable,
        guide: Callable,
        params: Arrays,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, str]:
        """How each latent site of the model is drawn; nothing is computed.

        :param params: parameters of the guide, e.g. ``svi.get_params(state)``.
        :return: by site ``"local reparameterization"``, ``"flipout"``, or ``"plain: "``
            and the reason.
        """
        methods: dict[str, str] = {}

        def read() -> None:
            terms = read_terms(
                jax.random.key(0), params, model, guide, args, kwargs, self._call
            )
            methods.update(self._methods(terms, self._uses(terms)))

        jax.eval_shape(read)
        return methods

    def _uses(self, terms: Terms) -> WeightUses:
        return find_uses(terms.program, terms.values, terms.normals, self._call)

    def _methods(self, terms: Terms, weight_uses: WeightUses) -> dict[str, str]:
        reasons = terms.plain | weight_uses.plain
        methods: dict[str, str] = {}
        for name in terms.sites:
            use = weight_uses.uses.get(name)
            if use is None:
                methods[name] = f"plain: {reasons[name]}"
            elif self.local and use.local:
                methods[name] = "local reparameterization"
            else:
                methods[name] = "flipout"
        return methods

    def _estimate(self, rng_key: Array, terms: Terms) -> Array:
        weight_uses = self._uses(terms)
        uses = weight_uses.uses
        if not uses:
            self._warn(self._methods(terms, weight_uses))
        inputs: dict[str, PyTree] = dict(terms.values)
        for name in uses:
            inputs[name] = SiteImage(name, *terms.normals[name])
        noise = draw_noise(rng_key, uses, self.local)
        bound = terms.guide_terms
        for term in run(terms.program, list(inputs.values()), uses, noise, self._call):
            bound += jnp.sum(term)
        return bound

    def _warn(self, methods: Mapping[str, str]) -> None:
        if not self._warned:
            self._warned = True
            message = "every site is drawn once for all rows, as `Trace_ELBO` does."
            reasons = "; ".join(
                f"{name!r} {method}" for name, method in methods.items()
            )
            warnings.warn(f"{self._call}: {message} {reasons}", stacklevel=4)


class TraceLocalReparam_ELBO(_RowwiseELBO):
    r"""ELBO with low-variance gradients by local reparameterization: draws
    pre-activations per row, not weights.

    Where independent normal weights w_ij ~ N(m_ij, s_ij^2) meet activations x (B, D) in
    a matrix product, the output (B, H) is drawn:

    .. math:: y_{bj} = \sum_i x_{bi} m_{ij} + \sqrt{\textstyle\sum_i x_{bi}^2 s_{ij}^2}\
              \epsilon_{bj},
              \qquad \epsilon_{bj} \sim N(0, 1).

    A bias, or any vector that is repeated over rows or looked up by them, is drawn for
    each row. The model may be any NumPyro function: its program is read, and each site
    whose guide is independent normals is traced to the place where it enters. Each term
    of the likelihood still sees weights with the distribution of the guide, so the
    bound and its gradient have the same expectation as with
    :class:`numpyro.infer.Trace_ELBO`; their variance is smaller, because rows no longer
    share one error.

    That holds only as long as rows do not interact. The random numbers of every row are
    traced through the program; if they mix before the likelihood (batch normalization,
    attention over an axis), rows along that axis share one draw. A site is drawn once
    for all rows, as in ``Trace_ELBO``, if it is used in two places, if it is a matrix
    that is neither multiplied with data (``dot_general``, ``conv_general_dilated``) nor
    indexed by it, if it enters a loop or a branch (``scan``, ``while``, ``cond``), or
    if other sites of the guide or priors depend on it. If outputs of one row share
    weights (convolutions, a dense layer at several positions), independent draws of
    them would be wrong; a kernel then gets flipout (:class:`TraceFlipout_ELBO`).
    :meth:`report` says how each site is drawn.

    KL(q || p) of a latent site is exact, instead of estimated from the draw, if there
    is a formula (two normals, or a pair in ``numpyro.distributions.kl``), the prior
    depends on no site that the guide draws given this one, and both sites have the same
    scale. This is read from the programs, whatever the order of the sites.

    :param num_particles: number of draws to average.
    :param vectorize_particles: as in :class:`numpyro.infer.Trace_ELBO`.

    :raises ValueError: for a model with ``numpyro.mutable`` state, or with latent sites
        the guide lacks.

    A :class:`UserWarning` is given once if every site has to be drawn once for all
    rows.

    Reference: Kingma, Salimans & Welling (2015), equation 6.

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import SVI
    >>> from numpyro.infer.autoguide import AutoNormal
    >>> from numpyro_bnn.guides import TraceLocalReparam_ELBO
    >>> def model(x, y):
    ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
    ...     b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     with numpyro.plate("data", 5):
    ...         numpyro.sample(
    ...             "y", dist.Normal(jnp.tanh(x @ w + b).sum(-1), 0.1), obs=y
    ...         )
    >>> data, guide, elbo = (
    ...     (jnp.ones((5, 3)), jnp.ones(5)),
    ...     AutoNormal(model),
    ...     TraceLocalReparam_ELBO(),
    ... )
    >>> svi = SVI(model, guide, numpyro.optim.Adam(1e-2), elbo)
    >>> state = svi.init(jax.random.key(0), *data)
    >>> elbo.report(model, guide, svi.get_params(state), *data)
    {'w': 'local reparameterization', 'b': 'local reparameterization'}
    >>> bool(svi.evaluate(state, *data) > 0)
    True
    """

    local = True


class TraceFlipout_ELBO(_RowwiseELBO):
    r"""ELBO with low-variance gradients by flipout: every row of data gets its own
    perturbation of the weights.

    With one draw of the perturbation ``s_ij eps_ij`` and, for each row b, random signs
    r_bi of the inputs and t_bj of the outputs, a product of activations x (B, D) and
    weights w_ij ~ N(m_ij, s_ij^2) gives (B, H)

    .. math:: y_{bj} = \sum_i x_{bi} m_{ij} + t_{bj} \sum_i x_{bi} r_{bi} s_{ij}
              \epsilon_{ij}.

    In a convolution a row is an image and the signs belong to channels: all positions
    of an image see the same weights. Since eps is symmetric, each row sees weights with
    the distribution of the guide, so the bound and its gradient have the same
    expectation as with :class:`numpyro.infer.Trace_ELBO`, while the errors of different
    rows are uncorrelated. The cost is a second product; where a row has more positions
    than a weight has inputs, each row gets its own weight matrix, and the cost is that
    of one product. A bias has a sign for each row.

    Which sites are drawn this way, and everything else, is as in
    :class:`TraceLocalReparam_ELBO`.

    :param num_particles: number of draws to average.
    :param vectorize_particles: as in :class:`numpyro.infer.Trace_ELBO`.

    :raises ValueError: for a model with ``numpyro.mutable`` state, or with latent sites
        the guide lacks.

    Reference: Wen, Vicol, Ba, Tran & Grosse (2018), equations 3-4.

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import SVI
    >>> from numpyro_bnn import nn, priors, random_network
    >>> from numpyro_bnn.guides import AutoMeanField, TraceFlipout_ELBO
    >>> def model(x, y):
    ...     net = random_network(
    ...         "net", nn.MLP([4, 1], "tanh"), x.shape[1:], priors.Normal()
    ...     )
    ...     with numpyro.plate("data", 5):
    ...         numpyro.sample("y", dist.Normal(net(x)[..., 0], 0.1), obs=y)
    >>> data, guide, elbo = (
    ...     (jnp.ones((5, 3)), jnp.ones(5)),
    ...     AutoMeanField(model),
    ...     TraceFlipout_ELBO(),
    ... )
    >>> svi = SVI(model, guide, numpyro.optim.Adam(1e-2), elbo)
    >>> state = svi.init(jax.random.key(0), *data)
    >>> set(elbo.report(model, guide, svi.get_params(state), *data).values())
    {'flipout'}
    """

    local = False


def read_terms(
    rng_key: Array,
    params: Mapping,
    model: Callable,
    guide: Callable,
    args: tuple,
    kwargs: Mapping,
    call: str,
) -> Terms:
    """Run the guide once, and read the program of the model."""
    guide_key, model_key = jax.random.split(rng_key)

    def trace(program: Callable, values: Trees) -> Sites:
        filled = handlers.substitute(program, data={**params, **values})
        return _checked(handlers.trace(filled).get_trace(*args, **kwargs), call)

    def run_guide(values: Trees) -> Sites:
        return trace(handlers.seed(guide, guide_key), values)

    guide_trace = run_guide({})
    latent = {name: site for name, site in guide_trace.items() if is_latent(site)}
    # in the order in which JAX flattens them
    values = {name: latent[name]["value"] for name in sorted(latent)}
    followers = _followers(run_guide, values)

    def terms(values: Trees) -> dict[Any, Array]:
        guide_sites = dict(guide_trace)
        for name, value in values.items():
            guide_sites[name] = {**guide_sites[name], "value": value}
        seeded = handlers.seed(model, model_key)
        model_trace = trace(handlers.replay(seeded, guide_sites), {})
        check_model_guide_match(model_trace, guide_trace)
        check_observations(model_trace)
        return _model_terms(model_trace, latent, call)

    program, shapes = jax.make_jaxpr(terms, return_shape=True)(values)
    parents = program_dependence(program, shapes, values)
    exact, priors = set(), {}
    for name in latent:
        if ("sampled", name) in parents:
            priors[name] = parents["sampled", name]
        formula = ("exact", name)
        if formula in parents and not parents[formula] & followers[name]:
            exact.add(name)
    needed = []
    outputs = zip(sorted(shapes), program.jaxpr.outvars, strict=True)
    for (kind, name), output in outputs:  # as JAX flattens them
        if kind == "likelihood" or (kind == "exact") == (name in exact):
            needed.append(output)
    program = program.replace(jaxpr=program.jaxpr.replace(outvars=needed))
    plain = _plain(latent, followers, priors)
    normals = {}
    for name in priors:
        moments = affine_normal(latent[name]["fn"])
        if name not in plain and moments is not None:
            normals[name] = moments
    guide_terms = jnp.zeros(())
    for name, site in guide_trace.items():
        if site["type"] == "sample" and name not in priors:
            guide_terms += _log_prob(site).sum()
    return Terms(program, values, list(priors), normals, plain, -guide_terms)


def _checked(trace: Sites, call: str) -> Sites:
    for name, site in trace.items():
        if site["type"] == "mutable":
            instead = "Use `Trace_ELBO`, or a layer without running state."
            raise argument_error(call, "model", f"a mutable site {name!r}", instead)
    return trace


def _log_prob(site: Site, value: Operand = None) -> Array:
    """Scaled log density of a site, elementwise."""
    if value is None and site["intermediates"]:
        density = site["fn"].log_prob(site["value"], site["intermediates"])
    else:
        density = site["fn"].log_prob(site["value"] if value is None else value)
    return jnp.asarray(scale_and_mask(density, scale=site["scale"]))


def _followers(
    run_guide: Callable[[Arrays], Sites], values: Trees
) -> dict[str, set[str]]:
    """For each latent site of the guide, the others whose draw or density in the guide
    depends on its value.
    """

    def sites(values: Trees) -> Trees:
        draws = {}
        for name, site in run_guide(values).items():
            if is_latent(site):
                draws[name] = site["value"], _log_prob(site)
        return draws

    followers: dict[str, set[str]] = {name: set() for name in values}
    for child, parents in dependence(sites, values).items():
        for name in parents - {child}:
            followers[name].add(child)
    return followers


def _plain(
    latent: Sites, followers: Mapping[str, set], priors: Mapping[str, set]
) -> dict[str, str]:
    """Why sites of the model cannot be redrawn for every term of the likelihood."""
    reasons = {}
    for name in priors:
        children = [
            child for child in sorted(priors) if child != name and name in priors[child]
        ]
        if not is_affine_normal(latent[name]["fn"]):
            kind = type(unwrapped(latent[name]["fn"])).__name__
            reasons[name] = f"its guide is a {kind}, not independent normals"
        elif followers[name]:
            reasons[name] = f"the guide of {min(followers[name])!r} depends on it"
        elif children:
            reasons[name] = f"the prior of {children[0]!r} depends on it"
    return reasons


def _model_terms(trace: Sites, latent: Sites, call: str) -> dict[Any, Array]:
    """Terms by kind and site: likelihoods elementwise; E_q[log p - log q] from a draw,
    and by formula.
    """
    terms: dict[Any, Array] = {}
    for name, site in trace.items():
        if site["type"] != "sample":
            continue
        if site["is_observed"]:
            terms["likelihood", name] = _log_prob(site)
        elif name not in latent:
            instead = "Give it a site in the guide, or sum it out."
            raise argument_error(
                call,
                "model",
                f"the latent site {name!r}, which the guide lacks",
                instead,
            )
        else:  # at the draw of the guide, even if the model is given another value
            terms["sampled", name] = (
                _log_prob(site, latent[name]["value"]).sum()
                - _log_prob(latent[name]).sum()
            )
            exact = _divergence(latent[name], site)
            if exact is not None:
                terms["exact", name] = -exact
    return terms


def _divergence(guide: Site, model: Site) -> Array | None:
    """KL(q || p) summed over a site, with its scale; ``None`` if there is
    no formula.
    """
    if isinstance(unwrapped(guide["fn"], masked=True), dist.Delta) or not _same(
        guide["scale"], model["scale"]
    ):
        return None
    event_dim = model["fn"].event_dim

    def normal(loc: Array, scale: Array) -> dist.Distribution:
        return dist.Normal(loc, scale, validate_args=False).to_event(event_dim)

    guide_fn, model_fn = guide["fn"], model["fn"]
    q, p = affine_normal(guide_fn), affine_normal(model_fn)
    if q is not None and p is not None:
        guide_fn, model_fn = normal(*q), normal(*p)
    try:
        each = kl_divergence(guide_fn, model_fn)
    except NotImplementedError:
        return None
    return jnp.sum(scale_and_mask(each, scale=model["scale"]))


def _same(a: Operand, b: Operand) -> bool:
    """Whether two scales are known to be equal."""
    if a is b or isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return a is b
    return np.array_equal(1.0 if a is None else a, 1.0 if b is None else b)
