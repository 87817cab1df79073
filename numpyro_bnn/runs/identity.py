"""What a run is of: a description in words and hashes, compared before a run is
resumed.

Code is compared as Python runs it (:mod:`numpyro_bnn.runs.code`), models by the log
densities of their sites as well.
"""

import sys
from collections.abc import Callable
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.mcmc import MCMCKernel

from numpyro_bnn._checks import argument_error
from numpyro_bnn._types import Arrays, Attributes, Kwargs, Trees
from numpyro_bnn.program.arguments import Arguments
from numpyro_bnn.program.batches import Feed, feeds_in
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.rows import rows_in
from numpyro_bnn.program.sites import Sites, safe
from numpyro_bnn.runs.code import PACKAGES, described_value, options_of
from numpyro_bnn.runs.folder import DENSITY, FolderPath, digest

SEEDS = range(3)  # of prior draws at which the densities of a model are compared


def read_model(call: str, model: Callable, args: tuple, kwargs: Kwargs) -> Posterior:
    """The model on its data; an error about arguments that it does not take."""
    try:
        return Posterior(model, args, kwargs, full=False)
    except (TypeError, NotImplementedError, AttributeError) as cause:
        got = f"arguments with which the model fails ({cause})"
        raise argument_error(
            call, "args", got, "Pass those that the model takes."
        ) from cause


def begin_feeds(place: FolderPath, args: tuple, kwargs: Kwargs) -> list[Feed]:
    """The loaders among the arguments, at their begin; refuse to go on with those that
    have no position.
    """
    feeds = feeds_in(args, kwargs)
    for feed in feeds:
        if not feed.has_position and (place.path / "run.json").exists():
            got = "a loader without a position, for a run that has begun"
            instead = (
                "To go on it needs iterators with `get_state` and `set_state`, as "
                "those of grain. `to_inference_data` reads the run as it is."
            )
            raise argument_error(place.call, "args", got, instead)
        feed.rewind()
    return feeds


def described_model(reading: Posterior, args: tuple, kwargs: Kwargs) -> Attributes:
    """Sites by name with shape and support, data by place, and log densities at three
    draws from the prior.
    """
    description: Attributes = {}
    for name, site in reading.sites.items():
        if site["type"] == "sample":
            kind = "observed" if site["is_observed"] else "latent"
            value = jax.eval_shape(lambda v: v, site["value"])
            description[f"site {name}"] = (
                f"{kind}, {value.dtype}{list(value.shape)}, "
                f"{type(site['fn'].support).__name__}"
            )
        elif site["type"] == "plate":
            description[f"plate {name}"] = f"{site['args']}"
    leaves, _ = jax.tree_util.tree_flatten_with_path((args, dict(kwargs)))
    for path, leaf in leaves:
        place = jax.tree_util.keystr(path)
        if hasattr(leaf, "dtype"):
            description[f"argument {place}"] = (
                f"{leaf.dtype}{list(leaf.shape)} {digest(leaf)[:16]}"
            )
        else:
            description[f"argument {place}"] = described_value(leaf)
    return description | _densities(reading)


def _densities(reading: Posterior) -> dict[str, str]:
    """For each site, its log density at some draws from the prior, and the sum of the
    sizes of its terms.

    Site by site: a sum over all rows would hide what changes in a prior.
    """

    def sums(reading: Posterior, values: Arrays) -> Arrays:
        sums_by_site = {}
        for name, site in reading.at(values).items():
            if site["type"] == "sample":
                scale = 1.0 if site["scale"] is None else site["scale"]
                terms = scale * jnp.asarray(site["fn"].log_prob(site["value"]), float)
                sums_by_site[name] = jnp.stack(
                    [jnp.sum(terms), jnp.sum(jnp.abs(terms))]
                )
        return sums_by_site

    numbers = [
        jax.device_get(reading.run(sums, values)) for values in reading.draw(SEEDS)
    ]
    texts: dict[str, str] = {}
    for name in numbers[0]:
        pairs = np.concatenate([at_draw[name] for at_draw in numbers])
        texts[DENSITY + name] = " ".join(f"{number:.9g}" for number in pairs)
    return texts


def functions_of_data(reading: Posterior, args: tuple, kwargs: Kwargs) -> list[str]:
    """Names on disk of the deterministic sites that are functions of the data: the
    export of a run leaves them out.

    :param reading: the model on these arguments.
    """
    names = [
        name for name, site in reading.sites.items() if site["type"] == "deterministic"
    ]
    if not names:
        return []

    def values(sites: Sites) -> Trees:
        return {name: sites[name]["value"] for name in names}

    if rows_in(args, kwargs):  # read by the indices of a plate
        sources = reading.depends(values, on=reading.plates)
        return [safe(name) for name in names if sources[name]]
    # what a model is without its data may be another program, as after `collapse`
    model = getattr(reading.model, "predictive_model", reading.model)
    if model is not reading.model:
        reading = Posterior(model, args, kwargs)
    arrays = {id(array) for array in Arguments.of(args, kwargs, model).arrays.values()}
    places = {place for place, array in reading.data.items() if id(array) in arrays}
    sources = reading.sources(values)
    return [safe(name) for name in names if sources[name] & places]


def described_options(role: str, method: object) -> Attributes:
    """Type, options and model of a kernel or a guide, and of the kernels in it.

    :param role: ``"kernel"`` or ``"guide"``.
    """
    if not isinstance(method, MCMCKernel | AutoGuide):  # a guide that is a function
        return {role: described_value(method)}
    description: Attributes = {role: type(method).__name__}
    for name, value in options_of(method).items():
        if isinstance(value, MCMCKernel):
            for key, text in described_options(role, value).items():
                description[f"inner {key}"] = text
        else:
            key = "model" if name == "model" else f"option {name}"
            description[key] = described_value(value)
    return description


def described_versions() -> dict[str, str]:
    """Versions of Python and of packages, and the precision: draws are the same bit for
    bit only in the same ones.

    Code is compared as Python runs it, which is another in each of its versions.
    """
    versions = {"version of Python": "{}.{}".format(*sys.version_info)}
    for name in PACKAGES:
        versions[f"version of {name}"] = version(name)
    return versions | {"precision": str(jnp.result_type(float))}
