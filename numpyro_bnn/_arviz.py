"""The interface to ArviZ 0.x and 1.x: the only module that imports it (and xarray).

ArviZ 0.x stores results in ``arviz.InferenceData``, ArviZ 1.x in ``xarray.DataTree``;
the rest of the package calls the functions below and need not know which of the two it
holds. Both libraries are imported when first used, since they take longer than the rest
of the package.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_bnn._checks import argument_error, as_floats, unknown_name
from numpyro_bnn._options import Choice
from numpyro_bnn._types import ArrayLike, Attributes, Floats, InferenceData, Kwargs

if TYPE_CHECKING:
    import xarray as xr

Variables = Mapping[str, tuple[Sequence[str], ArrayLike]]

# ArviZ needs four draws in each chain that it splits.
_MIN_DRAWS = 4
# A generalized Pareto distribution is fitted to a fifth of the weights, but to at least
# five of them.
_MIN_WEIGHTS = 25


@cache
def _arviz() -> Any:
    with warnings.catch_warnings():
        # ArviZ 0.23 announces its refactoring once a day; version 1, the result, is
        # supported here.
        warnings.filterwarnings(
            "ignore", message=r"\s*ArviZ is undergoing", category=FutureWarning
        )
        import arviz
    return arviz


def _has_trees() -> bool:
    """Decided by the version: ArviZ 1.x still has a name `InferenceData`, which only
    warns.
    """
    return int(_arviz().__version__.split(".")[0]) >= 1


def rhat(draws: ArrayLike) -> Floats:
    """Rank-normalized split R-hat of every column of ``draws``, computed by ArviZ.

    A single chain is cut into halves, which are compared as two chains (each is split
    once more). This detects slow drifts, but not a mode that the chain never visits.

    :param draws: (C, S, ...) draws by chain.
    :return: R-hat, shape (...). NaN for a column that is constant or not finite, and
        for all columns if a chain has fewer than 4 draws (8 for a single chain);
        infinite or huge if every chain is constant at its own value.
    :raises ValueError: if ``draws`` has no chain and draw axis.

    Reference: Vehtari et al. (2021), *Rank-normalization, folding, and localization*,
    equations (4) and (14).

    >>> import numpy as np
    >>> draws = np.random.default_rng(0).normal(size=(4, 500, 2))
    >>> draws[0, :, 1] += 5.0
    >>> (rhat(draws) < 1.05).tolist()
    [True, False]
    """
    array = _by_chain("rhat", draws)
    if array.shape[0] == 1:
        half = array.shape[1] // 2
        array = np.concatenate([array[:, :half], array[:, array.shape[1] - half :]])
    return _by_column(array, _arviz().rhat, method="rank")


def ess(draws: ArrayLike, kind: str = "bulk") -> Floats:
    """Effective sample size of every column of ``draws``, computed by ArviZ.

    :param draws: (C, S, ...) draws by chain.
    :param kind: ``"bulk"`` (rank-normalized), ``"tail"`` (the smaller of the 5 % and 95
        % quantiles') or ``"mean"``.
    :return: effective draws, shape (...). NaN for a column that is constant or not
        finite, and for all columns if a chain has fewer than 4 draws.
    :raises ValueError: if ``draws`` has no chain and draw axis, or ``kind`` is unknown.

    Reference: Vehtari et al. (2021), *Rank-normalization, folding, and localization*.

    >>> import numpy as np
    >>> draws = np.random.default_rng(0).normal(size=(4, 500))
    >>> bool(1500 < ess(draws, "bulk") < 2500)
    True
    """
    Choice(("bulk", "tail", "mean")).check("ess", "kind", kind)
    # The quantiles are named because the default differs between the two ArviZ
    # versions.
    options: dict = {"prob": (0.05, 0.95)} if kind == "tail" else {}
    return _by_column(_by_chain("ess", draws), _arviz().ess, method=kind, **options)


def pareto_smoothed(
    log_weights: ArrayLike,
) -> tuple[Floats, Floats]:
    """Pareto-smoothed importance weights of independent draws and the shape k of their
    tail, computed by ArviZ.

    :param log_weights: (..., S) logarithms of importance ratios, up to a constant;
        ``-inf`` is a weight of 0.
    :return: (..., S) logarithms of weights that sum to 1, and k, (...). Weights that
        are all equal have k = -inf. With fewer than 25 draws, NaN or infinite weights,
        k is NaN and nothing is smoothed.

    Reference: Vehtari et al. (2024), *Pareto smoothed importance sampling*.

    >>> import numpy as np
    >>> heavy = 3.0 * np.random.default_rng(0).exponential(
    ...     size=1000
    ... )  # weights with tail k = 3
    >>> bool(pareto_smoothed(heavy)[1] > 2.0)
    True
    """
    array = np.asarray(log_weights, dtype=np.float64)
    rows = array.reshape(-1, array.shape[-1])
    with np.errstate(invalid="ignore"):
        smoothed = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
    k = np.full(len(rows), np.nan)
    for i, row in enumerate(rows):
        zero = np.isneginf(row)
        if len(row) < _MIN_WEIGHTS or zero.all() or not np.isfinite(row[~zero]).all():
            continue
        if np.ptp(row) == 0:
            k[i] = -np.inf
            continue
        # ArviZ subtracts and sorts, so a weight of zero is replaced by a negligible
        # one.
        filled = np.where(zero, row[~zero].min() - 1000.0, row)
        smoothed_row, k[i] = _smooth(_untied(filled))
        smoothed[i] = np.where(zero, -np.inf, smoothed_row)
    return smoothed.reshape(array.shape), k.reshape(array.shape[:-1])


def dataset(variables: Variables, coords: Kwargs | None = None) -> "xr.Dataset":
    """Build one group of results.

    :param variables: by name, the dimension names and the array, e.g. ``{"w":
        (("chain", "draw"), w)}``.
    :param coords: coordinate values by dimension; those of other dimensions are
        ignored, and a dimension without coordinates gets 0, 1, 2, ... as in ArviZ.
    :raises ValueError: for dimension names that do not fit the array, or an array that
        netCDF cannot hold.

    >>> import numpy as np
    >>> data = dataset(
    ...     {"w": (("chain", "draw", "unit"), np.zeros((2, 5, 3)))},
    ...     {"unit": ["a", "b", "c"]},
    ... )
    >>> dict(data.sizes)
    {'chain': 2, 'draw': 5, 'unit': 3}
    """
    import xarray as xr

    arrays = {}
    sizes: dict[str, int] = {}
    for name, (dims, values) in variables.items():
        array = np.asarray(values)
        if array.dtype.kind not in "biufUM":
            got = f"{name!r} of dtype {array.dtype}"
            instead = (
                "netCDF holds real numbers, booleans and text: convert it first, e.g. "
                "`.astype('float32')`."
            )
            raise argument_error("dataset", "variables", got, instead)
        arrays[name] = tuple(dims), array
        sizes.update(zip(dims, array.shape, strict=True))
    used = {dim: np.arange(size) for dim, size in sizes.items()}
    coords = coords or {}
    for dim in used.keys() & coords.keys():
        used[dim] = np.asarray(coords[dim])
    return xr.Dataset(arrays, coords=used)


def inference_data(
    groups: Mapping[str, "xr.Dataset"], attrs: Attributes | None = None
) -> InferenceData:
    """Join groups into the installed ArviZ's ``arviz.InferenceData`` (0.x) or
    ``xarray.DataTree`` (1.x).

    :param groups: datasets by group name, e.g. ``{"posterior": dataset(...)}``; empty
        ones are left out.
    :param attrs: text or numbers about the whole; anything else is a TypeError.

    >>> import numpy as np
    >>> idata = inference_data(
    ...     {"posterior": dataset({"w": (("chain", "draw"), np.zeros((2, 5)))})}
    ... )
    >>> group_names(idata)
    ['posterior']
    """
    filled: dict = {name: data for name, data in groups.items() if data.data_vars}
    about = _attributes("inference_data", attrs)
    if not _has_trees():
        return _arviz().InferenceData(attrs=about, **filled)
    import xarray as xr

    return xr.DataTree.from_dict({"/": xr.Dataset(attrs=about), **filled})


def opened(call: str, idata: InferenceData) -> InferenceData:
    """Results as they are, or read from the netCDF file at a path; a TypeError of a
    call for anything else.
    """
    if isinstance(idata, str | PathLike):
        path = os.path.expanduser(idata)
        if not os.path.exists(path):
            instead = "Pass the path of a netCDF file, or the results themselves."
            got = f"{str(path)!r}, where there is no file"
            raise argument_error(call, "idata", got, instead, FileNotFoundError)
        idata = _arviz().from_netcdf(path)
    group_names(idata, call)
    return idata


def zarr_group(path: "str | PathLike[str]", name: str, draws: int) -> "xr.Dataset":
    """The first draws of a group of a Zarr folder; its arrays are read when they are
    used.
    """
    import xarray as xr

    data = xr.open_zarr(str(path), group=name, consolidated=False, chunks=None)
    # A kernel may have no statistics.
    data = data.isel(draw=slice(draws), missing_dims="ignore")
    return data.assign_coords(
        {dim: np.arange(size) for dim, size in data.sizes.items()}
    )


def group_names(idata: InferenceData, call: str = "group_names") -> list[str]:
    """Names of the groups of ``idata``, in order."""
    import xarray as xr

    if isinstance(idata, xr.DataTree):
        return list(idata.children)
    if not _has_trees() and isinstance(idata, _arviz().InferenceData):
        return list(idata.groups())
    got = f"an object of type {type(idata).__name__}"
    instead = "Pass the result of `to_inference_data` or `az.from_netcdf`."
    instead = "Pass its `idata_`." if hasattr(type(idata), "idata_") else instead
    raise argument_error(call, "idata", got, instead, TypeError)


def group(idata: InferenceData, name: str) -> "xr.Dataset":
    """The dataset of one group; the error for an unknown name lists the groups."""
    names = group_names(idata)
    if name not in names:
        raise unknown_name("group", "name", name, names)
    data = idata[name]
    return data.to_dataset() if hasattr(data, "children") else data


def attrs(idata: InferenceData) -> Attributes:
    """Attributes of ``idata`` itself (not of one group)."""
    group_names(idata)
    return dict(idata.attrs)


def _by_chain(call: str, draws: ArrayLike) -> Floats:
    array = as_floats(call, "draws", draws)
    if array.ndim < 2 or 0 in array.shape:
        raise argument_error(
            call,
            "draws",
            f"shape {array.shape}",
            "Pass draws shaped (C, S, ...), chains first.",
        )
    return array


def _by_column(array: Floats, diagnostic: Any, **options: Any) -> Floats:
    """Apply an ArviZ diagnostic to the columns for which it is defined; the others are
    NaN.
    """
    chains, draws, *shape = array.shape
    columns = array.reshape(chains, draws, -1)
    result = np.full(columns.shape[2], np.nan)
    defined = np.isfinite(columns).all(axis=(0, 1)) & (np.ptp(columns, axis=(0, 1)) > 0)
    if draws >= _MIN_DRAWS and defined.any():
        data = dataset(
            {"columns": (("chain", "draw", "column"), columns[:, :, defined])}
        )
        # Constant chains at different values: ArviZ would divide by a within-chain
        # variance of zero.
        with np.errstate(divide="ignore", invalid="ignore"):
            result[defined] = diagnostic(data, **options)["columns"].to_numpy()
    return result.reshape(shape)


def _untied(log_weights: Floats) -> Floats:
    """Spread equal values (equal within the resolution of float32) over that
    resolution.
    """
    distinct = np.unique(log_weights)
    if len(distinct) == len(log_weights):
        return log_weights
    # Many equal values at the threshold of the tail would look like an infinite density
    # there.
    width = np.diff(distinct).min()
    return log_weights + width * np.random.default_rng(0).uniform(
        -0.5, 0.5, len(log_weights)
    )


def _smooth(log_weights: Floats) -> tuple[Any, float]:
    """PSIS of one vector; ArviZ 1.x takes log likelihoods, so the sign is reversed."""
    if not _has_trees():
        return _arviz().psislw(log_weights.copy())
    from arviz_stats.base import array_stats

    try:
        return array_stats.psislw(-log_weights)
    except ValueError:
        # ArviZ 1.x refuses a tail of equal weights; ArviZ 0.x then smooths nothing
        return log_weights - np.logaddexp.reduce(log_weights), -np.inf


def _attributes(call: str, values: Kwargs | None) -> Attributes:
    """Check attributes; booleans, which netCDF lacks, become 0 and 1."""
    checked: Attributes = {}
    for name, value in (values or {}).items():
        if isinstance(value, (bool, np.bool_)):
            checked[name] = int(value)
        elif isinstance(value, (str, int, float, np.integer, np.floating)):
            checked[name] = value
        else:
            got = f"{name!r} of type {type(value).__name__}"
            instead = (
                "netCDF attributes are text or numbers: pass `str(...)` or "
                "`json.dumps(...)` of it."
            )
            raise argument_error(call, "attrs", got, instead, TypeError)
    return checked
