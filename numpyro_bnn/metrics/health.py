"""A health report: what is off in a result, how much, and what to do about it."""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from numpyro_bnn import _arviz
from numpyro_bnn.metrics._explained import (
    Losses,
    losses_by_site,
    losses_of_linear_model,
)
from numpyro_bnn.metrics._inputs import (
    INPUT_ROWS,
    columns,
    extrapolated,
    high,
    spread,
    table,
)

# draws of a chain below which R-hat, ESS and averages over draws are mostly noise
MIN_DRAWS = 100
# so many rejections in a row have the probability 1e-6 at an acceptance of 0.5
MIN_REPEATED_DRAWS = 20
MIN_STEPS = 1000  # of a chain before they are called few
# a chain is frozen if no parameter varies by more than this part of its size
MAX_RELATIVE_RANGE = 1e-4
# At most so many values of the function, parameters, rows, and draws of a mean are
# read.
COLUMNS, PARAMETERS = 16, 256
MAX_SHARE_LOST = 0.75  # of what a member explains, before a chain counts as trapped
MAX_SHARE_BEHIND_LINE = 0.1  # of the targets that a linear model explains
MAX_RHAT = 1.1
# Chains whose means differ by less than half a standard deviation of the observations
MAX_RHAT_OF_OBSERVATIONS = 1.05


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


def health(idata: Any) -> Health:
    """Check a result: its chains, energies, temperatures, mixing and fit of the
    function, its guide, its data.

    R-hat and ESS are those of the function at up to 16 rows, because weights do not mix
    by symmetry. A check that lacks its numbers is left out; chains that one check finds
    at fault are left out of those after it.

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
    checks = _Checks(_arviz.opened("metrics.health", idata))
    noisy = checks.about.get("noisy_gradients")
    tempering = "" if noisy else ", or `ParallelTempering`"
    findings = []
    marked: set[int] = set()
    for check in CHECKS:
        few = checks.independent or checks.draws < check.min_draws
        if check.min_draws and few:
            continue
        with np.errstate(all="ignore"):
            measurement: Measurement | None = getattr(checks, check.name)()
        if measurement is None:
            continue
        value, limit, words, verdict, at_fault = measurement
        checks.faulty |= at_fault
        if check.marks:
            marked |= at_fault
        advice = check.advice.format(tempering)
        findings.append(
            Finding(check.name, verdict, float(value), float(limit), words, advice)
        )
    return Health(tuple(findings), tuple(checks.chains[c] for c in sorted(marked)))


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
    """A check in the report: a method of ``_Checks``.

    :param min_draws: draws that each chain needs; 0: also for independent draws.
    :param advice: what to do if it is off.
    :param marks: whether chains at fault are marked.
    """

    name: str
    min_draws: int
    advice: str
    marks: bool = False


class _Checks:
    """What is read of a result, and the checks, by name: each returns what it measured,
    or nothing if it cannot.
    """

    def __init__(self, idata: Any) -> None:
        self.about = _arviz.attrs(idata)
        self.groups = {
            name: _arviz.group(idata, name) for name in _arviz.group_names(idata)
        }
        sampled = [g for g in self.groups.values() if {"chain", "draw"} <= set(g.sizes)]
        self.chains: list[int] = []
        self.draws = 0
        if sampled:
            self.chains = sampled[0]["chain"].to_numpy().tolist()
            self.draws = sampled[0].sizes["draw"]
        self.independent = bool(self.about.get("independent_draws", not sampled))
        #: Positions of the chains that the checks so far have found at fault: `health`
        # adds them after each check.
        self.faulty: set[int] = set()
        # Chains may have been selected, or have labels of their own. Kernels report one
        # number per chain and replica.
        self.run_chains = int(self.about.get("num_chains", len(self.chains)))
        of_run = all(label in range(self.run_chains) for label in self.chains)
        self.positions = np.array(
            self.chains if of_run else range(len(self.chains)), int
        )

    @property
    def sound(self) -> list[int]:
        """Positions of the chains that are not at fault so far."""
        return [c for c in range(len(self.chains)) if c not in self.faulty]

    def variables(self, group: str) -> Mapping[Any, Any]:
        """Variables of a group; none if there is no such group."""
        return self.groups[group].data_vars if group in self.groups else {}

    def arrays(self, group: str) -> dict[str, np.ndarray]:
        """Values of a group, chains and draws first; data as the model has seen
        them.
        """
        scaled = group in ("constant_data", "observed_data", "posterior_predictive")
        arrays = {}
        for name, variable in self.variables(group).items():
            ordered = variable.transpose("chain", "draw", ..., missing_dims="ignore")
            array = ordered.to_numpy()
            if scaled and (scale := self.scales.get(name.removesuffix("_mean"))):
                array = (array - scale[0]) / scale[1]
            arrays[str(name)] = array
        return arrays

    @cached_property
    def scales(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Means and standard deviations of data that an estimator standardized: it is
        judged by what it has seen.
        """
        scales = {}
        if self.about.get("standardized_inside"):
            data = {
                **self.variables("constant_data"),
                **self.variables("observed_data"),
            }
            for name, variable in data.items():
                x = variable.to_numpy()
                if x.dtype.kind == "f":
                    shifted = x - x[0]  # constants are exact
                    sd = shifted.std(axis=0) + (np.ptp(shifted, axis=0) == 0)
                    scales[str(name)] = x[0] + shifted.mean(axis=0), sd
        return scales

    def numbers(self, name: str) -> np.ndarray:
        """The numbers of an attribute, maybe none."""
        texts = str(self.about.get(name, "")).strip("[]").split(",")
        return np.array([float(text) for text in texts if text])

    def by_chain(self, name: str) -> np.ndarray | None:
        """Numbers of an attribute, one per chain (of replicas, that of the first)."""
        values = self.numbers(name)
        places = self.positions * max(len(values) // max(self.run_chains, 1), 1)
        return values[np.minimum(places, len(values) - 1)] if values.size else None

    def statistic(self, *names: str) -> np.ndarray | None:
        """Sampler statistic (C, S) with one of these names, also of the kernel inside a
        wrapper.
        """
        for name, values in self.arrays("sample_stats").items():
            if name.removeprefix("base.") in names and values.ndim == 2:
                return values
        return None

    def worst(
        self,
        values: ArrayLike,
        limit: float,
        words: str,
        below: bool = False,
        left_out: Iterable[int] = (),
        **more: np.ndarray,
    ) -> Measurement | None:
        """What is measured of the chain with the largest value (NaN is larger) that is
        not at fault.

        :param words: of value {0}, chain {1} and ``more`` values by chain.
        :param below: the smallest value is the worst; the limit is one from below.
        :param left_out: chains that are at fault too.
        """
        by_chain = np.asarray(values, np.float64)
        scores = np.nan_to_num(-by_chain if below else by_chain, nan=np.inf)
        candidates = [c for c in self.sound if c not in left_out]
        if not candidates:
            return None
        c = max(candidates, key=scores.__getitem__)
        of_chain = {name: numbers[c] for name, numbers in more.items()}
        text = words.format(by_chain[c], self.chains[c], **of_chain)
        return (at_least if below else at_most)(by_chain[c], limit, text)

    def attribute(
        self, name: str, limit: float, words: str, below: bool = False
    ) -> Measurement | None:
        """The check of a number by chain that a kernel reports."""
        values = self.by_chain(name)
        return None if values is None else self.worst(values, limit, words, below)

    def finite(self, group: str) -> np.ndarray:
        """At which draws (C, S) all real numbers of a group are finite."""
        finite = np.ones((len(self.chains), self.draws), bool)
        for value in self.arrays(group).values():
            if value.dtype.kind == "f":
                finite &= np.isfinite(value).reshape(*finite.shape, -1).all(axis=2)
        return finite

    @cached_property
    def parameters(self) -> np.ndarray:
        """Some columns (C, S, K) of the parameters that are real numbers."""
        values = self.arrays("posterior").values()
        return columns([v for v in values if v.dtype.kind == "f"], PARAMETERS)

    @cached_property
    def function(self) -> np.ndarray:
        """Some columns (C, S, K) of the function in sound chains, or of its log
        likelihood; maybe none.

        `rhat` reads it first, after all checks that find chains at fault.
        """
        values = (
            self.means("posterior_predictive")
            or self.means("predictions")
            or self.arrays("log_likelihood")
        )
        drawn = columns(values.values(), COLUMNS)
        finite = np.flatnonzero(np.isfinite(drawn).all(axis=(1, 2)))
        return drawn[np.setdiff1d(finite, [*self.faulty])]

    @cached_property
    def rhat_of_function(self) -> float:
        """NaN if it is not defined."""
        return high(_arviz.rhat(self.function)) if self.function.size else np.nan

    def observations(self) -> np.ndarray:
        """Some columns (C, S, K) of observations that sound chains draw; maybe none."""
        for group in ("posterior_predictive", "predictions"):
            values = self.arrays(group)
            sites = {name.rsplit("_", 1)[0] for name in self.means(group)}
            drawn = [values[site] for site in sorted(sites & values.keys())]
            if drawn:
                return columns(drawn, COLUMNS)[self.sound]
        return np.zeros((0, 0, 0))

    @cached_property
    def losses(self) -> dict[str, Losses]:
        """Losses of each observed site at some of the training rows."""
        return losses_by_site(self.means("posterior_predictive"), self.targets)

    def means(self, group: str) -> dict[str, np.ndarray]:
        """Draws of the mean of each observed site, or of its class probabilities, by
        variable.
        """
        arrays = self.arrays(group)
        for name, value in list(arrays.items()):
            if not name.endswith(("_mean", "_probs")) or value.ndim <= 2:
                del arrays[name]
        return arrays

    @cached_property
    def has_network(self) -> bool:
        """Whether the model has a network, whose priors expect standardized data."""
        for name in self.variables("posterior"):
            _, dot, leaf = name.rpartition(".")
            if dot and leaf.removesuffix("_base") in ("kernel", "weight"):
                return True
        return "network" in self.about

    @cached_property
    def targets(self) -> dict[str, np.ndarray]:
        """Observed data, NaN where a mask leaves elements out: the log likelihood has
        an axis of the others.
        """
        targets = self.arrays("observed_data")
        density = self.groups.get("log_likelihood")
        for name, y in targets.items():
            dim = f"{name}_observed"
            if density is not None and dim in density.coords:
                variable = self.groups["observed_data"][name]
                labels = np.arange(y.size)
                if y.ndim == 1 and variable.dims[0] in variable.coords:
                    labels = variable[variable.dims[0]].to_numpy()
                unmasked = np.isin(labels, density[dim].to_numpy())
                targets[name] = np.where(unmasked.reshape(y.shape), y, np.nan)
        return targets

    @cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        """Arguments of a network with a row per observation, as (N, D), or (N height
        width, channels) for images.
        """
        rows = {}
        for name, x in self.arrays("constant_data").items():
            axis = self._row_axis(name)
            if axis is not None and self.has_network:
                rows[name] = np.moveaxis(x, axis, 0)
        inputs = {}
        for name, x in rows.items():
            numeric = x.dtype.kind in ("fiu" if x.ndim > 1 else "f")
            if numeric and (x.ndim > 1 or len(rows) == 1):
                inputs[name] = table(x)
        return inputs

    def _row_axis(self, name: str) -> int | None:
        """The axis of an argument that has a dimension of observed data; without
        plates, a first one as long.
        """
        row_dims: set[str] = set()
        lengths_without_plate: set[int] = set()
        for site, y in self.variables("observed_data").items():
            if y.ndim:
                dim = str(y.dims[0])
                # A dimension called like a variable has the ending `_dim`.
                row_dims.add(dim.removesuffix("_dim"))
                if dim == f"{site}_dim_0":
                    lengths_without_plate.add(len(y))
        argument = self.groups["constant_data"][name]
        for axis, dim in enumerate(map(str, argument.dims)):
            if dim.removesuffix("_dim") in row_dims:
                return axis
        return 0 if argument.ndim and len(argument) in lengths_without_plate else None

    # -- the checks --------------------------------------------------------------------

    def diverged(self) -> Measurement:
        first = self.by_chain("first_divergence")
        if first is None:
            first = np.full(len(self.chains), -1.0)
        wrong = np.flatnonzero((first >= 0) | ~self.finite("posterior").all(axis=1))
        names = []
        for c in wrong:
            step = f" at step {first[c]:.0f}" if first[c] >= 0 else ""
            names.append(f"chain {self.chains[c]}{step}")
        words = "all draws are finite"
        if names:
            words = (
                f"{self.about.get('algorithm', 'sampler')} diverged "
                f"({', '.join(names)}), draws are NaN or one point from there on"
            )
            sizes = self.numbers("base_step_size")
            words += f", with step sizes up to {sizes.max():.2g}" if sizes.size else ""
        return at_most(len(wrong), 0, words, wrong.tolist())

    def frozen(self) -> Measurement | None:
        if not self.parameters.size:
            return None
        limit = max(MIN_REPEATED_DRAWS, self.draws // 10)
        repeats = []
        for draws in self.parameters:
            ends = np.flatnonzero(
                np.append((draws[1:] != draws[:-1]).any(axis=1), True)
            )
            ranges = np.ptp(draws, axis=0)
            if (ranges <= MAX_RELATIVE_RANGE * np.abs(draws).max(axis=0)).all():
                repeats.append(self.draws)
            else:
                repeats.append(np.diff(ends, prepend=-1).max())
        words = f"chain {{1}} holds one draw for {{0:.0f}} of its {self.draws} draws"
        longest = self.worst(repeats, limit - 1, words)
        still = np.flatnonzero(np.array(repeats) >= limit).tolist()
        return longest and longest._replace(at_fault=frozenset(still))

    def moved(self) -> Measurement | None:
        """The verdict of a kernel on its chains, from all of their steps."""
        if "frozen_chains" not in self.about:
            return None
        frozen = self.numbers("frozen_chains") / self.about.get("num_replicas", 1)
        still = [c for c in self.sound if self.positions[c] in frozen.tolist()]
        words = (
            f"chains {[self.chains[c] for c in still]} accept below 1 %, or cover "
            f"below 2 % of the variance"
        )
        return at_most(len(still), 0, words if still else "all chains moved", still)

    def support(self) -> Measurement | None:
        """Draws that no kernel should have taken: an observation of theirs is
        impossible, or has no density.
        """
        if not self.arrays("log_likelihood"):
            return None
        words = (
            "{0:.2%} of the draws of chain {1} have log likelihoods that are NaN or "
            "infinite"
        )
        return self.worst(1 - self.finite("log_likelihood").mean(axis=1), 0, words)

    def acceptance(self) -> Measurement | None:
        words = "chain {1} accepts {0:.1%} of its proposals"
        return self.attribute("mean_accept_prob", 0.1, words, below=True)

    def divergences(self) -> Measurement | None:
        diverging = self.statistic("diverging")
        if diverging is None or "first_divergence" in self.about:
            return None
        words = "{0:.1%} of the transitions of chain {1} diverged"
        return self.worst(diverging.mean(axis=1), 0.05, words)

    def energy_variance(self) -> Measurement | None:
        """Against its target; on minibatches, whose noise chooses the steps, there is
        none, and only the bias that it implies is judged.
        """
        energies = self.by_chain("mean_energy_variance")
        if energies is None:
            return None
        target = float(self.about.get("target_energy_variance", 0.0))
        # The bias is that of the worst of all chains.
        bias = 0.0 if self.faulty else float(self.about.get("implied_bias", 0.0))
        words = "the energy variance of chain {1} is {energy:.2g} per parameter"
        words += f", its target {target:.2g}" if target else ""
        words += f" (implied error of a variance {bias:.2g})" if bias else ""
        if not target:
            largest = self.worst(energies, np.inf, words, energy=energies)
            return largest and at_most(bias, 0.5, largest.words)
        # Four times the tolerated bias has 64 times its variance, a tenth of the step
        # length a millionth.
        ratio = np.maximum(energies / target, 64e-6 * target / energies)
        largest = self.worst(ratio, 64, words, energy=energies)
        if largest and not bias < 0.5:
            return largest._replace(verdict="warning")
        return largest

    def restarts(self) -> Measurement | None:
        words = "chain {1} started again {0:.0f} times in warm-up"
        largest = self.attribute("restarts", 0, words)
        return largest and largest.as_note()

    def refused_steps(self) -> Measurement | None:
        words = "chain {1} refused {0:.0%} of its steps"
        return self.attribute("refused_steps", 0.1, words)

    def temperature(self) -> Measurement | None:
        """The mean of each chain, less four standard errors by batches of draws,
        against the target or its band.

        The mean of theta' grad U / P is no temperature while a chain still drifts: it
        contains mean position times mean gradient. Where the kernel reports the
        covariance of the two, that is judged, whether it is too hot: too little of it
        is what ``covered`` finds.
        """
        target = float(self.about.get("temperature", 1.0))
        band = float(self.about.get("temperature_band_high", target)) - target
        covered = self.by_chain("variance_covered")
        measurements = []
        for name in ("configurational_temperature", "kinetic_temperature"):
            values = self.statistic(name)
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
            measurements.append(self.worst(excess, allowed, words, mean=means))
        return max(filter(None, measurements), default=None)

    def fit(self) -> Measurement | None:
        """The share of what its member of the warm start, or the best chain, explains
        that a chain does not.

        A member may have learned the noise of its rows, which no draw should. But the
        draws of a chain around it lose about half a nat of the density for each
        parameter, as those of a Gaussian do: where they have lost no more, it is a
        note.
        """
        if self.draws < MIN_DRAWS:
            return None
        members = json.loads(self.about.get("explained_by_members", "{}"))
        left_member = self._left_member()
        at_fault: set[int] = set()
        measurements = []
        for site, losses in self.losses.items():
            share = losses.share(losses.by_chain)
            start = np.full(len(share), np.nan)
            if site in members:
                start = np.array(members[site])[self.positions]
            best = np.full(len(share), np.fmax.reduce(share))
            good = np.fmax(start, best)
            lost = share_lost(share, good)
            trapped = share_lost(share, best) > MAX_SHARE_LOST
            trapped |= (lost > MAX_SHARE_LOST) & left_member
            words = (
                f"of {site} at the training rows chain {{1}} explains {{own:.0%}}, its "
                f"member or the best chain {{good:.0%}}"
            )
            largest = self.worst(
                np.where(trapped, lost, 0.0) if trapped.any() else lost,
                MAX_SHARE_LOST,
                words,
                left_out=at_fault,
                own=np.maximum(share, 0),
                good=good,
            )
            if largest:
                measurements.append(largest if trapped.any() else largest.as_note())
            if not trapped.all():
                at_fault |= set(np.flatnonzero(trapped).tolist())
        if not measurements:
            return None
        worst = max(measurements, key=lambda m: (m.verdict == "warning", m.value))
        return worst._replace(at_fault=frozenset(at_fault))

    def linear(self) -> Measurement | None:
        """What a linear model explains, each row predicted from the others, and a chain
        does not, less two standard errors.
        """
        if self.draws < MIN_DRAWS:
            return None
        measurements = []
        for site, of_site in self.losses.items():
            size = len(self.targets[site])
            tables = [x for x in self.inputs.values() if len(x) == size]
            if not tables:
                continue
            x = np.column_stack(tables)[of_site.rows].astype(np.float64)
            if not np.isfinite(x).all():
                continue
            of_line = losses_of_linear_model(x, of_site.targets, of_site.classes)
            if of_line is None:
                continue
            with np.errstate(all="ignore"):
                more = (of_site.by_chain - of_line) / of_site.of_constant.mean()
            error = more.std(axis=1, ddof=1) / more.shape[1] ** 0.5
            line = float(of_site.share(of_line))
            words = (
                f"a linear model explains {line:.0%} of {site} at the training rows, "
                f"chain {{1}} {{own:.0%}}"
            )
            share = of_site.share(of_site.by_chain)
            worst = self.worst(
                more.mean(axis=1) - 2 * error,
                MAX_SHARE_BEHIND_LINE,
                words,
                own=np.maximum(share, 0),
            )
            if worst:
                measurements.append(worst)
        return max(measurements, key=lambda m: m.value, default=None)

    def _left_member(self) -> np.ndarray:
        """Whether the log likelihood of a chain (C,) is lower than that of its member
        by more than P / 2 nats; where it was not exported, by assumption.
        """
        members = self.numbers("log_likelihood_of_members")
        densities = self.arrays("log_likelihood")
        if not members.size or not densities:
            return np.ones(len(self.chains), bool)
        totals = np.zeros(len(self.chains))
        for values in densities.values():
            by_draw = values.reshape(*values.shape[:2], -1).sum(
                axis=2, dtype=np.float64
            )
            totals += by_draw.mean(axis=1)
        size = sum(
            value[0, 0].size
            for value in self.arrays("posterior").values()
            if value.dtype.kind == "f"
        )
        return ~(members[self.positions] - totals <= size / 2)  # also if one is NaN

    def covered(self) -> Measurement | None:
        words = "chain {1} covers {0:.0%} of the posterior variance"
        return self.attribute("variance_covered", 0.25, words, below=True)

    def steps(self) -> Measurement | None:
        """Steps after warm-up, against those in which a chain on minibatches forgets
        its position often enough.
        """
        steps = float(self.about.get("steps_kept", 0))
        needed = float(self.about.get("steps_needed", 0))
        if not needed or steps < MIN_STEPS:
            return None
        words = (
            f"{steps:.0f} steps, where the gradient noise asks for {needed:.0e} after "
            f"as long a warm-up"
        )
        return at_most(needed / steps, 1, words)

    def rhat(self) -> Measurement | None:
        """R-hat of the function; a note where noise hides that its chains differ, so
        that observations drawn from them do not.
        """
        value = self.rhat_of_function
        if np.isnan(value):
            return None
        words = f"R-hat of the function is {value:.3g}"
        if value <= MAX_RHAT:
            return at_most(value, MAX_RHAT, words)
        if len(self.function) > 1:
            largest = max(high(_arviz.rhat(chain[None])) for chain in self.function)
            words += f" (at most {largest:.3g} within a chain)"
        drawn = self.observations()
        hidden = high(_arviz.rhat(drawn)) if drawn.size else np.inf
        if not hidden <= MAX_RHAT_OF_OBSERVATIONS:
            return at_most(value, MAX_RHAT, words)
        words += f", of observations drawn {hidden:.3g}"
        return at_most(value, MAX_RHAT, words).as_note()

    def ess(self) -> Measurement | None:
        """Effective draws, which mean nothing where R-hat is large."""
        if not self.function.size or self.rhat_of_function > MAX_RHAT:
            return None
        value = -high(-_arviz.ess(self.function))
        if np.isnan(value):
            return None
        total = len(self.function) * self.draws
        words = f"{total} draws are worth {value:.0f} independent ones of the function"
        return at_least(value, min(100.0, total / 10), words)

    def tree_depth(self) -> Measurement | None:
        steps = self.statistic("n_steps", "num_steps")
        depth = int(self.about.get("max_tree_depth", 0))
        if steps is None or not depth:
            return None
        words = f"{{0:.0%}} of the trees of chain {{1}} have the largest depth, {depth}"
        return self.worst((steps >= 2**depth - 1).mean(axis=1), 0.1, words)

    def pareto_k(self) -> Measurement | None:
        """For networks it is a note: it is above its limit for about every guide,
        whatever the function is like.
        """
        if self.draws < MIN_DRAWS:
            return None
        words = "the importance weights have Pareto k {0:.2f}"
        largest = self.attribute("pareto_k", 0.7, words)
        return largest.as_note() if largest and self.has_network else largest

    def elbo(self) -> Measurement | None:
        rise = self.by_chain("elbo_rise")
        if rise is None:
            return None
        size = sum(y.size for y in self.arrays("observed_data").values())
        words = (
            "at the end of the fit the ELBO changes by {rise:+.3g} nats per tenth of "
            "the steps"
        )
        return self.worst(np.abs(rise), max(1.0, 0.01 * size), words, rise=rise)

    def standardized(self) -> Measurement | None:
        if not self.has_network:
            return None
        observed = self.arrays("observed_data")
        tables = dict(self.inputs)
        for name, y in self.targets.items():
            if observed[name].dtype.kind == "f" and y.ndim:
                tables[name] = table(y)
        measurements = []
        for name, x in tables.items():
            rows = x if name in self.inputs else x[np.isfinite(x).all(axis=1)]
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

    def constant_inputs(self) -> Measurement | None:
        tables = {name: x for name, x in self.inputs.items() if x.size}
        if not tables:
            return None
        constant: list[str] = []
        for name, x in tables.items():
            still = np.flatnonzero((np.ptp(x, axis=0) == 0) & (x[0] != 0))
            constant += [f"{column} of {name}" for column in still]
        words = f"constant columns: {', '.join(constant[:5]) or 'none'}"
        return at_most(len(constant), 0, words)

    def extrapolation(self) -> Measurement | None:
        new = self.arrays("predictions_constant_data")
        measurements = []
        for name, x in self.inputs.items():
            if name in new and x.size:
                rows = table(np.moveaxis(new[name], self._row_axis(name) or 0, 0))
                share = extrapolated(x, rows, f" new rows of {name}")
                measurements.append(at_most(*share))
        return max(measurements, default=None)

    def few_draws(self) -> Measurement:
        words = (
            f"{self.draws} draws{'' if self.independent else ' in each chain'}; "
            f"mixing, fit and weights are judged from {MIN_DRAWS}"
        )
        return at_least(self.draws, MIN_DRAWS, words).as_note()


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


SMALLER = "Use a smaller `step_size`, or None to have one chosen"
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
CHECKS = (
    Check("diverged", 0, LEAVE_OUT, marks=True),
    Check("frozen", MIN_REPEATED_DRAWS, LEAVE_OUT, marks=True),
    Check(
        "moved",
        1,
        f"If nothing is accepted, use a smaller `step_size`; otherwise {MORE}",
        marks=True,
    ),
    Check("support", 0, BORDER),
    Check("acceptance", MIN_REPEATED_DRAWS, LEAVE_OUT),
    Check(
        "divergences",
        MIN_DRAWS,
        "Raise `target_accept_prob`, or make scales non-centered.",
    ),
    Check(
        "energy_variance",
        MIN_DRAWS,
        f"{SMALLER} by more warm-up. Non-centered scales need less.",
    ),
    Check("restarts", 1, f"It took none of many steps. {SMALLER} by more warm-up."),
    Check(
        "refused_steps", 1, f"{SMALLER} by more warm-up. Non-centered scales need less."
    ),
    Check(
        "temperature", MIN_DRAWS, f"{SMALLER}; take larger batches, and more warm-up."
    ),
    Check("fit", 0, "It is trapped: start elsewhere, or run longer."),
    Check(
        "linear",
        0,
        "It has not learned: take more steps, or another method; compare with a linear "
        "model.",
    ),
    Check("covered", MIN_DRAWS, f"Too few steps, or too small ones: {MORE}"),
    Check("steps", 0, f"Too few steps: {MORE}"),
    Check(
        "rhat", MIN_DRAWS, "Take more draws; if chains differ, a longer warm start{}."
    ),
    Check(
        "ess", MIN_DRAWS, "Take more draws, or more steps per draw (`steps_per_draw`)."
    ),
    Check(
        "tree_depth",
        MIN_DRAWS,
        "Raise `max_tree_depth`, standardize the data, or make scales non-centered.",
    ),
    Check(
        "pareto_k",
        0,
        "The guide misses part of the posterior: judge its predictions of test data.",
    ),
    Check(
        "elbo",
        0,
        (
            "If it rises, go on from `init_state=result.state`; if it falls, take "
            "smaller steps."
        ),
    ),
    Check(
        "standardized", 0, "Priors of networks expect about 0 and 1: `datasets.Scaler`."
    ),
    Check("constant_inputs", 0, "Drop them: they say what the bias says."),
    Check("extrapolation", 0, FAR),
    Check("few_draws", 0, "Take more draws for a judgment."),
)
