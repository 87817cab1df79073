"""Traces of the function, which symmetries of the weights cannot disturb."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from numpyro_bnn import metrics
from numpyro_bnn._checks import argument_error
from numpyro_bnn.plots import _read, _style

__all__ = ["function_trace"]


@_style.styled
def function_trace(
    idata: Any,
    points: int | Sequence[int] = 3,
    *,
    site: str | None = None,
    group: str | None = None,
    output: int = -1,
    ylabel: str | None = None,
    ax: Any = None,
) -> "NDArray[Any]":
    """Trace of the function at chosen inputs, one color a chain, with R-hat and effective sample sizes.

    :param idata: result of ``to_inference_data`` with predictions (else the function at the data is drawn).
    :param points: how many points, spread over the data, or their indices.
    :param site: observed site; by default the only one.
    :param group: ``"predictions"`` or ``"posterior_predictive"``; by default the first of them there is.
    :param output: index of the class or output, where the function has several.
    :param ylabel: label with units; by default made of the name and units of the site.
    :param ax: one axes a point to draw on; by default those of a new figure.
    :return: the axes, one a point.
    :raises ValueError: if there are no draws of the function, or a point or output does not exist.
    :raises ImportError: without Matplotlib.

    **Example**

    >>> from numpyro_bnn.plots import example_results
    >>> idata = example_results()  # for yours: to_inference_data(mcmc, predictions={"x": x_test, "y": y_test})
    >>> axes = function_trace(idata, points=[0, 60])
    >>> axes[0].get_title(loc="left")[:22]
    'x = -2.5: R-hat 1.00, '
    """
    call = "plots.function_trace"
    drawn = _read.predicted(call, idata, site, group)
    if drawn.function is None:
        raise argument_error(call, "site", repr(drawn.site), "The draws of its mean are needed.")
    function = _read.one_output(call, drawn.function, output)
    chosen = _read.spread(call, points, function.shape[2])
    found = metrics.function_space(function[:, :, chosen])
    height = 0.4 + 0.95 * len(chosen)
    axes = _style.axes(call, ax, (len(chosen), 1), (_style.COLUMN, height), sharex=True)
    for place, (axis, point) in enumerate(zip(axes, chosen, strict=True)):
        for chain, values in enumerate(function[:, :, point]):
            axis.plot(
                values, color=_style.chain_color(chain), linewidth=0.5, alpha=0.8, label=f"chain {chain}"
            )
        sizes = f"ESS {found.ess_bulk[place]:.0f} bulk, {found.ess_tail[place]:.0f} tail"
        axis.set_title(
            f"{_read.point_name(idata, drawn, point)}: R-hat {found.rhat[place]:.2f}, {sizes}",
            loc="left",
            fontsize=7,
            pad=2,
        )
        axis.set_xlim(0, max(function.shape[1] - 1, 1))
    name = _read.label(idata, drawn.group, drawn.site)
    what = f"P({name} = {output % drawn.function.shape[-1]})" if drawn.classes else f"mean of {name}"
    axes[len(axes) // 2].set_ylabel(ylabel or what)
    axes[-1].set_xlabel("draw")
    return axes
