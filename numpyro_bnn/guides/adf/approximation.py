"""The posterior of assumed density filtering as a NumPyro guide: sampling, summaries,
parameters.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import gammainc
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoNormal

from numpyro_bnn._checks import argument_error, probabilities
from numpyro_bnn._distributions import is_latent
from numpyro_bnn.guides.adf.moment_matching import Gamma, Hyperparameter
from numpyro_bnn.guides.adf.problem import ADFProblem, ADFState
from numpyro_bnn.guides.adf.reading import CALL, Data, read
from numpyro_bnn.moments import Gaussian
from numpyro_bnn.program.arguments import as_arrays
from numpyro_bnn.program.compiled import shared

FIELDS = {"gamma": ("concentration", "rate"), "normal": ("loc", "scale")}


class ADFPosterior(AutoNormal):
    """Independent Gaussians for weights, Gammas for precisions.

    For a non-centered weight w = s w_base the guide makes w independent of s: given s,
    w_base is N(m / s, v / s^2).
    """

    _problem: ADFProblem | None = None
    _data: Data | None = None
    _start: dict[str, Any] | None = None

    def _known_problem(self) -> ADFProblem:
        """The model as it was read; after unpickling it is read again."""
        if self._problem is None and self._data is not None:
            with jax.enable_x64(True):
                self._problem = ADFProblem.of(self._data)
        if self._problem is None:
            instead = (
                "Call `run` of this guide first, or use it in `SVI`, so that it reads "
                "the model."
            )
            raise argument_error(CALL, "params", "those of another guide", instead)
        return self._problem

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        """Read the model, skipping AutoNormal's search for a valid start."""
        if self._problem is None:
            with jax.enable_x64(True):
                data = Data.read(self.model, args, kwargs)
                self._problem, self._data = ADFProblem.of(data), data.head()
        sites = read(self.model, args, kwargs).sites
        self._prototype_call = (args, kwargs)
        # The values are placeholders here, so only the fields without values are
        # stored.
        fields = ("type", "name", "is_observed", "cond_indep_stack", "args")
        self.prototype_trace = {}
        for name, site in sites.items():
            self.prototype_trace[name] = {k: site[k] for k in fields if k in site}
            if site["type"] == "plate":
                self._prototype_frame_full_sizes[name] = site["args"][0]
            elif is_latent(site):
                self._event_dims[name] = site["fn"].event_dim
                for frame in site["cond_indep_stack"]:
                    self._prototype_frames[frame.name] = frame

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """Sample the latent sites of the model, from parameters
        ``<site>_<prefix>_...``.
        """
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        problem, start = self._known_problem(), self._start_params()
        plates = self._create_plates(*args, **kwargs)

        def parameter(site: str, field: str) -> jax.Array:
            name = f"{site}_{self.prefix}_{field}"
            constraint = (
                constraints.real if field == "loc" else constraints.softplus_positive
            )
            value = jnp.asarray(start[name], float)
            event_dim = self._event_dims.get(site, value.ndim)
            return numpyro.param(
                name, value, constraint=constraint, event_dim=event_dim
            )

        values: dict[str, jax.Array] = {}
        by_latent = {
            weight.latent: (name, weight)
            for name, weight in problem.sites.weights.items()
        }
        for latent in self._event_dims:
            # in the order of the model, as TraceMeanField_ELBO requires
            if latent in by_latent:
                name, weight = by_latent[latent]
                loc, scale = parameter(name, "loc"), parameter(name, "scale")
                if not weight.centered:
                    unit = weight.prior_sd(values)
                    loc = (loc - jnp.asarray(weight.loc, float)) / unit
                    scale = scale / unit
                fn: dist.Distribution = dist.Normal(loc, scale)
            else:
                hyper = problem.hyperparameters[latent]
                fn = _distribution(
                    hyper, _state(hyper.kind, partial(parameter, latent))
                )
            values[latent] = self._sample(latent, fn, plates)
        return values

    def _sample(
        self, name: str, fn: dist.Distribution, plates: Mapping[str, Any]
    ) -> jax.Array:
        assert self.prototype_trace is not None
        with ExitStack() as stack:
            for frame in self.prototype_trace[name]["cond_indep_stack"]:
                stack.enter_context(plates[frame.name])
            return numpyro.sample(name, fn.to_event(self._event_dims[name]))

    def _start_params(self) -> dict[str, Any]:
        """Parameters before any data are seen."""
        problem = self._known_problem()
        if self._start is None:
            # Also while SVI traces the guide; `ensure_compile_time_eval` would run each
            # operation by itself.
            with jax.enable_x64(True), jax.core.eval_context():
                make = shared(
                    lambda key: self._to_params(
                        problem.start(problem.random_means(key))
                    ),
                    once=True,
                )
                self._start = jax.device_get(make(jax.random.key(0)))
        return self._start

    def _to_params(self, state: ADFState) -> dict[str, jax.Array]:
        """Parameters ``<site>_<prefix>_loc`` and ``_scale``, for Gamma sites
        ``_concentration`` and ``_rate``.
        """
        params: dict[str, jax.Array] = {}
        for name, value in {**state.hyperparameters, **state.weights}.items():
            if isinstance(value, Gamma):
                fields = value._asdict()
            else:
                fields = {"loc": value.mean, "scale": _sqrt(value.var)}
            for field, field_value in fields.items():
                params[f"{name}_{self.prefix}_{field}"] = field_value
        return params

    def _from_params(self, params: Mapping[str, Any]) -> ADFState:
        problem = self._known_problem()

        def parameter(site: str, field: str) -> jax.Array:
            return jnp.asarray(params[f"{site}_{self.prefix}_{field}"], float)

        state = ADFState({}, {}, {})
        for name in problem.sites.weights:
            state.weights[name] = _state("normal", partial(parameter, name))
        for name, hyper in problem.hyperparameters.items():
            state.hyperparameters[name] = _state(hyper.kind, partial(parameter, name))
        return state

    def sample_posterior(
        self,
        rng_key: jax.Array,
        params: Mapping[str, Any],
        *args: Any,
        sample_shape: tuple = (),
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
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

    def median(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Posterior medians of the latent and deterministic sites; bases of
        non-centered weights follow from them.

        :param params: parameters from a run.
        """
        return {name: value[0] for name, value in self.quantiles(params, [0.5]).items()}

    def quantiles(
        self, params: Mapping[str, Any], quantiles: Any
    ) -> dict[str, jax.Array]:
        """Posterior quantiles (Q, ...) of the latent and deterministic sites.

        :param params: parameters from a run.
        :param quantiles: Q probabilities.
        """
        q = probabilities("AutoADF.quantiles", quantiles)
        values = {}
        for name, fn in self._distributions(params).items():
            values[name] = _quantile(fn, q.reshape((-1,) + (1,) * len(fn.shape())))
        return self._complete(values, q.shape, (), {})

    def _distributions(self, params: Mapping[str, Any]) -> dict[str, dist.Distribution]:
        state = self._from_params(params)
        fns: dict[str, dist.Distribution] = {}
        for name, hyper in self._known_problem().hyperparameters.items():
            fns[name] = _distribution(hyper, state.hyperparameters[name])
        for name, (mean, var) in state.weights.items():
            fns[name] = dist.Normal(mean, jnp.sqrt(var))
        return fns

    def _complete(
        self,
        values: dict[str, jax.Array],
        sample_shape: tuple,
        args: tuple,
        kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Add the bases of non-centered weights and the deterministic sites of the
        model.
        """
        assert self.prototype_trace is not None
        weights = self._known_problem().sites.weights

        def bases(draw: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            standardized = {}
            for name, weight in weights.items():
                if not weight.centered:
                    residual = draw[name] - jnp.asarray(weight.loc, float)
                    standardized[weight.latent] = residual / weight.prior_sd(draw)
            return standardized

        values = {**map_samples(bases, values, sample_shape), **values}
        missing = [
            name
            for name, site in self.prototype_trace.items()
            if site["type"] == "deterministic" and name not in values
        ]
        if not missing:
            return values
        call = (args, kwargs) if args or kwargs else self._prototype_call

        reading = read(self.model, *as_arrays(*call))

        def deterministic(draw: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            return {
                name: site["value"]
                for name, site in reading.at(draw, only=missing).items()
            }

        return {**values, **map_samples(deterministic, values, sample_shape)}


def _sqrt(value: Any) -> Any:
    return (
        np.sqrt(value)
        if isinstance(value, np.ndarray | np.generic)
        else jnp.sqrt(value)
    )


def _state(kind: str, parameter: Callable[[str], jax.Array]) -> Any:
    """The state of a site, from its parameters by field."""
    first, second = map(parameter, FIELDS[kind])
    return Gamma(first, second) if kind == "gamma" else Gaussian(first, second**2)


def _distribution(hyper: Hyperparameter, state: Any) -> dist.Distribution:
    if isinstance(state, Gamma):
        return dist.Gamma(state.concentration, state.rate)
    return dist.TransformedDistribution(
        dist.Normal(state.mean, jnp.sqrt(state.var)), hyper.transform
    )


def _quantile(fn: dist.Distribution, probability: jax.Array) -> jax.Array:
    if isinstance(fn, dist.TransformedDistribution):
        return dist.transforms.ComposeTransform(fn.transforms)(
            fn.base_dist.icdf(probability)
        )
    if isinstance(fn, dist.Gamma):
        return _gamma_quantile(fn, probability)
    return fn.icdf(probability)


def _gamma_quantile(gamma: dist.Gamma, probability: jax.Array) -> jax.Array:
    """Inverse cdf of a Gamma distribution, by bisection of log x."""
    a = gamma.concentration
    low = jnp.log(a) - 20.0 - 20.0 / a
    high = jnp.log(a) + 5.0 + jnp.log1p(20.0 / a)
    low, high = jnp.broadcast_arrays(low, high + 0.0 * probability)
    low = low + jnp.zeros_like(high)

    def halve(_: int, ends: tuple) -> tuple:
        low, high = ends
        middle = 0.5 * (low + high)
        below = gammainc(a, jnp.exp(middle)) < probability
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    low, high = jax.lax.fori_loop(0, 80, halve, (low, high))
    return jnp.exp(0.5 * (low + high)) / gamma.rate


def map_samples(
    fn: Callable, samples: Mapping[str, Any], sample_shape: tuple[int, ...]
) -> dict[str, Any]:
    """Apply ``fn`` to every sample of a dictionary, one at a time."""
    if not sample_shape:
        return fn(samples)
    ndim = len(sample_shape)
    flat = jax.tree.map(
        lambda leaf: leaf.reshape((-1, *leaf.shape[ndim:])), dict(samples)
    )
    return jax.tree.map(
        lambda leaf: leaf.reshape(sample_shape + leaf.shape[1:]), jax.lax.map(fn, flat)
    )
