"""The style that all figures share, and the only import of Matplotlib."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np

from numpyro_bnn._checks import argument_error
from numpyro_bnn._types import Attributes

P = ParamSpec("P")
T = TypeVar("T")
Axes: TypeAlias = Any  # of Matplotlib, one or an array of them

# Width of one column of a two-column paper, in inches.
COLUMN = 3.4

# Colors that can be distinguished with any color vision (Okabe and Ito, 2008), also
# when printed in gray.
FUNCTION, MISSED = "#0072B2", "#D55E00"
OBSERVATION, DATA = "#808080", "#000000"
# For background elements.
PALE = "#E4E4E4"

SETTINGS = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "legend.columnspacing": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": False,
    "axes.facecolor": "white",
    "figure.facecolor": "white",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "figure.dpi": 200,
}


def pyplot() -> Any:
    """Matplotlib's ``pyplot``, imported when a figure is drawn; the error says what to
    install.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as cause:
        install = 'pip install "numpyro_bnn[plots]"'
        raise ImportError(
            f"numpyro_bnn.plots needs Matplotlib, which is not installed: {install}"
        ) from cause
    return plt


def styled(function: Callable[P, T]) -> Callable[P, T]:
    """Draw with the shared settings, and leave Matplotlib's own unchanged."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with pyplot().rc_context(SETTINGS):
            return function(*args, **kwargs)

    return wrapper


def axes(
    call: str,
    ax: Axes,
    shape: tuple[int, int] = (1, 1),
    size: Sequence[float] = (COLUMN, 2.4),
) -> np.ndarray:
    """The axes to draw on, (rows x columns) as a flat array: the user's, or those of a
    new figure.
    """
    count = shape[0] * shape[1]
    if ax is None:
        return (
            pyplot()
            .subplots(*shape, figsize=tuple(size), layout="constrained", squeeze=False)[
                1
            ]
            .ravel()
        )
    array = np.atleast_1d(np.asarray(ax, dtype=object)).ravel()
    strangers = [part for part in array if not isinstance(part, pyplot().Axes)]
    if strangers or array.size != count:
        came = repr(strangers[0])[:80] if strangers else f"{array.size} axes"
        instead = f"Pass {count}, e.g. of `plt.subplots{shape}`."
        raise argument_error(call, "ax", came, instead)
    return array


def above(**options: Any) -> Attributes:
    """Options of a legend above the axes."""
    return {
        "loc": "lower left",
        "bbox_to_anchor": (0.0, 1.0),
        "borderaxespad": 0.2,
        **options,
    }
