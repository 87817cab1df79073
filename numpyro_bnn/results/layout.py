"""Values as ArviZ groups: names of variables, dimensions and coordinates."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error, outside
from numpyro_bnn._distributions import is_factor, unwrapped
from numpyro_bnn._types import HostArrays, PyTree, Trees
from numpyro_bnn.program.plates import sites_of_type
from numpyro_bnn.program.sites import Site, Sites, safe
from numpyro_bnn.results.fit import CALL
from numpyro_bnn.results.replay import Groups, Replay

SAMPLE_DIMS = ("chain", "draw")
VALUE_GROUPS = {
    "log_likelihood": "log_likelihood",
    "predictions": "posterior_predictive",
}
# Names of the axes of a network parameter, by the last part of its name and its rank.
PARAMETER_AXES = {
    ("kernel", 2): ("in", "out"),
    ("kernel", 4): ("h", "w", "in", "out"),
    ("bias", 1): ("out",),
    ("scale", 1): ("out",),
}


class Layout:
    """Names, dimensions and coordinates of the variables of a result.

    :param coords: labels by dimension; ``dims``: names of dimensions by variable.
    """

    def __init__(
        self,
        replay: Replay,
        coords: Mapping[str, Sequence],
        dims: Mapping[str, Sequence[str]],
    ) -> None:
        self.replay = replay
        self.coords: dict[str, PyTree] = {}
        self.dims: dict[str, Sequence[str]] = {}
        for stat, (axis, labels) in replay.fit.stat_coords.items():
            self.coords[axis] = labels
            self.dims[stat] = (axis,)
        self.coords.update(coords)
        self.dims.update(dims)
        for types in (("sample", "deterministic"), ("plate",)):
            self._check_names(sites_of_type(replay.sites, *types))
        #: Sites with the values of observations at the training rows.
        self.sites = replay.observations(replay.read)

    def with_coords(self, coords: Trees) -> "Layout":
        """The same with other coordinates."""
        layout = copy(self)
        layout.coords = dict(coords)
        return layout

    def _check_names(self, names: Collection[str]) -> None:
        """Variables and plates must keep apart once they are renamed for netCDF."""
        owners = {dim: f"{dim!r} (an axis of the draws)" for dim in SAMPLE_DIMS}
        for name in names:
            owner = owners.setdefault(safe(name), repr(name))
            if owner != repr(name):
                got = f"a model with the names {owner} and {name!r}"
                instead = (
                    f"Both are exported as {safe(name)!r}: rename one in the model."
                )
                raise argument_error(CALL, "result", got, instead)

    # -- groups ------------------------------------------------------------------------

    def training_groups(self, values: Groups) -> dict:
        """Groups of a fit and of values at its rows."""
        fit, replay = self.replay.fit, self.replay
        posterior = {}
        for name, value in fit.posterior.items():
            if name not in replay.dependent:
                posterior[safe(name)] = value
        groups = {"posterior": self._parameters(posterior)}
        if fit.sample_stats:
            stats = fit.sample_stats
            if "diverging" in stats:
                stats = _with_impossible(stats, values.get("log_likelihood", {}))
            groups["sample_stats"] = self._parameters(stats)
        for group, name in VALUE_GROUPS.items():
            if group in values:
                groups[name] = self._sampled({group: values[group]}, self.sites)
        observed = {}
        data = self.observed_values()
        for name in replay.observed_sites:
            value = data[safe(name)]
            dims = site_dims(self.sites[name], safe(name), value.shape)
            observed[safe(name)] = dims, value
        groups["observed_data"] = self._dataset(observed)
        arrays = dict(fit.arguments.arrays)
        for name in replay.observed:
            del arrays[name]
        groups["constant_data"] = self._constants(arrays, self.sites)
        return groups

    def prediction_groups(
        self,
        values: Groups,
        sites: Sites,
        arrays: Trees,
        coords: Mapping[str, Sequence],
    ) -> dict:
        """Groups of values at new rows.

        :param sites: at these rows; ``arrays``: new arguments; ``coords``: of new rows.
        """
        plates = _plate_sizes(sites)
        rows = set()
        for name, value in arrays.items():
            for axis, size in enumerate(np.shape(value)):
                rows.add(self._plate(name, axis, size, plates))
        both = {}  # coordinates that hold for training and new rows
        for dim, labels in self.coords.items():
            if dim not in rows and not dim.endswith("_dim_0"):
                both[dim] = labels
        layout = self.with_coords({**both, **coords})
        return {
            "predictions": layout._sampled(values, sites, "_log_likelihood"),
            "predictions_constant_data": layout._constants(arrays, sites),
        }

    def warn_of_missing(self, groups: Trees) -> None:
        """Say what a reader of these groups would look for in vain."""
        replay = self.replay
        if "log_likelihood" in groups and replay.without_rows:
            factors = ", ".join(map(repr, replay.without_rows))
            instead = "Give it a log density for each row, inside the plate of the data"
            warnings.warn(
                f"{CALL}: `log_likelihood` lacks the factor {factors}. {instead}.",
                stacklevel=outside(),
            )
        for group in ("predictions", "posterior_predictive"):
            data = groups[group].data_vars if group in groups else {}
            for name in replay.redrawn:
                variable = safe(name)
                means = {f"{variable}_mean", f"{variable}_probs"} & data.keys()
                if variable in data and not means:
                    fn = unwrapped(replay.sites[name]["fn"], masked=True)
                    text = (
                        f"no `{variable}_mean`, as NumPyro has no mean of a "
                        f"{type(fn).__name__}. "
                        f"Average the draws of {variable!r}"
                    )
                    warnings.warn(f"{CALL}: {text}.", stacklevel=outside())
                    return

    def observed_values(self) -> HostArrays:
        """Data by variable."""
        values = {}
        for name in self.replay.observed_sites:
            values[safe(name)] = self._as_passed(np.asarray(self.sites[name]["value"]))
        return values

    def _as_passed(self, value: np.ndarray) -> np.ndarray:
        """An observation in the precision in which it was passed: the model may see it
        in float32.
        """
        for name in self.replay.observed:
            passed = np.asarray(self.replay.fit.arguments.arrays[name])
            if np.array_equal(passed.astype(value.dtype), value, equal_nan=True):
                return passed
        return value

    def _parameters(self, values: HostArrays) -> Any:
        """Dataset of draws (C, S, ...) of parameters or statistics."""
        variables = {}
        for name, value in values.items():
            variables[name] = SAMPLE_DIMS + self._dims(name, value.shape[2:]), value
        return self._dataset(variables)

    def _sampled(self, values: Groups, sites: Sites, suffix: str = "") -> Any:
        """Dataset of draws of observed or deterministic sites, dimensions by plate.

        :param suffix: of the names of log likelihoods, of which only elements that no
            mask leaves out are data.
        """
        variables = {}
        for (site, ending), value in values.get("predictions", {}).items():
            name = self._variable(site, ending)
            dims = site_dims(sites[site], name, value.shape[2:])
            variables[name] = SAMPLE_DIMS + dims, value
        for (site, _), value in values.get("log_likelihood", {}).items():
            name = self._variable(site, suffix)
            dims = site_dims(sites[site], name, value.shape[2:])
            unmasked = _unmasked(sites[site], value)
            if not unmasked.all():
                labels = self.coords.get(dims[0], ()) if len(dims) == 1 else ()
                places = np.flatnonzero(unmasked)
                if len(labels) == unmasked.size:
                    labels = np.asarray(labels)[places]
                else:
                    labels = places
                dims, value = (f"{safe(site)}_observed",), value[..., unmasked]
                self.coords[dims[0]] = labels
            if unmasked.any():
                variables[name] = SAMPLE_DIMS + dims, value
        return self._dataset(variables)

    def _variable(self, site: str, ending: str) -> str:
        """Name of a variable that is computed from a site, which no other site may
        have.
        """
        name = safe(site) + ending
        for drawn_site in (*self.replay.redrawn, *self.replay.dependent):
            if ending and safe(drawn_site) == name:
                instead = (
                    f"The export has a variable of this name, computed from {site!r}: "
                    f"rename the site."
                )
                raise argument_error(
                    CALL, "result", f"a model with a site {drawn_site!r}", instead
                )
        return name

    def _constants(self, arrays: Trees, sites: Sites) -> Any:
        """Dataset of array arguments; an axis that counts the rows of a plate is named
        after it.
        """
        plates = _plate_sizes(sites)
        variables = {}
        for name, value in arrays.items():
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
                alike = self.replay.counts.alike((name, axis), plate)
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
        dims = parameter_dims(name, shape)
        for site in self.replay.latent:
            if safe(site) == name:
                return _with_plates(self.sites[site], dims, shape)
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


def _plate_sizes(sites: Sites) -> dict[str, int]:
    plates = sites_of_type(sites, "plate")
    return {name: site["args"][0] for name, site in plates.items()}


def _with_impossible(
    stats: HostArrays, densities: Mapping[Any, np.ndarray]
) -> HostArrays:
    """Statistics in which draws at which an observation has no density count as
    diverging.
    """
    diverging = np.asarray(stats["diverging"])
    for value in densities.values():
        by_draw = np.isfinite(value).reshape(*value.shape[:2], -1)
        diverging = diverging | ~by_draw.all(axis=2)
    return {**stats, "diverging": diverging}


def _unmasked(site: Site, log_likelihood: np.ndarray) -> np.ndarray:
    """Which elements of log likelihoods (C, S, ...) of a site are of data, not left out
    by a mask in every draw.
    """
    counted = (log_likelihood != 0).any(axis=(0, 1))
    if is_factor(site["fn"]):
        return counted
    return counted | site["unmasked"].any(axis=tuple(range(-site["fn"].event_dim, 0)))


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


def site_dims(site: Site, name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Dimensions of a value of a site, without chain and draw: plates by their names,
    the other axes numbered.

    >>> from numpyro.primitives import CondIndepStackFrame
    >>> site_dims(
    ...     {"cond_indep_stack": [CondIndepStackFrame("data", -1, 5)]}, "y", (5, 2)
    ... )
    ('data', 'y_dim_1')
    """
    numbered = [f"{name}_dim_{i}" for i in range(len(shape))]
    return _with_plates(site, numbered, shape)


def _with_plates(
    site: Site, dims: Sequence[str], shape: Sequence[int]
) -> tuple[str, ...]:
    """Dimensions of which those of plates have their names."""
    # Batch axes come before event axes, the outermost plate (most negative dim) first.
    named = list(dims)
    offset = -min((frame.dim for frame in site["cond_indep_stack"]), default=0)
    for frame in site["cond_indep_stack"]:
        axis = offset + frame.dim
        if axis < len(shape) and shape[axis] == frame.size:
            named[axis] = safe(frame.name)
    return tuple(named)
