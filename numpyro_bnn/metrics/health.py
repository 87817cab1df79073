"""A health report: what is off in a result, how much, and what to do about it.

A check is a function of a :class:`Result`, which returns what it measures, or nothing
where the result lacks its numbers. They are made in the order of this file; chains that
one of them finds at fault are left out of those after it.
"""

import json
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from scipy.special import chdtri

from numpyro_bnn import _arviz
from numpyro_bnn._types import ArrayLike, InferenceData
from numpyro_bnn.metrics._inputs import (
    INPUT_ROWS,
    Entries,
    columns,
    extrapolated,
    spread,
    table,
)
from numpyro_bnn.metrics._result import Result
from numpyro_bnn.metrics.left_out import MAX_NATS_BEHIND

# draws of a chain below which R-hat, ESS and averages over draws are mostly noise
MIN_DRAWS = 100
# so many rejections in a row have the probability 1e-6 at an acceptance of 0.5
MIN_REPEATED_DRAWS = 20
MIN_STEPS = 1000  # of a chain before they are called few
# a chain is frozen if no parameter varies by more than this part of its size
MAX_RELATIVE_RANGE = 1e-4
MAX_PARAMETERS = 256  # that are read to see whether a chain is frozen
MAX_SHARE_LOST = 0.75  # of what a member explains, before a chain counts as trapped
MAX_RHAT = 1.1
MAX_REFUSED = 0.5  # of the steps of a chain that says the same as the others
# Of an observation. Half of what a score of predictions must fall behind to matter: a
# chain alone costs so much, all of them together less.
MAX_NATS_APART = 0.1
# A hundred independent draws of an observation know their mean as well.
MAX_NATS_OF_ERROR = 0.005

SMALLER = "Use a smaller `step_size`, or None to have one chosen"
SMALLER_OR_NON_CENTERED = f"{SMALLER} by more warm-up. Non-centered scales need less."
LEAVE_OUT = f"{SMALLER}; or leave these chains out (`idata.sel(chain=[...])`)."
BORDER = (
    "Keep the parameters of the likelihood inside of their bounds: `jnp.exp`, "
    "`jax.nn.softplus` or `sigmoid`."
)
FAR = "There the prior decides: do not rely on these predictions."
MORE = (
    "leave out `step_size` and `preconditioner`, take more steps or larger "
    "minibatches, or allow more bias."
)


class Finding(NamedTuple):
    """One check of a result.

    :param verdict: ``"ok"``, ``"warning"``, or ``"note"`` for what is worth knowing and
        may be intended.
    :param limit: the largest ``value`` that is ok (of ``acceptance``, ``covered``,
        ``ess``, ``few_draws`` the least).
    :param what: the measurement in words; ``advice``: what to do if it is off.
    """

    name: str
    verdict: str
    value: float
    limit: float
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}. {self.advice}"


class Health(NamedTuple):
    """The checks that could be made of a result, ``findings``; prints as a table.

    :param marked: labels of the chains that diverged or froze, which scores and figures
        leave out.
    """

    findings: tuple[Finding, ...]
    marked: tuple[int, ...] = ()

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What is off."""
        return tuple(
            finding for finding in self.findings if finding.verdict == "warning"
        )

    def __str__(self) -> str:
        row = "{f.verdict:8}{f.name:16}{f.value:>10.3g} (limit {f.limit:.3g})  {f.what}"
        return "\n".join(row.format(f=finding) for finding in self.findings)


def health(idata: InferenceData) -> Health:
    """Check whether a result can be trusted: its chains, energies, temperatures, mixing
    and fit of the function, its guide, its data.

    R-hat and ESS are those of the function at some rows, and of its worst output,
    because weights do not mix by symmetry. A check that lacks its numbers is left out;
    chains that one check finds at fault are left out of those after it.

    :param idata: result of :func:`~numpyro_bnn.to_inference_data`, or the path of a
        netCDF file with one.
    :raises TypeError: for anything else.

    >>> import numpy as np
    >>> from numpyro_bnn import _arviz
    >>> w, dims = (
    ...     np.random.default_rng(0).normal(size=(2, 200)),
    ...     ("chain", "draw", "data"),
    ... )
    >>> w[1] += 5.0
    >>> groups = {
    ...     "posterior": {"w": (dims[:2], w)},
    ...     "posterior_predictive": {"y_mean": (dims, w[..., None])},
    ... }
    >>> idata = _arviz.inference_data(
    ...     {name: _arviz.dataset(group) for name, group in groups.items()}
    ... )
    >>> health(idata).warnings[0].what
    'R-hat of the function is 1.82 (at most 1 within a chain)'
    """
    result = Result(_arviz.opened("metrics.health", idata))
    noisy = result.about.get("noisy_gradients")
    tempering = "" if noisy else ", or `ParallelTempering`"
    findings = []
    marked: set[int] = set()
    for check in CHECKS:
        few = result.independent or result.draws < check.min_draws
        if check.min_draws and few:
            continue
        with np.errstate(all="ignore"):
            measurement = check.measure(result)
        if measurement is None:
            continue
        value, limit, words, verdict, at_fault = measurement
        result = result.without(at_fault)
        if check.marks:
            marked |= at_fault
        name, advice = check.measure.__name__, check.advice.format(tempering)
        findings.append(
            Finding(name, verdict, float(value), float(limit), words, advice)
        )
    return Health(tuple(findings), tuple(result.chains[c] for c in sorted(marked)))


class Measurement(NamedTuple):
    """What a check has measured.

    :param verdict: as in :class:`Finding`.
    :param at_fault: positions of the chains that later checks leave out.
    """

    value: float
    limit: float
    words: str
    verdict: str
    at_fault: frozenset[int] = frozenset()

    def as_note(self) -> "Measurement":
        """A warning becomes a note."""
        return self if self.verdict == "ok" else self._replace(verdict="note")


def at_most(
    value: float, limit: float, words: str, at_fault: Iterable[int] = ()
) -> Measurement:
    """A warning if the value is above the limit, or NaN."""
    verdict = "ok" if value <= limit else "warning"
    return Measurement(value, limit, words, verdict, frozenset(at_fault))


def at_least(value: float, limit: float, words: str) -> Measurement:
    """A warning if the value is below the limit, or NaN."""
    return Measurement(value, limit, words, "ok" if value >= limit else "warning")


class Check(NamedTuple):
    """A check in the report.

    :param min_draws: draws that each chain needs; 0: also for independent draws.
    :param advice: what to do if it is off.
    :param marks: whether chains at fault are marked.
    """

    measure: Callable[[Result], Measurement | None]
    min_draws: int
    advice: str
    marks: bool


CHECKS: list[Check] = []


def check(advice: str, min_draws: int = 0, marks: bool = False) -> Callable:
    """Put a function in the list of checks."""

    def listed(measure: Callable) -> Callable:
        CHECKS.append(Check(measure, min_draws, advice, marks))
        return measure

    return listed


def worst(
    result: Result,
    values: ArrayLike,
    limit: float,
    words: str,
    below: bool = False,
    **more: np.ndarray,
) -> Measurement | None:
    """What is measured of the chain with the largest value (NaN is larger) that is
    not at fault.

    :param words: of value {0}, chain {1} and ``more`` values by chain.
    :param below: the smallest value is the worst; the limit is one from below.
    """
    by_chain = np.asarray(values, np.float64)
    scores = np.nan_to_num(-by_chain if below else by_chain, nan=np.inf)
    if not result.sound:
        return None
    c = max(result.sound, key=scores.__getitem__)
    of_chain = {name: numbers[c] for name, numbers in more.items()}
    text = words.format(by_chain[c], result.chains[c], **of_chain)
    return (at_least if below else at_most)(by_chain[c], limit, text)


def attribute(
    result: Result, name: str, limit: float, words: str, below: bool = False
) -> Measurement | None:
    """The check of a number by chain that a kernel reports."""
    values = result.by_chain(name)
    return None if values is None else worst(result, values, limit, words, below)


def mean_and_error(batches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of each chain over batches (B, C), and its standard error if these follow
    each other like an autoregression of first order.
    """
    mean = batches.mean(axis=0)
    off = batches - mean
    squares = np.maximum((off**2).sum(axis=0), np.finfo(np.float64).tiny)
    # The autocorrelation of few values is too low by about 2 over their number.
    related = (off[1:] * off[:-1]).sum(axis=0) / squares + 2 / len(batches)
    related = np.clip(related, 0.0, 0.9)
    error = batches.std(axis=0, ddof=1) / len(batches) ** 0.5
    return mean, error * ((1 + related) / (1 - related)) ** 0.5


def share_lost(share: np.ndarray, good: np.ndarray) -> np.ndarray:
    """The share of what is explained well (above 0.2) that chains do not explain."""
    return np.where(good > 0.2, 1 - np.maximum(share, 0.0) / good, 0.0)


# -- the checks ------------------------------------------------------------------------


@check(LEAVE_OUT, marks=True)
def diverged(result: Result) -> Measurement:
    first = result.by_chain("first_divergence")
    if first is None:
        first = np.full(len(result.chains), -1.0)
    wrong = np.flatnonzero((first >= 0) | ~result.finite("posterior").all(axis=1))
    names = []
    for c in wrong:
        step = f" at step {first[c]:.0f}" if first[c] >= 0 else ""
        names.append(f"chain {result.chains[c]}{step}")
    words = "all draws are finite"
    if names:
        words = (
            f"{result.about.get('algorithm', 'sampler')} diverged "
            f"({', '.join(names)}), draws are NaN or one point from there on"
        )
        sizes = result.numbers("base_step_size")
        words += f", with step sizes up to {sizes.max():.2g}" if sizes.size else ""
    return at_most(len(wrong), 0, words, wrong.tolist())


@check(LEAVE_OUT, MIN_REPEATED_DRAWS, marks=True)
def frozen(result: Result) -> Measurement | None:
    parameters = columns(result.numeric("posterior"), MAX_PARAMETERS)
    if not parameters.size:
        return None
    limit = max(MIN_REPEATED_DRAWS, result.draws // 10)
    repeats = []
    for draws in parameters:
        ends = np.flatnonzero(np.append((draws[1:] != draws[:-1]).any(axis=1), True))
        ranges = np.ptp(draws, axis=0)
        if (ranges <= MAX_RELATIVE_RANGE * np.abs(draws).max(axis=0)).all():
            repeats.append(result.draws)
        else:
            repeats.append(np.diff(ends, prepend=-1).max())
    words = f"chain {{1}} holds one draw for {{0:.0f}} of its {result.draws} draws"
    longest = worst(result, repeats, limit - 1, words)
    still = np.flatnonzero(np.array(repeats) >= limit).tolist()
    return longest and longest._replace(at_fault=frozenset(still))


@check(
    f"If nothing is accepted, use a smaller `step_size`; otherwise {MORE}",
    1,
    marks=True,
)
def moved(result: Result) -> Measurement | None:
    """The verdict of a kernel on its chains, from all of their steps."""
    if "frozen_chains" not in result.about:
        return None
    frozen = result.numbers("frozen_chains") / result.about.get("num_replicas", 1)
    still = [c for c in result.sound if result.positions[c] in frozen.tolist()]
    words = (
        f"chains {[result.chains[c] for c in still]} accept below 1 %, or cover "
        f"below 2 % of the variance"
    )
    return at_most(len(still), 0, words if still else "all chains moved", still)


@check(BORDER)
def support(result: Result) -> Measurement | None:
    """Draws that no kernel should have taken: an observation of theirs is
    impossible, or has no density.
    """
    if not result.arrays("log_likelihood"):
        return None
    words = (
        "{0:.2%} of the draws of chain {1} have log likelihoods that are NaN or "
        "infinite"
    )
    return worst(result, 1 - result.finite("log_likelihood").mean(axis=1), 0, words)


@check(LEAVE_OUT, MIN_REPEATED_DRAWS)
def acceptance(result: Result) -> Measurement | None:
    words = "chain {1} accepts {0:.1%} of its proposals"
    return attribute(result, "mean_accept_prob", 0.1, words, below=True)


@check("Raise `target_accept_prob`, or make scales non-centered.", MIN_DRAWS)
def divergences(result: Result) -> Measurement | None:
    diverging = result.statistic("diverging")
    if diverging is None or "first_divergence" in result.about:
        return None
    words = "{0:.1%} of the transitions of chain {1} diverged"
    return worst(result, diverging.mean(axis=1), 0.05, words)


@check(SMALLER_OR_NON_CENTERED, MIN_DRAWS)
def energy_variance(result: Result) -> Measurement | None:
    """Against its target; on minibatches, whose noise chooses the steps, there is
    none, and only the bias that it implies is judged.
    """
    energies = result.by_chain("mean_energy_variance")
    if energies is None:
        return None
    target = float(result.about.get("target_energy_variance", 0.0))
    # The bias is that of the worst of all chains.
    has_faults = len(result.sound) < len(result.chains)
    bias = 0.0 if has_faults else float(result.about.get("implied_bias", 0.0))
    words = "the energy variance of chain {1} is {energy:.2g} per parameter"
    words += f", its target {target:.2g}" if target else ""
    words += f" (implied error of a variance {bias:.2g})" if bias else ""
    if not target:
        largest = worst(result, energies, np.inf, words, energy=energies)
        return largest and at_most(bias, 0.5, largest.words)
    # Four times the tolerated bias has 64 times its variance, a tenth of the step
    # length a millionth.
    ratio = np.maximum(energies / target, 64e-6 * target / energies)
    largest = worst(result, ratio, 64, words, energy=energies)
    if largest and not bias < 0.5:
        return largest._replace(verdict="warning")
    return largest


@check(f"It took none of many steps. {SMALLER} by more warm-up.", 1)
def restarts(result: Result) -> Measurement | None:
    words = "chain {1} started again {0:.0f} times in warm-up"
    largest = attribute(result, "restarts", 0, words)
    return largest and largest.as_note()


@check(SMALLER_OR_NON_CENTERED, 1)
def refused_steps(result: Result) -> Measurement | None:
    """A note where few are refused, or fewer than half and chains do not differ in
    what they predict.
    """
    words = "chain {1} refused {0:.0%} of its steps"
    largest = attribute(result, "refused_steps", 0.05, words)
    if largest is None or not largest.value <= MAX_REFUSED:
        return largest
    few = largest.value <= 0.1 or nats_apart(result) <= MAX_NATS_APART
    return largest.as_note() if few else largest


@check(f"{SMALLER}; take larger batches, and more warm-up.", MIN_DRAWS)
def temperature(result: Result) -> Measurement | None:
    """The mean of each chain, less four standard errors by batches of draws,
    against the target or its band.

    The mean of theta' grad U / P is no temperature while a chain still drifts: it
    contains mean position times mean gradient. Where the kernel reports the
    covariance of the two, that is judged, whether it is too hot: too little of it
    is what ``covered`` finds.
    """
    target = float(result.about.get("temperature", 1.0))
    band = float(result.about.get("temperature_band_high", target)) - target
    covered = result.by_chain("variance_covered")
    measurements = []
    for name in ("configurational_temperature", "kinetic_temperature"):
        values = result.statistic(name)
        if values is None or not target:
            continue
        batches = [
            batch.mean(axis=1, dtype=np.float64)
            for batch in np.array_split(values, 10, axis=1)
        ]
        means, errors = mean_and_error(np.array(batches))
        if name == "configurational_temperature" and covered is not None:
            means = covered * target
            excess = means - target
        else:
            excess = np.abs(means - target)
        words = (
            f"the {name.replace('_', ' ')} of chain {{1}} is {{mean:.2f}}, its "
            f"target {target:g}"
        )
        allowed = max(0.25 * target, band)
        excess = np.maximum(excess - 4 * errors, 0.0)
        measurements.append(worst(result, excess, allowed, words, mean=means))
    return max(filter(None, measurements), default=None)


@check("It is trapped: start elsewhere, or run longer.")
def fit(result: Result) -> Measurement | None:
    """The share of what its member of the warm start, or the best chain, explains that
    a chain does not.

    A member may have learned the noise of its rows, which no draw should. But the draws
    of a chain around it lose about half a nat of the density for each parameter, as
    those of a Gaussian do: where they have lost no more, it is a note.
    """
    if result.draws < MIN_DRAWS:
        return None
    members = json.loads(result.about.get("explained_by_members", "{}"))
    left_member = _left_member(result)
    at_fault: set[int] = set()
    measurements = []
    for site, share in result.explained.items():
        best = np.full(len(share), np.fmax.reduce(share))
        good = best
        if site in members:
            good = np.fmax(np.array(members[site])[result.positions], best)
        lost = share_lost(share, good)
        trapped = share_lost(share, best) > MAX_SHARE_LOST
        trapped |= (lost > MAX_SHARE_LOST) & left_member
        words = (
            f"of {site} at the training rows chain {{1}} explains {{own:.0%}}, its "
            f"member or the best chain {{good:.0%}}"
        )
        largest = worst(
            result.without(at_fault),
            np.where(trapped, lost, 0.0) if trapped.any() else lost,
            MAX_SHARE_LOST,
            words,
            own=np.maximum(share, 0),
            good=good,
        )
        if largest:
            measurements.append(largest if trapped.any() else largest.as_note())
        if not trapped.all():
            at_fault |= set(np.flatnonzero(trapped).tolist())
    if not measurements:
        return None
    largest = max(measurements, key=lambda m: (m.verdict == "warning", m.value))
    return largest._replace(at_fault=frozenset(at_fault))


def _left_member(result: Result) -> np.ndarray:
    """Whether the log likelihood of a chain (C,) is lower than that of its member by
    more than P / 2 nats; where it was not exported, by assumption.
    """
    members = result.numbers("log_likelihood_of_members")
    densities = result.arrays("log_likelihood")
    if not members.size or not densities:
        return np.ones(len(result.chains), bool)
    totals = np.zeros(len(result.chains))
    for values in densities.values():
        by_draw = values.reshape(*values.shape[:2], -1).sum(axis=2, dtype=np.float64)
        totals += by_draw.mean(axis=1)
    return ~(members[result.positions] - totals <= result.size / 2)  # also if NaN


@check(
    "If it has not learned, take more steps; if it has learned noise, a narrower prior "
    "or a smaller network; or another method. Of `AutoLaplace` take `predictive`."
)
def linear(result: Result) -> Measurement | None:
    """By how much a constant or a linear model predicts rows better, each from the
    others.
    """
    if result.draws < MIN_DRAWS:
        return None
    measurements = []
    for site, better in result.behind().items():
        words = f"no simple model is clearly better at left-out rows of {site}"
        nats = 0.0
        if better is not None:
            nats = better.nats
            words = (
                f"{better.model} predicts each row of {site} from the others better "
                f"by {nats:.2g} nats"
            )
        measurements.append(at_most(nats, MAX_NATS_BEHIND, words))
    return max(measurements, key=lambda m: m.value, default=None)


@check(f"Too few steps, or too small ones: {MORE}", MIN_DRAWS)
def covered(result: Result) -> Measurement | None:
    """A note where all that is missing is worth little: a chain at rest has P / 2 nats
    more than its mode, shared by all observations.
    """
    words = "chain {1} covers {0:.0%} of the posterior variance"
    least = attribute(result, "variance_covered", 0.25, words, below=True)
    if least is None:
        return None
    observations = sum(np.isfinite(y).sum() for y in result.targets.values())
    missing = (1 - least.value) * result.size / (2 * observations)  # inf without any
    return least.as_note() if missing <= MAX_NATS_APART else least


@check(f"Too few steps: {MORE}")
def steps(result: Result) -> Measurement | None:
    """Steps after warm-up, against those in which a chain on minibatches forgets
    its position often enough.
    """
    steps = float(result.about.get("steps_kept", 0))
    needed = float(result.about.get("steps_needed", 0))
    if not needed or steps < MIN_STEPS:
        return None
    words = (
        f"{steps:.0f} steps, where the gradient noise asks for {needed:.0e} after "
        f"as long a warm-up"
    )
    return at_most(needed / steps, 1, words)


def max_of(costs: Iterable[np.ndarray]) -> float:
    """The largest of all; NaN if one is, or there is none."""
    largest = [cost.max() for cost in costs]
    return float(np.max(largest)) if largest else float("nan")


def nats_apart(result: Result) -> float:
    """What it costs an observation to predict it by the worst half of a chain."""
    return max_of(halves.costs() for halves in result.halves())


def _largest_rhat(function: Entries) -> float:
    """The limit, or what the worst of all entries of few independent draws exceeds in
    one of a hundred results.
    """
    chains, draws, entries = function.draws.shape
    freedom = 2 * chains - 1  # of means of the halves of chains
    # ranks are compared, and distances from the median
    chance = chdtri(freedom, 0.01 / (2 * entries)) / freedom
    return max(MAX_RHAT, float(np.sqrt(1 + chance / (draws / 2))))


@check("Take more draws; if chains differ, a longer warm start{}.", MIN_DRAWS)
def rhat(result: Result) -> Measurement | None:
    """R-hat of the function; a note where chains differ by so little beside the noise
    that a prediction by the worst half of a chain costs next to nothing.
    """
    function = result.function()
    if not function.draws.size or np.isnan(value := function.worst(_arviz.rhat)):
        return None
    words, limit = f"R-hat of the function is {value:.3g}", _largest_rhat(function)
    if value <= limit:
        return at_most(value, limit, words)
    if len(function.draws) > 1:
        chains = [function._replace(draws=chain[None]) for chain in function.draws]
        largest = max(chain.worst(_arviz.rhat) for chain in chains)
        words += f" (at most {largest:.3g} within a chain)"
    apart = nats_apart(result)
    if not apart <= MAX_NATS_APART:
        return at_most(value, limit, words)
    words += f"; no half of a chain costs an observation more than {apart:.2g} nats"
    return at_most(value, limit, words).as_note()


@check("Take more draws, or more steps per draw (`steps_per_draw`).", MIN_DRAWS)
def ess(result: Result) -> Measurement | None:
    """Effective draws, which mean nothing where R-hat is large; a note where the error
    of the mean function is small beside the noise.
    """
    function = result.function()
    if not function.draws.size:
        return None
    if function.worst(_arviz.rhat) > _largest_rhat(function):
        return None
    value = -function.worst(lambda draws: -_arviz.ess(draws))
    if np.isnan(value):
        return None
    total = len(function.draws) * result.draws
    words = f"{total} draws are worth {value:.0f} independent ones of the function"
    measurement = at_least(value, min(100.0, total / 10), words)
    cost = max_of(halves.costs_of_error(value) for halves in result.halves())
    return measurement.as_note() if cost <= MAX_NATS_OF_ERROR else measurement


@check(
    "Raise `max_tree_depth`, standardize the data, or make scales non-centered.",
    MIN_DRAWS,
)
def tree_depth(result: Result) -> Measurement | None:
    steps = result.statistic("n_steps", "num_steps")
    depth = int(result.about.get("max_tree_depth", 0))
    if steps is None or not depth:
        return None
    words = f"{{0:.0%}} of the trees of chain {{1}} have the largest depth, {depth}"
    return worst(result, (steps >= 2**depth - 1).mean(axis=1), 0.1, words)


@check("The guide misses part of the posterior: judge its predictions of test data.")
def pareto_k(result: Result) -> Measurement | None:
    """For networks it is a note: it is above its limit for about every guide,
    whatever the function is like.
    """
    if result.draws < MIN_DRAWS:
        return None
    words = "the importance weights have Pareto k {0:.2f}"
    largest = attribute(result, "pareto_k", 0.7, words)
    return largest.as_note() if largest and result.has_network else largest


@check(
    "If it rises, go on from `init_state=result.state`; if it falls, take smaller "
    "steps."
)
def elbo(result: Result) -> Measurement | None:
    rise = result.by_chain("elbo_rise")
    if rise is None:
        return None
    size = sum(y.size for y in result.arrays("observed_data").values())
    words = (
        "at the end of the fit the ELBO changes by {rise:+.3g} nats per tenth of "
        "the steps"
    )
    return worst(result, np.abs(rise), max(1.0, 0.01 * size), words, rise=rise)


@check("Priors of networks expect about 0 and 1: `datasets.Scaler`.")
def standardized(result: Result) -> Measurement | None:
    if not result.has_network:
        return None
    observed = result.arrays("observed_data")
    tables = dict(result.inputs)
    for name, y in result.targets.items():
        if observed[name].dtype.kind == "f" and y.ndim:
            tables[name] = table(y)
    measurements = []
    for name, x in tables.items():
        rows = x if name in result.inputs else x[np.isfinite(x).all(axis=1)]
        rows = rows[spread(len(rows), INPUT_ROWS)].astype(np.float64)
        if rows.size:
            mean = rows.mean(axis=0)
            sd = rows.std(axis=0)
            size = 1 / np.abs(rows).max(axis=0)
            off = np.maximum.reduce([np.abs(mean), sd, size])
            off = np.nan_to_num(np.where(sd == 0, 0.0, off), nan=np.inf)
            c = int(off.argmax())
            words = (
                f"{(off > 10).sum()} of {off.size} columns of {name} are off: "
                f"column {c} has mean {mean[c]:.3g}, standard deviation {sd[c]:.3g}"
            )
            measurements.append(at_most(off[c], 10, words))
    return max(measurements, default=None)


@check("Drop them: they say what the bias says.")
def constant_inputs(result: Result) -> Measurement | None:
    tables = {name: x for name, x in result.inputs.items() if x.size}
    if not tables:
        return None
    constant: list[str] = []
    for name, x in tables.items():
        still = np.flatnonzero((np.ptp(x, axis=0) == 0) & (x[0] != 0))
        constant += [f"{column} of {name}" for column in still]
    words = f"constant columns: {', '.join(constant[:5]) or 'none'}"
    return at_most(len(constant), 0, words)


@check(FAR)
def extrapolation(result: Result) -> Measurement | None:
    new = result.arrays("predictions_constant_data")
    measurements = []
    for name, x in result.inputs.items():
        if name in new and x.size:
            rows = table(np.moveaxis(new[name], result.row_axis(name) or 0, 0))
            share = extrapolated(x, rows, f" new rows of {name}")
            measurements.append(at_most(*share))
    return max(measurements, default=None)


@check("Take more draws for a judgment.")
def few_draws(result: Result) -> Measurement:
    words = (
        f"{result.draws} draws{'' if result.independent else ' in each chain'}; "
        f"mixing, fit and weights are judged from {MIN_DRAWS}"
    )
    return at_least(result.draws, MIN_DRAWS, words).as_note()
