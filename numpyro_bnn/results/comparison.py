"""Models compared by their predictions of each data point left out (PSIS-LOO)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn._table import text_table

__all__ = ["LOO", "LOOComparison", "compare_loo", "loo"]

# More than so many numbers are not held at once beside the log likelihood.
CHUNK_SIZE = 2**22


class LOO(NamedTuple):
    r"""Expected log predictive density of a model, each data point predicted from the others.

    :param elpd: sum over data points.
    :param se: its standard error over data points.
    :param p_loo: effective number of parameters: log density of the data less ``elpd``.
    :param pointwise: :math:`\log p(y_n \mid y_{-n})`, (N,).
    :param pareto_k: k-hat of the importance weights of each data point, (N,).
    :param good_k: above it, min(1 - 1 / log10 S, 0.7), a data point's value is unreliable.
    """

    elpd: float
    se: float
    p_loo: float
    pointwise: NDArray[np.float64]
    pareto_k: NDArray[np.float64]
    good_k: float

    @property
    def num_bad(self) -> int:
        """Data points whose value is unreliable."""
        return int(np.sum(~(self.pareto_k <= self.good_k)))


class LOORow(NamedTuple):
    """One model of a comparison.

    :param difference: its ``elpd`` less that of the best model; ``difference_se`` is the standard error over pairs.
    """

    name: str
    loo: LOO
    difference: float
    difference_se: float


class LOOComparison(NamedTuple):
    """Models in the order of their ``elpd``, the best first; prints as a table."""

    rows: tuple[LOORow, ...]

    @property
    def best(self) -> str:
        """Name of the first model."""
        return self.rows[0].name

    def __str__(self) -> str:
        cells = [
            [
                row.name,
                *(
                    f"{value:.2f}"
                    for value in (row.loo.elpd, row.loo.se, row.difference, row.difference_se, row.loo.p_loo)
                ),
                f"{row.loo.num_bad} of {len(row.loo.pointwise)}",
            ]
            for row in self.rows
        ]
        return text_table(["model", "elpd", "se", "difference", "se", "p_loo", "bad k"], cells)


def loo(idata: Any, var_name: str | None = None, *, weighted: bool = True) -> LOO:
    r"""Leave-one-out cross-validation from one fit, by Pareto-smoothed importance sampling.

    Draws z_s of the posterior are weighted by r_ns = 1 / p(y_n | z_s) to predict y_n as if it had not been seen.
    Draws of a guide q are weighted by r_ns p(D, z_s) / q(z_s): the result is about the posterior, not about q.

    :param idata: from :func:`~numpyro_bnn.to_inference_data`, with ``log_likelihood``; ``log_weight`` in
        ``sample_stats``, where there is one, holds the log weights of the draws.
    :param var_name: the observed site; needed where there are several.
    :param weighted: use ``log_weight``. With a guide far from the posterior (``pareto_k`` of the results above 0.7,
        as for most networks) no weights help; ``False`` takes its draws for draws of the posterior.
    :return: a :class:`LOO`; the weights are smoothed by ArviZ.
    :raises ValueError: without log likelihood, for an unknown or ambiguous ``var_name``, or NaN.

    References: Vehtari, Gelman & Gabry (2017), *Practical Bayesian model evaluation*, equation (10); Magnusson et
    al. (2019), *Bayesian leave-one-out cross-validation for large data*, section 2, for draws that are weighted.

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC, BarkerMH
    >>> import numpyro_bnn as bnn
    >>> def model(y):
    ...     mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     with numpyro.plate("data", len(y)):
    ...         numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> mcmc = MCMC(BarkerMH(model), num_warmup=200, num_samples=400, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), jax.random.normal(jax.random.key(1), (20,)))
    >>> loo(bnn.to_inference_data(mcmc)).num_bad
    0
    """
    return _loo("results.loo", "idata", idata, var_name, weighted)


def compare_loo(
    models: Mapping[str, Any], var_name: str | None = None, *, weighted: bool = True
) -> LOOComparison:
    """Compare models of the same data by :func:`loo`.

    Differences are between the same data points, so that their standard errors are those of pairs.

    :param models: results of :func:`~numpyro_bnn.to_inference_data`, or of :func:`loo`, by name.
    :param var_name: the observed site; needed where there are several.
    :param weighted: as in :func:`loo`, for draws of guides.
    :return: a :class:`LOOComparison`.
    :raises ValueError: for no models, different numbers of data points, and as :func:`loo` does.

    >>> import numpy as np
    >>> from numpyro_bnn import _arviz
    >>> def result(mean):                       # log likelihood of 0 under draws of a mean
    ...     value = np.random.default_rng(0).normal(mean, 0.1, (1, 200, 30))
    ...     return _arviz.inference_data({
    ...         "posterior": _arviz.dataset({"mean": (("chain", "draw"), value[..., 0])}),
    ...         "log_likelihood": _arviz.dataset({"y": (("chain", "draw", "data"), -0.5 * value**2 - 0.92)}),
    ...     })
    >>> print(compare_loo({"far": result(2.0), "near": result(0.0)}).best)
    near
    """
    call = "results.compare_loo"
    if not isinstance(models, Mapping) or not models:
        instead = "Pass a mapping from names to results of `to_inference_data`."
        raise argument_error(call, "models", models, instead)
    found = {
        name: one if isinstance(one, LOO) else _loo(call, f"models[{name!r}]", one, var_name, weighted)
        for name, one in models.items()
    }
    sizes = {name: len(one.pointwise) for name, one in found.items()}
    if len(set(sizes.values())) > 1:
        instead = "Models can be compared on the same data only."
        raise argument_error(call, "models", f"different numbers of data points: {sizes}", instead)
    order = sorted(found, key=lambda name: -found[name].elpd)
    best = found[order[0]].pointwise
    rows = []
    for name in order:
        pairs = found[name].pointwise - best
        rows.append(LOORow(name, found[name], float(pairs.sum()), _error(pairs)))
    return LOOComparison(tuple(rows))


def _loo(call: str, argument: str, idata: Any, var_name: str | None, weighted: bool) -> LOO:
    log_likelihood = _log_likelihood(call, argument, idata, var_name)
    chains, draws = log_likelihood.shape[:2]
    by_point = log_likelihood.reshape(chains * draws, -1).T
    weights = _draw_weights(idata, chains * draws) if weighted else None
    efficiency = 1.0 if weights is not None else _efficiency(idata, chains, draws)
    log_w = np.zeros(chains * draws) if weights is None else weights
    log_w = log_w - np.logaddexp.reduce(log_w)
    pointwise, shapes, whole = (np.empty(len(by_point)) for _ in range(3))
    size = max(1, CHUNK_SIZE // (chains * draws))
    for start in range(0, len(by_point), size):
        part = slice(start, start + size)
        log_p = by_point[part].astype(np.float64)
        smoothed, shapes[part] = _arviz.pareto_smoothed(log_w - log_p, efficiency)
        pointwise[part] = np.logaddexp.reduce(smoothed + log_p, axis=1)
        whole[part] = np.logaddexp.reduce(log_w + log_p, axis=1)
    elpd = float(pointwise.sum())
    good = float(min(1.0 - 1.0 / np.log10(chains * draws), 0.7))
    return LOO(elpd, _error(pointwise), float(whole.sum()) - elpd, pointwise, shapes, good)


def _log_likelihood(call: str, argument: str, idata: Any, var_name: str | None) -> NDArray[np.floating]:
    if "log_likelihood" not in _arviz.group_names(idata):
        instead = "Export it: `to_inference_data(..., log_likelihood=True)`."
        raise argument_error(call, argument, "results without `log_likelihood`", instead)
    held = _arviz.group(idata, "log_likelihood")
    names = [str(name) for name in held.data_vars]
    if var_name is None and len(names) > 1:
        raise argument_error(call, "var_name", None, f"Name one of the observed sites {', '.join(names)}.")
    if var_name is not None and var_name not in names:
        raise unknown_name(call, "var_name", var_name, names)
    values = held[var_name or names[0]].to_numpy()
    if values.shape[0] * values.shape[1] < 2 or np.isnan(values).any() or np.isinf(values).any():
        came = f"log likelihood of shape {values.shape}, with {int((~np.isfinite(values)).sum())} not finite"
        instead = "Pass two draws or more, under which the data are possible."
        raise argument_error(call, argument, came, instead)
    return values


def _draw_weights(idata: Any, number: int) -> NDArray[np.float64] | None:
    """Log weights of draws of a guide, (S,)."""
    if "sample_stats" not in _arviz.group_names(idata):
        return None
    stats = _arviz.group(idata, "sample_stats")
    if "log_weight" not in stats:
        return None
    return stats["log_weight"].to_numpy().astype(np.float64).reshape(number)


def _efficiency(idata: Any, chains: int, draws: int) -> float:
    """Effective draws over draws, as ArviZ takes it: 1 for a single chain, else the mean over parameters."""
    if chains == 1 or "posterior" not in _arviz.group_names(idata):
        return 1.0
    variables = _arviz.group(idata, "posterior").data_vars.values()
    effective = np.concatenate([np.ravel(_arviz.ess(value.to_numpy(), "mean")) for value in variables])
    return float(np.nanmean(effective)) / (chains * draws) if np.isfinite(effective).any() else 1.0


def _error(pointwise: NDArray[np.float64]) -> float:
    return float(np.sqrt(len(pointwise) * np.var(pointwise)))
