"""What the checks of health read of a result: its numbers, how much of the targets it
explains at the training rows, and whether a simple model predicts them better.
"""

import json
from collections.abc import Iterable, Mapping
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from numpyro_bnn import _arviz
from numpyro_bnn._types import InferenceData
from numpyro_bnn.metrics._inputs import MAX_OUTPUTS, Entries, spread, table
from numpyro_bnn.metrics.left_out import Behind, behind, scores_without

# At most so many rows, and draws of a mean, are read.
ROWS, DRAWS = 500, 100
# The same for scores of rows that are left out.
ROWS_LEFT_OUT, DRAWS_LEFT_OUT = 250, 1000
# About so many values of the function are read, or some of each output.
MAX_COLUMNS = 16
TINY = 1e-12  # a probability that is next to nothing


class Losses(NamedTuple):
    """Of one observed site at some rows.

    :param rows: (n,) positions in the data; ``targets``: (n, ...) what was observed.
    :param by_chain: (C, n) squared errors of each chain's mean, or errors (0, 1) of its
        most probable class.
    :param of_constant: (n,) the same of the mean, or of the most frequent class.
    :param classes: whether the targets are classes.
    """

    rows: np.ndarray
    targets: np.ndarray
    by_chain: np.ndarray
    of_constant: np.ndarray
    classes: bool

    def share(self, losses: np.ndarray) -> np.ndarray:
        """How much is explained where losses (..., n) are left: 1 for all, 0 for as
        much as by a constant.
        """
        with np.errstate(all="ignore"):
            return 1 - losses.mean(axis=-1) / self.of_constant.mean()


def losses_by_site(
    means: Mapping[str, np.ndarray], observed: Mapping[str, np.ndarray]
) -> dict[str, Losses]:
    """The losses of each site whose draws of means, or of class probabilities, fit its
    targets.

    :param means: (C, S, N, ...) by variable, ``<site>_mean`` or ``<site>_probs``.
    :param observed: targets by site; rows that are not finite are left out.
    """
    losses = {}
    for name, draws in means.items():
        site, suffix = name.rsplit("_", 1)
        classes = suffix == "probs"
        y = observed.get(site)
        if y is None or not y.ndim or draws.shape[2 : draws.ndim - classes] != y.shape:
            continue
        finite = np.flatnonzero(np.isfinite(y).reshape(len(y), -1).all(axis=1))
        if not finite.size:
            continue
        rows = finite[spread(len(finite), ROWS)]
        mean = draws[:, spread(draws.shape[1], DRAWS)[:, None], rows].mean(
            axis=1, dtype=np.float64
        )
        targets = y[rows]
        if (targets == targets[0]).all():
            continue  # there is nothing to explain
        if classes:
            labels, counts = np.unique(targets, return_counts=True)
            wrong = mean.argmax(axis=-1) != targets
            wrong_constant = targets != labels[counts.argmax()]
        else:
            wrong = (mean - targets) ** 2
            center = targets.mean(axis=0, dtype=np.float64)
            wrong_constant = (targets - center) ** 2
        losses[site] = Losses(
            rows=rows,
            targets=targets,
            by_chain=wrong.reshape(len(wrong), len(rows), -1).mean(axis=2),
            of_constant=wrong_constant.reshape(len(rows), -1).mean(axis=1),
            classes=classes,
        )
    return losses


class Halves(NamedTuple):
    """What the first and the last draws of each chain say of a site, at some of its
    rows R and outputs D.

    :param means: (H, R, D) of the function in each of these halves, or (H, R, D, K) of
        class probabilities.
    :param variances: of the same.
    :param noise: the variance (R, D) of an observation around the function, the least
        of the chains; NaN where none was drawn, ``None`` for classes.
    """

    means: np.ndarray
    variances: np.ndarray
    noise: np.ndarray | None

    @classmethod
    def of(
        cls,
        function: np.ndarray,
        y: np.ndarray | None,
        chains: np.ndarray,
        classes: bool,
    ) -> "Halves":
        """From draws (C, S, N, ...) of a function, and of observations if any."""
        shape = *function.shape[:3], -1, *function.shape[function.ndim - classes :]
        function, half = function.reshape(shape), function.shape[1] // 2
        y = np.broadcast_to(np.nan, function.shape) if y is None else y.reshape(shape)
        rows = spread(function.shape[2], MAX_COLUMNS)[:, None]
        outputs = spread(function.shape[3], MAX_OUTPUTS)
        means, variances, noise = [], [], []
        for chain in chains:
            around = []
            for draws in (slice(half), slice(-half, None)):
                f = function[chain, draws][:, rows, outputs].astype(np.float64)
                means.append(f.mean(axis=0))
                variances.append(f.var(axis=0))
                around.append((y[chain, draws][:, rows, outputs] - f).var(axis=0))
            noise.append(np.mean(around, axis=0))
        least = None if classes else np.min(noise, axis=0)
        return cls(np.array(means), np.array(variances), least)

    def costs(self) -> np.ndarray:
        """What it costs to predict an observation by a half alone, in nats (H, D): the
        divergence from it of all halves together, of normal ones or of classes.
        """
        mean = self.means.mean(axis=0)
        with np.errstate(all="ignore"):
            if self.noise is None:
                ratio = mean / np.maximum(self.means, TINY)
                cost = np.where(mean > 0, mean * np.log(ratio), 0.0).sum(axis=-1)
            else:
                squares, own = (self.means - mean) ** 2, self.variances + self.noise
                of_all = (squares + own).mean(axis=0)
                cost = 0.5 * ((of_all + squares) / own - 1 - np.log(of_all / own))
                cost = np.where(of_all == 0, 0.0, cost)  # a constant
        return cost.mean(axis=1)

    def costs_of_error(self, effective: float) -> np.ndarray:
        """What the error of the mean function costs an observation, in nats (D,), if
        its draws are worth so many independent ones.
        """
        mean, of_function = self.means.mean(axis=0), self.means.var(axis=0)
        of_function = of_function + self.variances.mean(axis=0)
        of_all = mean if self.noise is None else of_function + self.noise
        with np.errstate(all="ignore"):
            cost = np.where(of_function == 0, 0.0, of_function / of_all)
        cost = cost if self.noise is not None else cost.sum(axis=-1)
        return 0.5 * cost.mean(axis=0) / effective


class Result:
    """A result, and the chains in it that are at fault.

    :param idata: as :func:`~numpyro_bnn.to_inference_data` returns it.
    """

    def __init__(self, idata: InferenceData) -> None:
        self.about = _arviz.attrs(idata)
        self.groups = {
            name: _arviz.group(idata, name) for name in _arviz.group_names(idata)
        }
        sampled = [g for g in self.groups.values() if {"chain", "draw"} <= set(g.sizes)]
        self.chains: list[int] = []  # labels
        self.draws = 0
        if sampled:
            self.chains = sampled[0]["chain"].to_numpy().tolist()
            self.draws = sampled[0].sizes["draw"]
        self.independent = bool(self.about.get("independent_draws", not sampled))
        #: Positions of the chains that are not at fault.
        self.sound = list(range(len(self.chains)))
        # Chains may have been selected, or have labels of their own. Kernels report one
        # number per chain and replica.
        self.run_chains = int(self.about.get("num_chains", len(self.chains)))
        of_run = all(label in range(self.run_chains) for label in self.chains)
        self.positions = np.array(self.chains if of_run else self.sound, int)

    def without(self, chains: Iterable[int]) -> "Result":
        """The same with more chains at fault."""
        result = copy(self)
        result.sound = [c for c in self.sound if c not in set(chains)]
        return result

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
            if scaled and (scale := self._scales.get(name.removesuffix("_mean"))):
                array = (array - scale[0]) / scale[1]
            arrays[str(name)] = array
        return arrays

    def numeric(self, group: str) -> list[np.ndarray]:
        """Values of the variables of a group that are real numbers."""
        return [v for v in self.arrays(group).values() if v.dtype.kind == "f"]

    @cached_property
    def _scales(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Means and standard deviations of data that an estimator standardized: it is
        judged by what it has seen.
        """
        scales = {}
        if self.about.get("standardized_inside"):
            data = dict(self.variables("constant_data"))
            data |= self.variables("observed_data")
            for name, variable in data.items():
                x = variable.to_numpy()
                if x.dtype.kind == "f":
                    shifted = x - x[0]  # constants are exact
                    sd = shifted.std(axis=0) + (np.ptp(shifted, axis=0) == 0)
                    scales[str(name)] = x[0] + shifted.mean(axis=0), sd
        return scales

    @property
    def size(self) -> int:
        """Parameters P, those that are functions of others too."""
        return sum(value[0, 0].size for value in self.numeric("posterior"))

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

    def finite(self, group: str) -> np.ndarray:
        """At which draws (C, S) all real numbers of a group are finite."""
        finite = np.ones((len(self.chains), self.draws), bool)
        for value in self.numeric(group):
            finite &= np.isfinite(value).reshape(*finite.shape, -1).all(axis=2)
        return finite

    def means(self, group: str) -> dict[str, np.ndarray]:
        """Draws of the mean of each observed site, or of its class probabilities, by
        variable.
        """
        means = {}
        for name, value in self.arrays(group).items():
            if name.endswith(("_mean", "_probs")) and value.ndim > 2:
                means[name] = value
        return means

    def function(self) -> Entries:
        """Some entries of the function in sound chains, or of its log likelihood; maybe
        none.
        """
        return self._entries._replace(draws=self._entries.draws[self._are_usable()])

    def halves(self) -> list[Halves]:
        """The halves of the chains of :meth:`function`, of each site with a mean."""
        means, drawn = self.means(self._predicted), self.arrays(self._predicted)
        usable, halves = np.flatnonzero(self._are_usable()), []
        for name, mean in means.items():
            site, suffix = name.rsplit("_", 1)
            y = drawn.get(site)
            known = y is not None and y.shape == mean.shape
            drawn_y = y if known else None
            halves.append(Halves.of(mean, drawn_y, usable, suffix == "probs"))
        return halves

    @property
    def _predicted(self) -> str:
        """The group whose means are the function."""
        at_data = self.means("posterior_predictive")
        return "posterior_predictive" if at_data else "predictions"

    @cached_property
    def _entries(self) -> Entries:
        """Those of :meth:`function` in all chains."""
        means = self.means(self._predicted) or self.arrays("log_likelihood")
        return Entries.of(means.values(), MAX_COLUMNS)

    def _are_usable(self) -> np.ndarray:
        """Which chains are sound and have finite draws."""
        finite = np.isfinite(self._entries.draws).all(axis=(1, 2))
        return finite & np.isin(np.arange(len(finite)), self.sound)

    # -- data --------------------------------------------------------------------------

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
            axis = self.row_axis(name)
            if axis is not None and self.has_network:
                rows[name] = np.moveaxis(x, axis, 0)
        inputs = {}
        for name, x in rows.items():
            numeric = x.dtype.kind in ("fiu" if x.ndim > 1 else "f")
            if numeric and (x.ndim > 1 or len(rows) == 1):
                inputs[name] = table(x)
        return inputs

    def row_axis(self, name: str) -> int | None:
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

    # -- fit ---------------------------------------------------------------------------

    @cached_property
    def losses(self) -> dict[str, Losses]:
        """Losses of each observed site at some of the training rows."""
        return losses_by_site(self.means("posterior_predictive"), self.targets)

    @cached_property
    def explained(self) -> dict[str, np.ndarray]:
        """The share that each chain explains of each observed site: of the predictions
        in the result, or as an attribute says.
        """
        explained = {}
        recorded = json.loads(self.about.get("explained_by_chains", "{}"))
        for site, shares in recorded.items():
            # an estimator leaves out chains at fault, and does not record them
            whole = len(shares) == len(self.chains)
            explained[site] = np.array(shares)[slice(None) if whole else self.positions]
        if not explained:
            for site, losses in self.losses.items():
                explained[site] = losses.share(losses.by_chain)
        return explained

    def behind(self) -> dict[str, Behind | None]:
        """Of each observed site whether a simple model predicts rows better, each from
        the others, than the draws of sound chains; of sites of which they tell.

        Nothing of estimators, whose densities may be of targets in other units.
        """
        compared: dict[str, Behind | None] = {}
        if self.about.get("standardized_inside"):
            return compared
        for site, densities in self.arrays("log_likelihood").items():
            y = self.targets.get(site)
            if y is None or not y.ndim or densities.ndim == 2 or not self.sound:
                continue
            # a mask has left out the others
            seen = np.flatnonzero(np.isfinite(y).reshape(len(y), -1).all(axis=1))
            if densities.shape[2] == len(y):
                densities = densities[:, :, seen]
            if densities.shape[2] != len(seen) or not len(seen):
                continue
            some = spread(len(seen), ROWS_LEFT_OUT)
            draws = spread(self.draws, max(DRAWS_LEFT_OUT // len(self.sound), 1))
            scores = densities[self.sound][:, draws[:, None], some].astype(np.float64)
            scores = scores.reshape(-1, len(some), densities[0, 0, 0].size).sum(axis=2)
            rows = seen[some]
            inputs = [x[rows] for x in self.inputs.values() if len(x) == len(y)]
            kind = "counts"
            if y.dtype.kind == "f":
                kind = "numbers"
            elif f"{site}_probs" in self.means(self._predicted) or y.max() <= 1:
                kind = "classes"
            if all(np.isfinite(values).all() for values in (scores, *inputs)):
                scores = scores_without(scores)
                compared[site] = behind(scores, inputs, y[rows], kind)
        return compared
