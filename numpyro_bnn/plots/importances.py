"""Importances: which columns the predictions depend on."""

from collections.abc import Mapping
from typing import Annotated

import numpy as np

from numpyro_bnn._checks import argument_error, as_floats
from numpyro_bnn._options import Kind, PositiveInt, checked
from numpyro_bnn.plots import _style
from numpyro_bnn.plots._style import Axes

BAR = 0.2  # height in inches of a bar and its gap


@checked("plots.importances")
@_style.styled
def importances(
    shares: Annotated[
        Mapping[str, float], Kind(Mapping, "Pass `forecaster.importances()`.")
    ],
    *,
    max_columns: PositiveInt = 20,
    ax: Axes = None,
) -> Axes:
    """The share of the variance of the predictions that each column has, the largest
    first.

    :param shares: by name of the column, as from the ``importances`` of an estimator.
    :param max_columns: columns with smaller shares are one bar, their sum.
    :param ax: axes to draw on; by default those of a new figure.
    :return: the axes.
    :raises ValueError: for no columns, or shares that are negative or not finite.

    >>> from numpyro_bnn.plots import importances
    >>> axes = importances({"staff": 0.7, "shop": 0.3, "day": 0.02})
    >>> [label.get_text() for label in axes.get_yticklabels()]
    ['staff', 'shop', 'day']
    """
    call = "plots.importances"
    names, values = list(shares), as_floats(call, "shares", [*shares.values()])
    if values.ndim != 1 or not names or not np.all((values >= 0) & np.isfinite(values)):
        instead = "Pass `forecaster.importances()`: at least one share, none negative."
        raise argument_error(call, "shares", repr(dict(shares))[:80], instead)
    order = np.argsort(-values, kind="stable")
    names, values = [str(names[place]) for place in order], values[order]
    if len(names) > max_columns:
        first = max_columns - 1
        names = [*names[:first], f"{len(names) - first} others"]
        values = np.append(values[:first], values[first:].sum())
    size = (_style.COLUMN, 0.6 + BAR * len(names))
    (axes,) = _style.axes(call, ax, size=size)
    axes.barh(range(len(names)), values, height=0.7, color=_style.FUNCTION)
    for place, value in enumerate(values):
        axes.annotate(
            f"{value:.2f}",
            (value, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("share of the variance of predictions")
    return axes
