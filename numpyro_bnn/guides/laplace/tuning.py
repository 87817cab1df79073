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
    Mode,
    Search,
    distance,
    finite,
    gaussian_at,
    measured,
    newton,
    prior_at,
)
from numpyro_bnn.guides.laplace.likelihoods import CALL
from numpyro_bnn.guides.laplace.prediction import gaussian_outputs
from numpyro_bnn.guides.laplace.problem import Call, LaplaceProblem, Values
from numpyro_bnn.guides.laplace.structures import LaplaceGaussian
from numpyro_bnn.program.compiled import run

LOG_PRECISION_TOLERANCE = 1e-3  # change of a log precision below which tuning ends
ROUND_NEWTON_STEPS = 2  # of Newton in a round of tuning
FINAL_NEWTON_STEPS = 1000  # at most, at the end
MAX_LOWER_ROUNDS = 3  # rounds of tuning without a larger evidence after which it ends
# relative error of a variance by rounding above which a run warns
MAX_ROUNDING_ERROR = 0.1
MAX_FLOAT64_EPS = 1e-12  # the rounding of float32 is above
# distance from the mode, in posterior standard deviations, below which a run has
# converged
CONVERGED_DISTANCE_SDS = 0.1


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
    groups = [names] if tune == "global" else [[name] for name in names]
    spread = _spread(guide, problem, call, v, None) if tune else {}
    precision = dict.fromkeys(names, 1.0)
    losses: list[float] = []
    dense = newton_steps and guide.structure == "full" and not problem.plates

    def polished(mode: Mode, spread: Any, num_steps: int) -> Mode:
        if dense:
            bar = progress_bar and num_steps > ROUND_NEWTON_STEPS
            mode, newton_losses = newton(
                guide, problem, call, mode, spread, num_steps, bar
            )
            losses.extend(newton_losses)
        return mode

    highest, since = -np.inf, 0
    best: Any = None
    for _ in range(num_rounds if tune else 1):
        key, search_key = split(key)
        v, search_losses = search(v, (precision, spread), search_key)
        losses += search_losses
        mode = measured(guide, problem, call, v, precision)
        mode = polished(mode, spread, ROUND_NEWTON_STEPS)
        _check_positive(problem, gaussian_at(guide, problem, mode))
        evidence = float(_evidence(guide, problem, call)(mode))
        since += 1
        if best is None or evidence > highest:
            highest, since, best = evidence, 0, (mode, spread)
        if not tune or since == MAX_LOWER_ROUNDS:
            break
        v, precision = mode.v, _fixed_point(guide, problem, mode, groups, call)
        gaussian = gaussian_at(guide, problem, mode._replace(precision=precision))
        spread = _spread(guide, problem, call, v, gaussian)
        factors = [precision[name] / mode.precision[name] for name in names]
        if np.max(np.abs(np.log(factors))) < LOG_PRECISION_TOLERANCE:
            break
    mode, spread = best
    if tune and not dense:
        v, search_losses = search(mode.v, (mode.precision, spread), key)
        losses += search_losses
        mode = measured(guide, problem, call, v, mode.precision)
    mode = polished(mode, spread, FINAL_NEWTON_STEPS)
    return _result(guide, problem, call, mode, spread, losses)


def _result(
    guide: Any,
    problem: LaplaceProblem,
    call: Call,
    mode: Mode,
    spread: Mapping[str, jax.Array],
    losses: list[float],
) -> LaplaceResult:
    """The Gaussian at the end of the search, its evidence, and how far it is from the
    mode.
    """
    v = mode.v
    gaussian = gaussian_at(guide, problem, mode)
    _check_positive(problem, gaussian)
    grads = problem.total("gradient", jax.grad(problem.log_likelihood), v, call, spread)
    of_prior = run(
        lambda g, *c: jax.grad(problem.log_prior)(g[0], g[1], c, list(v)),
        (v, mode.precision),
        *call,
    )
    grads = jax.tree.map(jnp.add, grads, of_prior)
    gradient = np.asarray(problem.flat(grads), np.float64)
    away = distance(guide, problem, call, mode, gradient)
    eps = float(jnp.finfo(jnp.result_type(float)).eps)
    error = eps * float(gaussian.lost)
    if not away < CONVERGED_DISTANCE_SDS:
        message = (
            f"{CALL}.run: {away:.2g} posterior sds from the mode on average. Run more "
            f"epochs"
        )
        message += (
            ", or in float64 (`jax_enable_x64`)." if eps > MAX_FLOAT64_EPS else "."
        )
        warnings.warn(message, stacklevel=outside())
    elif error > MAX_ROUNDING_ERROR:
        message = (
            f"{CALL}.run: rounding changes variances by up to about "
            f"{min(1.0, error):.0%}: the precision of some directions is so much "
            "smaller than that of others. Use float64 (`jax_enable_x64`)."
        )
        warnings.warn(message, stacklevel=outside())
    effective: Any = 0.0
    for name, prior in prior_at(problem, mode).items():
        effective += jnp.sum(1 - prior * gaussian.variance[name])
    evidence = finite(float(_evidence(guide, problem, call)(mode)))
    guide._problem = replace(
        problem, programs={}, training=call if problem.normalizes else None
    )
    return LaplaceResult(
        params={**guide._to_params(v, gaussian), **problem.model_params},
        losses=jax.device_put(np.asarray(losses, jnp.result_type(float))),
        log_evidence=evidence,
        prior_precision={name: float(value) for name, value in mode.precision.items()},
        effective_parameters=float(effective),
        grad_norm=float(jnp.linalg.norm(ravel_pytree(grads)[0])),
        distance=away,
        converged=away < CONVERGED_DISTANCE_SDS,
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
    names = []
    for name, (_, used) in problem.observed.items():
        if {"loc", "log_scale"} <= set(used):
            names.append(name)
    params = {} if gaussian is None else guide._to_params(v, gaussian)

    def rows(
        inputs: tuple, args: tuple, kwargs: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        params, index = inputs
        call = args, kwargs
        variances = {}
        if not params:
            observations = problem.observations(problem.trace(v, index, call))
            for name in names:
                variances[name] = jnp.zeros_like(observations[name].weight, float)
            return variances
        for name in names:
            observation, cov, _ = gaussian_outputs(
                guide, problem, params, call, name, index=index
            )
            variance = jnp.diagonal(cov, axis1=1, axis2=2)
            variances[name] = variance[:, : observation.weight.shape[1]]
        return variances

    program = problem.prepared("variances" if params else "no variances", rows, call)
    chunks = [program((params, index)) for index in problem.chunks()]
    return jax.tree.map(lambda *variances: jnp.concatenate(variances), *chunks)


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
    mode: Mode,
    groups: list[list[str]],
    call: Call,
) -> dict[str, float]:
    """Prior precisions that maximize the evidence at one mode."""

    def by_site(logs: jax.Array) -> dict[str, jax.Array]:
        precision: dict[str, jax.Array] = {}
        for i, group in enumerate(groups):
            precision |= dict.fromkeys(group, jnp.exp(logs[i]))
        return precision

    def update(inputs: tuple, args: tuple, kwargs: Mapping[str, Any]) -> jax.Array:
        logs, mode = inputs
        mode = mode._replace(precision=by_site(logs))
        variance = gaussian_at(guide, problem, mode).variance
        prior = prior_at(problem, mode)
        updated = []
        for group in groups:
            gamma: Any = 0.0
            squares: Any = 0.0
            for name in group:
                loc, scale = problem.fixed[name]
                gamma += jnp.sum(1 - prior[name] * variance[name])
                squares += jnp.sum(jnp.square((mode.v[name] - loc) / scale))
            log_gamma = jnp.log(jnp.maximum(gamma, 1e-6))
            updated.append(log_gamma - jnp.log(jnp.maximum(squares, 1e-12)))
        return jnp.clip(jnp.stack(updated), -15.0, 15.0)

    logs = jnp.log(jnp.asarray([mode.precision[group[0]] for group in groups]))
    program = problem.prepared("fixed point", update, call)
    for _ in range(100):
        logs, old_logs = program((logs, mode)), logs
        if float(jnp.max(jnp.abs(logs - old_logs))) < LOG_PRECISION_TOLERANCE / 10:
            break
    return {name: float(value) for name, value in by_site(logs).items()}


def _evidence(guide: Any, problem: LaplaceProblem, call: Call) -> Any:
    """:func:`log_evidence` as a program."""

    def evidence(mode: Mode, args: tuple, kwargs: Mapping[str, Any]) -> jax.Array:
        return log_evidence(guide, problem, mode, (args, kwargs))

    return problem.prepared("evidence", evidence, call)


def log_evidence(
    guide: Any,
    problem: LaplaceProblem,
    mode: Mode,
    call: Call,
) -> jax.Array:
    r"""Laplace's log p(D) = log p(D, v) + P / 2 log 2 pi - 1/2 log det of the
    precision, given what is held.
    """
    gaussian = gaussian_at(guide, problem, mode)
    unknowns = sum(mode.v[name].size for name in problem.sites)
    prior = problem.log_prior(mode.v, mode.precision, call, problem.sites)
    return (
        mode.log_likelihood
        + prior
        + 0.5 * unknowns * jnp.log(2 * jnp.pi)
        - 0.5 * gaussian.log_det
    )
