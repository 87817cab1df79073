"""Turn the parts of a fit into ArviZ groups: the model at every draw, names,
dimensions.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error, outside
from numpyro_bnn._distributions import in_support, is_factor, unwrapped
from numpyro_bnn._keys import key_numbers
from numpyro_bnn.program.arguments import Arguments
from numpyro_bnn.program.axes import Counted, counted
from numpyro_bnn.program.plates import PARAMETERS
from numpyro_bnn.program.reading import Reading, Sites, arrays_in
from numpyro_bnn.program.row_lengths import check_state
from numpyro_bnn.results import replay
from numpyro_bnn.results.fit import Fit
from numpyro_bnn.results.replay import (
    CALL,
    map_draws,
    site_values,
    sites_at,
    zero_draws,
)

SAMPLE_DIMS = ("chain", "draw")
MAX_ROWS_UNASKED = 10_000  # training rows that are predicted without being asked for
# Names of the axes of a network parameter, by the last part of its name and its rank.
PARAMETER_AXES = {
    ("kernel", 2): ("in", "out"),
    ("kernel", 4): ("h", "w", "in", "out"),
    ("bias", 1): ("out",),
    ("scale", 1): ("out",),
}


class Exporter:
    """Turns the parts of a fit into ArviZ groups."""

    def __init__(
        self,
        fit: Fit,
        coords: Mapping,
        dims: Mapping,
        draws_per_chunk: int | None,
        shown: bool,
    ) -> None:
        self.fit = fit
        self.coords: dict[str, Any] = {}
        self.dims: dict[str, Sequence[str]] = {}
        for stat, (axis, labels) in fit.stat_coords.items():
            self.coords[axis] = labels
            self.dims[stat] = (axis,)
        self.coords.update(coords)
        self.dims.update(dims)
        self.draws_per_chunk = draws_per_chunk
        self._counted: Counted | None = None
        #: Factors of the data that are no log likelihood of single rows.
        self.without_rows: list[str] = []
        self.first = fit.params | {
            name: value[0, 0] for name, value in fit.posterior.items()
        }
        reading = self.read(fit.arguments)
        self.sites = site_values(
            fit.model, self.first, jax.random.key(0), fit.arguments.call()
        )
        self.map_draws: Callable = partial(map_draws, progress_bar=shown)
        self._check_parameters(reading)
        self._check_names()
        sampled = _of_type(self.sites, "sample")
        self.latent = {
            name: value for name, value in fit.posterior.items() if name in sampled
        }
        self.reading = reading
        sources = reading.sources(_values)
        self._find_observations(reading, sources)
        self.dependent = [
            name for name in _of_type(self.sites, "deterministic") if sources[name]
        ]
        #: Factors of single rows, such as those of censored ones, which are likelihood
        # as well.
        self.factors = self._factors_of_data(reading)

    # -- the model at the first draw ---------------------------------------------------

    def read(self, arguments: Arguments) -> Reading:
        """What the model is as a function of its array arguments."""

        def model(**arrays: Any) -> Any:
            args, kwargs = arguments.call(arrays)
            return handlers.substitute(self.fit.model, data=self.fit.params)(
                *args, **kwargs
            )

        return Reading(model, (), arguments.arrays)

    def _find_observations(self, reading: Reading, sources: Mapping[str, set]) -> None:
        """Tell observations from fixed values, such as weights given to
        ``handlers.condition``.

        A value is fixed if other sites depend on it and no argument of the model gives
        it. An observation is redrawn in predictions, unless it is an input of the
        others: a site of x, of which y is a function.
        """
        data_sites = [name for name, site in self.sites.items() if replay.is_data(site)]
        samples = _of_type(self.sites, "sample")
        below = reading.depends(partial(_log_densities, names=samples), data_sites)
        inner: set[str] = set()
        for name in samples:
            inner |= below[name] - {name}
        outer = [name for name in data_sites if name not in inner]
        self.observed: set[str] = set().union(*map(sources.__getitem__, outer))
        self.observed_sites = []
        self.redrawn = []
        for name in data_sites:
            if name in outer or sources[name]:
                self.observed_sites.append(name)
            if name in outer or sources[name] & self.observed:
                self.redrawn.append(name)

    def _factors_of_data(self, reading: Reading) -> list[str]:
        """Names of the factors that are computed from data, in a plate whose rows they
        have.
        """
        factors = [
            name
            for name in _of_type(self.sites, "sample")
            if is_factor(self.sites[name]["fn"])
        ]
        by_row: list[str] = []
        if not factors:
            return by_row
        sources = reading.sources(partial(_log_densities, names=factors))
        for name in factors:
            shape = self.sites[name]["fn"].batch_shape
            frames = self.sites[name]["cond_indep_stack"]
            has_rows = frames and all(
                len(shape) >= -f.dim and shape[f.dim] == f.size for f in frames
            )
            if sources[name]:
                (by_row if has_rows else self.without_rows).append(name)
        return by_row

    def _check_parameters(self, reading: Reading) -> None:
        """Parameter sites must not depend on the key, because their values in the run
        are not stored.
        """
        unknown = [
            name
            for name in _of_type(self.sites, *PARAMETERS)
            if name not in self.fit.params
        ]
        if not unknown:
            return
        check_state(CALL, "result", reading)
        at_other_key = site_values(
            self.fit.model, self.first, jax.random.key(1), self.fit.arguments.call()
        )
        for name in unknown:
            pairs = zip(
                self.sites[name]["value"], at_other_key[name]["value"], strict=True
            )
            if any(
                not np.array_equal(key_numbers(a), key_numbers(b)) for a, b in pairs
            ):
                got = f"a model whose parameter site {name!r} starts at random values"
                instead = (
                    "MCMC froze and did not store it: fix it by `handlers.substitute` "
                    "before the run."
                )
                raise argument_error(CALL, "result", got, instead)

    def _check_names(self) -> None:
        """Variables and plates must keep apart once they are renamed for netCDF."""
        for types in (("sample", "deterministic"), ("plate",)):
            owners: dict[str, str] = {
                dim: f"{dim!r} (an axis of the draws)" for dim in SAMPLE_DIMS
            }
            for name in _of_type(self.sites, *types):
                owner = owners.setdefault(safe(name), repr(name))
                if owner != repr(name):
                    got = f"a model with the names {owner} and {name!r}"
                    instead = (
                        f"Both are exported as {safe(name)!r}: rename one in the model."
                    )
                    raise argument_error(CALL, "result", got, instead)

    def _derived(self, name: str, suffix: str) -> str:
        """Name of a variable that is computed from a site, which no other site may
        have.
        """
        variable = f"{safe(name)}_{suffix}"
        for site in (*self.redrawn, *self.dependent):
            if safe(site) == variable:
                instead = (
                    f"The export has a variable of this name, computed from {name!r}: "
                    f"rename the site."
                )
                raise argument_error(
                    CALL, "result", f"a model with a site {site!r}", instead
                )
        return variable

    def affecting(self) -> set[str]:
        """Names of the arguments that change what is predicted, and not only a mask or
        a scale of the likelihood.
        """

        def parts(sites: Sites) -> dict[str, Any]:
            values: dict[str, Any] = {}
            for name, site in sites.items():
                if site["type"] == "deterministic":
                    values[name] = site["value"]
                elif site["type"] == "sample" and not is_factor(site["fn"]):
                    values[name] = arrays_in(unwrapped(site["fn"], masked=True))
            return values

        return set().union(*self.reading.sources(parts).values())

    def counts(self) -> Counted:
        """Which axes of the arguments count the rows of which plate."""
        if self._counted is None:
            self._counted = counted(self.reading)
        return self._counted

    def warn_of_missing(self, groups: Mapping[str, Any]) -> None:
        """Say what a reader of these groups would look for in vain."""
        if "log_likelihood" in groups and self.without_rows:
            factors = ", ".join(map(repr, self.without_rows))
            instead = "Give it a log density for each row, inside the plate of the data"
            warnings.warn(
                f"{CALL}: `log_likelihood` lacks the factor {factors}. {instead}.",
                stacklevel=outside(),
            )
        for group in ("predictions", "posterior_predictive"):
            if group not in groups:
                continue
            data = groups[group].data_vars
            for name in self.redrawn:
                variable = safe(name)
                means = {f"{variable}_mean", f"{variable}_probs"} & data.keys()
                if variable in data and not means:
                    kind = type(unwrapped(self.sites[name]["fn"], masked=True)).__name__
                    text = (
                        f"no `{variable}_mean`, as NumPyro has no mean of a {kind}. "
                        f"Average the draws of {variable!r}"
                    )
                    warnings.warn(f"{CALL}: {text}.", stacklevel=outside())
                    return

    def predicts_training_rows(self, asked: bool | None) -> bool:
        """Whether to predict the training rows: as asked, else with a warning only if
        there are few.
        """
        values = [np.atleast_1d(self.sites[name]["value"]) for name in self.redrawn]
        rows = max(map(len, values), default=0)
        if asked is None and rows > MAX_ROWS_UNASKED:
            message = (
                f"{CALL}: no `posterior_predictive` of {rows} training rows: ask for "
                f"it by"
            )
            warnings.warn(
                f"{message} `posterior_predictive=True`, or leave it out by `False`.",
                stacklevel=outside(),
            )
            return False
        return asked is not False

    def outline(self) -> "Exporter":
        """An exporter of the same groups that computes nothing: one draw of zeros in
        the place of values.
        """
        exporter = copy(self)
        exporter.coords, exporter.map_draws = {}, zero_draws
        return exporter

    # -- groups ------------------------------------------------------------------------

    def training_groups(
        self, rng_key: jax.Array, log_likelihood: bool, predictive: bool
    ) -> dict[str, Any]:
        fit = self.fit
        posterior = {
            safe(name): value
            for name, value in fit.posterior.items()
            if name not in self.dependent
        }
        groups = {"posterior": self._sampled_parameters(posterior)}
        if fit.sample_stats:
            groups["sample_stats"] = self._sampled_parameters(fit.sample_stats)

        def at_draw(
            draw: Mapping[str, Any], key: jax.Array, params: Mapping, call: tuple
        ) -> dict[str, jax.Array]:
            values: dict[str, jax.Array] = {}
            run_model: Callable = partial(
                sites_at, fit.model, {**params, **draw}, key, call
            )
            sites = run_model()
            if predictive:
                values |= self._predicted(
                    run_model(predict=self.redrawn)
                ) | self._functions(sites)
            if log_likelihood:
                for name, density in self._log_likelihood(sites).items():
                    values[f"log_likelihood/{safe(name)}"] = density
            return values

        scored_sites = [*self.observed_sites, *self.factors] if log_likelihood else []
        if scored_sites or (predictive and (self.redrawn or self.dependent)):
            shared = fit.params, fit.arguments.call()
            values = self.map_draws(
                at_draw, self.latent, rng_key, self.draws_per_chunk, shared
            )
            predicted = {}
            density = {}
            for name, value in values.items():
                if "/" in name:
                    density[name.removeprefix("log_likelihood/")] = value
                else:
                    predicted[name] = value
            groups["log_likelihood"] = self._sampled(density, self.sites, density)
            if "diverging" in fit.sample_stats:
                groups["sample_stats"] = self._sampled_parameters(
                    _with_impossible(fit.sample_stats, density)
                )
            groups["posterior_predictive"] = self._sampled(predicted, self.sites)
        observed = {}
        for name in self.observed_sites:
            value = self._as_given(np.asarray(self.sites[name]["value"]))
            observed[safe(name)] = (
                site_dims(self.sites[name], safe(name), value.shape),
                value,
            )
        groups["observed_data"] = self._dataset(observed)
        groups["constant_data"] = self._constants(
            fit.arguments.arrays, self.observed, self.sites
        )
        return groups

    def prediction_groups(
        self,
        rng_key: jax.Array,
        new: Arguments,
        new_names: set[str],
        new_coords: Mapping[str, Sequence],
    ) -> dict[str, Any]:
        model = self.fit.model
        shared = self.fit.params, new.call(), self.fit.arguments.call()
        scored = bool(self.observed) and self.observed <= new_names

        def at_draw(
            draw: Mapping[str, Any], key: jax.Array, params: Mapping, *calls: Any
        ) -> dict[str, jax.Array]:
            run_model: Callable = partial(
                sites_at, model, {**params, **draw}, key, *calls
            )
            sites = run_model(predict=self.redrawn)
            values = self._predicted(sites) | self._functions(sites)
            if scored:
                for name, density in self._log_likelihood(run_model()).items():
                    values[self._derived(name, "log_likelihood")] = density
            return values

        sites = site_values(
            model, self.first, jax.random.key(0), *shared[1:], self.redrawn
        )
        values = self.map_draws(
            at_draw, self.latent, rng_key, self.draws_per_chunk, shared
        )
        arrays = {
            name: value for name, value in new.arrays.items() if name in new_names
        }
        plates = _plate_sizes(sites)
        rows = set()
        for name, value in arrays.items():
            for axis, size in enumerate(np.shape(value)):
                rows.add(self._plate(name, axis, size, plates))
        exporter = copy(self)
        exporter.coords = {}
        for dim, labels in self.coords.items():
            if dim not in rows and not dim.endswith("_dim_0"):
                exporter.coords[dim] = labels
        exporter.coords.update(new_coords)
        densities = [
            f"{safe(name)}_log_likelihood"
            for name in (*self.observed_sites, *self.factors)
        ]
        return {
            "predictions": exporter._sampled(values, sites, densities),
            "predictions_constant_data": exporter._constants(arrays, set(), sites),
        }

    def _as_given(self, value: np.ndarray) -> np.ndarray:
        """An observation in the precision in which it was passed: the model may see it
        in float32.
        """
        for name in self.observed:
            passed = np.asarray(self.fit.arguments.arrays[name])
            if np.array_equal(passed.astype(value.dtype), value, equal_nan=True):
                return passed
        return value

    # -- values at one draw ------------------------------------------------------------

    def _predicted(self, sites: Sites) -> dict[str, jax.Array]:
        values = {}
        for name in self.redrawn:
            values[safe(name)] = sites[name]["value"]
            mean = replay.observation_mean(sites[name]["fn"])
            if mean is not None:
                values[self._derived(name, mean[0])] = mean[1]
        return values

    def _functions(self, sites: Sites) -> dict[str, jax.Array]:
        return {
            safe(name): sites[name]["value"] for name in self.dependent if name in sites
        }

    def _log_likelihood(self, sites: Sites) -> dict[str, jax.Array]:
        log_densities = _log_densities(sites, self.factors)
        for name in self.observed_sites:
            fn, value = sites[name]["fn"], sites[name]["value"]
            log_densities[name] = jnp.where(
                in_support(fn, value), fn.log_prob(value), -jnp.inf
            )
        return log_densities

    # -- datasets ----------------------------------------------------------------------

    def _sampled_parameters(self, values: Mapping[str, np.ndarray]) -> Any:
        """Dataset of draws (C, S, ...) of parameters or statistics."""
        variables = {}
        for name, value in values.items():
            variables[name] = SAMPLE_DIMS + self._dims(name, value.shape[2:]), value
        return self._dataset(variables)

    def _sampled(
        self,
        values: Mapping[str, np.ndarray],
        sites: Sites,
        densities: Collection[str] = (),
    ) -> Any:
        """Dataset of draws of observed or deterministic sites, dimensions by plate.

        :param densities: names of log likelihoods, of which only elements that no mask
            leaves out are data.
        """
        names = (*self.observed_sites, *self.factors, *self.redrawn, *self.dependent)
        by_name = {safe(name): sites[name] for name in names}
        variables = {}
        for name, value in values.items():
            # A derived variable such as `y_mean` belongs to the site with the longest
            # name that is a prefix of it.
            stem = name
            if name not in by_name:
                stems = [stem for stem in by_name if name.startswith(f"{stem}_")]
                stem = max(stems, key=len)
            site = by_name[stem]
            dims = site_dims(site, name, value.shape[2:])
            unmasked = np.array(True)
            if name in densities:
                unmasked = replay.observed_elements(site, value)
            if not unmasked.all():
                dim = f"{safe(site['name'])}_observed"
                labels = np.asarray(
                    self.coords.get(dims[0], ()) if len(dims) == 1 else ()
                )
                places = np.flatnonzero(unmasked)
                self.coords[dim] = (
                    labels[places] if labels.size == unmasked.size else places
                )
                dims, value = (dim,), value[..., unmasked]
            if unmasked.any():
                variables[name] = (SAMPLE_DIMS + dims, value)
        return self._dataset(variables)

    def _constants(
        self, arrays: Mapping[str, Any], left_out: set[str], sites: Sites
    ) -> Any:
        """Dataset of array arguments; an axis that counts the rows of a plate is named
        after it.
        """
        plates = _plate_sizes(sites)
        variables = {}
        for name, value in arrays.items():
            if name not in left_out:
                dims = list(self._dims(name, np.shape(value)))
                for axis, size in enumerate(np.shape(value)):
                    plate = self._plate(name, axis, size, plates)
                    if plate is not None and plate not in dims:
                        dims[axis] = plate
                variables[name] = (dims, np.asarray(value))
        return self._dataset(variables)

    def _plate(
        self, name: str, axis: int, size: int, plates: Mapping[str, int]
    ) -> str | None:
        """The plate whose rows an axis counts; by its length if the program cannot say
        and the axis is the first.
        """
        guess = None
        for plate, rows in plates.items():
            if rows == size:
                alike = self.counts().alike((name, axis), plate)
                if alike:
                    return safe(plate)
                if alike is None and axis == 0:
                    guess = safe(plate)
        return guess

    def _dims(self, name: str, shape: Sequence[int]) -> tuple[str, ...]:
        dims = tuple(self.dims.get(name, self._default_dims(name, shape)))
        if len(dims) != len(shape) or {*SAMPLE_DIMS} & {*dims}:
            instead = "Name every axis but `chain` and `draw` once."
            raise argument_error(
                CALL, "dims", f"{dims} for {name!r} of shape {tuple(shape)}", instead
            )
        return dims

    def _default_dims(self, name: str, shape: Sequence[int]) -> tuple[str, ...]:
        """The names of the plates of a latent site, and the names of a parameter for
        its other axes.
        """
        dims = parameter_dims(name, shape)
        for site in self.latent:
            if safe(site) == name:
                plates = site_dims(self.sites[site], name, shape)
                return tuple(
                    dim if plate.startswith(f"{name}_dim_") else plate
                    for plate, dim in zip(plates, dims, strict=True)
                )
        return dims

    def _dataset(
        self, variables: Mapping[str, tuple[Sequence[str], np.ndarray]]
    ) -> Any:
        # A plate and an argument may share a name, but for ArviZ dimensions and
        # variables must differ.
        renamed = {}
        sizes: dict[str, int] = {}
        for name, (axes, value) in variables.items():
            dims = tuple(f"{dim}_dim" if dim in variables else dim for dim in axes)
            renamed[name] = dims, value
            sizes.update(zip(dims, value.shape, strict=True))
        coords = {}
        for dim, labels in self.coords.items():
            if sizes.get(dim) == len(labels):
                coords[dim] = labels
        return _arviz.dataset(renamed, coords)


def _of_type(sites: Sites, *types: str) -> list[str]:
    return [name for name, site in sites.items() if site["type"] in types]


def _plate_sizes(sites: Sites) -> dict[str, int]:
    return {name: sites[name]["args"][0] for name in _of_type(sites, "plate")}


def _values(sites: Sites) -> dict[str, Any]:
    names = _of_type(sites, "sample", "deterministic")
    return {name: sites[name]["value"] for name in names}


def _log_densities(sites: Sites, names: Collection[str]) -> dict[str, jax.Array]:
    return {name: sites[name]["fn"].log_prob(sites[name]["value"]) for name in names}


def _with_impossible(
    stats: Mapping[str, np.ndarray], densities: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Statistics in which draws at which an observation has no density count as
    diverging.
    """
    diverging = np.asarray(stats["diverging"])
    for value in densities.values():
        diverging = diverging | ~np.isfinite(value).reshape(*value.shape[:2], -1).all(
            axis=2
        )
    return {**stats, "diverging": diverging}


def safe(name: str) -> str:
    """Variable name that netCDF and DataTree accept: the ``/`` of a site becomes a dot.

    >>> safe("net/Dense_0.kernel")
    'net.Dense_0.kernel'
    """
    return name.replace("/", ".")


def parameter_dims(name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Dimensions of a posterior variable without chain and draw.

    Kernels and biases get ``_in``, ``_out`` (and ``_h``, ``_w``) after their name,
    everything else ArviZ's ``<name>_dim_<i>``.

    >>> parameter_dims("net.Dense_0.kernel", (3, 8))
    ('net.Dense_0.kernel_in', 'net.Dense_0.kernel_out')
    >>> parameter_dims("tau", (2,))
    ('tau_dim_0',)
    """
    leaf = name.rsplit(".", 1)[-1].removesuffix("_base")
    axes = PARAMETER_AXES.get((leaf, len(shape))) if "." in name else None
    return tuple(
        f"{name}_{axis}" for axis in axes or [f"dim_{i}" for i in range(len(shape))]
    )


def site_dims(
    site: Mapping[str, Any], name: str, shape: Sequence[int]
) -> tuple[str, ...]:
    """Dimensions of a value of a site, without chain and draw: plates by their names,
    the other axes numbered.

    >>> from numpyro.primitives import CondIndepStackFrame
    >>> site_dims(
    ...     {"cond_indep_stack": [CondIndepStackFrame("data", -1, 5)]}, "y", (5, 2)
    ... )
    ('data', 'y_dim_1')
    """
    # Batch axes come before event axes, the outermost plate (most negative dim) first.
    plates = sorted(site["cond_indep_stack"], key=lambda frame: frame.dim)
    dims = [f"{name}_dim_{i}" for i in range(len(shape))]
    offset = -plates[0].dim if plates else 0
    for frame in plates:
        axis = offset + frame.dim
        if axis < len(shape) and np.shape(shape) and shape[axis] == frame.size:
            dims[axis] = safe(frame.name)
    return tuple(dims)
