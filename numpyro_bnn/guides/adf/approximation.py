"""The posterior of assumed density filtering as a guide: what NumPyro asks of it, from its parameters."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoNormal

from numpyro_bnn._checks import argument_error
from numpyro_bnn.guides.adf import posterior
from numpyro_bnn.guides.adf.problem import ADFState, Problem
from numpyro_bnn.guides.adf.rows import Arguments, outline, run_model
from numpyro_bnn.guides.adf.updates import Gamma
from numpyro_bnn.moments import Gaussian

__all__ = ["ADFPosterior"]


class ADFPosterior(AutoNormal):
    """Independent Gaussians for weights, Gammas for precisions.

    Of a non-centered weight w = s w_base it is w that is independent of s: given s, w_base is N(m / s, v / s^2).
    """

    _problem: Problem | None = None
    _arguments: Arguments | None = None
    _start: dict[str, Any] | None = None

    def _read(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _known_problem(self) -> Problem:
        """The model as it was read; once more after the guide came out of storage."""
        if self._problem is None and self._arguments is not None:
            with jax.enable_x64(True):
                self._problem = Problem.of(self._arguments)
        if self._problem is None:
            instead = "Call `run` of this guide first, or use it in `SVI`: it reads the model."
            raise argument_error("guides.AutoADF", "params", "those of another guide", instead)
        return self._problem

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        """Read the model, without AutoNormal's search for a valid start."""
        if self._problem is None:
            self._read(args, kwargs)
        found = outline(self.model, {}, args, kwargs)
        self._prototype_call = (args, kwargs)
        # Only what survives without the numbers, which are placeholders.
        kept = ("type", "name", "is_observed", "cond_indep_stack", "args")
        self.prototype_trace = {n: {k: site[k] for k in kept if k in site} for n, site in found.items()}
        for name, site in found.items():
            if site["type"] == "plate":
                self._prototype_frame_full_sizes[name] = site["args"][0]
            elif site["type"] == "sample" and not site["is_observed"]:
                self._event_dims[name] = site["fn"].event_dim
                self._prototype_frames |= {frame.name: frame for frame in site["cond_indep_stack"]}

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """Sample the latent sites of the model, from parameters ``<site>_<prefix>_...``."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        problem = self._known_problem()
        start = self._start_params()
        plates = self._create_plates(*args, **kwargs)

        def parameter(site: str, field: str) -> jax.Array:
            name = f"{site}_{self.prefix}_{field}"
            constraint = constraints.real if field == "loc" else constraints.softplus_positive
            value = jnp.asarray(start[name], float)
            return numpyro.param(
                name, value, constraint=constraint, event_dim=self._event_dims.get(site, value.ndim)
            )

        values: dict[str, jax.Array] = {}
        by_latent = {weight.latent: (name, weight) for name, weight in problem.sites.weights.items()}
        for latent in self._event_dims:  # in the order of the model, as TraceMeanField_ELBO wants it
            if latent in by_latent:
                name, weight = by_latent[latent]
                loc, scale = parameter(name, "loc"), parameter(name, "scale")
                if not weight.centered:
                    unit = posterior.prior_scale(weight, values)
                    loc, scale = (loc - jnp.asarray(weight.loc, float)) / unit, scale / unit
                fn: dist.Distribution = dist.Normal(loc, scale)
            else:
                other = problem.others[latent]
                first, second = (parameter(latent, field) for field in posterior.FIELDS[other.kind])
                state = Gamma(first, second) if other.kind == "gamma" else Gaussian(first, second**2)
                fn = posterior.other_distribution(other, state)
            values[latent] = self._sample(latent, fn, plates)
        return values

    def _sample(self, name: str, fn: dist.Distribution, plates: Mapping[str, Any]) -> jax.Array:
        assert self.prototype_trace is not None
        with ExitStack() as stack:
            for frame in self.prototype_trace[name]["cond_indep_stack"]:
                stack.enter_context(plates[frame.name])
            return numpyro.sample(name, fn.to_event(self._event_dims[name]))

    def _start_params(self) -> dict[str, Any]:
        """Parameters before any data."""
        problem = self._known_problem()
        if self._start is None:
            with jax.enable_x64(True), jax.ensure_compile_time_eval():
                make = jax.jit(
                    lambda key: posterior.to_params(problem.start(problem.random_means(key)), self.prefix)
                )
                self._start = jax.device_get(make(jax.random.key(0)))
        return self._start

    # -- draws and summaries ---------------------------------------------------------------------------

    def sample_posterior(
        self,
        rng_key: jax.Array,
        params: Mapping[str, Any],
        *args: Any,
        sample_shape: tuple = (),
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Draws ``(*sample_shape, ...)`` of the latent and deterministic sites.

        :param rng_key: a key.
        :param params: of a run.
        :param args: arguments of the model for its deterministic sites; by default those of the run.
        :param sample_shape: shape of the batch of draws.
        """
        problem, state = self._known(params)
        keys = iter(jax.random.split(rng_key, len(problem.others) + len(problem.sites.weights)))
        values: dict[str, jax.Array] = {}
        for name, other in problem.others.items():
            values[name] = posterior.other_distribution(other, state.others[name]).sample(
                next(keys), sample_shape
            )
        for name in problem.sites.weights:
            mean, var = state.weights[name]
            values[name] = dist.Normal(mean, jnp.sqrt(var)).sample(next(keys), sample_shape)
        return self._complete(values, sample_shape, args, kwargs)

    def median(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Posterior medians of the latent and deterministic sites; the base of a non-centered weight goes with them.

        :param params: of a run.
        """
        return {name: value[0] for name, value in self.quantiles(params, [0.5]).items()}

    def quantiles(self, params: Mapping[str, Any], quantiles: Any) -> dict[str, jax.Array]:
        """Posterior quantiles (Q, ...) of the latent and deterministic sites.

        :param params: of a run.
        :param quantiles: Q probabilities.
        """
        problem, state = self._known(params)
        q = jnp.asarray(quantiles, float)

        def of(shape: tuple[int, ...], inverse_cdf: Callable) -> jax.Array:
            return inverse_cdf(q.reshape((-1,) + (1,) * len(shape)))

        values: dict[str, jax.Array] = {}
        for name, other in problem.others.items():
            part = state.others[name]
            values[name] = of(part[0].shape, lambda p, o=other, s=part: posterior.quantile(o, s, p))
        for name, (mean, var) in state.weights.items():
            values[name] = of(mean.shape, dist.Normal(mean, jnp.sqrt(var)).icdf)
        return self._complete(values, q.shape, (), {})

    def _known(self, params: Mapping[str, Any]) -> tuple[Problem, ADFState]:
        problem = self._known_problem()
        return problem, posterior.from_params(params, problem.sites.weights, problem.others, self.prefix)

    def _complete(
        self, values: dict[str, jax.Array], sample_shape: tuple, args: tuple, kwargs: Any
    ) -> dict[str, jax.Array]:
        """Add the bases of non-centered weights and the deterministic sites of the model."""
        assert self.prototype_trace is not None
        weights = self._known_problem().sites.weights

        def bases(one: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            return {
                weight.latent: (one[name] - jnp.asarray(weight.loc, float))
                / posterior.prior_scale(weight, one)
                for name, weight in weights.items()
                if not weight.centered
            }

        values = {**posterior.map_samples(bases, values, sample_shape), **values}
        wanted = [name for name, site in self.prototype_trace.items() if site["type"] == "deterministic"]
        missing = [name for name in wanted if name not in values]
        if not missing:
            return values
        call = (args, kwargs) if args or kwargs else self._prototype_call

        def deterministic(one: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            trace = run_model(self.model, one, *call)
            return {name: trace[name]["value"] for name in missing}

        return {**values, **posterior.map_samples(deterministic, values, sample_shape)}
