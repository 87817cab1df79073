"""What each chain, or each member of an ensemble, says at single points."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from numpyro_bnn._checks import argument_error
from numpyro_bnn.plots import _intervals, _read, _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["member_intervals"]


@_style.styled
def member_intervals(
    fits: Any,
    points: int | Sequence[int] = 12,
    *,
    level: float = 0.9,
    site: str | None = None,
    group: str | None = None,
    target: str | None = None,
    output: int = -1,
    ylabel: str | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Median and central interval of the function at some points, of every chain or member for itself.

    Chains whose intervals do not meet sample modes of their own. Gray dashes are the targets, where there are any;
    the points stand in the order of those.

    :param fits: result of ``to_inference_data``, or several of the same points by name, e.g. ``{"ensemble":
        to_inference_data(mcmc, members=True), "MCLMC": idata}``: one color each.
    :param points: how many points, spread over the sorted targets, or their indices.
    :param level: probability inside the intervals, over the draws of one chain.
    :param site: observed site; by default the only one.
    :param group: ``"predictions"`` or ``"posterior_predictive"``; by default the first of them there is.
    :param target: name of the new targets in ``predictions_constant_data``; by default that of the site.
    :param output: index of the class or output, where the function has several.
    :param ylabel: label with units; by default made of the name and units of the site.
    :param ax: axes to draw on; by default those of a new figure, two columns wide.
    :return: the axes.
    :raises ValueError: if there are no draws of the function, the fits differ in their points, or a point does not
        exist.
    :raises ImportError: without Matplotlib.

    **Example**

    >>> from numpyro_bnn.plots import example_results
    >>> axes = member_intervals({"a": example_results(), "b": example_results(num_chains=2)}, points=5)
    >>> [text.get_text() for text in axes.get_legend().get_texts()]
    ['a', 'b', 'target']
    """
    call = "plots.member_intervals"
    (level,) = _read.shares(call, "level", [level])
    alone = _read.is_results(fits)
    if not alone and (not isinstance(fits, Mapping) or not fits):
        raise argument_error(call, "fits", fits, 'Pass a result, or several by name: `{"NUTS": idata}`.')
    held = {"": fits} if alone else dict(fits)
    drawn = {name: _read.predicted(call, idata, site, group, target=target) for name, idata in held.items()}
    functions = {name: _function(call, one, output) for name, one in drawn.items()}
    sizes = {name: function.shape[2] for name, function in functions.items()}
    if len(set(sizes.values())) > 1:
        raise argument_error(
            call, "fits", f"numbers of points {sizes}", "Pass predictions of the same points."
        )
    first_name = next(iter(held))
    first = drawn[first_name]
    observed = None if first.observed is None or first.classes else _read.targets(first)
    chosen = _shown(call, points, sizes[first_name], observed)
    (axis,) = _style.axes(call, ax, size=(2 * _style.COLUMN, 2.8))
    at = np.arange(len(chosen), dtype=np.float64)
    chains = [len(function) for function in functions.values()]
    # A gap of two intervals between fits.
    places = np.split(
        _intervals.offsets(sum(chains) + 2 * len(chains) - 2, 0.85), np.cumsum(np.add(chains, 2))[:-1]
    )
    dot = float(np.clip(40 / sum(chains), 1.2, 2.8))
    for number, ((name, function), offsets) in enumerate(zip(functions.items(), places, strict=True)):
        for chain, offset in enumerate(offsets[: len(function)]):
            label = name if chain == 0 and name else "_"
            color = _style.chain_color(chain if alone else number)
            _intervals.upright(axis, at + offset, function[chain][:, chosen], level, color, label, dot=dot)
    if observed is not None and observed.size == sizes[first_name]:
        axis.hlines(observed[chosen], at - 0.45, at + 0.45, color="0.6", zorder=0, label="target")
    what = _read.label(held[first_name], first.group, first.site)
    axis.set_ylabel(ylabel or (f"P({what})" if first.classes else f"mean of {what}, by chain"))
    axis.set_xlabel("points" if observed is None else "points, in the order of their targets")
    axis.set_xticks([])
    axis.set_xlim(-0.6, len(chosen) - 0.4)
    axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, borderaxespad=0.2)
    return axis


def _function(call: str, drawn: _read.Drawn, output: int) -> NDArray[np.float64]:
    if drawn.function is None:
        raise argument_error(call, "site", repr(drawn.site), "The draws of its mean are needed.")
    return _read.one_output(call, drawn.function, output)


def _shown(
    call: str, points: int | Sequence[int], size: int, observed: NDArray[np.float64] | None
) -> NDArray[np.intp]:
    """Indices of the points, in the order of their targets."""
    order = (
        np.arange(size) if observed is None or observed.size != size else np.argsort(observed, kind="stable")
    )
    chosen = _read.spread(call, points, size)
    if isinstance(points, (int, np.integer)):
        return order[chosen]
    rank = np.argsort(order)
    return np.array(sorted(chosen, key=lambda point: rank[point]))
