"""AutoAmortized: a network maps each data point to the posterior of its latent variables, q(z_n | y_n)."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions.transforms import biject_to
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.initialization import init_to_median
from numpyro.infer.util import helpful_support_errors

from numpyro_bnn._checks import argument_error, check_flag, check_kind
from numpyro_bnn._plates import full_plates
from numpyro_bnn.guides.gaussian import AutoMeanField
from numpyro_bnn.guides.inference_network import (
    CALL,
    Posterior,
    RowSite,
    argument_by_name,
    center_and_spread,
    declare_head,
    find_plate,
    minibatch,
    plate_sizes,
    without,
)
from numpyro_bnn.guides.initialization import check_imputed
from numpyro_bnn.nn import Dense, Layer, Sequential
from numpyro_bnn.nn.base import Shape

Values = dict[str, jax.Array]


class AutoAmortized(AutoGuide):
    r"""Guide for models with a latent variable per data point: a network computes its posterior from the data.

    For each row n of the data the *inference network* computes features h_n = f(y_n), and linear heads the parameters
    of q(z_n | y_n) = N(mu_n, sigma_n^2) for every latent site in the plate of the data, in unconstrained space:

    .. math:: \mu_n = h_n W + a, \qquad \sigma_n = \mathrm{softplus}(h_n V + c)

    The number of parameters does not grow with N, a step on B rows costs O(B), and new rows get a posterior without
    further training. W and V start at zero, a and c at the center and spread of the prior. Sites outside the plate
    are approximated by the guide ``rest``, independently of the local ones.

    The plate may be subsampled: the plate statement of the guide draws the indices, and the model uses the same rows
    and the same scale. A model may also receive its minibatch as an argument: ``plate("data", N, len(y))``.

    :param model: a model with latent sites in a plate over data points.
    :param inputs: the input of the network: the name of an argument of the model that has one row per data
        point, such as ``"y"``, or a function of the model's arguments that returns such an array,
        ``(N, *input_shape)``.
    :param network: a network of :mod:`numpyro_bnn.nn` that turns one row into features of any shape, by default two
        dense layers of 64 units with tanh; or a callable from rows ``(B, *input_shape)`` to features (B, H) that
        declares its own parameters, such as ``flax_module("encoder", module, ...)`` called inside it.
    :param full_rank: let the local latents of one row correlate: N(mu_n, L_n L_n^T) over all of them, with a separate
        head for the triangle of L_n.
    :param plate: name of the plate of the data points, needed if latent sites lie in several plates.
    :param rest: a function that makes the guide of the other sites from a model, e.g. ``AutoDelta``.
    :param prefix: prefix of the parameter names.
    :param init_loc_fn: NumPyro's strategy for the values at which the model is first run.
    :param create_plates: as in NumPyro's autoguides.
    :raises ValueError: for a model without latents in a plate, for inputs with another number of rows than the plate,
        and for a network with batch normalization, which makes rows dependent.

    References: Kingma & Welling (2014), *Auto-encoding variational Bayes*, section 3; Cremer, Li & Duvenaud (2018),
    *Inference suboptimality in variational autoencoders*, on the gap to the best q of each point.

    >>> import jax, numpyro, optax, numpyro.distributions as dist
    >>> from numpyro.infer import SVI, Trace_ELBO
    >>> from numpyro_bnn import guides, nn
    >>> def model(y, batch_size=None):
    ...     with numpyro.plate("data", y.shape[0], subsample_size=batch_size) as n:
    ...         z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    ...         numpyro.sample("y", dist.Normal(z[:, None], 0.5).to_event(1), obs=y[n])
    >>> y = jax.random.normal(jax.random.key(0), (100, 3))
    >>> guide = guides.AutoAmortized(model, inputs="y", network=nn.Sequential([nn.Dense(8), "tanh"]))
    >>> fit = SVI(model, guide, optax.adam(1e-2), Trace_ELBO()).run(
    ...     jax.random.key(1), 5, y, batch_size=20, progress_bar=False)
    >>> draws = guide.sample_posterior(jax.random.key(2), fit.params, y[:7], sample_shape=(10,))
    >>> draws["z"].shape, guide.median(fit.params, y[:7])["z"].shape
    ((10, 7), (7,))
    """

    def __init__(
        self,
        model: Callable,
        inputs: str | Callable[..., Any],
        network: Layer | Callable[[jax.Array], jax.Array] | None = None,
        *,
        full_rank: bool = False,
        plate: str | None = None,
        rest: Callable[[Callable], AutoGuide] = AutoMeanField,
        prefix: str = "auto",
        init_loc_fn: Callable = init_to_median,
        create_plates: Callable | None = None,
    ) -> None:
        check_kind(CALL, "model", model, callable, "Pass a NumPyro model (a function).")
        check_kind(CALL, "rest", rest, callable, "Pass a function of a model, e.g. `AutoDelta`.")
        check_flag(CALL, "full_rank", full_rank)
        if not isinstance(inputs, str) and not callable(inputs):
            instead = 'Name an argument of the model, e.g. `inputs="y"`, or pass a function of its arguments.'
            raise argument_error(CALL, "inputs", inputs, instead, TypeError)
        if network is None:
            network = Sequential([Dense(64), "tanh", Dense(64), "tanh"])
        if not isinstance(network, Layer) and not callable(network):
            instead = 'Pass a network, e.g. `nn.Sequential([nn.Dense(64), "tanh"])`, or a callable.'
            raise argument_error(CALL, "network", repr(network), instead, TypeError)
        self.inputs, self.network, self.full_rank = inputs, network, full_rank
        self._plate_name, self._make_rest = plate, rest
        self.rest: AutoGuide | None = None
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn, create_plates=create_plates)

    # -- reading the model and its data ------------------------------------------------------------------

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self._prototype_call = args, kwargs
        check_imputed(CALL, self.prototype_trace)
        trace = self.prototype_trace.items()
        latent = {n: s for n, s in trace if s["type"] == "sample" and not s["is_observed"]}
        self.plate = find_plate(latent, self._plate_name)
        local = [s for s in latent.values() if self.plate in [f.name for f in s["cond_indep_stack"]]]
        self._sites: list[RowSite] = []
        for site in local:
            self._sites.append(self._row_site(site))
        if len(local) < len(latent):
            self.rest = self._make_rest(without(self.model, [site["name"] for site in local]))

    def _row_site(self, site: dict[str, Any]) -> RowSite:
        name, fn = site["name"], site["fn"]
        for frame in site["cond_indep_stack"]:
            if frame.name != self.plate and frame.size != self._prototype_frame_full_sizes[frame.name]:
                got = f"site {name!r} in plate {frame.name!r}, subsampled as well"
                raise argument_error(CALL, "model", got, f"Only the plate {self.plate!r} may be subsampled.")
        with helpful_support_errors(site):
            transform = biject_to(fn.support)
        shape = transform.inverse_shape(fn.shape())
        event_dim = len(shape) - len(fn.batch_shape)
        axis = self._prototype_frames[self.plate].dim - event_dim
        loc, scale = (jnp.mean(part, axis) for part in center_and_spread(fn, transform))
        raw_scale = scale + jnp.log(-jnp.expm1(-scale))  # the inverse of softplus
        start = self._sites[-1].part.stop if self._sites else 0
        part = slice(start, start + loc.size)
        return RowSite(name, part, loc.shape, axis, event_dim, fn.support, loc.ravel(), raw_scale.ravel())

    def _rows(self, args: tuple, kwargs: Mapping[str, Any]) -> jax.Array:
        """Inputs ``(N, *input_shape)``, or ``(B, *input_shape)`` if the model is given its minibatch."""
        if callable(self.inputs):
            rows = self.inputs(*args, **kwargs)
        else:
            rows = argument_by_name(self.model, self.inputs, args, kwargs)
        if rows is None:
            instead = (
                "The posterior of local latents needs their data. To draw them from their prior, pass draws of the"
                " other sites to `Predictive`."
            )
            raise argument_error(CALL, "inputs", "None", instead)
        rows = jnp.asarray(rows)
        if rows.ndim < 2:
            got = f"an array of shape {rows.shape}"
            raise argument_error(CALL, "inputs", got, "Give (N, D), e.g. `lambda y: y[:, None]`.")
        return rows if jnp.issubdtype(rows.dtype, jnp.inexact) else rows.astype(float)

    def _plates(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, numpyro.plate]:
        """Plates of the local sites with the sizes that the model gives them for these arguments."""
        plates = {} if self.create_plates is None else self.create_plates(*args, **kwargs)
        if not isinstance(plates, dict):
            plates = {p.name: p for p in ([plates] if isinstance(plates, numpyro.plate) else plates)}
        needed = [f.name for s in self._sites for f in self.prototype_trace[s.name]["cond_indep_stack"]]
        sizes = {} if set(needed) <= set(plates) else plate_sizes(self.model, args, kwargs)
        for name in dict.fromkeys(needed):
            if name not in plates:
                size, subsample_size = sizes[name]
                dim = self._prototype_frames[name].dim
                plates[name] = numpyro.plate(name, size, subsample_size=subsample_size, dim=dim)
        return plates

    # -- the guide -------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Values:
        """Sample all latent sites of the model, those in the plate for the rows of this minibatch."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        result = {} if self.rest is None else dict(self.rest(*args, **kwargs))
        rows = self._rows(args, kwargs)
        plates = self._plates(args, kwargs)
        posterior = self._posterior(minibatch(rows, plates[self.plate]))
        joint = self._sample_joint(posterior, plates[self.plate]) if self.full_rank else None
        for site in self._sites:
            prior = self.prototype_trace[site.name]
            fn = site.independent(posterior) if joint is None else site.point(joint, prior["fn"].event_dim)
            with ExitStack() as stack:
                for frame in prior["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                result[site.name] = numpyro.sample(site.name, fn)
        return result

    def _sample_joint(self, posterior: Posterior, plate: numpyro.plate) -> jax.Array:
        """Values (B, L) of all local sites, from one statement."""
        inner = (1,) * (-plate.dim - 1)  # dims of other plates
        rows, size = posterior.loc.shape
        fn = dist.MultivariateNormal(
            posterior.loc.reshape(rows, *inner, size),
            scale_tril=posterior.scale.reshape(rows, *inner, size, size),
        )
        with plate:
            value = numpyro.sample(f"_{self.prefix}_{self.plate}_latent", fn, infer={"is_auxiliary": True})
        return value.reshape(rows, size)

    def _posterior(self, rows: jax.Array) -> Posterior:
        """Declare the parameters, and evaluate network and heads on rows ``(B, *input_shape)``."""
        features = self._features(rows)
        parts = []
        for site in self._sites:
            loc = declare_head(f"{site.name}_{self.prefix}_loc", features, site.loc)
            scale = declare_head(f"{site.name}_{self.prefix}_scale", features, site.raw_scale)
            parts.append((loc, jax.nn.softplus(scale)))
        loc, sd = (jnp.concatenate(part, -1) for part in zip(*parts, strict=True))
        if not self.full_rank:
            return Posterior(loc, sd)
        size = loc.shape[-1]
        below = declare_head(f"{self.prefix}_{self.plate}_tril", features, jnp.zeros(size * (size - 1) // 2))
        at = np.tril_indices(size, -1)
        factor = jnp.broadcast_to(jnp.eye(size), (len(loc), size, size)).at[:, *at].set(below)
        return Posterior(loc, sd[:, :, None] * factor)

    def _features(self, rows: jax.Array) -> jax.Array:
        network, shape = self.network, rows.shape[1:]
        if isinstance(network, Layer):
            params = {}
            for name in network.param_shapes(shape):
                start = partial(lambda key, name: network.init(key, shape)[name], name=name)
                params[name] = numpyro.param(f"{self.prefix}_network/{name}", start)
            if jax.eval_shape(partial(network.statistics, params), rows):
                got = "a network with batch normalization"
                instead = "Use `nn.LayerNorm`: batch normalization makes q of one row depend on other rows."
                raise argument_error(CALL, "network", got, instead)
            features = network.apply(params, rows)
        else:
            features = network(rows)
            if jnp.ndim(features) < 1 or jnp.shape(features)[0] != rows.shape[0]:
                got = f"one that maps {rows.shape} to {jnp.shape(features)}"
                raise argument_error(CALL, "network", got, "It must return one row of features per row.")
        return jnp.reshape(features, (rows.shape[0], -1))

    # -- draws and summaries ---------------------------------------------------------------------------

    def sample_posterior(
        self, rng_key: jax.Array, params: Mapping, *args: Any, sample_shape: Shape = (), **kwargs: Any
    ) -> Values:
        """Draw the latent sites of every row of the data, and the sites outside the plate.

        :param rng_key: legacy or typed.
        :param params: fitted parameters.
        :param args: arguments of the model, with these or new data; without any, those of the first run.
        :param sample_shape: shape of the batch of draws.
        :return: local sites ``(*sample_shape, N, ...)``, other sites, and deterministic sites of the model.
        """
        args, kwargs, posterior = self._read(params, args, kwargs)
        of_rest, of_local, of_model = jax.random.split(rng_key, 3)
        rest = {}
        if self.rest is not None:
            rest = self.rest.sample_posterior(of_rest, params, *args, sample_shape=sample_shape, **kwargs)
        flat = posterior.draw(of_local, tuple(sample_shape))
        return self._complete(of_model, flat, rest, len(sample_shape), params, (args, kwargs))

    def median(self, params: Mapping[str, Any], *args: Any, **kwargs: Any) -> Values:
        """Medians of all latent sites, and deterministic sites at these.

        :param params: fitted parameters.
        :param args: arguments of the model, with these or new data; without any, those of the first run.
        """
        args, kwargs, posterior = self._read(params, args, kwargs)
        rest = {} if self.rest is None else self.rest.median(params)
        return self._complete(jax.random.key(0), posterior.loc, rest, 0, params, (args, kwargs))

    def quantiles(self, params: Mapping[str, Any], quantiles: Any, *args: Any, **kwargs: Any) -> Values:
        """Quantiles of all latent sites, along a new first axis, and deterministic sites at these.

        :param params: fitted parameters.
        :param quantiles: numbers between 0 and 1.
        :param args: arguments of the model, with these or new data; without any, those of the first run.
        """
        args, kwargs, posterior = self._read(params, args, kwargs)
        at = jnp.atleast_1d(jnp.asarray(quantiles, float)).reshape(-1, 1, 1)
        flat = dist.Normal(posterior.loc, posterior.sd).icdf(at)
        rest = {} if self.rest is None else self.rest.quantiles(params, quantiles)
        return self._complete(jax.random.key(0), flat, rest, 1, params, (args, kwargs))

    def _read(self, params: Mapping[str, Any], args: tuple, kwargs: Any) -> tuple[tuple, Any, Posterior]:
        """The arguments, by default those of the first run, and the posterior at these parameters."""
        if self.prototype_trace is None:
            with handlers.seed(rng_seed=0):
                self._setup_prototype(*args, **kwargs)
        args, kwargs = (args, kwargs) if args or kwargs else self._prototype_call
        with handlers.block():
            posterior = handlers.substitute(self._posterior, data=dict(params))(self._rows(args, kwargs))
        return args, kwargs, posterior

    def _complete(
        self, key: jax.Array, flat: jax.Array, rest: Values, batch_ndims: int, params: Any, call: tuple
    ) -> Values:
        """All sites, from the local ones (..., B, L) in unconstrained space and those of the other guide."""
        args, kwargs = call
        values = {**rest, **{site.name: site.transform(site.place(flat)) for site in self._sites}}
        names = [n for n, site in self.prototype_trace.items() if site["type"] == "deterministic"]
        if not names:
            return values
        size, _ = plate_sizes(self.model, args, kwargs)[self.plate]
        model = full_plates(self.model) if self._rows(args, kwargs).shape[0] == size else self.model
        at = Predictive(model, values, params=dict(params), return_sites=names, batch_ndims=batch_ndims)
        return {**values, **at(key, *args, **kwargs)}
