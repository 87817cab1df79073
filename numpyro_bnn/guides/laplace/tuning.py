"""A run: the mode, the precision there, and prior precisions that maximize the
evidence.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from numpyro_bnn._checks import argument_error, outside
from numpyro_bnn._keys import split
from numpyro_bnn.guides.laplace.fitting import (
    PrecisionSums,
    Search,
    distance,
    finite,
    gaussian_at,
    measured,
    newton,
)
from numpyro_bnn.guides.laplace.likelihoods import CALL
from numpyro_bnn.guides.laplace.prediction import gaussian_outputs
from numpyro_bnn.guides.laplace.problem import Call, LaplaceProblem, Values
from numpyro_bnn.guides.laplace.structures import LaplaceGaussian
from numpyro_bnn.program.compiled import run

SAME = 1e-3  # change of a log precision below which tuning ends
FEW_STEPS, NEWTON_STEPS = (
    2,
    1000,
)  # of Newton: in a round of tuning, and at most at the end
LOWER_ROUNDS = 3  # rounds of tuning without a larger evidence after which it ends
INEXACT = 0.1  # relative error of a variance by rounding above which a run warns
FLOAT64 = 1e-12  # the rounding of float32 is above
# distance from the mode, in posterior standard deviations, below which a run has
# converged
CLOSE = 0.1


class LaplaceResult(NamedTuple):
    """Result of :meth:`AutoLaplace.run`; ``params`` and ``losses`` are as in NumPyro's
    ``SVIRunResult``.

    :param params: parameters of the guide by name, as all its methods take them.
    :param losses: -log p(D, v) after each epoch of the search for the mode.
    :param log_evidence: Laplace's log p(D), given the sites that are held at the mode.
    :param prior_precision: by site with a fixed Normal prior, the factor on its
        precision (1 without ``tune_prior``).
    :param effective_parameters: how many unknowns the data determine, sum_j (1 - prior
        precision_j * variance_j).
    :param grad_norm: norm of the gradient of -log p(D, v) at the end.
    :param distance: estimated distance from the mode in posterior sds, sqrt(g^T H^-1 g
        / P) with the gradient g, and the whole Gauss-Newton precision H of the P
        unknowns, whatever the structure.
    :param converged: whether the distance is below 0.1; a run that did not converge
        also warns.
    """

    params: dict[str, jax.Array]
    losses: jax.Array
    log_evidence: float
    prior_precision: dict[str, float]
    effective_parameters: float
    grad_norm: float
    distance: float
    converged: bool


def tuned(
    guide: Any,
    problem: LaplaceProblem,
    call: Call,
    search: Search,
    v: Values,
    key: Any,
    tune: bool | str,
    num_rounds: int,
    newton_steps: bool,
    progress_bar: bool,
) -> LaplaceResult:
    """Search, measure and, if asked for, tune prior precisions in turn; returns a
    ``LaplaceResult``.
    """
    names = [name for name in problem.sites if name in problem.fixed]
    tune = bool(names) if tune == "auto" else tune
    groups = [names] if tune == "global" else [[name] for name in names]
    spread = _spread(guide, problem, call, v, None) if tune else {}
    if tune and not names:
        got = (
            f"{tune!r} for a guide without a site that has a Normal prior of fixed "
            f"scale"
        )
        raise argument_error(
            f"{CALL}.run",
            "tune_prior",
            got,
            "Leave it out: the scales are learned with the model.",
        )
    precision = dict.fromkeys(names, 1.0)
    losses: list[float] = []
    evidence_of = _evidence(guide, problem, call)

    dense = newton_steps and guide.structure == "full" and not problem.plates

    def polished(
        v: Values, sums: PrecisionSums, precision: Any, spread: Any, num_steps: int
    ) -> tuple:
        bar = progress_bar and dense and num_steps > FEW_STEPS
        return newton(
            guide,
            problem,
            call,
            v,
            sums,
            (precision, spread),
            num_steps if dense else 0,
            bar,
        )

    highest, since = -np.inf, 0
    best: Any = None
    for _ in range(num_rounds if tune else 1):
        key, now = split(key)
        v, search_losses = search(v, (precision, spread), now)
        sums = measured(guide, problem, call, v, precision)
        v, sums, newton_losses = polished(v, sums, precision, spread, FEW_STEPS)
        losses += [*search_losses, *newton_losses]
        gaussian = gaussian_at(guide, problem, sums, v, precision)
        _check_positive(problem, gaussian)
        evidence = float(evidence_of((sums, v, precision)))
        if best is None or evidence > highest:
            highest, since, best = evidence, 0, (v, sums, precision, spread)
        else:
            since += 1
        if not tune or since == LOWER_ROUNDS:
            break
        new = _fixed_point(guide, problem, sums, v, precision, groups, call)
        change = max(abs(np.log(new[name] / precision[name])) for name in names)
        spread, precision = (
            _spread(guide, problem, call, v, gaussian_at(guide, problem, sums, v, new)),
            new,
        )
        if change < SAME:
            break
    v, sums, precision, spread = best
    if tune and not dense:
        v, search_losses = search(v, (precision, spread), key)
        losses += search_losses
        sums = measured(guide, problem, call, v, precision)
    v, sums, search_losses = polished(v, sums, precision, spread, NEWTON_STEPS)
    return _result(
        guide, problem, call, (v, sums, precision, spread), [*losses, *search_losses]
    )


def _result(
    guide: Any, problem: LaplaceProblem, call: Call, mode: tuple, losses: list[float]
) -> LaplaceResult:
    """The Gaussian at the end of the search, its evidence, and how far it is from the
    mode.
    """
    v, sums, precision, spread = mode
    gaussian = gaussian_at(guide, problem, sums, v, precision)
    _check_positive(problem, gaussian)
    grads = problem.total("gradient", jax.grad(problem.log_likelihood), v, call, spread)
    of_prior = run(
        lambda g, *c: jax.grad(problem.log_prior)(g[0], g[1], c, list(v)),
        (v, precision),
        *call,
    )
    grads = jax.tree.map(jnp.add, grads, of_prior)
    flat = np.concatenate([np.ravel(grads[n]) for n in guide._structure.sizes]).astype(
        np.float64
    )
    away = distance(guide, problem, call, v, sums, precision, flat)
    eps = float(jnp.finfo(jnp.result_type(float)).eps)
    if not away < CLOSE:
        message = (
            f"{CALL}.run: {away:.2g} posterior sds from the mode on average. Run more "
            f"epochs"
        )
        message += ", or in float64 (`jax_enable_x64`)." if eps > FLOAT64 else "."
        warnings.warn(message, stacklevel=outside())
    elif eps * float(gaussian.lost) > INEXACT:
        error = min(1.0, eps * float(gaussian.lost))
        message = (
            f"{CALL}.run: rounding changes variances by up to about {error:.0%}: the "
            f"precision of some"
        )
        message += (
            " directions is so much smaller than that of others. Use float64 "
            "(`jax_enable_x64`)."
        )
        warnings.warn(message, stacklevel=outside())
    prior = {**problem.prior_precision(v, precision), **sums.curvature}
    effective = sum(
        jnp.sum(1 - prior[name] * gaussian.variance[name]) for name in problem.sites
    )
    evidence = finite(float(_evidence(guide, problem, call)((sums, v, precision))))
    guide._problem = replace(
        problem, programs={}, training=call if problem.normalizes else None
    )
    return LaplaceResult(
        params={**guide._to_params(v, gaussian), **problem.model_params},
        losses=jax.device_put(np.asarray(losses, jnp.result_type(float))),
        log_evidence=evidence,
        prior_precision={name: float(value) for name, value in precision.items()},
        effective_parameters=float(effective),
        grad_norm=float(jnp.linalg.norm(ravel_pytree(grads)[0])),
        distance=away,
        converged=away < CLOSE,
    )


def _spread(
    guide: Any,
    problem: LaplaceProblem,
    call: Call,
    v: Values,
    gaussian: LaplaceGaussian | None,
) -> dict[str, jax.Array]:
    """(N, M) variances of the loc of sites whose noise scale is learned; 0 before there
    is a Gaussian.
    """
    names = [
        name
        for name, (_, used) in problem.observed.items()
        if {"loc", "log_scale"} <= set(used)
    ]
    params = {} if gaussian is None else guide._to_params(v, gaussian)

    def rows(
        inputs: tuple, args: tuple, kwargs: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        params, index = inputs
        if not params:
            observation = problem.observations(problem.trace(v, index, (args, kwargs)))
            return {
                name: jnp.zeros_like(observation[name].weight, float) for name in names
            }
        variances = {}
        for name in names:
            observation, cov, _ = gaussian_outputs(
                guide, problem, params, (args, kwargs), name, index=index
            )
            variances[name] = jnp.diagonal(cov, axis1=1, axis2=2)[
                :, : observation.weight.shape[1]
            ]
        return variances

    program = problem.prepared("variances" if params else "no variances", rows, call)
    chunks = [program((params, index)) for index in problem.chunks()]
    return {name: jnp.concatenate([chunk[name] for chunk in chunks]) for name in names}


def _check_positive(problem: LaplaceProblem, gaussian: LaplaceGaussian) -> None:
    for name in problem.sites:
        variance = gaussian.variance[name]
        if not bool(jnp.all(jnp.isfinite(variance) & (variance > 0))):
            got = f"a model whose precision is not positive at the site {name!r}"
            instead = (
                "With little noise use float64 (`jax_enable_x64`); else run more "
                "epochs, or use Normal priors."
            )
            raise argument_error(CALL, "model", got, instead)


def _fixed_point(
    guide: Any,
    problem: LaplaceProblem,
    sums: PrecisionSums,
    v: Values,
    precision: Mapping[str, float],
    groups: list[list[str]],
    call: Call,
) -> dict[str, float]:
    """Prior precisions that maximize the evidence at one mode."""

    def update(inputs: tuple, args: tuple, kwargs: Mapping[str, Any]) -> jax.Array:
        log_precision, sums, v = inputs
        now = {
            name: jnp.exp(log_precision[i])
            for i, group in enumerate(groups)
            for name in group
        }
        variance, prior = (
            gaussian_at(guide, problem, sums, v, now).variance,
            problem.prior_precision(v, now),
        )
        new = []
        for group in groups:
            squares = sum(
                jnp.sum(jnp.square((v[n] - problem.fixed[n][0]) / problem.fixed[n][1]))
                for n in group
            )
            gamma = sum(jnp.sum(1 - prior[n] * variance[n]) for n in group)
            new.append(
                jnp.log(jnp.maximum(gamma, 1e-6)) - jnp.log(jnp.maximum(squares, 1e-12))
            )
        return jnp.clip(jnp.stack(new), -15.0, 15.0)

    logs = jnp.log(jnp.asarray([precision[group[0]] for group in groups]))
    program = problem.prepared("fixed point", update, call)
    for _ in range(100):
        logs, old_logs = program((logs, sums, v)), logs
        if float(jnp.max(jnp.abs(logs - old_logs))) < SAME / 10:
            break
    return {
        name: float(jnp.exp(logs[i]))
        for i, group in enumerate(groups)
        for name in group
    }


def _evidence(guide: Any, problem: LaplaceProblem, call: Call) -> Any:
    """:func:`log_evidence` as a program."""
    return problem.prepared(
        "evidence",
        lambda g, *c: log_evidence(guide, problem, g[0], g[1], g[2], c),
        call,
    )


def log_evidence(
    guide: Any,
    problem: LaplaceProblem,
    sums: PrecisionSums,
    v: Values,
    precision: Mapping[str, Any],
    call: Call,
) -> jax.Array:
    r"""Laplace's log p(D) = log p(D, v) + P / 2 log 2 pi - 1/2 log det of the
    precision, given what is held.
    """
    gaussian = gaussian_at(guide, problem, sums, v, precision)
    unknowns = sum(v[name].size for name in problem.sites)
    prior = problem.log_prior(v, precision, call, problem.sites)
    return (
        sums.log_likelihood
        + prior
        + 0.5 * unknowns * jnp.log(2 * jnp.pi)
        - 0.5 * gaussian.log_det
    )
