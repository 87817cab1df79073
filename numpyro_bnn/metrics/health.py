"""A health report: what is off in a result, how much, and what to do about it."""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from numpyro_bnn import _arviz
from numpyro_bnn.metrics._inputs import (
    INPUT_ROWS,
    columns,
    extrapolated,
    high,
    spread,
    table,
)

# draws of a chain below which R-hat, ESS and averages over draws are mostly noise
LEAST_DRAWS = 100
LEAST_REPEATS = (
    20  # so many rejections in a row have the probability 1e-6 at an acceptance of 0.5
)
LEAST_STEPS = 1000  # of a chain before they are called few
STILL = (
    1e-4  # a chain is frozen if no parameter varies by more than this part of its size
)
# At most so many values of the function, parameters, rows, and draws of a mean are
# read.
COLUMNS, PARAMETERS, ROWS, DRAWS = 16, 256, 500, 100
MOST_LOST = 0.75  # of what a member explains, before a chain counts as trapped
# Chains whose means differ by less than half a standard deviation of the observations
MOST_RHAT_OF_OBSERVATIONS = 1.05

# Value, limit, words, and whether it is off, or a verdict; without that it is off if
# the value is above the limit.
Measured = tuple[Any, ...] | None


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
    checks, found, marked = (
        _Checks(_arviz.opened("metrics.health", idata)),
        [],
        set[int](),
    )
    for name, least, advice in CHECKS:
        if least and (checks.independent or checks.draws < least):
            continue
        with np.errstate(all="ignore"):
            measured = (
                checks.attribute(*ATTRIBUTES[name])
                if name in ATTRIBUTES
                else getattr(checks, name)()
            )
        marked |= checks.faulty if name in MARKING else set()
        if measured:
            value, limit, what, *rest = measured
            off = rest[0] if rest else not value <= limit  # NaN is off
            verdict = off if isinstance(off, str) else "warning" if off else "ok"
            exact = (
                ""
                if checks.about.get("noisy_gradients")
                else ", or `ParallelTempering`"
            )
            found.append(
                Finding(
                    name,
                    verdict,
                    float(value),
                    float(limit),
                    what,
                    advice.format(exact),
                )
            )
    return Health(tuple(found), tuple(checks.chains[c] for c in sorted(marked)))


class _Checks:
    """What is read of a result, and the checks, by name: each returns what it measured,
    or nothing if it cannot.
    """

    def __init__(self, idata: Any) -> None:
        self.about = _arviz.attrs(idata)
        self.groups = {
            name: _arviz.group(idata, name) for name in _arviz.group_names(idata)
        }
        shaped = [g for g in self.groups.values() if {"chain", "draw"} <= set(g.sizes)]
        self.chains: list[int] = (
            shaped[0]["chain"].to_numpy().tolist() if shaped else []
        )
        self.draws: int = shaped[0].sizes["draw"] if shaped else 0
        self.independent = bool(self.about.get("independent_draws", not shaped))
        self.faulty: set[int] = (
            set()
        )  # positions of the chains that checks have found at fault
        # Chains may have been selected, or have labels of their own. Kernels report one
        # number per chain and replica.
        self.run_chains = int(self.about.get("num_chains", len(self.chains)))
        known = all(label in range(self.run_chains) for label in self.chains)
        self.positions = np.array(
            self.chains if known else range(len(self.chains)), int
        )

    def arrays(self, group: str) -> dict[str, np.ndarray]:
        """Variables of a group, chains and draws first; none if there
        is no such group.
        """
        if group not in self.groups:
            return {}
        ordered = self.groups[group].transpose(
            "chain", "draw", ..., missing_dims="ignore"
        )
        held = {
            str(name): value.to_numpy() for name, value in ordered.data_vars.items()
        }
        scales = (
            self.scales
            if group in ("constant_data", "observed_data", "posterior_predictive")
            else {}
        )
        return {
            n: (v - s[0]) / s[1] if (s := scales.get(n.removesuffix("_mean"))) else v
            for n, v in held.items()
        }

    @cached_property
    def scales(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Means and standard deviations of data that an estimator standardized: it is
        judged by what it has seen.
        """
        groups = (
            ("constant_data", "observed_data")
            if self.about.get("standardized_inside")
            else ()
        )
        held = [
            self.groups[group].data_vars.items()
            for group in groups
            if group in self.groups
        ]
        data = {str(name): value.to_numpy() for each in held for name, value in each}
        shifted = {
            name: (x[0], x - x[0]) for name, x in data.items() if x.dtype.kind == "f"
        }  # constants are exact
        return {
            n: (x0 + x.mean(axis=0), x.std(axis=0) + (np.ptp(x, axis=0) == 0))
            for n, (x0, x) in shifted.items()
        }

    def numbers(self, name: str) -> np.ndarray:
        """The numbers of an attribute, maybe none."""
        return np.array(
            [
                float(value)
                for value in str(self.about.get(name, "")).strip("[]").split(",")
                if value
            ]
        )

    def by_chain(self, name: str) -> np.ndarray | None:
        """Numbers of an attribute, one per chain (of replicas, that of the first)."""
        values = self.numbers(name)
        at = self.positions * max(len(values) // max(self.run_chains, 1), 1)
        return values[np.minimum(at, len(values) - 1)] if values.size else None

    def statistic(self, *names: str) -> np.ndarray | None:
        """Sampler statistic (C, S) with one of these names, also of the kernel inside a
        wrapper.
        """
        held = self.arrays("sample_stats").items()
        return next(
            (v for k, v in held if k.removeprefix("base.") in names and v.ndim == 2),
            None,
        )

    def worst(
        self,
        values: ArrayLike,
        limit: float,
        words: str,
        least: bool = False,
        **more: np.ndarray,
    ) -> Measured:
        """What is measured of the chain with the largest value (NaN is larger), or
        least, that is not at fault.

        :param words: of value {0}, chain {1} and ``more`` values by chain; ``least``:
            the limit is one from below.
        """
        by_chain = np.asarray(values, np.float64)
        scores = np.nan_to_num(-by_chain if least else by_chain, nan=np.inf)
        sound = [c for c in range(len(self.chains)) if c not in self.faulty]
        if not sound:
            return None
        c = max(sound, key=scores.__getitem__)
        what = words.format(
            by_chain[c],
            self.chains[c],
            **{name: each[c] for name, each in more.items()},
        )
        return (
            by_chain[c],
            limit,
            what,
            not (by_chain[c] >= limit if least else by_chain[c] <= limit),
        )

    def attribute(
        self, name: str, limit: float, words: str, least: bool = False
    ) -> Measured:
        """The check of a number by chain that a kernel reports."""
        values = self.by_chain(name)
        return None if values is None else self.worst(values, limit, words, least)

    def finite(self, group: str) -> np.ndarray:
        """At which draws (C, S) all real numbers of a group are finite."""
        found = np.ones((len(self.chains), self.draws), bool)
        for value in self.arrays(group).values():
            if value.dtype.kind == "f":
                found &= np.isfinite(value).reshape(*found.shape, -1).all(axis=2)
        return found

    @cached_property
    def parameters(self) -> np.ndarray:
        """Some columns (C, S, K) of the parameters that are real numbers."""
        real = [
            value
            for value in self.arrays("posterior").values()
            if value.dtype.kind == "f"
        ]
        return (
            columns(real, PARAMETERS)
            if real
            else np.zeros((len(self.chains), self.draws, 0))
        )

    @cached_property
    def function(self) -> np.ndarray:
        """Some columns (C, S, K) of the function in sound chains, or of its log
        likelihood; maybe none.
        """
        groups = (
            self.means("posterior_predictive"),
            self.means("predictions"),
            self.arrays("log_likelihood"),
        )
        values = columns(next(filter(None, groups), {}).values(), COLUMNS)
        return values[
            [
                c not in self.faulty and bool(np.isfinite(each).all())
                for c, each in enumerate(values)
            ]
        ]

    @cached_property
    def observations(self) -> np.ndarray:
        """Some columns (C, S, K) of observations that sound chains draw; maybe none."""
        drawn: list[np.ndarray] = []
        for group in ("posterior_predictive", "predictions"):
            values = self.arrays(group)
            sites = {name.rsplit("_", 1)[0] for name in self.means(group)}
            drawn = drawn or [values[site] for site in sorted(sites & values.keys())]
        sound = [c for c in range(len(self.chains)) if c not in self.faulty]
        return columns(drawn, COLUMNS)[sound] if drawn else np.zeros((0, 0, 0))

    def means(self, group: str) -> dict[str, np.ndarray]:
        """Draws of the mean of each observed site, or of its class probabilities, by
        variable.
        """
        return {
            n: v
            for n, v in self.arrays(group).items()
            if n.endswith(("_mean", "_probs")) and v.ndim > 2
        }

    @cached_property
    def has_network(self) -> bool:
        """Whether the model has a network, whose priors expect standardized data."""
        leaves = {
            name.rsplit(".", 1)[-1].removesuffix("_base")
            for name in self.arrays("posterior")
            if "." in name
        }
        return "network" in self.about or bool(leaves & {"kernel", "weight"})

    @cached_property
    def targets(self) -> dict[str, np.ndarray]:
        """Observed data, NaN where a mask leaves elements out: the log likelihood has
        an axis of the others.
        """
        found = self.arrays("observed_data")
        for name, y in found.items():
            dim = f"{name}_observed"
            if (
                "log_likelihood" in self.groups
                and dim in self.groups["log_likelihood"].coords
            ):
                given = self.groups["observed_data"][name]
                labeled = y.ndim == 1 and given.dims[0] in given.coords
                places = (
                    given[given.dims[0]].to_numpy() if labeled else np.arange(y.size)
                )
                kept = np.isin(places, self.groups["log_likelihood"][dim].to_numpy())
                found[name] = np.where(kept.reshape(y.shape), y, np.nan)
        return found

    @cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        """Arguments of a network with a row per observation, as (N, D), or (N height
        width, channels) for images.
        """
        held = {}
        for name, x in self.arrays("constant_data").items():
            axis = self._row_axis(name)
            if axis is not None:
                held[name] = np.moveaxis(x, axis, 0)
        wide = {name: x for name, x in held.items() if x.ndim > 1} or (
            held if len(held) == 1 else {}
        )
        wide = {
            name: x
            for name, x in wide.items()
            if x.dtype.kind == "f" or (x.ndim > 1 and x.dtype.kind in "iu")
        }
        return {name: table(x) for name, x in wide.items()} if self.has_network else {}

    def _row_axis(self, name: str) -> int | None:
        """The axis of an argument that has a dimension of observed data; without
        plates, a first one as long.
        """
        targets = (
            self.groups["observed_data"].data_vars
            if "observed_data" in self.groups
            else {}
        )
        dims = [str(dim) for dim in self.groups["constant_data"][name].dims]
        own = {
            str(y.dims[0])
            for site, y in targets.items()
            if y.ndim and y.dims[0] == f"{site}_dim_0"
        }
        # A dimension called like a variable has the ending `_dim`.
        rows = {str(y.dims[0]).removesuffix("_dim") for y in targets.values() if y.ndim}
        found = [
            axis for axis, dim in enumerate(dims) if dim.removesuffix("_dim") in rows
        ]
        if found or not own:
            return found[0] if found else None
        lengths = {
            y.sizes[dim] for y in targets.values() for dim in y.dims[:1] if dim in own
        }
        return (
            0
            if dims and self.groups["constant_data"].sizes[dims[0]] in lengths
            else None
        )

    # -- the checks --------------------------------------------------------------------

    def diverged(self) -> Measured:
        found, sizes = self.by_chain("first_divergence"), self.numbers("base_step_size")
        first = np.full(len(self.chains), -1.0) if found is None else found
        wrong = np.flatnonzero((first >= 0) | ~self.finite("posterior").all(axis=1))
        self.faulty |= set(wrong.tolist())
        named = ", ".join(
            f"chain {self.chains[c]}" + f" at step {first[c]:.0f}" * int(first[c] >= 0)
            for c in wrong
        )
        algorithm = self.about.get("algorithm", "sampler")
        what = (
            f"{algorithm} diverged ({named}), draws are NaN or one point from there on"
        )
        what += f", with step sizes up to {sizes.max():.2g}" if sizes.size else ""
        return len(wrong), 0, what if named else "all draws are finite"

    def frozen(self) -> Measured:
        limit, runs = max(LEAST_REPEATS, self.draws // 10), []
        for draws in self.parameters if self.parameters.size else ():
            ends = np.flatnonzero(
                np.append((draws[1:] != draws[:-1]).any(axis=1), True)
            )
            still = (np.ptp(draws, axis=0) <= STILL * np.abs(draws).max(axis=0)).all()
            runs.append(self.draws if still else np.diff(ends, prepend=-1).max())
        words = f"chain {{1}} holds one draw for {{0:.0f}} of its {self.draws} draws"
        found = self.worst(runs, limit - 1, words) if runs else None
        self.faulty |= set(np.flatnonzero(np.array(runs) >= limit).tolist())
        return found

    def moved(self) -> Measured:
        """The verdict of a kernel on its chains, from all of their steps."""
        if "frozen_chains" not in self.about:
            return None
        named = (
            self.numbers("frozen_chains") / self.about.get("num_replicas", 1)
        ).tolist()
        still = [
            c
            for c, position in enumerate(self.positions)
            if position in named and c not in self.faulty
        ]
        self.faulty |= set(still)
        what = (
            f"chains {[self.chains[c] for c in still]} accept below 1 %, or cover "
            f"below 2 % of the variance"
        )
        return len(still), 0, what if still else "all chains moved"

    def support(self) -> Measured:
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

    def restarts(self) -> Measured:
        found = self.attribute(
            "restarts", 0, "chain {1} started again {0:.0f} times in warm-up"
        )
        return found and (*found[:3], found[3] and "note")

    def divergences(self) -> Measured:
        if (
            diverging := self.statistic("diverging")
        ) is None or "first_divergence" in self.about:
            return None
        return self.worst(
            diverging.mean(axis=1),
            0.05,
            "{0:.1%} of the transitions of chain {1} diverged",
        )

    def energy_variance(self) -> Measured:
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
            found = self.worst(energies, np.inf, words, energy=energies)
            return found and (bias, 0.5, found[2])
        # Four times the tolerated bias has 64 times its variance, a tenth of the step
        # length a millionth.
        ratio = np.maximum(energies / target, 64e-6 * target / energies)
        found = self.worst(ratio, 64, words, energy=energies)
        return found and (*found[:3], found[3] or not bias < 0.5)

    def temperature(self) -> Measured:
        """The mean of each chain, less four standard errors by batches of draws,
        against the target or its band.

        The mean of theta' grad U / P is no temperature while a chain still drifts: it
        contains mean position times mean gradient. Where the kernel reports the
        covariance of the two, that is judged, whether it is too hot: too little of it
        is what ``covered`` finds.
        """
        target, found = float(self.about.get("temperature", 1.0)), []
        allowed = max(
            0.25 * target,
            float(self.about.get("temperature_band_high", target)) - target,
        )
        covered = self.by_chain("variance_covered")
        for name in ("configurational_temperature", "kinetic_temperature"):
            values = self.statistic(name)
            if values is not None and target:
                batches = [
                    batch.mean(axis=1, dtype=np.float64)
                    for batch in np.array_split(values, 10, axis=1)
                ]
                means, errors = mean_and_error(np.array(batches))
                if name == "configurational_temperature" and covered is not None:
                    means = covered * target
                    away = np.maximum(means - target - 4 * errors, 0.0)
                else:
                    away = np.maximum(np.abs(means - target) - 4 * errors, 0.0)
                words = (
                    f"the {name.replace('_', ' ')} of chain {{1}} is {{mean:.2f}}, its "
                    f"target {target:g}"
                )
                found.append(self.worst(away, allowed, words, mean=means))
        return max(filter(None, found), default=None)

    def fit(self) -> Measured:
        """The share of what its member of the warm start, or the best chain, explains
        that a chain does not.

        A member may have learned the noise of its rows, which no draw should. But the
        draws of a chain around it lose about half a nat of the density for each
        parameter, as those of a Gaussian do: where they have lost no more, it is a
        note.
        """
        means = self.means("posterior_predictive") if self.draws >= LEAST_DRAWS else {}
        members = json.loads(self.about.get("explained_by_members", "{}"))
        left_member, found = self._left_member(), []
        for site, own in explained(means, self.targets).items():
            start = np.full(len(own), np.nan)
            if site in members:
                start = np.array(members[site])[self.positions]
            best = np.full(len(own), np.fmax.reduce(own))
            good = np.fmax(start, best)
            lost = share_lost(own, good)
            trapped = share_lost(own, best) > MOST_LOST
            trapped |= (lost > MOST_LOST) & left_member
            words = (
                f"of {site} at the training rows chain {{1}} explains {{own:.0%}}, its "
                f"member or the best chain {{good:.0%}}"
            )
            worst = self.worst(
                np.where(trapped, lost, 0.0) if trapped.any() else lost,
                MOST_LOST,
                words,
                own=np.maximum(own, 0),
                good=good,
            )
            if worst and not trapped.any():
                worst = (*worst[:3], worst[3] and "note")
            found.append(worst)
            if not trapped.all():
                self.faulty |= set(np.flatnonzero(trapped).tolist())
        return max(
            filter(None, found),
            key=lambda measured: (measured[3] is True, measured[0]),
            default=None,
        )

    def _left_member(self) -> np.ndarray:
        """Whether the log likelihood of a chain (C,) is lower than that of its member
        by more than P / 2 nats; where it was not exported, by assumption.
        """
        members = self.numbers("log_likelihood_of_members")
        densities = self.arrays("log_likelihood")
        if not members.size or not densities:
            return np.ones(len(self.chains), bool)
        own = np.zeros(len(self.chains))
        for values in densities.values():
            by_draw = values.reshape(*values.shape[:2], -1).sum(
                axis=2, dtype=np.float64
            )
            own += by_draw.mean(axis=1)
        size = sum(
            value[0, 0].size
            for value in self.arrays("posterior").values()
            if value.dtype.kind == "f"
        )
        return ~(members[self.positions] - own <= size / 2)  # also where one is NaN

    def steps(self) -> Measured:
        """Steps after warm-up, against those in which a chain on minibatches forgets
        its position often enough.
        """
        kept, needed = (
            float(self.about.get(name, 0)) for name in ("steps_kept", "steps_needed")
        )
        what = (
            f"{kept:.0f} steps, where the gradient noise asks for {needed:.0e} after "
            f"as long a warm-up"
        )
        return (needed / kept, 1, what) if needed and kept >= LEAST_STEPS else None

    def rhat(self) -> Measured:
        """R-hat of the function; a note where noise hides that its chains differ, so
        that observations drawn from them do not.
        """
        value = high(_arviz.rhat(self.function)) if self.function.size else np.nan
        self.mixed = not value > 1.1
        if np.isnan(value):
            return None
        what = f"R-hat of the function is {value:.3g}"
        if self.mixed:
            return value, 1.1, what
        if len(self.function) > 1:
            largest = max(high(_arviz.rhat(chain[None])) for chain in self.function)
            what += f" (at most {largest:.3g} within a chain)"
        drawn = self.observations
        hidden = high(_arviz.rhat(drawn)) if drawn.size else np.inf
        if not hidden <= MOST_RHAT_OF_OBSERVATIONS:
            return value, 1.1, what, True
        return value, 1.1, f"{what}, of observations drawn {hidden:.3g}", "note"

    def ess(self) -> Measured:
        """Effective draws, which mean nothing where R-hat is large."""
        value = (
            -high(-_arviz.ess(self.function))
            if self.function.size and self.mixed
            else np.nan
        )
        total = len(self.function) * self.draws
        limit, what = (
            min(100.0, total / 10),
            f"{total} draws are worth {value:.0f} independent ones of the function",
        )
        return None if np.isnan(value) else (value, limit, what, value < limit)

    def tree_depth(self) -> Measured:
        steps, depth = (
            self.statistic("n_steps", "num_steps"),
            int(self.about.get("max_tree_depth", 0)),
        )
        words = f"{{0:.0%}} of the trees of chain {{1}} have the largest depth, {depth}"
        return (
            self.worst((steps >= 2**depth - 1).mean(axis=1), 0.1, words)
            if steps is not None and depth
            else None
        )

    def pareto_k(self) -> Measured:
        """For networks it is a note: it is above its limit for about every guide,
        whatever the function is like.
        """
        found = self.attribute(
            "pareto_k", 0.7, "the importance weights have Pareto k {0:.2f}"
        )
        enough = self.draws >= LEAST_DRAWS
        return (
            (*found[:3], found[3] and ("note" if self.has_network else True))
            if found and enough
            else None
        )

    def elbo(self) -> Measured:
        limit = max(
            1.0, 0.01 * sum(np.size(y) for y in self.arrays("observed_data").values())
        )
        words = (
            "at the end of the fit the ELBO changes by {rise:+.3g} nats per tenth of "
            "the steps"
        )
        rise = self.by_chain("elbo_rise")
        return (
            None if rise is None else self.worst(np.abs(rise), limit, words, rise=rise)
        )

    def standardized(self) -> Measured:
        held = self.arrays("observed_data")
        targets = {
            name: y
            for name, y in self.targets.items()
            if held[name].dtype.kind == "f" and y.ndim
        }
        tables, found = (
            {**self.inputs, **{name: table(y) for name, y in targets.items()}},
            [],
        )
        for name, x in tables.items():
            known = x if name in self.inputs else x[np.isfinite(x).all(axis=1)]
            some = known[spread(len(known), INPUT_ROWS)].astype(np.float64)
            if some.size and self.has_network:
                mean, sd, size = (
                    some.mean(axis=0),
                    some.std(axis=0),
                    1 / np.abs(some).max(axis=0),
                )
                off = np.nan_to_num(
                    np.where(sd == 0, 0.0, np.maximum.reduce([np.abs(mean), sd, size])),
                    nan=np.inf,
                )
                c, many = (
                    int(off.argmax()),
                    f"{(off > 10).sum()} of {off.size} columns of {name} are off",
                )
                what = (
                    f"{many}: column {c} has mean {mean[c]:.3g}, standard deviation "
                    f"{sd[c]:.3g}"
                )
                found.append((off[c], 10, what))
        return max(found, default=None)

    def constant_inputs(self) -> Measured:
        tables = {name: x for name, x in self.inputs.items() if x.size}
        still = {
            name: np.flatnonzero((np.ptp(x, axis=0) == 0) & (x[0] != 0))
            for name, x in tables.items()
        }
        found = [
            f"{column} of {name}" for name, held in still.items() for column in held
        ]
        return (
            (len(found), 0, f"constant columns: {', '.join(found[:5]) or 'none'}")
            if tables
            else None
        )

    def extrapolation(self) -> Measured:
        held, pairs = self.arrays("predictions_constant_data"), {}
        for name, x in self.inputs.items():
            if name in held and x.size:
                pairs[name] = (
                    x,
                    table(np.moveaxis(held[name], self._row_axis(name) or 0, 0)),
                )
        return max(
            (
                extrapolated(*pair, f" new rows of {name}")
                for name, pair in pairs.items()
            ),
            default=None,
        )

    def few_draws(self) -> Measured:
        what = (
            f"{self.draws} draws{'' if self.independent else ' in each chain'}; "
            f"mixing, fit and weights are judged"
        )
        return (
            self.draws,
            LEAST_DRAWS,
            f"{what} from {LEAST_DRAWS}",
            self.draws < LEAST_DRAWS and "note",
        )


def explained(
    means: Mapping[str, np.ndarray], observed: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """How much of each site the mean of each chain explains, (C,): 1 for all of it, 0
    for as much as a constant.
    """
    found = {}
    for name, draws in means.items():
        site, suffix = name.rsplit("_", 1)
        y, classes = observed.get(site), suffix == "probs"
        if y is None or not y.ndim or draws.shape[2 : draws.ndim - classes] != y.shape:
            continue
        known = np.flatnonzero(np.isfinite(y).reshape(len(y), -1).all(axis=1))
        if not known.size:
            continue
        rows = known[spread(len(known), ROWS)]
        mean = draws[:, spread(draws.shape[1], DRAWS)[:, None], rows].mean(
            axis=1, dtype=np.float64
        )
        y, (labels, counts) = y[rows], np.unique(y[rows], return_counts=True)
        losses = mean.argmax(axis=-1) != y if classes else (mean - y) ** 2
        least = (
            y != labels[counts.argmax()]
            if classes
            else (y - y.mean(axis=0, dtype=np.float64)) ** 2
        )
        with np.errstate(all="ignore"):
            found[site] = (
                1 - losses.reshape(len(losses), -1).mean(axis=1) / least.mean()
            )
    return found


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


def share_lost(own: np.ndarray, good: np.ndarray) -> np.ndarray:
    """The share of what is explained well (above 0.2) that chains do not explain."""
    return np.where(good > 0.2, 1 - np.maximum(own, 0.0) / good, 0.0)


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
# Check -> attribute, limit, words, and whether the limit is one from below.
ATTRIBUTES: dict[str, Any] = {
    "acceptance": (
        "mean_accept_prob",
        0.1,
        "chain {1} accepts {0:.1%} of its proposals",
        True,
    ),
    "refused_steps": ("refused_steps", 0.1, "chain {1} refused {0:.0%} of its steps"),
    "covered": (
        "variance_covered",
        0.25,
        "chain {1} covers {0:.0%} of the posterior variance",
        True,
    ),
}
MARKING = ("diverged", "frozen", "moved")  # checks that mark chains
# name, draws that each chain needs (0: also for independent draws), and what to do
CHECKS = (
    ("diverged", 0, LEAVE_OUT),
    ("frozen", LEAST_REPEATS, LEAVE_OUT),
    (
        "moved",
        1,
        f"If nothing is accepted, use a smaller `step_size`; otherwise {MORE}",
    ),
    ("support", 0, BORDER),
    ("acceptance", LEAST_REPEATS, LEAVE_OUT),
    (
        "divergences",
        LEAST_DRAWS,
        "Raise `target_accept_prob`, or make scales non-centered.",
    ),
    (
        "energy_variance",
        LEAST_DRAWS,
        f"{SMALLER} by more warm-up. Non-centered scales need less.",
    ),
    ("restarts", 1, f"It took none of many steps. {SMALLER} by more warm-up."),
    ("refused_steps", 1, f"{SMALLER} by more warm-up. Non-centered scales need less."),
    ("temperature", LEAST_DRAWS, f"{SMALLER}; take larger batches, and more warm-up."),
    ("fit", 0, "It is trapped: start elsewhere, or run longer."),
    ("covered", LEAST_DRAWS, f"Too few steps, or too small ones: {MORE}"),
    ("steps", 0, f"Too few steps: {MORE}"),
    ("rhat", LEAST_DRAWS, "Take more draws; if chains differ, a longer warm start{}."),
    ("ess", LEAST_DRAWS, "Take more draws, or more steps per draw (`steps_per_draw`)."),
    (
        "tree_depth",
        LEAST_DRAWS,
        "Raise `max_tree_depth`, standardize the data, or make scales non-centered.",
    ),
    (
        "pareto_k",
        0,
        "The guide misses part of the posterior: judge its predictions of test data.",
    ),
    (
        "elbo",
        0,
        (
            "If it rises, go on from `init_state=result.state`; if it falls, take "
            "smaller steps."
        ),
    ),
    ("standardized", 0, "Priors of networks expect about 0 and 1: `datasets.Scaler`."),
    ("constant_inputs", 0, "Drop them: they say what the bias says."),
    ("extrapolation", 0, FAR),
    ("few_draws", 0, "Take more draws for a judgment."),
)
