"""Functions that the posterior holds for possible, one line a draw."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error
from numpyro_bnn.plots import _read, _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["posterior_functions"]


@_style.styled
def posterior_functions(
    idata: Any,
    x: str | ArrayLike | None = None,
    num_draws: int = 20,
    *,
    site: str | None = None,
    group: str | None = None,
    output: int = -1,
    xlabel: str | None = None,
    ylabel: str | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws of the function along a one-dimensional input, one color a chain (or member of an ensemble).

    Chains whose lines keep apart sample modes of their own; :func:`member_intervals` shows the same at points of
    several inputs.

    :param idata: result of ``to_inference_data`` with the group ``predictions`` (else the function at the data is
        drawn).
    :param x: name of the input, or (N,) values to draw against; by default the only input.
    :param num_draws: lines of each chain, spread evenly over its draws.
    :param site: observed site; by default the only one.
    :param group: ``"predictions"`` or ``"posterior_predictive"``; by default the first of them there is.
    :param output: index of the class or output, where the function has several.
    :param xlabel: label with units; by default the name and the attribute ``units`` of the input.
    :param ylabel: the same for the site.
    :param ax: axes to draw on; by default those of a new figure, one column wide.
    :return: the axes; its lines are the first draw of every chain, then the next.
    :raises ValueError: if there are no draws of the function, or the input is not one-dimensional.
    :raises ImportError: without Matplotlib.

    **Example**

    >>> from numpyro_bnn.plots import example_results
    >>> axes = posterior_functions(example_results(), num_draws=10)
    >>> len(axes.lines)
    40
    """
    call = "plots.posterior_functions"
    _read.count(call, "num_draws", num_draws)
    drawn = _read.predicted(call, idata, site, group)
    if drawn.function is None:
        raise argument_error(call, "site", repr(drawn.site), "The draws of its mean are needed.")
    name, values = _read.input_values(call, idata, drawn, x)
    function = _read.one_output(call, drawn.function, output)
    order = np.argsort(values, kind="stable")
    chains, size = function.shape[:2]
    shown = np.unique(np.linspace(0, size - 1, min(int(num_draws), size)).round().astype(int))
    (axis,) = _style.axes(call, ax)
    # Many faint lines, few strong ones; the first of each chain names it.
    faint = float(np.clip(3 / np.sqrt(chains * len(shown)), 0.25, 1.0))
    word = "member" if "members_of_warm_start" in _arviz.attrs(idata) else "chain"
    # Draw by draw: the last chain must not cover the others.
    for place, draw in enumerate(shown):
        for chain, draws in enumerate(function):
            label = f"{word} {chain}" if place == 0 and chains <= len(_style.CYCLE) else None
            color = _style.chain_color(chain)
            axis.plot(values[order], draws[draw][order], color=color, linewidth=0.7, alpha=faint, label=label)
    points = None if drawn.classes else _read.training_points(idata, drawn.site, name)
    if points is not None:
        dots = float(np.clip(60 / np.sqrt(len(points[0])), 1.0, 8.0))
        axis.scatter(*points, s=dots, color=_style.DATA, linewidths=0, zorder=3, label="data")
    what = _read.label(idata, drawn.group, drawn.site)
    if drawn.classes:
        what = f"P({what} = {output % drawn.function.shape[-1]})"
    axis.set_xlabel(xlabel or ("x" if name is None else _read.label(idata, drawn.group, name)))
    axis.set_ylabel(ylabel or what)
    ends = values if points is None else np.concatenate([values, points[0]])
    axis.set_xlim(ends.min(), ends.max())
    if axis.get_legend_handles_labels()[1]:
        legend = axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, borderaxespad=0.2)
        for handle in legend.legend_handles:
            handle.set_alpha(1.0)
    return axis
