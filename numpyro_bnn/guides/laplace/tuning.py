"""A run: the mode, the precision there, and prior precisions that maximize the
evidence.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer.autoguide import AutoGuide

from numpyro_bnn._checks import argument_error, outside
from numpyro_bnn._distributions import unwrapped
from numpyro_bnn._keys import split
from numpyro_bnn._types import PyTree
from numpyro_bnn.guides.laplace.likelihoods import CALL
from numpyro_bnn.guides.laplace.posterior import LaplacePosterior, Tuned, Values
from numpyro_bnn.guides.laplace.prediction import (
    LeftOutRows,
    gaussian_outputs,
    left_out,
)
from numpyro_bnn.guides.laplace.rows import Batch
from numpyro_bnn.guides.laplace.search import Mode, ModeSearch, finite
from numpyro_bnn.guides.laplace.structures import LaplaceGaussian
from numpyro_bnn.metrics import HealthWarning
from numpyro_bnn.metrics._inputs import spread
from numpyro_bnn.metrics.left_out import (
    MIN_ROWS_OF_FORMULAS,
    unless_interrupted,
    warn_if_behind,
)

LOG_PRECISION_TOLERANCE = 1e-3  # change of a log precision below which tuning ends
MAX_LOG_PRECISION = 15.0
FIXED_POINT_STEPS = 100
MAX_LOG_STEP = 2.0  # of a log precision, where steps are extrapolated
ROUND_NEWTON_STEPS = 2  # of Newton in a round of tuning
FINAL_NEWTON_STEPS = 1000  # at most, at the end
MAX_LOWER_ROUNDS = 3  # rounds of tuning without a larger evidence after which it ends
# relative error of a variance by rounding above which a run warns
MAX_ROUNDING_ERROR = 0.1
MAX_FLOAT64_EPS = 1e-12  # the rounding of float32 is above
# distance from the mode, in posterior standard deviations, below which a run has
# converged
CONVERGED_DISTANCE_SDS = 0.1
MAX_LEFT_OUT_ROWS = 500  # that are predicted from all others
INSTEAD_OF_OVERFIT = (
    "Pass `tune_prior=True`, take a narrower prior or fewer weights, or use chains."
)


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

    params: Values
    losses: Array
    log_evidence: float
    prior_precision: dict[str, float]
    effective_parameters: float
    grad_norm: float
    distance: float
    converged: bool


class Summary(NamedTuple):
    """What follows from a mode.

    :param weights: variances of the weights whose prior scale is learned, given that.
    :param log_evidence: Laplace's log p(D), given what is held.
    :param evidence_of_round: what rounds raise, up to a constant: the evidence given
        the prior scales that are learned, times their prior.
    """

    gaussian: LaplaceGaussian
    params: Values
    effective: Array
    weights: Values
    log_evidence: Array
    evidence_of_round: Array


@dataclass(frozen=True)
class EvidenceTuning:
    """Search, measure and, if asked for, tune prior precisions in turn.

    :param groups: sites that share a factor on their prior precision; none are tuned
        without.
    :param by_newton: whether steps of Newton follow the search.
    """

    guide: AutoGuide
    search: ModeSearch
    groups: list[list[str]]
    num_rounds: int
    by_newton: bool

    @property
    def posterior(self) -> LaplacePosterior:
        return self.search.posterior

    def run(self, v: Values, key: Array) -> LaplaceResult:
        """The result of all rounds, from a start."""
        losses: list[float] = []
        tuned = self._first(v)
        in_rounds = bool(self.groups or tuned.weights)

        def searched(v: Values, tuned: Tuned, key: Array) -> Mode:
            v, search_losses = self.search.descend(v, tuned, key)
            losses.extend(search_losses)
            return self.search.measure(v, tuned)

        def polished(mode: Mode, num_steps: int) -> Mode:
            if self.by_newton:
                bar = self.search.progress_bar and num_steps > ROUND_NEWTON_STEPS
                mode, newton_losses = self.search.newton(mode, num_steps, bar)
                losses.extend(newton_losses)
            return mode

        highest, since = -np.inf, 0
        best: Any = None
        for _ in range(self.num_rounds if in_rounds else 1):
            key, search_key = split(key)
            mode = polished(searched(v, tuned, search_key), ROUND_NEWTON_STEPS)
            evidence = float(self._summary(mode).evidence_of_round)
            since += 1
            if best is None or evidence > highest:
                highest, since, best = evidence, 0, mode
            if not in_rounds or since == MAX_LOWER_ROUNDS:
                break
            v, last, tuned = mode.v, tuned, self._fixed_point(mode)
            if _change(last, tuned) < LOG_PRECISION_TOLERANCE:
                break
        if in_rounds and not self.by_newton:
            best = searched(best.v, best.tuned, key)
        mode = polished(best, FINAL_NEWTON_STEPS)
        return self._result(mode, losses)

    def _first(self, v: Values) -> Tuned:
        """As if no data had been seen: weights vary as in their prior."""
        posterior = self.posterior
        precision: Any = dict.fromkeys(fixed_sites(posterior), 1.0)
        weights: Values = {}
        if self.search.num_epochs and posterior.learned:
            unit = {name: jnp.ones_like(value) for name, value in v.items()}
            weights = posterior.rows.run_once(posterior.weight_variances, v, unit)
        in_rounds = self.groups or weights
        return Tuned(precision, self._spread(v, None) if in_rounds else {}, weights)

    def _result(self, mode: Mode, losses: list[float]) -> LaplaceResult:
        """The Gaussian at the end of the search, its evidence, and how far it is from
        the mode.
        """
        summary, precision = self._summary(mode), mode.tuned.precision
        distance = self.search.distance(mode, summary.gaussian)
        _warn(distance, float(summary.gaussian.lost))
        if distance < CONVERGED_DISTANCE_SDS:  # else it has warned, and is no mode
            unless_interrupted(f"{CALL}.run", self._check_left_out, summary.params)
        slopes = [np.ravel(np.asarray(g, np.float64)) for g in mode.gradient.values()]
        return LaplaceResult(
            params=summary.params,
            losses=jax.device_put(np.asarray(losses, jnp.result_type(float))),
            log_evidence=finite(float(summary.log_evidence)),
            prior_precision={name: float(value) for name, value in precision.items()},
            effective_parameters=float(summary.effective),
            grad_norm=float(np.linalg.norm(np.concatenate(slopes))),
            distance=distance,
            converged=distance < CONVERGED_DISTANCE_SDS,
        )

    def _summary(self, mode: Mode) -> Summary:
        """By one program; refuses a precision that is not positive."""
        summary = self.posterior.rows.run_once(self._summarized, mode)
        _check_positive(summary.gaussian)
        return summary

    def _summarized(self, batch: Batch, mode: Mode) -> Summary:
        search, learned, v = self.search, self.posterior.learned, mode.v
        prior, gaussian = search.prior(mode), search.gaussian(mode)
        effective = jnp.zeros(())
        for name in prior:
            effective += jnp.sum(1 - prior[name] * gaussian.variance[name])
        given_scales = search.given_scales(mode) if learned else gaussian
        of_unit = {name: prior[name] * given_scales.variance[name] for name in learned}
        return Summary(
            gaussian,
            self.guide._to_params(v, gaussian),
            effective,
            self.posterior.weight_variances(batch, v, of_unit),
            self._evidence(batch, mode, gaussian),
            self._evidence(batch, mode, given_scales),
        )

    def _check_left_out(self, params: Values) -> None:
        """Warn of a fit that predicts rows without their part in it worse than the
        simplest models.
        """
        rows, plate = self.posterior.rows, self.posterior.rows.plate
        reading = rows.reading(rows.chunks[0])
        for name, (axis, *_) in self.posterior.observed.items():
            fn = reading.sites[name]["fn"]
            number = 1 if axis is None else fn.shape()[axis]
            number = number if plate is None else plate.size
            if number < MIN_ROWS_OF_FORMULAS:
                continue
            places = spread(number, MAX_LEFT_OUT_ROWS)
            scores, value, weight = self._left_out(params, name, places)
            complete = np.all(weight > 0, axis=1)
            weights = weight[complete]
            if not np.allclose(weights, weights.max(initial=0.0)):
                continue  # the fit was not to predict all rows alike
            inputs = [
                np.asarray(array)[places][complete]
                for array in self.posterior.inputs(name)
            ]
            warn_if_behind(
                f"{CALL}.run",
                scores[complete],
                inputs,
                value[complete],
                unwrapped(fn, masked=True),
                INSTEAD_OF_OVERFIT,
            )

    def _left_out(self, params: Values, name: str, places: np.ndarray) -> LeftOutRows:
        """Rows of an observed site, in batches as large as those of the fit."""
        rows, plate = self.posterior.rows, self.posterior.rows.plate
        positions = places if plate is None else slice(None)

        def predicted(batch: Batch, params: Values) -> LeftOutRows:
            return left_out(self.guide, self.posterior, batch, params, name, positions)

        indices: list[Any] = [None]
        if plate is not None:
            number = max(1, min(ceil(len(places) / plate.batch_size), len(places) // 2))
            indices = list(map(jnp.asarray, np.array_split(places, number)))
        batches = [rows.run(predicted, index, params) for index in indices]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)

    # -- prior precisions and noise ----------------------------------------------------

    def _spread(self, v: Values, params: Values | None) -> Values:
        """(N, M) variances of the loc of sites whose noise scale is learned; 0 before
        there is a Gaussian.
        """
        rows = self.posterior.rows
        chunks = [rows.run(self._variances, i, v, params) for i in rows.chunks]
        return jax.tree.map(lambda *variances: np.concatenate(variances), *chunks)

    def _variances(self, batch: Batch, v: Values, params: Values | None) -> Values:
        variances = {}
        for name, site in self.posterior.observed.items():
            if len(site.used) < 2:  # a location and its noise
                continue
            if params is None:
                rows = self.posterior.outputs(batch, v, name)[name]
                variances[name] = jnp.zeros_like(rows.weight)
                continue
            outputs = gaussian_outputs(self.guide, self.posterior, batch, params, name)
            spread = outputs.rows.variances(outputs.covariance)
            variances[name] = spread[site.used[0]]
        return variances

    def _fixed_point(self, mode: Mode) -> Tuned:
        """Prior precisions that maximize the evidence at one mode, and the variances
        then.
        """
        precision = mode.tuned.precision
        start = np.log([float(precision[group[0]]) for group in self.groups])

        def step(logs: np.ndarray) -> Any:
            return self.posterior.rows.run_once(
                self._updated, jnp.asarray(logs, float), mode
            )

        if self.groups:
            precision = self._by_site(np.exp(fixed_point(step, start)).tolist())
        mode = mode._replace(tuned=mode.tuned._replace(precision=precision))
        summary = self._summary(mode)
        weights = summary.weights if mode.tuned.weights else {}
        return Tuned(precision, self._spread(mode.v, summary.params), weights)

    def _by_site(self, factors: PyTree) -> PyTree:
        precision: dict[str, PyTree] = {}
        for i, group in enumerate(self.groups):
            precision |= dict.fromkeys(group, factors[i])
        return precision

    def _updated(self, batch: Batch, logs: Array, mode: Mode) -> Array:
        """One step of MacKay's fixed point."""
        mode = mode._replace(tuned=Tuned(self._by_site(jnp.exp(logs))))
        variance = self.search.gaussian(mode).variance
        prior = self.search.prior(mode)
        updated = []
        for group in self.groups:
            gamma: PyTree = 0.0
            squares: PyTree = 0.0
            for name in group:
                loc, scale = self.posterior.fixed[name]
                gamma += jnp.sum(1 - prior[name] * variance[name])
                squares += jnp.sum(jnp.square((mode.v[name] - loc) / scale))
            log_gamma = jnp.log(jnp.maximum(gamma, 1e-6))
            updated.append(log_gamma - jnp.log(jnp.maximum(squares, 1e-12)))
        return jnp.clip(jnp.stack(updated), -MAX_LOG_PRECISION, MAX_LOG_PRECISION)

    # -- the evidence ------------------------------------------------------------------

    def _evidence(self, batch: Batch, mode: Mode, gaussian: LaplaceGaussian) -> Array:
        """log p(D, v) + P / 2 log 2 pi - 1/2 log det of the precision."""
        posterior, v = self.posterior, mode.v
        unknowns = sum(v[name].size for name in posterior.sites)
        tuned = Tuned(mode.tuned.precision)
        prior = posterior.log_prior(batch, v, tuned, posterior.sites)
        return (
            mode.log_likelihood
            + prior
            + 0.5 * unknowns * jnp.log(2 * jnp.pi)
            - 0.5 * gaussian.log_det
        )


def _change(last: Tuned, tuned: Tuned) -> float:
    """Largest change of a log precision, or of the log variance of a weight."""
    pairs = [(last.precision, tuned.precision), (last.weights, tuned.weights)]
    largest = 0.0
    for before, after in pairs:
        for name, value in after.items():
            logs = np.log(np.asarray(value) / np.asarray(before[name]))
            largest = max(largest, float(np.max(np.abs(logs))))
    return largest


def fixed_point(step: Callable, start: np.ndarray) -> np.ndarray:
    """Log precisions that a step leaves as they are, by Anderson's extrapolation.

    The log evidence of one mode is concave in them, as the determinant of a precision
    is a polynomial in the factors without negative coefficients: there is one such
    point. Where the step is not a number, because rounding leaves no positive
    precision, the search goes half of the way back.

    Reference: Anderson (1965); Walker & Ni (2011), equation 2.1.

    >>> def step(logs):
    ...     return np.where(logs > -2.1, logs - 0.2 * np.tanh(logs + 2), np.nan)
    >>> fixed_point(step, np.array([2.0])).round(3)
    array([-2.])
    """
    history: list[tuple[np.ndarray, np.ndarray]] = []
    point = start
    for _ in range(FIXED_POINT_STEPS):
        change = np.asarray(step(point), np.float64) - point
        if np.isfinite(change).all():
            history.append((point, change))
            if np.max(np.abs(change)) < LOG_PRECISION_TOLERANCE / 10:
                break
            moved = _extrapolated(history[-1 - len(start) :])
            point = np.clip(moved, -MAX_LOG_PRECISION, MAX_LOG_PRECISION)
        elif history:
            point = (point + history[-1][0]) / 2
        else:
            return start
    return history[-1][0]


def _extrapolated(history: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The next point, from points and what one step changes there: where the change
    would vanish if it were linear.

    It is the step itself while that changes more than the one before it.
    """
    point, change = history[-1]
    if len(history) > 1 and np.linalg.norm(change) > np.linalg.norm(history[-2][1]):
        return point + change
    points, changes = (np.stack(values) for values in zip(*history, strict=True))
    steps, bends = np.diff(points, axis=0).T, np.diff(changes, axis=0).T
    weights = np.linalg.lstsq(bends, change, rcond=1e-6)[0]
    move = change - (steps + bends) @ weights
    return point + np.clip(move, -MAX_LOG_STEP, MAX_LOG_STEP)


def fixed_sites(posterior: LaplacePosterior) -> list[str]:
    """The sites of the Gaussian whose prior scale is fixed."""
    return [name for name in posterior.sites if name in posterior.fixed]


def tuned_groups(posterior: LaplacePosterior, tune: bool | str) -> list[list[str]]:
    """The sites that share a factor on their prior precision, by the option
    ``tune_prior``.
    """
    names = fixed_sites(posterior)
    if not tune or (tune == "auto" and not names):
        return []
    if not names:
        got = f"{tune!r} for a guide without a site that has a Normal prior of fixed "
        instead = "Leave it out: the scales are learned with the model."
        raise argument_error(f"{CALL}.run", "tune_prior", f"{got}scale", instead)
    return [names] if tune == "global" else [[name] for name in names]


def _warn(distance: float, lost: float) -> None:
    """Of a run that is far from the mode, or loses digits."""
    eps = float(jnp.finfo(jnp.result_type(float)).eps)
    error = eps * lost
    if not distance < CONVERGED_DISTANCE_SDS:
        more = ", or in float64 (`jax_enable_x64`)." if eps > MAX_FLOAT64_EPS else "."
        message = (
            f"{CALL}.run: {distance:.2g} posterior sds from the mode on average. Run "
            f"more epochs{more}"
        )
    elif error > MAX_ROUNDING_ERROR:
        message = (
            f"{CALL}.run: rounding changes variances by up to about "
            f"{min(1.0, error):.0%}: the precision of some directions is so much "
            "smaller than that of others. Use float64 (`jax_enable_x64`)."
        )
    else:
        return
    warnings.warn(message, HealthWarning, stacklevel=outside())


def _check_positive(gaussian: LaplaceGaussian) -> None:
    for name, variance in gaussian.variance.items():
        values = np.asarray(variance)
        if not np.all(np.isfinite(values) & (values > 0)):
            got = f"a model whose precision is not positive at the site {name!r}"
            instead = (
                "With little noise use float64 (`jax_enable_x64`); else run more "
                "epochs, or use Normal priors."
            )
            raise argument_error(CALL, "model", got, instead)
