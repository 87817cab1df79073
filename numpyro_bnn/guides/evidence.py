"""Assess a fit: ELBO, importance-weighted bound and PSIS k-hat, each bound with its
standard error.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
from jax import Array

from numpyro_bnn._checks import argument_error, as_floats
from numpyro_bnn._options import Count, Natural, PositiveInt, RandomKey, checked
from numpyro_bnn._types import ArrayLike, Floats, Kwargs, Trees
from numpyro_bnn.program.arguments import as_arrays
from numpyro_bnn.program.compiled import map_keys, refuse_tracers, run
from numpyro_bnn.program.importance import check, weight_statistics, weighted_draw

GOOD_K, USABLE_K = 0.5, 0.7


class Evidence(NamedTuple):
    r"""How well a guide fits the posterior, from importance weights w_s = p(D, z_s) /
    q(z_s) of S draws z_s of it.

    :param elbo: the mean of log w, an unbiased estimate of the ELBO.
    :param elbo_se: its standard error.
    :param iw_bound: log of the mean of w, an unbiased estimate of the
        importance-weighted bound of S draws, which lies between the ELBO and log p(D).
    :param iw_se: its standard error by the delta method, valid if the weights have a
        finite variance (k-hat below 0.5); with k-hat above 0.7 it may be far too small.
    :param iw_bias: L_S minus log p(D) to first order, -iw_se^2 / 2: the bound is too
        low. As valid as ``iw_se``.
    :param pareto_k: k-hat, the shape of the tail of the weights after Pareto smoothing.
    :param ess: effective sample size of the weights, (sum w)^2 / sum w^2.
    :param num_observations: observed numbers in D, over all observed sites, without
        those that a mask leaves out.
    :param log_weights: log w, (S,).
    """

    elbo: float
    elbo_se: float
    iw_bound: float
    iw_se: float
    iw_bias: float
    pareto_k: float
    ess: float
    num_observations: int
    log_weights: Floats

    @property
    def num_samples(self) -> int:
        """How many draws of the guide the estimates are from: S."""
        return len(self.log_weights)

    @property
    def verdict(self) -> str:
        """``"good"`` (k-hat below 0.5), ``"usable"`` (below 0.7) or ``"unreliable"``
        (Yao et al. 2018).
        """
        if self.pareto_k < GOOD_K:
            return "good"
        return "usable" if self.pareto_k < USABLE_K else "unreliable"

    def __str__(self) -> str:
        meaning = {
            "good": "good: importance weights correct the remaining error",
            "usable": (
                "usable: the weights have a heavy tail; draw more, or use a richer "
                "guide"
            ),
            "unreliable": (
                "unreliable: the guide misses part of the posterior; the bound and "
                "its error are too low"
            ),
        }
        lines = [
            (
                f"Evidence from {self.num_samples} draws of the guide, "
                f"{self.num_observations} observations"
            ),
            f"  ELBO                       {self.elbo:.2f} ± {self.elbo_se:.2f}",
            f"  importance-weighted bound  {self.iw_bound:.2f} ± {self.iw_se:.2f}",
            f"  effective draws            {self.ess:.1f} of {self.num_samples}",
            (
                f"  PSIS k-hat                 {self.pareto_k:.2f}  "
                f"{meaning[self.verdict]}"
            ),
        ]
        return "\n".join(lines)


@checked("guides.evidence")
def evidence(
    guide: Callable,
    params: Trees,
    *args: Any,
    rng_key: RandomKey,
    num_samples: Annotated[int, Count(2)] = 1000,
    model: Callable | None = None,
    draws_per_chunk: PositiveInt | None = None,
    **kwargs: Any,
) -> Evidence:
    r"""Estimate how far a fitted guide is from the posterior, and bound the evidence,
    on the full data.

    With S draws z_s ~ q and weights w_s = p(D, z_s) / q(z_s),

    .. math:: \mathrm{ELBO} = E[\log w], \qquad
              L_S = E\Big[\log \frac1S \sum_s w_s\Big], \qquad
              \mathrm{ELBO} \le L_S \le \log p(D).

    Subsampled plates are made full. Auxiliary variables of a guide count in q only, so
    that both bounds stay bounds. k-hat describes the whole posterior: it grows with the
    number of weights of a network, and predictions may be good even if it is high. To
    compare two models of the same data, subtract their bounds; the standard error of
    the difference is the root of the sum of the squared ``iw_se``.

    :param guide: a NumPyro guide; an autoguide knows its model.
    :param params: fitted parameters of guide and model (``svi_result.params``).
    :param args: arguments of the model, on the full data.
    :param rng_key: key of the draws.
    :param num_samples: S.
    :param model: the model, for a guide that is a function.
    :param draws_per_chunk: draws evaluated at once; by default as many as keep working
        memory near 128 MiB.
    :param kwargs: keyword arguments of the model.
    :return: an :class:`Evidence`, which prints as a report.
    :raises ValueError: for missing parameters, latent sites without a guide, a guide of
        point masses (:class:`~numpyro.infer.autoguide.AutoDelta`), or weights that are
        NaN.

    References: Burda, Grosse & Salakhutdinov (2016), *Importance weighted
    autoencoders*, section 3; Yao et al. (2018), *Yes, but did it work?*, section 2.

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import SVI, Trace_ELBO
    >>> from numpyro.infer.autoguide import AutoNormal
    >>> def model(y):
    ...     z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    ...     numpyro.sample("y", dist.Normal(z, 1.0), obs=y)
    >>> guide = AutoNormal(model)
    >>> exact = {"z_auto_loc": 0.5, "z_auto_scale": 0.5**0.5}
    >>> found = evidence(guide, exact, 1.0, rng_key=jax.random.key(0))  # log N(1; 0, 2)
    >>> print(f"{found.elbo:.3f} {found.iw_bound:.3f}")
    -1.516 -1.516
    """
    call = "guides.evidence"
    refuse_tracers(
        call,
        "Call it outside: it compiles its own program.",
        args,
        kwargs,
        params,
        rng_key,
    )
    args, kwargs = as_arrays(args, kwargs, call)
    model = getattr(guide, "model", None) if model is None else model
    sites = check(call, model, guide, params, args, kwargs)  # type: ignore[arg-type]
    if not sites.has_density:
        got = f"{type(guide).__name__}, all of whose sites are Delta"
        instead = (
            "Point masses have no density; use a guide with a spread, e.g. "
            "`AutoNormal`."
        )
        raise argument_error(call, "guide", got, instead)

    def weigh(keys_and_params: tuple, args: tuple, kwargs: Kwargs) -> Array:
        keys, params = keys_and_params

        def log_weight(key: Array) -> Array:
            draw = weighted_draw(model, guide, params, args, kwargs, key)  # type: ignore[arg-type]
            return draw.log_joint - draw.log_guide

        return map_keys(log_weight, keys, draws_per_chunk)

    weights = run(
        weigh, (jax.random.split(rng_key, num_samples), dict(params)), args, kwargs
    )
    return _summary(call, np.asarray(weights, dtype=np.float64), sites.num_observations)


@checked("guides.summarize")
def summarize(log_weights: ArrayLike, num_observations: Natural = 0) -> Evidence:
    """Judge an approximation by its log importance weights: evidence, effective draws
    and k-hat.

    :param log_weights: (S,), e.g. the field of that name of :func:`evidence`.
    :param num_observations: number of observed values behind them.
    :raises ValueError: for fewer than two weights, NaN or infinite ones (``-inf``, a
        weight of 0, is allowed).

    >>> round(summarize([-1.0, -2.0, -3.0]).elbo, 6)
    -2.0
    """
    log_w = as_floats("guides.summarize", "log_weights", log_weights)
    if log_w.ndim != 1 or len(log_w) < 2:
        instead = "Pass two or more, as a vector (S,)."
        raise argument_error(
            "guides.summarize", "log_weights", f"shape {log_w.shape}", instead
        )
    return _summary("guides.summarize", log_w, num_observations)


def _summary(call: str, log_w: Floats, num_observations: int) -> Evidence:
    bad = int((np.isnan(log_w) | np.isposinf(log_w)).sum())
    if bad:
        instead = (
            "Check parameters and data: a density of the model or guide is NaN or "
            "infinite at a draw."
        )
        raise argument_error(
            call,
            "log_weights",
            f"{bad} NaN or infinite log weights of {len(log_w)}",
            instead,
        )
    return Evidence(
        **weight_statistics(log_w), num_observations=num_observations, log_weights=log_w
    )
