"""Predictions of each chain, or of each ensemble member, at single points."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numpyro_bnn._checks import argument_error, check_count, check_number
from numpyro_bnn.plots import _read, _style


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
    ax: Any = None,
) -> Any:
    """Median and central interval of the function at some points, for every chain or ensemble member.

    Chains whose intervals do not overlap sample different modes. Gray dashes are the targets, if there are any;
    the points are sorted by target.

    :param fits: result of ``to_inference_data``, or several of the same points by name, e.g. ``{"ensemble":
        to_inference_data(mcmc, members=True), "MCLMC": idata}``: one color each.
    :param points: how many points, spread over the sorted targets, or their indices.
    :param level: probability inside the intervals, over the draws of one chain.
    :param site: observed site; by default the only one.
    :param group: ``"predictions"`` or ``"posterior_predictive"``; by default the first of them that exists.
    :param target: name of the new targets in ``predictions_constant_data``; by default that of the site.
    :param output: index of the class or output, if the function has several.
    :param ylabel: label with units; by default from the name and units of the site.
    :param ax: axes to draw on; by default those of a new figure, two columns wide.
    :return: the axes.
    :raises ValueError: if there are no draws of the function, the fits differ in their points, or a point does not
        exist.

    >>> from numpyro_bnn import infinite, nn, to_inference_data
    >>> x = np.linspace(-1, 1, 9)[:, None]
    >>> gp = infinite.gp_regression(nn.Dense(1), x, x[:, 0], noise_sd=0.1)
    >>> idata = to_inference_data(gp, predictions={"x": 2 * x, "y": 2 * x[:, 0]}, num_samples=50)
    >>> axes = member_intervals({"a": idata, "b": idata}, points=5)
    >>> [text.get_text() for text in axes.get_legend().get_texts()]
    ['a', 'b', 'target']
    """
    call = "plots.member_intervals"
    check_number(call, "level", level, strict=True, below=1.0)
    alone = _read.is_results(fits)
    if not alone and (not isinstance(fits, Mapping) or not fits):
        raise argument_error(call, "fits", fits, 'Pass a result, or several by name: `{"NUTS": idata}`.')
    held = {"": fits} if alone else dict(fits)
    drawn = {name: _read.predicted(call, idata, site, group, target=target) for name, idata in held.items()}
    functions = {name: _one_output(call, one, output) for name, one in drawn.items()}
    sizes = {name: function.shape[2] for name, function in functions.items()}
    if len(set(sizes.values())) > 1:
        raise argument_error(call, "fits", f"numbers of points {sizes}", "Pass predictions of the same points.")
    name, first = next(iter(drawn.items()))
    scored = first.observed is not None and not first.classes and first.targets().size == sizes[name]
    observed = first.targets() if scored else None
    chosen = _chosen(call, points, sizes[name], observed)
    (axis,) = _style.axes(call, ax, size=(2 * _style.COLUMN, 2.8))
    _draw(axis, functions, chosen, level, alone)
    at = np.arange(len(chosen))
    if observed is not None:
        axis.hlines(observed[chosen], at - 0.45, at + 0.45, color="0.6", zorder=0, label="target")
    what = _read.label(held[name], first.group, first.site)
    axis.set_ylabel(ylabel or (f"P({what})" if first.classes else f"mean of {what}, by chain"))
    axis.set_xlabel("points" if observed is None else "points, sorted by target")
    axis.set_xticks([])
    axis.set_xlim(-0.6, len(chosen) - 0.4)
    axis.legend(**_style.above(ncols=4))
    return axis


def _draw(axis: Any, functions: Mapping[str, NDArray], chosen: NDArray, level: float, alone: bool) -> None:
    """Intervals of all chains side by side at each point, with a gap of two intervals between fits."""
    at = np.arange(len(chosen), dtype=np.float64)
    chains = [len(function) for function in functions.values()]
    offsets = _style.offsets(sum(chains) + 2 * len(chains) - 2, 0.85)
    places = np.split(offsets, np.cumsum(np.add(chains, 2))[:-1])
    dot = float(np.clip(40 / sum(chains), 1.2, 2.8))
    for number, ((name, function), shifts) in enumerate(zip(functions.items(), places, strict=True)):
        for chain, shift in enumerate(shifts[: len(function)]):
            label = name if chain == 0 and name else "_"
            color = _style.chain_color(chain if alone else number)
            _style.intervals(axis, at + shift, function[chain][:, chosen], level, color, label, dot=dot)


def _one_output(call: str, drawn: _read.Drawn, output: int) -> NDArray[np.float64]:
    """Draws of the function (C, S, N) of one class or output."""
    function = drawn.mean_draws(call)
    if function.ndim == 3:
        return function
    flat = function.reshape(*function.shape[:3], -1)
    count = flat.shape[3]
    if not -count <= output < count:
        raise argument_error(call, "output", output, f"The function has {count}: pass 0..{count - 1}.")
    return flat[..., output]


def _chosen(call: str, points: int | Sequence[int], size: int, observed: NDArray | None) -> NDArray[np.intp]:
    """Indices of the points, sorted by their targets."""
    order = np.arange(size) if observed is None else np.argsort(observed, kind="stable")
    if not isinstance(points, Sequence | np.ndarray) or isinstance(points, str):
        count = min(check_count(call, "points", points), size)
        return order[np.unique(np.linspace(0, size - 1, count).round().astype(int))]
    given = [int(i) for i in points]
    if not given or not all(0 <= i < size for i in given):
        raise argument_error(call, "points", given, f"Pass indices between 0 and {size - 1}.")
    rank = np.argsort(order)
    return np.array(sorted(given, key=lambda point: rank[point]))
