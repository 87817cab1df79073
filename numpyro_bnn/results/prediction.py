"""``predict``: predictions for new inputs from exported or saved draws."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error, check_finite
from numpyro_bnn._options import Model, RandomKey, Switch, checked
from numpyro_bnn._types import HostArrays, InferenceData, Trees
from numpyro_bnn.program.plates import PARAMETERS, check_observations, sites_of_type
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.sites import safe
from numpyro_bnn.results.fit import DRAW_NEW_SITES, Draws, Fit, bind, map_draws
from numpyro_bnn.results.layout import SAMPLE_DIMS, Layout
from numpyro_bnn.results.replay import (
    ReadModel,
    Replay,
    naming_new_rows,
    observation_mean,
    read_model,
)

# By how much a log likelihood or a mean may differ from that of the run, of one plus
# itself: rounding, other devices.
TOLERANCE = 0.01


@checked("predict")
def predict(
    model: Model,
    idata: InferenceData,
    *args: Any,
    rng_key: RandomKey | None = None,
    progress_bar: Switch = True,
    **kwargs: Any,
) -> InferenceData:
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
    with naming_new_rows("predict", "args"):
        read = read_model(model, arguments, new_rows=True)
    _check_redrawn(read.reading, observed)
    draws = _draws_of_sites(read.reading, _values(result, "posterior"), observed)
    replay = Replay(Fit(model, arguments, draws), read)
    fixed = set(replay.observed_sites) - set(replay.redrawn)
    replay.redrawn = [
        name for name in replay.sites if safe(name) in observed and name not in fixed
    ]
    training, as_in_run = _training_rows(replay, observed, constants)
    compared = "no"
    if training and as_in_run and not read.reading.stochastic:
        compared = _compared(training.reading, draws, result, observed)
    scored = bool(replay.observed) and replay.observed <= arguments.values.keys()
    key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)[1]
    evaluate = partial(map_draws, progress_bar=progress_bar)
    values = replay.values(read, draws, key, evaluate, scored=scored, training=training)
    layout = Layout(replay, {}, {})
    groups = layout.prediction_groups(values, layout.sites, arguments.arrays, {})
    layout.warn_of_missing(groups)
    return groups["predictions"].assign_attrs(model_compared=compared)


def _compared(
    reading: Posterior,
    draws: Draws,
    idata: InferenceData,
    observed: HostArrays,
) -> str:
    """Refuse a model under which stored draws have another log likelihood, or mean, at
    the training rows.

    :return: the group that was compared, or ``no`` if there is none.
    """
    stored = {
        name: _values(idata, name)
        for name in ("log_likelihood", "posterior_predictive")
    }

    def at_draw(
        reading: Posterior, draw: Draws, observed: Trees
    ) -> dict[str, dict[str, Array]]:
        computed: dict[str, dict[str, Array]] = {name: {} for name in stored}
        for name, site in sites_of_type(reading.at(draw), "sample").items():
            y = observed.get(safe(name))
            if y is None or site["fn"].shape() != y.shape:
                continue
            computed["log_likelihood"][safe(name)] = site["fn"].log_prob(y)
            mean = observation_mean(site["fn"])
            if mean is not None:
                computed["posterior_predictive"][safe(name) + mean[0]] = mean[1]
        return computed

    program = reading.prepare(at_draw)
    shape = next(iter(draws.values())).shape[:2]
    compared = "no"
    for place in {(0, 0), (shape[0] - 1, shape[1] - 1)}:
        draw = {name: value[place] for name, value in draws.items()}
        values = jax.device_get(program(draw, observed))
        for group, variables in stored.items():
            for name in values[group].keys() & variables.keys():
                value, in_run = values[group][name], variables[name][place]
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


def _training_rows(
    replay: Replay, observed: Trees, constants: Trees
) -> tuple[ReadModel | None, bool]:
    """The model at the training rows, and whether all its arguments are those of the
    run; ``None`` if they are not, and no batch normalization needs these rows.
    """
    arguments = replay.fit.arguments
    values, unknown = {}, []
    for name, default in arguments.optional.items():
        if name in replay.observed or name in constants:
            values[name] = constants.get(name, default)
    for name, value in arguments.values.items():
        source = observed if name in replay.observed else constants
        if name in source:
            values.setdefault(name, source[name])
        elif name not in values and value is not None:
            unknown.append(name)  # also settings, such as a width
    if unknown and not replay.read.statistics:
        return None, False
    lacking = sorted(arguments.arrays.keys() - replay.observed - constants.keys())
    if lacking and replay.read.statistics:
        instead = (
            "Batch normalization needs the training inputs: pass the whole result of "
            "`to_inference_data`."
        )
        raise argument_error(
            "predict", "idata", f"no `constant_data` of {lacking}", instead
        )
    read = read_model(replay.fit.model, arguments.with_values(values))
    return read, not unknown


def _values(idata: InferenceData, group: str) -> HostArrays:
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


def _check_redrawn(reading: Posterior, observed: HostArrays) -> None:
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
    reading: Posterior, posterior: HostArrays, observed: Trees
) -> HostArrays:
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
            f"data=...)`. {DRAW_NEW_SITES}"
        )
        if not observed:
            instead = (
                "It has no group `observed_data`, as if read from the folder of a run: "
                "export what `runs.start` returns."
            )
        raise argument_error("predict", "idata", got, instead)
    return draws
