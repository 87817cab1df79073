"""``to_inference_data``: any inference result as one ArviZ object with one layout."""

import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error
from numpyro_bnn._dependence import dependence
from numpyro_bnn._plates import PARAMETERS
from numpyro_bnn._programs import NEEDS_VALUES
from numpyro_bnn.infinite import GPRegression
from numpyro_bnn.results import replay
from numpyro_bnn.results.fit import Fit, from_guide, from_mcmc, key_text
from numpyro_bnn.results.naming import parameter_dims, safe, site_dims
from numpyro_bnn.results.processes import process_attrs, process_groups
from numpyro_bnn.results.replay import CALL, Arguments, map_draws, site_trace, site_values, sites_by_training

SAMPLE_DIMS = ("chain", "draw")


def to_inference_data(
    result: Any,
    predictions: Mapping[str, Any] | None = None,
    *,
    members: bool = False,
    guide: Any = None,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    num_samples: int = 1000,
    rng_key: jax.Array | None = None,
    log_likelihood: bool = True,
    posterior_predictive: bool = True,
    draws_per_chunk: int | None = None,
    coords: Mapping[str, Sequence] | None = None,
    prediction_coords: Mapping[str, Sequence] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    attrs: Mapping[str, str | int | float] | None = None,
) -> Any:
    """Convert an inference result to ArviZ: posterior, predictions, log likelihood, data, settings.

    Subsampled plates are made full first: every group covers the full data, in order. Variable names have ``.`` for
    the ``/`` of a site, because netCDF and DataTree reject it: ``net/Dense_0.kernel`` is ``net.Dense_0.kernel``.

    Groups (``y`` stands for the name of each observed site):

    - ``posterior``, ``sample_stats``: draws and the fields collected with ``extra_fields``, under ArviZ's names. For
      draws of a guide: ``lp`` and ``log_weight``, log p(D, z) / q(z), and computed from them the attributes ``elbo``,
      ``iw_bound``, their standard errors and ``pareto_k``.
    - ``posterior_predictive``: ``y`` (draws) and ``y_mean`` (draws of the function: the mean of the observation;
      for a categorical one ``y_probs``, class probabilities) at the training inputs, and the deterministic sites
      that are functions of the inputs (they are not in ``posterior``, which is about parameters).
    - ``log_likelihood``: pointwise, at the training data. If a mask leaves out elements of ``y``, the others have
      one axis, ``y_observed``, with their coordinates or positions.
    - ``predictions``: the same as ``posterior_predictive`` at new inputs, and ``y_log_likelihood`` if new
      targets are given. Batch normalizations use the statistics of the training data under each draw.
    - ``observed_data``, ``constant_data``, ``predictions_constant_data``: targets and other array arguments.

    :param result: a run :class:`~numpyro.infer.mcmc.MCMC`, the result of ``SVI.run`` or ``AutoADF.run``, or a
        :class:`~numpyro_bnn.infinite.GPRegression`, whose arguments are called ``x`` and ``y``.
    :param predictions: new values of arguments of the model by name, e.g. ``{"x": x_test, "y": y_test}``.
    :param members: for an MCMC whose kernel has a ``warm_start``: instead of the draws, export the point where the
        warm start of each chain ended, a deep ensemble with one draw per chain.
    :param guide: the guide of an SVI or ADF result.
    :param args: arguments of the model in an SVI or ADF run; an MCMC knows its own.
    :param kwargs: its keyword arguments.
    :param num_samples: draws from a guide or a Gaussian process.
    :param rng_key: key of the predictive draws; ``jax.random.key(0)`` by default.
    :param log_likelihood: whether to compute that group, and the ``sample_stats`` of a guide.
    :param posterior_predictive: whether to compute that group.
    :param draws_per_chunk: draws evaluated at once; by default as many as keep working memory near 128 MiB.
    :param coords: coordinate values by dimension, e.g. ``{"data": dates}``; those of rows are for the training data.
    :param prediction_coords: those of the rows of ``predictions``.
    :param dims: dimension names by variable, for axes that are not plates.
    :param attrs: additional text or numbers to store.
    :return: ``arviz.InferenceData`` (ArviZ 0.x) or ``xarray.DataTree`` (ArviZ 1.x).
    :raises ValueError: for a result that has not run or has no model, unknown arguments in ``predictions``, NaN, or
        wrong shapes.
    :raises TypeError: for any other kind of result.

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC, BarkerMH
    >>> import numpyro_bnn as bnn
    >>> def model(x, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("y", dist.Normal(w * x, 0.1), obs=y)
    >>> x = jax.numpy.linspace(-1, 1, 5)
    >>> mcmc = MCMC(BarkerMH(model), num_warmup=20, num_samples=10, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), x, 2 * x)
    >>> idata = bnn.to_inference_data(mcmc, predictions={"x": x[:2]})
    >>> dict(idata["predictions"]["y_mean"].sizes)
    {'chain': 1, 'draw': 10, 'data': 2}
    """
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    chosen = (log_likelihood, posterior_predictive)
    if isinstance(result, GPRegression):
        both_coords = coords or {}, prediction_coords or {}
        groups = process_groups(result, predictions, rng_key, num_samples, *chosen, *both_coords)
        return _arviz.inference_data(groups, _about(process_attrs(result, num_samples), rng_key, attrs))
    draws_key = jax.random.fold_in(rng_key, 1)
    if isinstance(result, MCMC):
        fit = from_mcmc(result, members)
    else:
        options = (draws_key, num_samples, log_likelihood, draws_per_chunk)
        fit = from_guide(result, guide, args, kwargs or {}, *options)
    train_key, new_key = jax.random.split(rng_key)
    exporter = _Exporter(fit, coords or {}, dims or {}, draws_per_chunk)
    if predictions is not None:
        new = replay.for_prediction(fit.arguments, predictions, exporter.observed)
    groups = exporter.training_groups(train_key, *chosen)
    if predictions is not None:
        groups |= exporter.prediction_groups(new_key, new, set(predictions or {}), prediction_coords or {})
    return _arviz.inference_data(groups, _about(fit.attrs, rng_key, attrs))


class _Exporter:
    """Turns the parts of a fit into ArviZ groups."""

    def __init__(self, fit: Fit, coords: Mapping, dims: Mapping, draws_per_chunk: int | None) -> None:
        self.fit = fit
        self.coords = {**dict(fit.stat_coords.values()), **coords}
        self.dims = {**{stat: (axis,) for stat, (axis, _) in fit.stat_coords.items()}, **dims}
        self.draws_per_chunk = draws_per_chunk
        self.first = fit.params | {name: jnp.asarray(value[0, 0]) for name, value in fit.posterior.items()}
        self.sites = site_values(fit.model, self.first, jax.random.key(0), fit.arguments.call())
        self._check_parameters()
        sampled = {name for name, site in self.sites.items() if site["type"] == "sample"}
        self.observed_sites = [name for name, site in self.sites.items() if replay.is_data(site)]
        self.latent = {name: value for name, value in fit.posterior.items() if name in sampled}
        found = self._sources()
        self.observed = set().union(*(found[name] for name in self.observed_sites))
        computed = [name for name, site in self.sites.items() if site["type"] == "deterministic"]
        self.dependent = [name for name in computed if found[name]]

    # -- the model at the first draw -------------------------------------------------------------------

    def _values(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the observed and deterministic sites as a function of the array arguments."""
        call, kinds = self.fit.arguments.call(arrays), ("sample", "deterministic")
        sites = site_trace(self.fit.model, self.first, jax.random.key(0), *call, predict=False)
        return {name: site["value"] for name, site in sites.items() if site["type"] in kinds}

    def _sources(self) -> dict[str, set]:
        """The array arguments from which each site is computed; those whose values shape the model count for none."""
        arrays = self.fit.arguments.arrays
        with suppress(*NEEDS_VALUES):
            return dependence(self._values, arrays)
        found: dict[str, set] = {name: set() for name in self.sites}
        for name, value in arrays.items():
            with suppress(*NEEDS_VALUES):
                for site, used in dependence(self._values, {name: value}).items():
                    found[site] |= used
        return found

    def _check_parameters(self) -> None:
        """Parameter sites must not depend on the key, because their values in the run are not stored."""
        unknown = [n for n, s in self.sites.items() if s["type"] in PARAMETERS and n not in self.fit.params]
        if not unknown:
            return
        again = site_values(self.fit.model, self.first, jax.random.key(1), self.fit.arguments.call())
        for name in unknown:
            pairs = zip(self.sites[name]["value"], again[name]["value"], strict=True)
            if any(not np.array_equal(a, b) for a, b in pairs):
                got = f"a model whose parameter site {name!r} starts at random values"
                instead = "MCMC froze and did not store it: fix it by `handlers.substitute` before the run."
                raise argument_error(CALL, "result", got, instead)

    # -- groups ----------------------------------------------------------------------------------------

    def training_groups(self, rng_key: jax.Array, log_likelihood: bool, predictive: bool) -> dict[str, Any]:
        fit = self.fit
        posterior = {safe(name): value for name, value in fit.posterior.items() if name not in self.dependent}
        groups = {"posterior": self._sampled_parameters(posterior)}
        if fit.sample_stats:
            groups["sample_stats"] = self._sampled_parameters(fit.sample_stats)

        def at_draw(draw: Mapping[str, Any], key: jax.Array, params: Mapping, call: tuple) -> dict[str, jax.Array]:
            values: dict[str, jax.Array] = {}
            at: Callable = partial(site_trace, fit.model, {**params, **draw}, key, *call)
            given = at(predict=False)
            if predictive:
                values |= self._predicted(at(predict=True)) | self._functions(given)
            if log_likelihood:
                values |= self._log_likelihood(given, "log_likelihood/{}")
            return values

        wanted = self.observed_sites if log_likelihood else []
        if wanted or (predictive and (self.observed_sites or self.dependent)):
            shared = fit.params, fit.arguments.call()
            values = map_draws(at_draw, self.latent, rng_key, self.draws_per_chunk, shared)
            density = {k.removeprefix("log_likelihood/"): v for k, v in values.items() if "/" in k}
            groups["log_likelihood"] = self._sampled(density, self.sites, density)
            predicted = {k: v for k, v in values.items() if "/" not in k}
            groups["posterior_predictive"] = self._sampled(predicted, self.sites)
        observed = {}
        for name in self.observed_sites:
            value = self._as_given(np.asarray(self.sites[name]["value"]))
            observed[safe(name)] = (site_dims(self.sites[name], safe(name), value.shape), value)
        groups["observed_data"] = self._dataset(observed)
        groups["constant_data"] = self._constants(fit.arguments.arrays, self.observed, self.sites)
        return groups

    def prediction_groups(
        self, rng_key: jax.Array, new: Arguments, given: set[str], new_coords: Mapping[str, Sequence]
    ) -> dict[str, Any]:
        model, shared = self.fit.model, (self.fit.params, new.call(), self.fit.arguments.call())
        scored = bool(self.observed) and self.observed <= given

        def at_draw(draw: Mapping[str, Any], key: jax.Array, params: Mapping, *calls: Any) -> dict[str, jax.Array]:
            at: Callable = partial(sites_by_training, model, {**params, **draw}, key, *calls)
            sites = at(predict=True)
            values = self._predicted(sites) | self._functions(sites)
            if scored:
                values |= self._log_likelihood(at(predict=False), "{}_log_likelihood")
            return values

        sites = site_values(model, self.first, jax.random.key(0), *shared[1:], self.observed_sites)
        values = map_draws(at_draw, self.latent, rng_key, self.draws_per_chunk, shared)
        arrays = {name: value for name, value in new.arrays.items() if name in given}
        lengths = {len(value) for value in arrays.values()}
        plates = {name: site["args"][0] for name, site in sites.items() if site["type"] == "plate"}
        rows = {safe(name) for name, size in plates.items() if size in lengths}
        others = {dim: v for dim, v in self.coords.items() if dim not in rows and not dim.endswith("_dim_0")}
        exporter = copy(self)
        exporter.coords = {**others, **new_coords}
        densities = [f"{safe(name)}_log_likelihood" for name in self.observed_sites]
        return {
            "predictions": exporter._sampled(values, sites, densities),
            "predictions_constant_data": exporter._constants(arrays, set(), sites),
        }

    def _as_given(self, value: np.ndarray) -> np.ndarray:
        """An observation in the precision in which it was passed: the model may see it in float32."""
        for name in self.observed:
            given = np.asarray(self.fit.arguments.arrays[name])
            if np.array_equal(given.astype(value.dtype), value, equal_nan=True):
                return given
        return value

    # -- values at one draw ----------------------------------------------------------------------------

    def _predicted(self, sites: Mapping[str, dict]) -> dict[str, jax.Array]:
        values = {}
        for name in self.observed_sites:
            values[safe(name)] = sites[name]["value"]
            mean = replay.observation_mean(sites[name]["fn"])
            if mean is not None:
                values[f"{safe(name)}_{mean.suffix}"] = mean.value
        return values

    def _functions(self, sites: Mapping[str, dict]) -> dict[str, jax.Array]:
        """Deterministic sites that are functions of the inputs."""
        return {safe(name): sites[name]["value"] for name in self.dependent if name in sites}

    def _log_likelihood(self, sites: Mapping[str, dict], variable: str) -> dict[str, jax.Array]:
        """Pointwise log likelihoods of the observed sites, called e.g. ``variable="{}_log_likelihood"``."""
        observed = {safe(name): sites[name] for name in self.observed_sites}
        return {variable.format(k): site["fn"].log_prob(site["value"]) for k, site in observed.items()}

    # -- datasets --------------------------------------------------------------------------------------

    def _sampled_parameters(self, values: Mapping[str, np.ndarray]) -> Any:
        """Dataset of draws (C, S, ...) of parameters or statistics."""
        dims = {name: SAMPLE_DIMS + self._dims(name, value.shape[2:]) for name, value in values.items()}
        return self._dataset({name: (dims[name], value) for name, value in values.items()})

    def _sampled(
        self, values: Mapping[str, np.ndarray], sites: Mapping[str, dict], densities: Collection[str] = ()
    ) -> Any:
        """Dataset of draws of observed or deterministic sites, dimensions by plate.

        :param densities: names of log likelihoods, of which only elements that no mask leaves out are data.
        """
        by_name = {safe(name): site for name, site in sites.items()}
        variables = {}
        for name, value in values.items():
            # A derived variable such as `y_mean` belongs to the site with the longest name that is a prefix of it.
            stems = [name] if name in by_name else [site for site in by_name if name.startswith(f"{site}_")]
            site = by_name[max(stems, key=len)]
            dims = site_dims(site, name, value.shape[2:])
            kept = replay.observed_elements(site, value) if name in densities else np.array(True)
            if not kept.all():
                dim = f"{safe(site['name'])}_observed"
                labels = np.asarray(self.coords.get(dims[0], ()) if len(dims) == 1 else ())
                places = np.flatnonzero(kept)
                self.coords[dim] = labels[places] if labels.size == kept.size else places
                dims, value = (dim,), value[..., kept]
            if kept.any():
                variables[name] = (SAMPLE_DIMS + dims, value)
        return self._dataset(variables)

    def _constants(self, arrays: Mapping[str, Any], left_out: set[str], sites: Mapping[str, dict]) -> Any:
        """Dataset of array arguments; a leading axis as long as a plate is that plate."""
        plates = {site["args"][0]: safe(name) for name, site in sites.items() if site["type"] == "plate"}
        variables = {}
        for name, value in arrays.items():
            if name not in left_out:
                first, *others = self._dims(name, np.shape(value))
                variables[name] = ((plates.get(np.shape(value)[0], first), *others), np.asarray(value))
        return self._dataset(variables)

    def _dims(self, name: str, shape: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.dims[name]) if name in self.dims else parameter_dims(name, shape)

    def _dataset(self, variables: Mapping[str, tuple[Sequence[str], np.ndarray]]) -> Any:
        # A plate and an argument may share a name, but for ArviZ dimensions and variables must differ.
        apart = {
            name: (tuple(f"{dim}_dim" if dim in variables else dim for dim in axes), value)
            for name, (axes, value) in variables.items()
        }
        sizes = {dim: n for axes, value in apart.values() for dim, n in zip(axes, value.shape, strict=True)}
        fitting = {dim: values for dim, values in self.coords.items() if sizes.get(dim) == len(values)}
        return _arviz.dataset(apart, fitting)


def _about(settings: Mapping[str, Any], rng_key: jax.Array, more: Mapping[str, Any] | None) -> dict[str, Any]:
    """Attributes of the whole result: versions, settings, key."""
    packages = ("numpyro_bnn", "numpyro", "jax", "arviz", "numpy")
    return {
        "created_at": datetime.now(UTC).isoformat(),
        "inference_library": "numpyro",
        "inference_library_version": version("numpyro"),
        "python_version": platform.python_version(),
        **{f"{name}_version": version(name) for name in packages},
        **settings,
        "predictive_rng_key": key_text(rng_key),
        **(more or {}),
    }
