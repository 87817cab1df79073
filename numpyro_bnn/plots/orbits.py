"""Where on their orbits draws lie: the directions in which weights move and the function does not."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn.plots import _style

__all__ = ["orbit_traces"]


@_style.styled
def orbit_traces(
    coordinates: Mapping[str, ArrayLike],
    names: Sequence[str] | None = None,
    *,
    unit: int = 0,
    exact: Mapping[str, Sequence[float]] | None = None,
    labels: Mapping[str, str] | None = None,
    ax: Any = None,
) -> "NDArray[Any]":
    """Trace of each orbit coordinate, one color a chain, with R-hat and effective sample size.

    Along an orbit the posterior is the prior, and moves along it mix at once; a gradient sampler drifts there.

    :param coordinates: name -> (C, S) or (C, S, U) draws, e.g. ``symmetry.orbit_coordinates(idata["posterior"],
        symmetries)``: log norms, ``log(|w_in| / |w_out|)``, log scales; or other summaries, as
        ``symmetry.invariants``.
    :param names: which of them, in this order; by default all.
    :param unit: index of the hidden unit, where a coordinate has several.
    :param exact: name -> (low, middle, high), an interval and the mean that are known: a gray band with a line.
    :param labels: name -> label of the y axis; without one the name stands above.
    :param ax: one axes a coordinate to draw on; by default those of a new figure, one column wide.
    :return: the axes, one a coordinate.
    :raises ValueError: for an unknown name, other axes than chain, draw and unit, or a unit that does not exist.
    :raises ImportError: without Matplotlib.

    **Example**

    >>> from numpyro_bnn import nn, symmetry
    >>> net, rng = nn.MLP([4, 1], "relu"), np.random.default_rng(0)
    >>> draws = {site: rng.normal(size=(2, 50, *shape)) for site, shape in net.param_shapes((3,)).items()}
    >>> found = [symmetry.Rescale([("Dense_0.kernel", 1), ("Dense_0.bias", 0)], [("Dense_1.kernel", 0)])]
    >>> (axis,) = orbit_traces(symmetry.orbit_coordinates(draws, found))
    >>> axis.get_title(loc="left")[:24]
    'Rescale(Dense_0.kernel):'
    """
    call = "plots.orbit_traces"
    found = _coordinates(call, coordinates, names, unit)
    axes = _style.axes(call, ax, (len(found), 1), (_style.COLUMN, 0.4 + 0.95 * len(found)), sharex=True)
    for axis, (name, draws) in zip(axes, found.items(), strict=True):
        if exact and name in exact:
            low, middle, high = exact[name]
            axis.axhspan(low, high, color=_style.PALE, linewidth=0, zorder=0)
            axis.axhline(middle, color=_style.DATA, linewidth=0.6, zorder=3)
        for chain, values in enumerate(draws):
            color = _style.chain_color(chain)
            axis.plot(values, color=color, linewidth=0.5, alpha=0.8, label=f"chain {chain}")
        rhat, size = float(_arviz.rhat(draws)), float(_arviz.ess(draws))
        what = "" if name in (labels or {}) else f"{name}: "
        axis.set_title(f"{what}R-hat {rhat:.2f}, ESS {size:.0f}", loc="left", fontsize=7, pad=2)
        axis.set_xlim(0, max(draws.shape[1] - 1, 1))
        axis.set_ylabel((labels or {}).get(name, ""))
    axes[-1].set_xlabel("draw")
    return axes


def _coordinates(
    call: str, coordinates: Mapping[str, ArrayLike], names: Sequence[str] | None, unit: int
) -> dict[str, NDArray[np.float64]]:
    """Draws (C, S) of one unit by name."""
    if not isinstance(coordinates, Mapping) or not coordinates:
        instead = (
            'Pass `symmetry.orbit_coordinates(idata["posterior"], symmetries)` of continuous symmetries.'
        )
        got = "nothing" if isinstance(coordinates, Mapping) else f"a {type(coordinates).__name__}"
        raise argument_error(call, "coordinates", got, instead)
    found = {}
    for name in coordinates if names is None else names:
        if name not in coordinates:
            raise unknown_name(call, "names", name, coordinates)
        draws = np.asarray(coordinates[name], dtype=np.float64)
        if draws.ndim not in (2, 3):
            got = f"{name!r} of shape {draws.shape}"
            raise argument_error(call, "coordinates", got, "Pass (C, S) or (C, S, U), chains first.")
        if draws.ndim == 3:
            units = draws.shape[2]
            if units > 1 and not -units <= unit < units:
                instead = f"{name!r} has {units} units: pass 0..{units - 1}."
                raise argument_error(call, "unit", unit, instead)
            draws = draws[..., unit if units > 1 else 0]
        found[str(name)] = draws
    return found
