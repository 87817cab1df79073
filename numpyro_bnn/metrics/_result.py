"""What the checks of health read of a result."""

import json
from collections.abc import Iterable, Mapping
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np

from numpyro_bnn import _arviz
from numpyro_bnn.metrics._explained import Explained, Losses, losses_by_site
from numpyro_bnn.metrics._inputs import columns, table

# At most so many values of the function are read.
MAX_COLUMNS = 16


class Result:
    """A result, and the chains in it that are at fault.

    :param idata: as :func:`~numpyro_bnn.to_inference_data` returns it.
    """

    def __init__(self, idata: Any) -> None:
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

    def function(self) -> np.ndarray:
        """Some columns (C, S, K) of the function in sound chains, or of its log
        likelihood; maybe none.
        """
        values = (
            self.means("posterior_predictive")
            or self.means("predictions")
            or self.arrays("log_likelihood")
        )
        drawn = columns(values.values(), MAX_COLUMNS)
        finite = np.flatnonzero(np.isfinite(drawn).all(axis=(1, 2)))
        return drawn[np.intersect1d(finite, self.sound)]

    def observations(self) -> np.ndarray:
        """Some columns (C, S, K) of observations that sound chains draw; maybe none."""
        for group in ("posterior_predictive", "predictions"):
            values = self.arrays(group)
            sites = {name.rsplit("_", 1)[0] for name in self.means(group)}
            drawn = [values[site] for site in sorted(sites & values.keys())]
            if drawn:
                return columns(drawn, MAX_COLUMNS)[self.sound]
        return np.zeros((0, 0, 0))

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
    def explained(self) -> dict[str, Explained]:
        """What each chain explains of each observed site, and a linear model: of the
        predictions in the result, or as an attribute says.
        """
        explained = {}
        recorded = json.loads(self.about.get("explained", "{}"))
        for site, (share, line, behind) in recorded.items():
            of_chains = np.array([share, behind])[:, self.positions]
            explained[site] = Explained(of_chains[0], line, of_chains[1])
        if explained:
            return explained
        for site, losses in self.losses.items():
            size = len(self.targets[site])
            tables = [x for x in self.inputs.values() if len(x) == size]
            explained[site] = Explained.of(losses, tables)
        return explained
