"""Pairs of weights as they were drawn, and in their canonical form."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn.plots import _read, _style

__all__ = ["canonical_corner"]

# A weight of a variable: its name, and where in it.
Weight = tuple[str, tuple[int, ...]]
# Dots of one panel; more would only make files large.
DOTS = 2000


@_style.styled
def canonical_corner(
    idata: Any,
    canonical: Mapping[str, ArrayLike],
    weights: Sequence[str | tuple[str, Sequence[int]]] | None = None,
    *,
    bins: int = 30,
    ax: Any = None,
) -> "NDArray[Any]":
    """Pair plots of some weights: above the diagonal as they were drawn, below it after ``symmetry.canonical``.

    One color a chain. On the diagonal are the histograms of all chains, gray as drawn and blue in canonical form.
    Symmetries show above as mirror images and exchanged chains; what is left below is the posterior, or units that
    it does not tell apart.

    :param idata: result of ``to_inference_data``.
    :param canonical: name -> (C, S, ...), e.g. ``symmetry.canonical(idata["posterior"], symmetries)``.
    :param weights: the weights to draw, each a variable and an index, e.g. ``("net.Dense_0.kernel", (0, 1))``, or the
        name of a scalar; by default the first three of the first weights that the canonical form changes.
    :param bins: bins of the histograms.
    :param ax: W x W axes to draw W weights on; by default those of a new figure.
    :return: the axes (W, W).
    :raises ValueError: if a weight is in only one of both, or there are fewer than two, or the shapes differ.
    :raises ImportError: without Matplotlib.

    **Example**

    >>> from numpyro_bnn.plots import example_results
    >>> idata = example_results()  # its weights have no symmetry; let the sign be one
    >>> axes = canonical_corner(idata, {"w": abs(idata["posterior"]["w"].to_numpy())}, [("w", (6,)), ("w", (7,))])
    >>> axes[1, 0].get_xlabel(), axes[1, 0].get_ylabel()
    ('w[6]', 'w[7]')
    """
    call = "plots.canonical_corner"
    _read.count(call, "bins", bins)
    data = _read.posterior(call, idata)
    # Sites have a "/" where variables of results have a dot.
    after = {str(name).replace("/", "."): canonical[name] for name in canonical}
    chosen = _chosen(call, data, after, weights)
    before = [_element(_read.chains_first(data, name), at) for name, at in chosen]
    moved = [_element(after[name], at) for name, at in chosen]
    count = len(chosen)
    side = min(1.2 * count + 0.4, 2 * _style.COLUMN)
    axes = _style.axes(call, ax, (count, count), (side, side)).reshape(count, count)
    ends = [_ends(pair) for pair in zip(before, moved, strict=True)]
    for row in range(count):
        for column in range(count):
            axis = axes[row, column]
            if row == column:
                _histograms(axis, before[row], moved[row], ends[row], bins)
            else:
                held = before if row < column else moved
                _dots(axis, held[column], held[row])
                axis.set_ylim(*ends[row])
            axis.set_xlim(*ends[column])
            axis.locator_params(nbins=3)
            axis.tick_params(labelbottom=row == count - 1, labelleft=column == 0 and row > 0)
        axes[row, 0].set_ylabel(_text(chosen[row]))
        axes[-1, row].set_xlabel(_text(chosen[row]))
    axes[0, 0].set_ylabel("")
    if ax is None:
        title = "gray and above: as drawn; blue and below: canonical"
        axes[0, 0].figure.suptitle(title, fontsize=8)
        axes[0, 0].figure.align_ylabels(list(axes[:, 0]))
    return axes


def _chosen(call: str, data: Any, after: Mapping[str, Any], weights: Any) -> list[Weight]:
    known = [str(name) for name in data.data_vars if str(name) in after]
    if not known:
        got = f"{sorted(after)}, and the posterior has {sorted(map(str, data.data_vars))}"
        instead = 'Pass `symmetry.canonical(idata["posterior"], symmetries)`.'
        raise argument_error(call, "canonical", got, instead)
    for name in known:
        shapes = tuple(data[name].transpose("chain", "draw", ...).shape), np.shape(after[name])
        if shapes[0] != shapes[1]:
            instead = "Pass the canonical form of the same draws."
            raise argument_error(
                call, "canonical", f"{name!r} of shape {shapes[1]}, not {shapes[0]}", instead
            )
    given = _first(data, known, after) if weights is None else list(weights)
    found = [_weight(call, data, known, weight) for weight in given]
    if len(found) < 2:
        got = f"{found}" if weights is not None else "nothing, and one weight or none changes"
        raise argument_error(call, "weights", got, "Name at least two, as `(variable, index)`.")
    return found


def _first(data: Any, known: Sequence[str], after: Mapping[str, Any]) -> list[Weight]:
    """Three weights of the first variable that changes: of the first input, into three units."""
    changed = [
        name
        for name in known
        if data[name].size > data.sizes["chain"] * data.sizes["draw"]
        and not np.array_equal(_read.chains_first(data, name), np.asarray(after[name], np.float64))
    ]
    if not changed:
        return []
    # A kernel rather than a bias.
    name = max(changed, key=lambda one: min(data[one].ndim, 4))
    shape = np.shape(after[name])[2:]
    count = min(3, int(np.prod(shape)))
    return [(name, tuple(map(int, np.unravel_index(i, shape)))) for i in range(count)]


def _weight(call: str, data: Any, known: Sequence[str], weight: Any) -> Weight:
    name, at = (weight, ()) if isinstance(weight, str) else weight
    name, at = str(name).replace("/", "."), tuple(np.atleast_1d(np.asarray(at, dtype=int)).tolist())
    if name not in known:
        raise unknown_name(call, "weights", name, known)
    shape = tuple(size for dim, size in data[name].sizes.items() if dim not in ("chain", "draw"))
    if len(at) != len(shape) or not all(-size <= i < size for i, size in zip(at, shape, strict=True)):
        instead = f"{name!r} has shape {shape}: pass an index with {len(shape)} numbers."
        raise argument_error(call, "weights", (name, at), instead)
    return name, at


def _element(draws: ArrayLike, at: tuple[int, ...]) -> NDArray[np.float64]:
    """Draws (C, S) of one weight."""
    place: Any = (..., *at)
    return np.asarray(draws, dtype=np.float64)[place]


def _ends(draws: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """Limits that hold all but the outermost draws of both."""
    low = min(np.quantile(values, 0.002) for values in draws)
    high = max(np.quantile(values, 0.998) for values in draws)
    room = 0.08 * (high - low) or 0.5
    return float(low - room), float(high + room)


def _dots(axis: Any, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    every = max(1, x.size // DOTS)
    size = float(np.clip(60 / np.sqrt(x.size / every), 0.8, 5.0))
    for chain in range(len(x)):
        axis.scatter(
            x[chain, ::every],
            y[chain, ::every],
            s=size,
            color=_style.chain_color(chain),
            alpha=0.5,
            linewidths=0,
            rasterized=True,
        )


def _histograms(
    axis: Any, before: NDArray[np.float64], after: NDArray[np.float64], ends: tuple[float, float], bins: int
) -> None:
    edges = np.linspace(*ends, bins + 1)
    for values, color, filled in ((before, _style.OBSERVATION, True), (after, _style.FUNCTION, False)):
        share = np.histogram(values, edges)[0] / values.size
        axis.stairs(share, edges, fill=filled, color=color, alpha=0.5 if filled else 1.0, linewidth=1.0)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)


def _text(weight: Weight) -> str:
    name, at = weight
    # In two lines: panels are narrow.
    text = f"{name}[{', '.join(map(str, at))}]" if at else name
    return text.replace(".kernel", ".\nkernel").replace(".bias", ".\nbias")
