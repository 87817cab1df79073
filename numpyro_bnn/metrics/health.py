"""A health report: what is off in a result, how much, and what to do about it."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from numpyro_bnn import _arviz
from numpyro_bnn.metrics._inputs import Floats
from numpyro_bnn.metrics.health_evidence import ROWS, Evidence, explained, explained_by_site, some_rows, spread, table

LEAST_DRAWS = 100  # draws of a chain below which R-hat, ESS and averages over draws are mostly noise
STILL = 1e-4  # a chain is frozen if no parameter varies by more than this part of its size
LEAST_REPEATS = 20  # so many rejections in a row have the probability 1e-6 at an acceptance of 0.5


class HealthWarning(UserWarning):
    """What :func:`health` finds wrong in a result that is exported; ``idata.attrs["health"]`` keeps it.

    >>> import warnings
    >>> warnings.simplefilter("ignore", HealthWarning)
    """


class Finding(NamedTuple):
    """One check of a result.

    :param name: name of the check.
    :param verdict: ``"ok"``, ``"warning"``, or ``"note"`` for what is worth knowing and may be intended.
    :param value: what was measured.
    :param limit: the largest value (of ``ess`` and ``draws`` the smallest) that is ok.
    :param what: the measurement in words.
    :param advice: what to do if it is off.
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
    """The checks that could be made of a result; prints as a table.

    :param findings: a :class:`Finding` for each.
    """

    findings: tuple[Finding, ...]

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What is off."""
        return tuple(finding for finding in self.findings if finding.verdict == "warning")

    def __str__(self) -> str:
        rows = [f"{f.verdict:8}{f.name:16}{f.value:>10.3g} (limit {f.limit:.3g})  {f.what}" for f in self.findings]
        return "\n".join(rows)

    def to_json(self) -> str:
        """The findings as text, for an attribute of a file; ``null`` for numbers that are not finite."""
        rows = [f._asdict() | {"value": f.value if np.isfinite(f.value) else None} for f in self.findings]
        return json.dumps(rows)


def health(idata: Any) -> Health:
    """Check a result: its chains, energies, temperatures, mixing and fit of the function, its guide, its data.

    R-hat and ESS are those of the function at up to 16 training rows (or new ones), because weights do not mix by
    symmetry. A check that lacks its numbers is left out, e.g. that of trees without the statistic ``num_steps``;
    chains that one check finds at fault are left out of those after it.

    :param idata: result of :func:`~numpyro_bnn.to_inference_data`, which warns of what is off
        (:class:`HealthWarning`), or the path of a netCDF file with one.
    :return: a :class:`~numpyro_bnn.metrics.health.Health`.
    :raises TypeError: for anything else.

    >>> import numpy as np
    >>> from numpyro_bnn import _arviz
    >>> w, dims = np.random.default_rng(0).normal(size=(2, 200)), ("chain", "draw", "data")
    >>> w[1] += 5.0
    >>> groups = {"posterior": {"w": (dims[:2], w)}, "posterior_predictive": {"y_mean": (dims, w[..., None])}}
    >>> idata = _arviz.inference_data({name: _arviz.dataset(group) for name, group in groups.items()})
    >>> health(idata).warnings[0].what
    'R-hat of the function is 1.82 (at most 1 within a chain)'
    """
    evidence, found = Evidence(_arviz.opened(idata)), []
    for check in CHECKS:
        if check.of_chains and (evidence.independent or evidence.draws < check.least):
            continue
        with np.errstate(all="ignore"):
            measured = check.measure(evidence)
        if measured:
            value, limit, what, *off = measured
            wrong = off[0] if off else not value <= limit  # NaN is wrong
            found.append(
                Finding(check.name, check.verdict if wrong else "ok", float(value), float(limit), what, check.advice)
            )
    return Health(tuple(found))


# -- the checks: each gives value, limit and words (and, unless larger values are worse, whether it is off) ----------

Measured = tuple[Any, ...] | None


def diverged(e: Evidence) -> Measured:
    first, wrong = e.by_chain("first_divergence"), ~np.isfinite(e.parameters).all(axis=(1, 2))
    wrong = wrong if first is None else wrong | (first >= 0)
    e.faulty |= set(np.flatnonzero(wrong).tolist())
    at = [f" at step {int(first[c])}" if first is not None and first[c] >= 0 else "" for c in range(len(wrong))]
    named = ", ".join(f"chain {e.chains[c]}{at[c]}" for c in np.flatnonzero(wrong))
    sizes = e.by_chain("base_step_size")
    largest = "" if sizes is None else f", with step sizes up to {np.max(sizes):.2g}"
    what = f"{e.about.get('algorithm', 'sampler')} diverged ({named}): draws are NaN from there on{largest}"
    return wrong.sum(), 0, what if named else "all draws are finite"


def frozen(e: Evidence) -> Measured:
    if not e.parameters.size:
        return None
    limit, runs = max(LEAST_REPEATS, e.draws // 10), []
    for draws in e.parameters:
        ends = np.flatnonzero(np.append((draws[1:] != draws[:-1]).any(axis=1), True))
        still = (np.ptp(draws, axis=0) <= STILL * np.abs(draws).max(axis=0)).all()
        runs.append(e.draws if still else np.diff(ends, prepend=-1).max())
    longest = e.without_faulty(runs)
    e.faulty |= set(np.flatnonzero(longest >= limit).tolist())
    worst = int(longest.argmax())
    what = f"chain {e.chains[worst]} holds one draw for {longest[worst]:.0f} of its {e.draws} draws"
    return longest[worst], limit - 1, what


def divergences(e: Evidence) -> Measured:
    diverging = e.statistic("diverging")
    if diverging is None or "first_divergence" in e.about:
        return None
    shares = diverging.mean(axis=1)
    worst = int(shares.argmax())
    return shares[worst], 0.05, f"{shares[worst]:.1%} of the transitions of chain {e.chains[worst]} diverged"


def step_sizes(e: Evidence) -> Measured:
    sizes, by_draw = e.by_chain("base_step_size"), e.statistic("step_size")
    sizes = by_draw.mean(axis=1) if sizes is None and by_draw is not None else sizes
    sound = [c for c in range(len(e.chains)) if c not in e.faulty]
    if sizes is None or len(sound) < 2:
        return None
    low, high = min(sound, key=sizes.__getitem__), max(sound, key=sizes.__getitem__)
    what = f"chain {e.chains[low]} takes steps of {sizes[low]:.2g}, chain {e.chains[high]} of {sizes[high]:.2g}"
    return sizes[high] / max(sizes[low], np.finfo(float).tiny), 100, what


def energy_variance(e: Evidence) -> Measured:
    energies, target = e.by_chain("mean_energy_variance"), float(e.about.get("target_energy_variance", 0.0))
    if energies is None or not target:
        return None
    # Four times the tolerated bias has 64 times its variance, a tenth of the step length a millionth.
    off = np.nan_to_num(np.maximum(energies / target / 64, 1e-6 * target / energies), nan=np.inf)
    worst = int(e.without_faulty(off).argmax())
    bias = 0.0 if e.faulty else float(e.about.get("implied_bias", 0.0))
    what = f"the energy variance of chain {e.chains[worst]} is {energies[worst]:.2g} per parameter, its target"
    what += f" {target:.2g}" + (f" (implied error of a variance {bias:.2g})" if bias else "")
    return energies[worst], 64 * target, what, e.without_faulty(off)[worst] > 1 or not bias < 0.5


def temperature(e: Evidence) -> Measured:
    """The mean of each chain, less four standard errors by batches of draws, against the target or its band."""
    target, found = float(e.about.get("temperature", 1.0)), []
    allowed = max(0.25 * target, float(e.about.get("temperature_band_high", target)) - target)
    for name in ("configurational_temperature", "kinetic_temperature"):
        values = e.statistic(name)
        if values is None or not target:
            continue
        batches = [batch.mean(axis=1, dtype=np.float64) for batch in np.array_split(values, 10, axis=1)]
        means, errors = np.mean(batches, axis=0), np.std(batches, axis=0, ddof=1) / np.sqrt(10)
        away = e.without_faulty(np.maximum(np.abs(means - target) - 4 * errors, 0.0))
        worst = int(away.argmax())
        named = f"the {name.replace('_', ' ')} of chain {e.chains[worst]} is {means[worst]:.2f}"
        found.append((away[worst], allowed, f"{named} on average, its target {target:g}"))
    return max(found, default=None)


def fit(e: Evidence) -> Measured:
    """The share of what each chain's member, the best chain or least squares explain that a chain does not."""
    observed, means = e.arrays("observed_data"), e.means("posterior_predictive")
    members, lost_by = json.loads(e.about.get("explained_by_members", "{}")), []
    if e.draws < LEAST_DRAWS:
        return None
    for site, values in explained_by_site(means, observed).items():
        references: dict[str, Any] = {
            "its member of the warm start": np.array(members[site])[e.positions] if site in members else np.nan,
            "the best chain": np.nan_to_num(values, nan=-np.inf).max(),
            "a linear fit": _least_squares(e, observed[site], f"{site}_probs" in means),
        }
        for name, reference in references.items():
            good = np.broadcast_to(reference, values.shape)
            lost = e.without_faulty(np.where(good > 0.2, 1 - np.maximum(values, 0.0) / np.maximum(good, 0.2), 0.0))
            c = int(lost.argmax())
            who = "the guide" if e.independent else f"chain {e.chains[c]}"
            what = f"of {site} at the training rows {who} explains {max(values[c], 0):.0%}, {name} {good[c]:.0%}"
            lost_by.append((lost[c], 0.75, what, lost > 0.75))
    if not lost_by:
        return None
    wrong = np.any([each[3] for each in lost_by], axis=0)
    e.faulty |= set() if wrong.all() else set(np.flatnonzero(wrong).tolist())
    return max(lost_by, key=lambda each: each[0])[:3]


def _least_squares(e: Evidence, y: np.ndarray, classes: bool) -> float:
    """What a linear function of the inputs explains, corrected for its number of parameters; NaN if unknown."""
    rows = spread(len(y), ROWS)
    inputs = [x[rows] for x in e.inputs.values() if len(x) == len(y)]
    design = np.concatenate([np.ones((len(rows), 1)), *inputs], axis=1, dtype=np.float64)
    target = np.eye(int(y.max()) + 1)[y[rows].astype(int)] if classes else y[rows].reshape(len(rows), -1)
    (n, size), known = design.shape, np.isfinite(design).all() and np.isfinite(target).all()
    if size == 1 or 5 * size * (target.shape[1] - 1 if classes else 1) > n or not known:
        return float("nan")
    fitted = design @ np.linalg.lstsq(design, target, rcond=None)[0]
    found = explained(fitted if classes else fitted.reshape(y[rows].shape), y[rows], classes)
    return float(1 - (1 - found) * (n - 1) / (n - size))


def rhat(e: Evidence) -> Measured:
    value, within = _high(_arviz.rhat(e.function), 0.9) if e.function.size else np.nan, ""
    e.mixed = not value > 1.1
    if not e.mixed and len(e.function) > 1:
        largest = max(_high(_arviz.rhat(chain[None]), 0.9) for chain in e.function)
        within = f" (at most {largest:.3g} within a chain)"
    return None if np.isnan(value) else (value, 1.1, f"R-hat of the function is {value:.3g}{within}")


def ess(e: Evidence) -> Measured:
    value, total = -_high(-_arviz.ess(e.function), 0.9) if e.function.size else np.nan, len(e.function) * e.draws
    limit = min(100.0, total / 10)
    what = f"{total} draws are worth {value:.0f} independent ones of the function"
    return (value, limit, what, value < limit) if e.mixed and not np.isnan(value) else None


def _high(values: Floats, level: float) -> float:
    """Quantile of the values that are defined (infinite ones too); NaN if none is."""
    known = np.sort(values[~np.isnan(values)])
    return float(known[int(np.ceil(level * (len(known) - 1)))]) if known.size else float("nan")


def trees(e: Evidence) -> Measured:
    depths, most = e.statistic("tree_depth"), int(e.about.get("max_tree_depth", 0))
    if depths is None or not most:
        return None
    share = (depths >= most).mean()
    return share, 0.1, f"{share:.0%} of the trees have the largest depth, {most}"


def pareto_k(network: bool, e: Evidence) -> Measured:
    """For networks it is a note: it is above its limit for about every guide, whatever the function is like."""
    k = float(e.about.get("pareto_k", np.nan))
    judged = not np.isnan(k) and e.draws >= LEAST_DRAWS and e.has_network == network
    return (k, 0.7, f"the importance weights have Pareto k {k:.2f}") if judged else None


def elbo(e: Evidence) -> Measured:
    if "elbo_rise" not in e.about:
        return None
    rise, size = float(e.about["elbo_rise"]), sum(np.size(y) for y in e.arrays("observed_data").values())
    how = f"{'rises' if rise >= 0 else 'falls'} by {abs(rise):.3g} nats per tenth of the steps"
    return abs(rise), max(1.0, 0.01 * size), f"at the end of the fit the ELBO {how}"


def standardized(e: Evidence) -> Measured:
    targets = {name: y for name, y in e.arrays("observed_data").items() if y.dtype.kind == "f" and y.ndim}
    tables, found = {**e.inputs, **{name: table(y) for name, y in targets.items()}}, []
    for name, x in tables.items() if e.has_network else ():
        some = some_rows(x)
        if not some.size:
            continue
        mean, sd, size = some.mean(axis=0), some.std(axis=0), 1 / np.abs(some).max(axis=0)
        off = np.where(sd > 0, np.maximum.reduce([np.abs(mean), sd, size]), 0.0)
        worst, more = int(off.argmax()), int((off > 10).sum()) - 1
        others = f" (and {more} more)" if more > 0 else ""
        what = f"column {worst} of {name}{others} has mean {mean[worst]:.3g}, standard deviation {sd[worst]:.3g}"
        found.append((off[worst], 10, what))
    return max(found, default=None)


def constant_inputs(e: Evidence) -> Measured:
    found = []
    for name, x in e.inputs.items():
        still = [c for c in np.flatnonzero(np.ptp(some_rows(x), axis=0) == 0) if x[0, c] and np.ptp(x[:, c]) == 0]
        found += [f"{c} of {name}" for c in still]
    return (len(found), 0, f"constant columns: {', '.join(found[:5]) or 'none'}") if e.inputs else None


def extrapolation(e: Evidence) -> Measured:
    held, found = e.arrays("predictions_constant_data"), []
    for name, x in e.inputs.items():
        if name in held:
            new, sd = table(held[name]), some_rows(x).std(axis=0)  # as many columns, or the export refuses them
            width = 3 * np.maximum(sd, np.median(sd))
            beyond = ((new < x.min(axis=0) - width) | (new > x.max(axis=0) + width)).any(axis=1)
            words = f"{beyond.sum()} of {len(new)} new rows of {name} lie more than 3 standard deviations"
            found.append((beyond.mean(), 0.01, f"{words} outside the training rows"))
    return max(found, default=None)


def few_draws(e: Evidence) -> Measured:
    what = f"{e.draws} draws{'' if e.independent else ' in each chain'}; mixing, fit and weights are judged from"
    return e.draws, LEAST_DRAWS, f"{what} {LEAST_DRAWS}", e.draws < LEAST_DRAWS


def attribute(name: str, limit: float, what: str, e: Evidence) -> Measured:
    """The largest value of an attribute over the chains: a kernel that reports one more needs one more row."""
    values = e.by_chain(name)
    return None if values is None else (np.max(values), limit, what.format(np.max(values)))


class Check(NamedTuple):
    """A row of the table: one ``of_chains`` needs ``least`` draws in each, and is not made of independent draws."""

    name: str
    measure: Callable[[Evidence], Measured]
    advice: str
    of_chains: bool = True
    least: int = LEAST_DRAWS
    verdict: str = "warning"


SMALLER = "Use a smaller `step_size`, or None to have one chosen"
LEAVE_OUT = "Leave it out (`idata.sel(chain=[...])`), or run it again with more warm-up and another key."
NONCENTER = "Non-centered scales (`priors.noncenter`) need less."
MISSES = "The guide misses part of the posterior: judge its predictions of test data."
REFUSED_STEPS = "refused_steps", 0.1, "{:.0%} of the steps were refused"
REFUSED_UPDATES = "refused_updates", 0.05, "{:.0%} of the updates of weights were refused"  # the run has warned
CHECKS = (
    Check("diverged", diverged, f"{SMALLER}; leave these chains out (`idata.sel(chain=[...])`).", False),
    Check("frozen", frozen, f"{SMALLER}, and look at its acceptance. {LEAVE_OUT}", least=LEAST_REPEATS),
    Check("divergences", divergences, "Raise `target_accept_prob`, or make scales non-centered."),
    Check("step_size", step_sizes, LEAVE_OUT, least=LEAST_REPEATS),
    Check("energy_variance", energy_variance, f"{SMALLER} by more warm-up. {NONCENTER}"),
    Check("refused_steps", partial(attribute, *REFUSED_STEPS), f"{SMALLER}. {NONCENTER}", least=LEAST_REPEATS),
    Check("temperature", temperature, f"{SMALLER}; take larger batches, and more warm-up."),
    Check("fit", fit, "It is trapped: start elsewhere, run longer, or give a guide a smaller `init_scale`.", False),
    Check("rhat", rhat, "Take more warm-up and draws; if chains differ, a longer warm start or `ParallelTempering`."),
    Check("ess", ess, "Take more draws, or more steps per draw (`steps_per_draw`)."),
    Check("tree_depth", trees, "Raise `max_tree_depth`, standardize the data, or make scales non-centered."),
    Check("pareto_k", partial(pareto_k, False), MISSES, False),
    Check("pareto_k", partial(pareto_k, True), MISSES, False, verdict="note"),
    Check("refused_updates", partial(attribute, *REFUSED_UPDATES), "Standardize the data.", False, verdict="note"),
    Check("elbo", elbo, "If it rises, go on from `init_state=result.state`; if it falls, take smaller steps.", False),
    Check("standardized", standardized, "Priors of networks expect about 0 and 1: `datasets.standardize`.", False),
    Check("constant_inputs", constant_inputs, "Drop them: they say what the bias says.", False),
    Check("extrapolation", extrapolation, "There the prior decides: do not rely on these predictions.", False),
    Check("draws", few_draws, "Take more draws for a judgment.", False, verdict="note"),
)
