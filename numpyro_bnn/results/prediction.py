"""``predict``: predictions for new inputs from exported or saved draws."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Model, RandomKey, Switch, checked
from numpyro_bnn.networks import record_statistics
from numpyro_bnn.program.plates import PARAMETERS
from numpyro_bnn.program.reading import Reading
from numpyro_bnn.results.exporter import SAMPLE_DIMS, Exporter, safe
from numpyro_bnn.results.fit import Fit
from numpyro_bnn.results.replay import bind


@checked("predict")
def predict(
    model: Model, idata: Any, *args: Any, rng_key: RandomKey | None = None, progress_bar: Switch = True, **kwargs: Any
) -> Any:
    """Predictions for new inputs from exported or saved draws: the group ``predictions`` of ``to_inference_data``.

    ``numpyro.infer.Predictive(model, idata.posterior)`` would draw a site ``net/Dense_0.kernel`` from its prior,
    because its variable is called ``net.Dense_0.kernel``. Here every latent site must have draws.

    :param model: the model of the run. Learned parameters are not in an export: fix them by ``handlers.substitute``.
    :param idata: result of :func:`~numpyro_bnn.to_inference_data`, or the path of a netCDF file with one. Batch
        normalizations use its ``constant_data``, the training inputs.
    :param args: new arguments of the model; with targets, their log likelihood is computed as well.
    :param rng_key: key of the draws of observations; ``jax.random.key(0)`` by default.
    :param progress_bar: show a bar over draws if the predictions take more than a few seconds.
    :param kwargs: new keyword arguments of the model.
    :return: ``xarray.Dataset``.
    :raises ValueError: if the sites of ``model`` and the variables of the posterior do not match.

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
    held, arguments = _arviz.opened("predict", idata), bind(model, args, kwargs)
    observed, constants = _values(held, "observed_data"), _values(held, "constant_data")
    with record_statistics() as recorded:
        reading = Reading(model, *arguments.call())
    draws = _draws_of_sites(reading, _values(held, "posterior"), observed)
    exporter = Exporter(Fit(model, arguments, draws, {}, {}), {}, {}, None, progress_bar)
    lacking = sorted(arguments.arrays.keys() - exporter.observed - constants.keys())
    if lacking and any(recorded.calls):
        instead = "Batch normalization needs the training inputs: pass the whole result of `to_inference_data`."
        raise argument_error("predict", "idata", f"no `constant_data` of {lacking}", instead)
    training = {name: value for name, value in constants.items() if name in arguments.values}
    training |= {name: default for name, default in arguments.optional.items() if name in exporter.observed}
    exporter.fit = replace(exporter.fit, arguments=arguments.with_values(training))
    fixed = set(exporter.observed_sites) - set(exporter.redrawn)
    exporter.redrawn = [name for name in exporter.sites if safe(name) in observed and name not in fixed]
    key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)[1]
    groups = exporter.prediction_groups(key, arguments, set(arguments.values), {})
    exporter.warn_of_missing(groups)
    return groups["predictions"]


def _values(idata: Any, group: str) -> dict[str, np.ndarray]:
    """Variables of a group by exported name, chains and draws first; none if there is no such group."""
    if group != "posterior" and group not in _arviz.group_names(idata):
        return {}
    held = _arviz.group(idata, group)
    ordered = held.transpose(*SAMPLE_DIMS, ..., missing_dims="ignore")
    return {safe(str(name)): value.to_numpy() for name, value in ordered.data_vars.items()}


def _draws_of_sites(
    reading: Reading, posterior: Mapping[str, np.ndarray], observed: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Draws by site: every latent site must have some, and every variable must be a site."""
    drawn = [name for name in reading.latent if name not in reading.fixed and safe(name) not in observed]
    shapes = {name: found.shape for name, found in reading.shapes(drawn).items()}
    params = {n: s["value"] for n, s in reading.sites.items() if s["type"] in PARAMETERS and n not in reading.fixed}
    # A network of another library has placeholders for the weights that are sampled.
    learned = [name for name, value in params.items() if jax.tree.leaves(value)]
    found = {name: posterior[safe(name)] for name in shapes if safe(name) in posterior}
    unlike = [f"{n!r} is {found[n].shape[2:]}, not {shapes[n]}" for n in found if found[n].shape[2:] != shapes[n]]
    faults = {
        "no draws of the sites": sorted(shapes.keys() - found.keys()),
        "no values of the parameters": learned,
        "variables that are no sites": sorted(posterior.keys() - set(map(safe, reading.sites))),
        "draws of another shape": unlike,
    }
    if any(faults.values()):
        got = "; ".join(f"{what} {', '.join(which)}" for what, which in faults.items() if which)
        instead = "Pass the model of the run; fix parameters by `handlers.substitute(model, data=...)`."
        raise argument_error("predict", "idata", got, instead)
    return found
