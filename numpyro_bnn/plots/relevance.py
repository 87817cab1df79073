"""Which inputs matter: the learned scales of automatic relevance determination."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error, check_choice, check_number
from numpyro_bnn.plots import _read, _style

# Endings of the names of sites with one number for each input.
LEARNED = ("_scale", "_local", "_precision")


@_style.styled
def relevance(
    idata: Any,
    var_names: str | Sequence[str] | None = None,
    *,
    level: float = 0.9,
    names: Sequence[str] | None = None,
    by_chain: bool = False,
    ordered: bool = False,
    xlabel: str | None = None,
    ax: Any = None,
) -> Any:
    r"""Relevance of inputs: median and central interval of the scale of each, on a logarithmic axis.

    A variable whose name ends in ``precision`` is drawn as the scale :math:`1 / \sqrt{\tau}`.

    :param idata: result of ``to_inference_data`` of a model with one scale for each input, such as ``priors.ARD`` or
        a horseshoe.
    :param var_names: one variable (D,) or several of one length, side by side; by default the only one.
    :param level: probability inside the intervals.
    :param names: (D,) names of the inputs; by default the coordinates of the variable, or those of the input axis of
        its kernel, if they are text.
    :param by_chain: whether to draw one interval per chain: scales are the last to mix.
    :param ordered: whether to sort by the median, largest on top, instead of keeping the order of inputs.
    :param xlabel: label with units of the scales.
    :param ax: axes to draw on; by default those of a new figure whose height fits the number of inputs.
    :return: the axes; intervals lie along x.
    :raises ValueError: if there is no such variable, or it is not one positive number for each input.

    Reference: MacKay (1994); Neal (1996), *Bayesian learning for neural networks*, section 4.3.

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC, NUTS
    >>> from numpyro_bnn import to_inference_data
    >>> def model():
    ...     numpyro.sample("net/Dense_0.kernel_scale", dist.LogNormal(0, 1).expand([3]).to_event(1))
    >>> mcmc = MCMC(NUTS(model), num_warmup=50, num_samples=50, progress_bar=False)
    >>> mcmc.run(jax.random.key(0))
    >>> axes = relevance(to_inference_data(mcmc), names=["age", "height", "weight"])
    >>> [text.get_text() for text in axes.get_yticklabels()]
    ['age', 'height', 'weight']
    """
    call = "plots.relevance"
    check_number(call, "level", level, strict=True, below=1.0)
    if "posterior" not in _arviz.group_names(idata):
        got = f"the groups {_arviz.group_names(idata)}, without posterior"
        raise argument_error(call, "idata", got, "Pass what `to_inference_data` returns.")
    data = _arviz.group(idata, "posterior")
    chosen = _chosen(call, data, var_names)
    if by_chain and len(chosen) > 1:
        raise argument_error(call, "by_chain", f"True for {len(chosen)} variables", "Pass one in `var_names`.")
    draws = {name: _scales(call, data, name) for name in chosen}
    sizes = {name: found.shape[2] for name, found in draws.items()}
    if len(set(sizes.values())) > 1:
        raise argument_error(call, "var_names", f"lengths {sizes}", "Pass variables of one length.")
    first, size = draws[chosen[0]], sizes[chosen[0]]
    inputs = _input_names(call, data, chosen[0], names, size)
    order = np.argsort(-np.median(first, axis=(0, 1)), kind="stable") if ordered else np.arange(size)
    groups = {f"chain {c}": values for c, values in enumerate(first)} if by_chain else draws
    places = np.arange(size, dtype=np.float64)
    height = max(1.4, 0.6 + size * max(0.18, 0.07 * (len(groups) + 1)))
    (axis,) = _style.axes(call, ax, size=(_style.COLUMN, height))
    for place, (label, offset) in enumerate(zip(groups, _style.offsets(len(groups)), strict=True)):
        values, color = groups[label].reshape(-1, size)[:, order], _style.chain_color(place)
        _style.intervals(axis, places + offset, values, level, color, label, along_x=True)
    _style.log_ticks(axis.xaxis)
    axis.set_yticks(places, [inputs[i] for i in order])
    axis.set_ylim(size - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel(xlabel or f"scale, median and {100 * level:g} % interval")
    if len(groups) > 1:
        axis.legend(**_style.above(ncols=4 if by_chain else 1))
    else:
        axis.set_title(chosen[0], loc="left")
    return axis


def _chosen(call: str, data: Any, var_names: str | Sequence[str] | None) -> list[str]:
    known = [str(name) for name in data.data_vars]
    if var_names is None:
        vectors = [name for name in known if data[name].ndim == 3]
        usable = [name for name in vectors if name.endswith(LEARNED)]
        if len(usable) != 1:
            got = f"nothing, and {len(usable)} variables end in {' or '.join(LEARNED)} with one axis"
            raise argument_error(call, "var_names", got, f"Name one of {usable or vectors}.")
        return usable
    chosen = [var_names] if isinstance(var_names, str) else [str(name) for name in var_names]
    if not chosen:
        raise argument_error(call, "var_names", "nothing", f"Name one of {known}.")
    # Variables of results have a dot for the "/" of a site.
    found = [name if name in known else name.replace("/", ".") for name in chosen]
    for name in found:
        check_choice(call, "var_names", name, known)
    return found


def _scales(call: str, data: Any, name: str) -> NDArray[np.float64]:
    """Draws (C, S, D) of scales."""
    values = _read.chains_first(data, name)
    if values.ndim != 3:
        got = f"{name!r} of shape {values.shape[2:]}"
        raise argument_error(call, "var_names", got, "Name a variable with one number for each input.")
    if not (values > 0).all():
        raise argument_error(call, "var_names", f"{name!r} with values that are not positive", "Name scales.")
    return values**-0.5 if name.endswith("precision") else values


def _input_names(call: str, data: Any, variable: str, names: Sequence[str] | None, size: int) -> list[str]:
    if names is not None:
        if len(names) != size:
            raise argument_error(call, "names", f"{len(names)} names", f"Pass one for each of {size} inputs.")
        return [str(name) for name in names]
    kernel = variable.rsplit("_", 1)[0]
    for axis in (data[variable].dims[-1], f"{kernel}_in", f"{kernel}_base_in"):
        labels = data[axis].to_numpy() if axis in data.coords else np.empty(0)
        if labels.shape == (size,) and labels.dtype.kind in "UOT":
            return [str(label) for label in labels]
    return [f"input {i}" for i in range(size)]
