"""The posterior of assumed density filtering as a NumPyro guide: sampling, summaries,
parameters.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoNormal
from numpyro.util import soft_vmap

from numpyro_bnn._checks import argument_error, probabilities
from numpyro_bnn._distributions import is_latent
from numpyro_bnn._types import Arrays, Kwargs, Trees
from numpyro_bnn.guides.adf.likelihoods import Likelihood
from numpyro_bnn.guides.adf.moment_matching import ADFState, Gamma
from numpyro_bnn.guides.adf.problem import first_state, read_problem
from numpyro_bnn.guides.adf.reading import CALL, Data, Values, read
from numpyro_bnn.moments import Gaussian
from numpyro_bnn.program.arguments import as_arrays
from numpyro_bnn.program.compiled import shared
from numpyro_bnn.program.posterior import Posterior

# A parameter by site and field.
Parameter = Callable[[str, str], Array]
# Names of the parameters of a site, by the kind of its posterior.
FIELDS: dict[type, tuple[str, str]] = {
    Gamma: ("concentration", "rate"),
    Gaussian: ("loc", "scale"),
}


class ADFPosterior(AutoNormal):
    """Independent Gaussians for weights, Gammas for precisions.

    For a non-centered weight w = s w_base the guide makes w independent of s: given s,
    w_base is N(m / s, v / s^2).
    """

    _problem: Likelihood | None = None
    _data: Data | None = None
    _start: dict[str, Any] | None = None

    def _known_problem(self) -> Likelihood:
        """The model as it was read; after unpickling it is read again."""
        if self._problem is None and self._data is not None:
            with jax.enable_x64(True):
                reading = read(self.model, *self._data.call())
                self._problem = read_problem(self._data, reading)
        if self._problem is None:
            instead = (
                "Call `run` of this guide first, or use it in `SVI`, so that it reads "
                "the model."
            )
            raise argument_error(CALL, "params", "those of another guide", instead)
        return self._problem

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        """Read the model, skipping AutoNormal's search for a valid start."""
        with jax.enable_x64(True):
            data, reading = Data.read(self.model, args, kwargs)
            self._problem = read_problem(data, reading)
        self._remember(data, reading, args, kwargs)

    def _remember(
        self, data: Data, reading: Posterior, args: tuple, kwargs: Kwargs
    ) -> None:
        """Keep what the guide needs of a model without its data."""
        self._data, self._prototype_call = data.head(), (args, kwargs)
        # The values are placeholders here, so only the fields without values are
        # stored.
        fields = ("type", "name", "is_observed", "cond_indep_stack", "args")
        self.prototype_trace = {}
        for name, site in reading.sites.items():
            self.prototype_trace[name] = {k: site[k] for k in fields if k in site}
            if site["type"] == "plate":
                self._prototype_frame_full_sizes[name] = site["args"][0]
            elif is_latent(site):
                self._event_dims[name] = site["fn"].event_dim
                for frame in site["cond_indep_stack"]:
                    self._prototype_frames[frame.name] = frame

    def __call__(self, *args: Any, **kwargs: Any) -> Arrays:
        """Sample the latent sites of the model, from parameters
        ``<site>_<prefix>_...``.
        """
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        problem, start = self._known_problem(), self._start_params()
        plates = self._create_plates(*args, **kwargs)

        def parameter(site: str, field: str) -> Array:
            name = f"{site}_{self.prefix}_{field}"
            constraint = (
                constraints.real if field == "loc" else constraints.softplus_positive
            )
            value = jnp.asarray(start[name], float)
            event_dim = self._event_dims.get(site, value.ndim)
            return numpyro.param(
                name, value, constraint=constraint, event_dim=event_dim
            )

        values: dict[str, Array] = {}
        weights = problem.roles.weights
        names = {weight.latent: name for name, weight in weights.items()}
        for latent, event_dim in self._event_dims.items():
            # in the order of the model, as TraceMeanField_ELBO requires
            name = names.get(latent, latent)
            fn = _distribution(problem, name, parameter)
            if name != latent:  # not centered
                weight, unit = weights[name], weights[name].prior_sd(values)
                residual = fn.loc - jnp.asarray(weight.loc, float)
                fn = dist.Normal(residual / unit, fn.scale / unit)
            with ExitStack() as stack:
                for frame in self.prototype_trace[latent]["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                values[latent] = numpyro.sample(latent, fn.to_event(event_dim))
        return values

    def _start_params(self) -> Trees:
        """Parameters before any data are seen."""
        problem = self._known_problem()
        if self._start is None:
            # Also while SVI traces the guide; `ensure_compile_time_eval` would run each
            # operation by itself.
            with jax.enable_x64(True), jax.core.eval_context():
                make = shared(
                    lambda key: self._to_params(first_state(problem, key, {})), True
                )
                self._start = jax.device_get(make(jax.random.key(0)))
        return self._start

    def _to_params(self, state: ADFState) -> dict[str, Array]:
        """Parameters ``<site>_<prefix>_loc`` and ``_scale``, for Gamma sites
        ``_concentration`` and ``_rate``.
        """
        params: dict[str, Array] = {}
        for name, value in {**state.hyperparameters, **state.weights}.items():
            if isinstance(value, Gaussian):
                value = Gaussian(value.mean, value.var**0.5)
            for field, moment in zip(FIELDS[type(value)], value, strict=True):
                params[f"{name}_{self.prefix}_{field}"] = moment
        return params

    def _parameter(self, params: Values) -> Parameter:
        return lambda site, field: jnp.asarray(
            params[f"{site}_{self.prefix}_{field}"], float
        )

    def _from_params(self, params: Values) -> ADFState:
        parameter, state = self._parameter(params), ADFState({}, {}, {})
        problem = self._known_problem()
        for name in problem.roles.weights:
            mean, sd = parameter(name, "loc"), parameter(name, "scale")
            state.weights[name] = Gaussian(mean, sd**2)
        for name, hyper in problem.hyperparameters.items():
            kind = type(hyper.prior)
            first, second = (parameter(name, field) for field in FIELDS[kind])
            second = second**2 if kind is Gaussian else second
            state.hyperparameters[name] = kind(first, second)
        return state

    def sample_posterior(
        self,
        rng_key: Array,
        params: Values,
        *args: Any,
        sample_shape: tuple = (),
        **kwargs: Any,
    ) -> dict[str, Array]:
        """Posterior draws ``(*sample_shape, ...)`` of the latent and deterministic
        sites.

        :param rng_key: a key.
        :param params: parameters from a run.
        :param args: arguments of the model for its deterministic sites; by default
            those of the run.
        :param sample_shape: shape of the batch of draws.
        """
        fns = self._distributions(params)
        keys = jax.random.split(rng_key, len(fns))
        values = {}
        for key, (name, fn) in zip(keys, fns.items(), strict=True):
            values[name] = fn.sample(key, sample_shape)
        return self._complete(values, sample_shape, args, kwargs)

    def median(self, params: Values) -> dict[str, Array]:
        """Posterior medians of the latent and deterministic sites; bases of
        non-centered weights follow from them.

        :param params: parameters from a run.
        """
        return {name: value[0] for name, value in self.quantiles(params, [0.5]).items()}

    def quantiles(
        self, params: Values, quantiles: ArrayLike | Sequence[float]
    ) -> dict[str, Array]:
        """Posterior quantiles (Q, ...) of the latent and deterministic sites.

        :param params: parameters from a run.
        :param quantiles: Q probabilities.
        """
        q = probabilities("AutoADF.quantiles", quantiles)
        values = {}
        for name, fn in self._distributions(params).items():
            values[name] = _quantile(fn, q.reshape((-1,) + (1,) * len(fn.shape())))
        return self._complete(values, q.shape, (), {})

    def _distributions(self, params: Values) -> dict[str, dist.Distribution]:
        problem, parameter = self._known_problem(), self._parameter(params)
        names = (*problem.hyperparameters, *problem.roles.weights)
        return {name: _distribution(problem, name, parameter) for name in names}

    def _complete(
        self,
        values: Arrays,
        sample_shape: tuple,
        args: tuple,
        kwargs: Kwargs,
    ) -> dict[str, Array]:
        """Add the bases of non-centered weights and the deterministic sites of the
        model.
        """
        assert self.prototype_trace is not None
        weights = self._known_problem().roles.weights

        def each_draw(fn: Callable) -> dict[str, Array]:
            return soft_vmap(fn, values, len(sample_shape), chunk_size=1)

        def bases(draw: Arrays) -> dict[str, Array]:
            standardized = {}
            for name, weight in weights.items():
                if weight.latent != name:
                    residual = draw[name] - jnp.asarray(weight.loc, float)
                    standardized[weight.latent] = residual / weight.prior_sd(draw)
            return standardized

        values = {**each_draw(bases), **values}
        missing = [
            name
            for name, site in self.prototype_trace.items()
            if site["type"] == "deterministic" and name not in values
        ]
        if not missing:
            return values
        call = (args, kwargs) if args or kwargs else self._prototype_call
        reading = read(self.model, *as_arrays(*call))

        def deterministic(draw: Arrays) -> dict[str, Array]:
            sites = reading.at(draw, only=missing).items()
            return {name: site["value"] for name, site in sites}

        return {**values, **each_draw(deterministic)}


def _distribution(
    problem: Likelihood, name: str, parameter: Parameter
) -> dist.Distribution:
    """The posterior of a weight or another site."""
    hyper = problem.hyperparameters.get(name)
    if hyper is not None and isinstance(hyper.prior, Gamma):
        return dist.Gamma(parameter(name, "concentration"), parameter(name, "rate"))
    normal = dist.Normal(parameter(name, "loc"), parameter(name, "scale"))
    if hyper is None:
        return normal
    return dist.TransformedDistribution(normal, hyper.transform)


def _quantile(fn: dist.Distribution, probability: Array) -> Array:
    if isinstance(fn, dist.TransformedDistribution):
        return dist.transforms.ComposeTransform(fn.transforms)(
            fn.base_dist.icdf(probability)
        )
    if isinstance(fn, dist.Gamma):
        return _gamma_quantile(fn, probability)
    return fn.icdf(probability)


def _gamma_quantile(gamma: dist.Gamma, probability: Array) -> Array:
    """Inverse cdf of a Gamma distribution, which JAX leaves to SciPy."""
    from scipy.special import gammaincinv

    inputs = jnp.broadcast_arrays(gamma.concentration, probability)
    unit = jax.pure_callback(
        gammaincinv, inputs[0], *inputs, vmap_method="broadcast_all"
    )
    return unit / gamma.rate
