"""What a model says at draws: one reading of it for each shape of its rows, evaluated
at all draws in chunks.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from jax.ad_checkpoint import checkpoint_name
from numpyro import handlers

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import (
    in_support,
    is_factor,
    unmasked_elements,
    unwrapped,
)
from numpyro_bnn._keys import key_numbers
from numpyro_bnn._types import Arrays, HostArrays, PyTree, Trees
from numpyro_bnn.networks import RandomNetwork, record_statistics
from numpyro_bnn.program.arguments import Arguments
from numpyro_bnn.program.axes import Counted, counted
from numpyro_bnn.program.plates import PARAMETERS, sites_of_type, unobserved
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.row_lengths import check_state
from numpyro_bnn.program.sites import MARK, Site, Sites, arrays_in
from numpyro_bnn.results.fit import CALL, Draws, Fit

# Observations that are censored: values are those of the distribution inside.
CENSORED = (
    dist.LeftCensoredDistribution,
    dist.RightCensoredDistribution,
    dist.IntervalCensoredDistribution,
)

# Values by group, and by site and what follows its name in that of the variable.
Groups = dict[str, dict[tuple[str, str], Any]]
# Evaluates a function of a reading, a draw and a key at all draws.
Evaluate = Callable[[Posterior, Callable, Draws, Array], Any]


class _statistic_sites(record_statistics):
    """Make the statistics of batch normalizations sites, whose values others can
    replace.

    :param new_rows: whether those of other rows will replace them: a single row has
        none.
    """

    def __init__(self, new_rows: bool) -> None:
        self.new_rows = new_rows
        super().__init__(None)

    def __enter__(self) -> "_statistic_sites":
        self.sites: dict[str, Array] = {}
        super().__enter__()
        return self

    def visit(self, network: RandomNetwork, x: Array) -> PyTree:
        """Name the statistics of a call, and return them."""
        statistics = super().visit(network, jnp.stack([x, x]) if self.new_rows else x)

        def named(path: tuple, leaf: Array) -> Array:
            name = f"statistics {len(self.calls)}{jax.tree_util.keystr(path)}"
            self.sites[name] = checkpoint_name(leaf, MARK + name)
            return self.sites[name]

        return jax.tree_util.tree_map_with_path(named, statistics)


class ReadModel(NamedTuple):
    """A model as it is at the rows of some arguments.

    :param statistics: names of the sites with statistics of batch normalizations.
    :param new_rows: whether it predicts.
    """

    reading: Posterior
    statistics: tuple[str, ...]
    new_rows: bool

    @property
    def sites(self) -> Sites:
        """The sites of the model itself."""
        sites = self.reading.sites
        return {name: sites[name] for name in sites if name not in self.statistics}


def read_model(
    model: Callable,
    arguments: Arguments,
    params: Trees | None = None,
    new_rows: bool = False,
) -> ReadModel:
    """Read a model at some arguments.

    :param params: values of its parameters by site.
    :param new_rows: whether it predicts: batch normalizations use the statistics of
        other rows.
    """
    statistics = _statistic_sites(new_rows)
    # models know by this handler that these are predictions
    model = unobserved(model, ()) if new_rows else model

    def with_statistics(params: Trees, /, **leaves: Any) -> None:
        args, kwargs = arguments.call(leaves)
        with statistics:
            handlers.substitute(model, data=params)(*args, **kwargs)
        for name, value in statistics.sites.items():
            numpyro.deterministic(name, value)

    reading = Posterior(with_statistics, (params or {},), arguments.split()[1])
    return ReadModel(reading, tuple(statistics.sites), new_rows)


@contextmanager
def naming_new_rows(call: str, argument: str) -> Iterator[None]:
    """Put before what a model says at new rows that it is about these."""
    try:
        yield
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        if ": argument `" in str(error):
            raise
        got = f"arguments with which the model fails ({error})"
        instead = (
            "Pass values shaped as in the run, with one row per new point in each."
        )
        raise argument_error(call, argument, got, instead) from error


class Replay:
    """The sites of a model by their roles, and their values at draws.

    :param fit: the model, its arguments, and the draws.
    :param read: the model at these arguments, if it has been read.
    """

    def __init__(self, fit: Fit, read: ReadModel | None = None) -> None:
        self.fit = fit
        self.read = read or read_model(fit.model, fit.arguments, fit.params)
        self.reading, self.sites = self.read.reading, self.read.sites
        #: Values of the latent sites: all others are computed from them.
        self.latent: HostArrays = {}
        for name in sites_of_type(self.sites, "sample"):
            if name in fit.posterior:
                self.latent[name] = fit.posterior[name]
        self.first = {name: value[0, 0] for name, value in self.latent.items()}
        self._check_parameters()
        sources = self._sources(_values)
        self._find_observations(sources)
        #: Deterministic sites that are functions of the data.
        self.dependent = [
            name for name in sites_of_type(self.sites, "deterministic") if sources[name]
        ]
        self._find_factors()

    def _sources(self, quantities: Callable[[Sites], Mapping]) -> dict[Any, set[str]]:
        """Names of the arguments from which quantities of a trace are computed."""
        arrays = self.fit.arguments.arrays.keys()
        sources = self.reading.sources(quantities)
        return {quantity: places & arrays for quantity, places in sources.items()}

    def _check_parameters(self) -> None:
        """Parameter sites must not depend on the key, because their values in the run
        are not stored.
        """
        unknown = sites_of_type(self.sites, *PARAMETERS).keys() - self.fit.params.keys()
        if not unknown:
            return
        check_state(CALL, "result", self.reading)

        def values(reading: Posterior, key: Array) -> dict[str, list]:
            sites = reading.at(self.first, key, unknown)
            leaves = {name: jax.tree.leaves(sites[name]["value"]) for name in unknown}
            return {name: arrays_in(leaves[name]) for name in sorted(unknown)}

        program = self.reading.prepare(values)
        first, second = (jax.device_get(program(random.key(seed))) for seed in (0, 1))
        for name in first:
            for a, b in zip(first[name], second[name], strict=True):
                if not np.array_equal(key_numbers(a), key_numbers(b)):
                    got = (
                        f"a model whose parameter site {name!r} starts at random values"
                    )
                    instead = (
                        "MCMC froze and did not store it: fix it by "
                        "`handlers.substitute` before the run."
                    )
                    raise argument_error(CALL, "result", got, instead)

    # -- roles of sites ----------------------------------------------------------------

    def _find_observations(self, sources: Mapping[str, set]) -> None:
        """Separate observations from fixed values, such as weights given to
        ``handlers.condition``.

        A value is fixed if other sites depend on it and no argument of the model gives
        it. An observation is redrawn in predictions, unless it is an input of the
        others: a site of x, of which y is a function.
        """
        samples = sites_of_type(self.sites, "sample")
        data_sites = [name for name, site in samples.items() if _is_data(site)]
        below = self.reading.depends(partial(_log_densities, names=samples), data_sites)
        #: Observed sites on which others depend.
        self.inner: set[str] = set()
        for name in samples:
            self.inner |= below[name] - {name}
        #: Names of the arguments that carry observations.
        self.observed: set[str] = set()
        for name in data_sites:
            if name not in self.inner:
                self.observed |= sources[name]
        self.observed_sites = []
        self.redrawn = []
        for name in data_sites:
            if name not in self.inner or sources[name]:
                self.observed_sites.append(name)
            if name not in self.inner or sources[name] & self.observed:
                self.redrawn.append(name)

    def _find_factors(self) -> None:
        """Find the factors that are computed from data: in a plate whose rows they
        have, such as those of censored rows, they are likelihood as well.
        """
        #: Factors of single rows, and of all of them.
        self.factors: list[str] = []
        self.without_rows: list[str] = []
        samples = sites_of_type(self.sites, "sample")
        names = [name for name, site in samples.items() if is_factor(site["fn"])]
        sources = self._sources(partial(_log_densities, names=names)) if names else {}
        for name in names:
            shape = samples[name]["fn"].batch_shape
            frames = samples[name]["cond_indep_stack"]
            has_rows = frames and all(
                len(shape) >= -frame.dim and shape[frame.dim] == frame.size
                for frame in frames
            )
            if sources[name]:
                (self.factors if has_rows else self.without_rows).append(name)

    def affecting(self) -> set[str]:
        """Names of the arguments that change what is predicted, and not only a mask or
        a scale of the likelihood.
        """

        def parts(sites: Sites) -> Trees:
            values: dict[str, PyTree] = {}
            for name, site in sites.items():
                if site["type"] == "deterministic":
                    values[name] = site["value"]
                elif site["type"] == "sample" and not is_factor(site["fn"]):
                    values[name] = arrays_in(unwrapped(site["fn"], masked=True))
            return values

        return set().union(*self._sources(parts).values())

    @cached_property
    def counts(self) -> Counted:
        """Which axes of the arguments count the rows of which plate."""
        return counted(self.reading)

    # -- values ------------------------------------------------------------------------

    def observations(self, read: ReadModel) -> Sites:
        """Sites with the values of observations at the first draw, computed by one
        program.

        Each also says which of its elements no mask leaves out, as ``"unmasked"``.
        """
        observed = dict.fromkeys((*self.observed_sites, *self.redrawn))
        names = [name for name in observed if name in read.sites]

        def values(reading: Posterior, draw: Draws) -> Sites:
            sites = reading.at(draw, only=names)
            return {
                name: {
                    "unmasked": unmasked_elements(site["fn"]),
                    "value": site["value"],
                }
                for name, site in sites.items()
            }

        computed = jax.device_get(read.reading.run(values, self.first))
        sites = read.sites
        return {name: {**sites[name], **computed.get(name, {})} for name in sites}

    def values(
        self,
        read: ReadModel,
        draws: Draws,
        rng_key: Array,
        evaluate: Evaluate,
        scored: bool,
        predictive: bool = True,
        training: ReadModel | None = None,
    ) -> Groups:
        """Log likelihoods and predictions, where they are asked for.

        :param read: the model at the training rows, or at new ones.
        :param training: the model at the training rows, by default that of the fit.
        """
        if not (scored or predictive):
            return {}
        if read.new_rows and read.statistics:
            training = training or self.read
            statistics = _batch_statistics(read, training, draws, rng_key, evaluate)
            draws = {**draws, **statistics}

        def at_draw(reading: Posterior, draw: Draws, key: Array) -> Groups:
            groups: Groups = {}
            at = partial(reading.at, rng_key=_model_key(key))
            if scored:
                sites = at(draw, only=(*self.observed_sites, *self.factors))
                groups["log_likelihood"] = self._log_likelihood(sites)
            if predictive:
                drawn, groups["predictions"] = self._predicted(at, draw, key)
                names = [name for name in self.dependent if name in reading.sites]
                sites = at({**draw, **drawn} if read.new_rows else draw, only=names)
                for name in names:
                    groups["predictions"][name, ""] = sites[name]["value"]
            return groups

        return evaluate(read.reading, at_draw, draws, rng_key)

    def _predicted(
        self, at: Callable, draw: Draws, key: Array
    ) -> tuple[dict[str, Array], dict[tuple[str, str], Array]]:
        """Observations that are drawn anew, by site, and with their means."""
        drawn: dict[str, Array] = {}
        sites = at(draw, only=self.redrawn)
        for name in self.redrawn:
            key, site_key = random.split(key)
            drawn[name] = sites[name]["fn"].sample(site_key)
            if name in self.inner:
                sites = at({**draw, **drawn}, only=self.redrawn)
        values = {}
        for name in self.redrawn:
            values[name, ""] = drawn[name]
            mean = observation_mean(sites[name]["fn"])
            if mean is not None:
                values[name, mean[0]] = mean[1]
        return drawn, values

    def _log_likelihood(self, sites: Sites) -> dict[tuple[str, str], Array]:
        """Log densities: minus infinity outside of a support."""
        densities = {}
        for name, density in _log_densities(sites, sites).items():
            if name in self.observed_sites:
                inside = in_support(sites[name]["fn"], sites[name]["value"])
                density = jnp.where(inside, density, -jnp.inf)
            densities[name, ""] = density
        return densities


def _batch_statistics(
    new: ReadModel,
    training: ReadModel,
    draws: Draws,
    rng_key: Array,
    evaluate: Evaluate,
) -> Trees:
    """Statistics of batch normalizations at the training rows, at each draw."""
    if new.statistics != training.statistics:
        got = "a model that normalizes new rows in other calls than training rows"
        instead = (
            "The model must call its networks equally often on training data and for "
            "prediction."
        )
        raise argument_error(CALL, "predictions", got, instead)

    def at_draw(reading: Posterior, draw: Draws, key: Array) -> Trees:
        sites = reading.at(draw, _model_key(key), new.statistics)
        return {name: site["value"] for name, site in sites.items()}

    return evaluate(training.reading, at_draw, draws, rng_key)


def _model_key(key: Array) -> Array:
    """The key of random numbers inside of the model, such as those of dropout: of a
    draw it is the same in each call, and not that of an observation.
    """
    return random.fold_in(key, 0)


def _is_data(site: Site) -> bool:
    is_auxiliary = site.get("infer", {}).get("is_auxiliary", False)
    return site["is_observed"] and not is_auxiliary


def _values(sites: Sites) -> Trees:
    named = sites_of_type(sites, "sample", "deterministic")
    return {name: site["value"] for name, site in named.items()}


def _log_densities(sites: Sites, names: Collection[str]) -> Arrays:
    return {name: sites[name]["fn"].log_prob(sites[name]["value"]) for name in names}


def observation_mean(fn: dist.Distribution) -> tuple[str, Array] | None:
    """The mean of an observation, if it has one, or class probabilities (..., K), after
    the ending of its name.
    """
    base = unwrapped(fn, masked=True)
    shape = fn.batch_shape + fn.event_shape
    if isinstance(base, CENSORED):  # draws of these are not censored either
        fn = base.base_dist
    if isinstance(base, dist.CategoricalProbs | dist.CategoricalLogits):
        classes = jnp.arange(base.probs.shape[-1]).reshape((-1,) + (1,) * len(shape))
        return "_probs", jnp.moveaxis(jnp.exp(base.log_prob(classes)), 0, -1)
    try:
        mean = fn.mean
    except NotImplementedError:
        return None
    return "_mean", jnp.broadcast_to(mean, shape)
