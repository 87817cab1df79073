"""What a sampler did at every draw: step sizes, temperatures, acceptance, energy errors."""

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn.plots import _read, _style

__all__ = ["sampler_traces"]


class _Statistic(NamedTuple):
    """Label of a statistic, the attribute that holds what its mean should be, and whether its axis is logarithmic."""

    label: str
    target: str | None = None
    log: bool = False


STATISTICS = {
    "step_size": _Statistic("step size"),
    "configurational_temperature": _Statistic("configurational temperature", "temperature"),
    "kinetic_temperature": _Statistic("kinetic temperature", "temperature"),
    "acceptance_rate": _Statistic("acceptance"),
    "orbit_accept_prob": _Statistic("acceptance of orbit moves"),
    "energy_variance": _Statistic("energy variance per parameter", "target_energy_variance", log=True),
    "decoherence_length": _Statistic("decoherence length"),
}


@_style.styled
def sampler_traces(idata: Any, var_names: Sequence[str] | None = None, *, ax: Any = None) -> "NDArray[Any]":
    """Traces of what the kernel tells of each draw, one color a chain, with means and their Monte Carlo errors.

    Where it is known what a mean should be (temperatures: that of the target; energy variance of ``infer.MCLMC``:
    what its steps are steered to) a black line stands there, in a gray band of two standard errors of the mean. The
    mean is a dotted line: outside of the band it is not what it should be. (A logarithmic axis has no band
    that reaches below 0.)

    :param idata: result of ``to_inference_data`` of a run with ``extra_fields``, e.g. ``("step_size",
        "configurational_temperature")``.
    :param var_names: statistics in ``sample_stats``; by default step size, temperatures, acceptance, energy variance
        and decoherence length, those that are there. Of one with several axes the mean over them is drawn.
    :param ax: one axes a statistic to draw on; by default those of a new figure, one column wide.
    :return: the axes, one a statistic.
    :raises ValueError: if a statistic is not there.
    :raises ImportError: without Matplotlib.

    **Example**

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC, BarkerMH
    >>> from numpyro_bnn import to_inference_data
    >>> def model():
    ...     numpyro.sample("w", dist.Normal(0, 1))
    >>> mcmc = MCMC(BarkerMH(model), num_warmup=50, num_samples=50, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), extra_fields=("accept_prob", "adapt_state.step_size"))
    >>> axes = sampler_traces(to_inference_data(mcmc))
    >>> [axis.get_ylabel() for axis in axes]
    ['step size', 'acceptance']
    """
    call = "plots.sampler_traces"
    chosen = _chosen(call, idata, var_names)
    stats, about = _arviz.group(idata, "sample_stats"), _arviz.attrs(idata)
    height = 0.4 + 1.05 * len(chosen)
    axes = _style.axes(call, ax, (len(chosen), 1), (_style.COLUMN, height), sharex=True)
    for axis, name in zip(axes, chosen, strict=True):
        known = STATISTICS.get(name, _Statistic(name))
        draws = _read.chains_first(stats, name)
        draws = draws.mean(axis=tuple(range(2, draws.ndim)))
        for chain, values in enumerate(draws):
            color = _style.chain_color(chain)
            axis.plot(values, color=color, linewidth=0.5, alpha=0.8, label=f"chain {chain}")
        if known.log and (draws[np.isfinite(draws)] > 0).all():
            _style.log_ticks(axis.yaxis)
        else:
            axis.yaxis.set_major_formatter("{x:g}")
        _mean_and_target(axis, draws, about.get(known.target or ""))
        axis.set_ylabel("\n".join(textwrap.wrap(known.label, 15)))  # panels are low
        axis.set_xlim(0, max(draws.shape[1] - 1, 1))
    axes[-1].set_xlabel("draw")
    if ax is None:
        axes[0].figure.align_ylabels(list(axes))
    return axes


def _chosen(call: str, idata: Any, var_names: Sequence[str] | None) -> list[str]:
    names = _arviz.group_names(idata)
    known = list(_arviz.group(idata, "sample_stats").data_vars) if "sample_stats" in names else []
    if var_names is None:
        chosen = [name for name in STATISTICS if name in known]
    else:
        chosen = [var_names] if isinstance(var_names, str) else list(var_names)
        for name in chosen:
            if name not in known:
                raise unknown_name(call, "var_names", name, known)
    if not chosen:
        instead = 'Collect them in the run: `mcmc.run(..., extra_fields=("step_size", "accept_prob"))`.'
        got = f"sample_stats of {known}" if known else f"the groups {names}, without sample_stats"
        raise argument_error(call, "idata", got, instead)
    return chosen


def _mean_and_target(axis: Any, draws: NDArray[np.float64], target: Any) -> None:
    """Mean with its Monte Carlo error above, and where it should be."""
    mean = draws.mean()
    if not np.isfinite(mean):
        axis.set_title(f"{np.isnan(draws).mean():.0%} NaN: a chain diverged", loc="left", fontsize=7, pad=2)
        return
    if not np.ptp(draws, axis=1).any():
        ends = sorted({f"{value:.3g}" for value in (draws.min(), draws.max())}, key=float)
        axis.set_title(f"constant, {' to '.join(ends)}", loc="left", fontsize=7, pad=2)
        return
    size = float(_arviz.ess(draws, "mean"))
    error = draws.std() / np.sqrt(size) if np.isfinite(size) else 0.0
    text = f"mean {mean:.3g} ± {error:.1g}" if error else f"mean {mean:.3g}"
    if isinstance(target, (int, float)):
        low, high = target - 2 * error, target + 2 * error
        if low > 0 or axis.get_yscale() == "linear":
            axis.axhspan(low, high, color=_style.PALE, linewidth=0, zorder=0)
        axis.axhline(target, color=_style.DATA, linewidth=0.8, zorder=3)
        axis.axhline(mean, color=_style.DATA, linewidth=1.0, linestyle=":", zorder=3)
        text += f", target {target:.3g}"
    axis.set_title(text, loc="left", fontsize=7, pad=2)
