"""What a health report reads of a result, and what a prediction explains of its targets."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_bnn import _arviz
from numpyro_bnn.metrics._inputs import Floats

COLUMNS, ROWS, INPUT_ROWS = 16, 500, 10_000  # at most so many values of the function, and rows, are looked at
DRAWS = 100  # draws of which a mean is taken


class Evidence:
    """What the checks read of a result; ``faulty`` are the positions of chains that checks have found at fault."""

    def __init__(self, idata: Any) -> None:
        self.about = _arviz.attrs(idata)
        self.groups = {name: _arviz.group(idata, name) for name in _arviz.group_names(idata)}
        shaped = [g for g in self.groups.values() if {"chain", "draw"} <= set(g.sizes)]
        self.chains: list[int] = shaped[0]["chain"].to_numpy().tolist() if shaped else []
        self.draws: int = shaped[0].sizes["draw"] if shaped else 0
        self.independent = bool(self.about.get("independent_draws", not shaped))
        self.faulty: set[int] = set()
        self.mixed = True  # whether R-hat is small, without which effective draws mean nothing
        # Chains may have been selected, or have labels of their own.
        self.run_chains = int(self.about.get("num_chains", len(self.chains)))
        known = all(label in range(self.run_chains) for label in self.chains)
        self.positions = np.array(self.chains if known else range(len(self.chains)), int)

    def arrays(self, group: str) -> dict[str, np.ndarray]:
        """Variables of a group, chains and draws first; none if there is no such group."""
        if group not in self.groups:
            return {}
        ordered = self.groups[group].transpose("chain", "draw", ..., missing_dims="ignore")
        return {str(name): value.to_numpy() for name, value in ordered.data_vars.items()}

    def by_chain(self, name: str) -> Floats | None:
        """Numbers of an attribute, one per chain (of replicas, that of the first)."""
        numbers = str(self.about.get(name, "")).strip("[]")
        if not numbers:
            return None
        values = np.array([float(value) for value in numbers.split(",")])
        return values[np.minimum(self.positions * max(len(values) // self.run_chains, 1), len(values) - 1)]

    def statistic(self, name: str) -> np.ndarray | None:
        """Sampler statistic (C, S), also of the kernel inside a wrapper."""
        held = self.arrays("sample_stats").items()
        return next((v for k, v in held if k.rsplit(".", 1)[-1] == name and v.ndim == 2), None)

    def without_faulty(self, values: ArrayLike) -> Floats:
        """Values by chain, 0 for those at fault."""
        return np.where([c in self.faulty for c in range(len(self.chains))], 0.0, np.asarray(values, np.float64))

    @cached_property
    def parameters(self) -> np.ndarray:
        """Some columns (C, S, K) of the parameters that are real numbers."""
        real = {name: value for name, value in self.arrays("posterior").items() if value.dtype.kind == "f"}
        return columns(real, 256) if real else np.zeros((len(self.chains), self.draws, 0))

    @cached_property
    def function(self) -> np.ndarray:
        """Some columns (C, S, K) of the function in sound chains, or of its log likelihood; maybe none."""
        groups = self.means("posterior_predictive"), self.means("predictions"), self.arrays("log_likelihood")
        values = columns(next(filter(None, groups), {}), COLUMNS)
        sound = [c for c, draws in enumerate(values) if c not in self.faulty and np.isfinite(draws).all()]
        return values[sound]

    def means(self, group: str) -> dict[str, np.ndarray]:
        """Draws of the mean of each observed site, or of its class probabilities, by variable."""
        return {n: v for n, v in self.arrays(group).items() if n.endswith(("_mean", "_probs")) and v.ndim > 2}

    @cached_property
    def has_network(self) -> bool:
        """Whether the model has a network, whose priors expect standardized data."""
        leaves = {name.rsplit(".", 1)[-1].removesuffix("_base") for name in self.arrays("posterior") if "." in name}
        return "network" in self.about or bool(leaves & {"kernel", "weight"})

    @cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        """Arguments of a network with a row per observation, as (N, D), or (N height width, channels) for images."""
        rows = {len(y) for y in self.arrays("observed_data").values() if np.ndim(y)}
        held = {name: x for name, x in self.arrays("constant_data").items() if np.ndim(x) and len(x) in rows}
        wide = {name: x for name, x in held.items() if x.ndim > 1 and x.dtype.kind in "fiu"}
        if not wide and len(held) == 1:
            wide = {name: x for name, x in held.items() if x.dtype.kind == "f"}
        return {name: table(x) for name, x in wide.items()} if self.has_network else {}


def table(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1] if x.ndim > 1 else 1)


def some_rows(x: np.ndarray) -> Floats:
    """Evenly spaced rows of a table, without NaN and infinity."""
    some = x[:: -(-len(x) // INPUT_ROWS)].astype(np.float64)
    return some[np.isfinite(some).all(axis=1)]


def columns(values: Mapping[str, np.ndarray], most: int) -> np.ndarray:
    """About ``most`` columns (C, S, K) of arrays (C, S, ...), spread over the arrays and within each."""
    kept = []
    for value in values.values():
        flat = value.reshape(*value.shape[:2], -1)
        kept.append(flat[..., spread(flat.shape[2], max(most // len(values), 1))])
    return np.concatenate(kept, axis=2) if kept else np.zeros((0, 0, 0))


def spread(size: int, most: int) -> NDArray[np.int64]:
    """At most ``most`` positions of ``size``, evenly spaced."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(int))


def explained(function: ArrayLike, y: ArrayLike, classes: bool) -> Floats:
    """How much of the targets a prediction explains: 1 for all, 0 for as much as a constant, NaN if these are equal.

    For numbers the coefficient of determination, averaged over outputs; for classes (accuracy - b) / (1 - b), where b
    is the share of the most frequent one.

    :param function: (..., N, ...) predictions, or (..., N, K) class probabilities.
    :param y: (N, ...) targets, or (N,) labels.

    >>> round(float(explained([1.0, 2.0, 2.0], [1.0, 2.0, 3.0], False)), 6)
    0.5
    """
    target, value = np.asarray(y), np.asarray(function, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        if classes:
            base = np.unique(target, return_counts=True)[1].max() / target.size
            return ((value.argmax(axis=-1) == target).mean(axis=-1) - base) / (1 - base)
        value = value.reshape(*value.shape[: value.ndim - target.ndim], len(target), -1)
        target = target.reshape(len(target), -1).astype(np.float64)
        variance = np.where(np.ptp(target, axis=0) > 0, target.var(axis=0), np.nan)
        return 1 - (((value - target) ** 2).mean(axis=-2) / variance).mean(axis=-1)


def explained_by_site(means: Mapping[str, np.ndarray], observed: Mapping[str, np.ndarray]) -> dict[str, Floats]:
    """:func:`explained` by the mean of each chain, (C,), by observed site; of at most 500 rows and 100 draws."""
    found = {}
    for name, draws in means.items():
        site, suffix = name.rsplit("_", 1)
        y, classes = observed.get(site), suffix == "probs"
        if (
            y is None
            or not np.ndim(y)
            or (classes and y.ndim > 1)
            or draws.shape[2 : draws.ndim - classes] != y.shape
        ):
            continue
        rows = spread(len(y), ROWS)
        rows = rows[np.isfinite(y[rows]).reshape(len(rows), -1).all(axis=1)]
        if len(rows) > 1:
            some = draws[:, spread(draws.shape[1], DRAWS)[:, None], rows]
            found[site] = explained(some.mean(axis=1, dtype=np.float64), y[rows], classes)
    return found


def elbo_rise(losses: ArrayLike) -> float:
    """Nats by which the ELBO rises per tenth of a fit, at its end, with four standard errors taken off its size.

    The slope of a straight line through the means of twenty batches of the last fifth of the losses.

    :param losses: (E,) negative ELBO of every step, at least 100.

    >>> round(elbo_rise(-0.1 * np.arange(1000.0)), 6)        # 0.1 nats per step
    10.0
    """
    values = np.asarray(losses, np.float64)
    size, steps = len(values) // 100, np.arange(20) - 9.5
    batches = np.nanmean(values[-20 * size :].reshape(20, size), axis=1)
    slope = steps @ batches / (steps @ steps)
    rest = batches - batches.mean() - slope * steps
    error = np.sqrt(rest @ rest / 18 / (steps @ steps))
    return float(-np.sign(slope) * max(abs(slope) - 4 * error, 0.0) * 10)
