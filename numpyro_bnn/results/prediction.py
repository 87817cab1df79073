"""``predict``: predictions for new inputs from exported or saved draws."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error, check_finite
from numpyro_bnn._options import Model, RandomKey, Switch, checked
from numpyro_bnn.networks import placeholder_statistics
from numpyro_bnn.program import compiled
from numpyro_bnn.program.arguments import Arguments
from numpyro_bnn.program.plates import PARAMETERS, check_observations, unobserved
from numpyro_bnn.program.reading import Reading
from numpyro_bnn.results import replay
from numpyro_bnn.results.exporter import SAMPLE_DIMS, Exporter, safe
from numpyro_bnn.results.fit import Fit
from numpyro_bnn.results.replay import bind

# By how much a log likelihood or a mean may differ from that of the run, of one plus
# itself: rounding, other devices.
TOLERANCE = 0.01


@checked("predict")
def predict(
    model: Model,
    idata: Any,
    *args: Any,
    rng_key: RandomKey | None = None,
    progress_bar: Switch = True,
    **kwargs: Any,
) -> Any:
    """Predictions for new inputs from exported or saved draws: the group
    ``predictions`` of ``to_inference_data``.

    ``numpyro.infer.Predictive(model, idata.posterior)`` would draw a site
    ``net/Dense_0.kernel`` from its prior, because its variable is called
    ``net.Dense_0.kernel``. Here every latent site must have draws.

    :param model: the model of the run. Learned parameters are not in an export: fix
        them by ``handlers.substitute``.
    :param idata: result of :func:`~numpyro_bnn.to_inference_data`, or the path of a
        netCDF file with one. Batch normalizations use its ``constant_data``, the
        training inputs.
    :param args: new arguments of the model; with targets, their log likelihood is
        computed as well.
    :param rng_key: key of the draws of observations; ``jax.random.key(0)`` by default.
    :param progress_bar: show a bar over draws if the predictions take more than a few
        seconds.
    :param kwargs: new keyword arguments of the model.
    :return: ``xarray.Dataset``, whose attribute ``model_compared`` says by which group
        the model was compared with that of the run, at its training rows:
        ``log_likelihood``, ``posterior_predictive``, or ``no``.
    :raises ValueError: if the sites of ``model`` and the variables of the posterior do
        not match, or if stored draws have another log likelihood or another mean under
        ``model`` than in the run.

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC, BarkerMH
    >>> import numpyro_bnn as bnn
    >>> def model(x, y=None):
    ...     w = numpyro.sample("net/w", dist.Normal(0.0, 1.0))
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("y", dist.Normal(w * x, 0.1), obs=y)
    >>> x = jax.numpy.linspace(-1, 1, 5)
    >>> mcmc = MCMC(BarkerMH(model), num_warmup=20, num_samples=10, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), x, 2 * x)
    >>> predict(model, bnn.to_inference_data(mcmc), x[:2])["y_mean"].shape
    (1, 10, 2)
    """
    result = _arviz.opened("predict", idata)
    arguments = bind(model, args, kwargs, "predict")
    observed = _values(result, "observed_data")
    constants = _values(result, "constant_data")
    for name, value in arguments.arrays.items():
        if value.dtype.kind == "f":
            check_finite("predict", name, value)
    model = unobserved(model, ())  # so that models know that these are predictions
    with placeholder_statistics() as recorded:
        # one row has no statistics, and none are needed to read the model
        reading = _read(model, arguments)
        _check_redrawn(reading, observed)
        draws = _draws_of_sites(reading, _values(result, "posterior"), observed)
        exporter = Exporter(
            Fit(model, arguments, draws, {}, {}), {}, {}, None, progress_bar
        )
    compared = (
        "no" if reading.stochastic else _compared(exporter, result, observed, constants)
    )
    lacking = sorted(arguments.arrays.keys() - exporter.observed - constants.keys())
    if lacking and any(recorded.calls):
        instead = (
            "Batch normalization needs the training inputs: pass the whole result of "
            "`to_inference_data`."
        )
        raise argument_error(
            "predict", "idata", f"no `constant_data` of {lacking}", instead
        )
    training = {}
    for name, value in constants.items():
        if name in arguments.values:
            training[name] = value
    for name, default in arguments.optional.items():
        if name in exporter.observed:
            training[name] = default
    exporter.fit = replace(exporter.fit, arguments=arguments.with_values(training))
    fixed = set(exporter.observed_sites) - set(exporter.redrawn)
    exporter.redrawn = [
        name for name in exporter.sites if safe(name) in observed and name not in fixed
    ]
    key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)[1]
    groups = exporter.prediction_groups(key, arguments, set(arguments.values), {})
    exporter.warn_of_missing(groups)
    return groups["predictions"].assign_attrs(model_compared=compared)


def _compared(
    exporter: Exporter,
    idata: Any,
    observed: Mapping[str, np.ndarray],
    constants: Mapping[str, Any],
) -> str:
    """Refuse a model under which stored draws have another log likelihood, or mean, at
    the training rows.

    :return: the group that was compared, or ``no`` if the result holds too little to
        call the model as in the run.
    """
    fit, call = exporter.fit, _training_call(exporter, observed, constants)
    groups = ("log_likelihood", "posterior_predictive")
    stored = {name: _values(idata, name) for name in groups}
    if call is None or not any(stored.values()):
        return "no"

    def at_draw(
        draw: Mapping[str, Any], call: tuple, observed: Mapping[str, Any]
    ) -> dict[str, dict[str, jax.Array]]:
        sites = replay.sites_at(fit.model, draw, jax.random.key(0), call)
        computed: dict[str, dict[str, jax.Array]] = {name: {} for name in stored}
        for name, site in sites.items():
            if site["type"] != "sample" or safe(name) not in observed:
                continue
            fn, y = site["fn"], observed[safe(name)]
            if fn.shape() != y.shape:
                continue
            computed["log_likelihood"][safe(name)] = fn.log_prob(y)
            mean = replay.observation_mean(fn)
            if mean is not None:
                computed["posterior_predictive"][f"{safe(name)}_{mean[0]}"] = mean[1]
        return computed

    program = compiled.prepare(
        lambda draw, shared, _: at_draw(draw, *shared), (call, observed), {}, once=True
    )
    shape = next(iter(fit.posterior.values())).shape[:2]
    compared = "no"
    for place in {(0, 0), (shape[0] - 1, shape[1] - 1)}:
        draw = {name: value[place] for name, value in fit.posterior.items()}
        values = jax.device_get(program(draw))
        for group, variables in stored.items():
            for name, value in values[group].items():
                if name not in variables:
                    continue
                in_run = variables[name][place]
                if in_run.shape != value.shape or not np.isfinite(in_run).all():
                    continue  # masked rows, or a draw of a chain that diverged
                compared = group if compared == "no" else compared
                difference = np.abs(value - in_run)
                if not (difference <= TOLERANCE * (1 + np.abs(in_run))).all():
                    got = (
                        f"a model with another `{group}` of {name!r} than in the run, "
                        f"by up to {difference.max():.2g}"
                    )
                    instead = (
                        "Pass the model of the run: its networks, activations and "
                        "constants belong to the draws."
                    )
                    raise argument_error("predict", "model", got, instead)
    return compared


def _training_call(
    exporter: Exporter, observed: Mapping[str, Any], constants: Mapping[str, Any]
) -> Any:
    """The call of the run, as far as a result holds it; ``None`` if an argument is not
    in it.
    """
    arguments = exporter.fit.arguments
    defaults, new = arguments.optional, {}
    for name, value in arguments.values.items():
        if name in exporter.observed:
            source = defaults if name in defaults else observed
        else:
            source = {name: None} if value is None else constants
        if name not in source:
            return None  # also settings, such as a width: a result has arrays only
        new[name] = source[name]
    more = {name: value for name, value in constants.items() if name in defaults}
    return arguments.with_values({**more, **new}).call()


def _values(idata: Any, group: str) -> dict[str, np.ndarray]:
    """Variables of a group by exported name, chains and draws first; none if there is
    no such group.
    """
    if group != "posterior" and group not in _arviz.group_names(idata):
        return {}
    data = _arviz.group(idata, group)
    ordered = data.transpose(*SAMPLE_DIMS, ..., missing_dims="ignore")
    return {
        safe(str(name)): value.to_numpy() for name, value in ordered.data_vars.items()
    }


def _read(model: Any, arguments: Arguments) -> Reading:
    """The model at the new arguments; an error about those with which it fails."""
    try:
        return Reading(model, *arguments.call())
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        if ": argument `" in str(error):
            raise
        got = f"arguments with which the model fails ({error})"
        instead = (
            "Pass values shaped as in the run, with one row per new point in each."
        )
        raise argument_error("predict", "args", got, instead) from error


def _check_redrawn(reading: Reading, observed: Mapping[str, np.ndarray]) -> None:
    """Refuse observations, drawn here, that the run's data would not fit: (M, M) for
    data (N, 1).
    """
    sites = {}
    for name, site in reading.sites.items():
        data = np.shape(observed.get(safe(name), 0.0))
        if site["type"] != "sample" or site["is_observed"] or not data:
            continue
        drawn = site["fn"].shape()[-len(data) :]
        # The first axis has the rows, of which the run may have had one.
        other_axes = zip(data[1:], drawn[1:], strict=False)
        shape = drawn[:1] + tuple(
            1 if data_size == 1 else drawn_size for data_size, drawn_size in other_axes
        )
        value = np.broadcast_to(0.0, shape)
        sites[name] = {**site, "is_observed": True, "value": value}
    check_observations(sites)


def _draws_of_sites(
    reading: Reading, posterior: Mapping[str, np.ndarray], observed: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Draws by site: every latent site must have some, and every variable must be a
    site.
    """
    drawn = [
        name
        for name in reading.latent
        if name not in reading.fixed and safe(name) not in observed
    ]
    draws = {}
    unlike = []
    for name, latent in reading.shapes(drawn).items():
        if safe(name) in posterior:
            draws[name] = posterior[safe(name)]
            shape = draws[name].shape[2:]
            if shape != latent.shape:
                unlike.append(f"{name!r} is {shape}, not {latent.shape}")
    # A network of another library has placeholders for the weights that are sampled.
    learned = [
        name
        for name, site in reading.sites.items()
        if site["type"] in PARAMETERS
        and name not in reading.fixed
        and jax.tree.leaves(site["value"])
    ]
    faults = {
        "no draws of the sites": sorted(set(drawn) - draws.keys()),
        "no values of the parameters": learned,
        "variables that are no sites": sorted(
            posterior.keys() - set(map(safe, reading.sites))
        ),
        "draws of another shape": unlike,
    }
    texts = [f"{fault} {', '.join(names)}" for fault, names in faults.items() if names]
    if texts:
        got = "; ".join(texts)
        instead = (
            "Pass the model of the run; fix parameters by `handlers.substitute(model, "
            "data=...)`."
        )
        raise argument_error("predict", "idata", got, instead)
    return draws
