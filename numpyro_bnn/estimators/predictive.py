"""Predictive distributions: mixtures over the draws, summarized on the device in chunks of rows."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp, ndtr, ndtri

from numpyro_bnn.program.compiled import CHUNK_BYTES, draws_per_chunk, shared
from numpyro_bnn.results.replay import sites_at

LEAST_ROWS, MOST_ROWS = 32, 1024  # rows of a chunk: few programs, bounded memory
HALVINGS = 40  # of the bracket of a quantile


class Predictive:
    """The mixture over M draws of what a model says of new rows.

    :param model: ``model(x)`` with the observation ``y``.
    :param draws: values (C, S, ...) by site.
    """

    def __init__(self, model: Callable, draws: Mapping[str, np.ndarray]) -> None:
        self.model, self.draws = model, draws
        self.num_draws = int(np.prod(next(iter(draws.values())).shape[:2]))
        self._programs: dict[str, Callable] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_programs": {}}

    def __call__(
        self, summary: str, x: np.ndarray, *by_row: np.ndarray, chosen: Any = None, options: Any = ()
    ) -> Any:
        """A summary of :data:`SUMMARIES` for rows x (N, D), and further arrays with one row each.

        :param chosen: indices of the draws that are used; by default all.
        :param options: arrays that are the same for all rows.
        :return: a tuple of arrays, whose rows are on the axis that the table says.
        """
        axis, _ = SUMMARIES[summary]
        program = self._programs.setdefault(summary, shared(self._program(summary)))
        merged = {name: value.reshape((-1, *value.shape[2:])) for name, value in self.draws.items()}
        draws = {name: jnp.asarray(value if chosen is None else value[chosen]) for name, value in merged.items()}
        chunk = self._rows(len(x), self.num_draws if chosen is None else len(chosen))
        found = []
        for first in range(0, len(x), chunk):
            kept = min(chunk, len(x) - first)
            index = np.minimum(np.arange(first, first + chunk), len(x) - 1)  # one shape: one program
            rows = [jnp.asarray(values[index], float if values.dtype.kind == "f" else int) for values in (x, *by_row)]
            values = jax.device_get(program(draws, rows, options))
            found.append([np.take(value, range(kept), axis).astype(np.float64) for value in values])
        return tuple(np.concatenate(parts, axis) for parts in zip(*found, strict=True))

    def _rows(self, wanted: int, num_draws: int) -> int:
        """Rows of a chunk: a power of two, so that the components of all draws fit into the memory of a chunk."""
        fitting = 2 ** (max(1, CHUNK_BYTES // (64 * num_draws)).bit_length() - 1)
        return max(LEAST_ROWS, min(MOST_ROWS, fitting, 2 ** (wanted - 1).bit_length()))

    def _program(self, summary: str) -> Callable:
        summarize = SUMMARIES[summary][1]

        def program(draws: Any, rows: list[jax.Array], options: Any) -> tuple:
            def components(draw: Mapping[str, jax.Array]) -> Any:
                fn = sites_at(self.model, draw, jax.random.key(0), ((rows[0],), {}))["y"]["fn"]
                return (fn.probs,) if hasattr(fn, "logits") else (fn.mean, jnp.sqrt(fn.variance))

            size = draws_per_chunk(components, jax.tree.map(lambda value: value[0], draws))
            number = len(next(iter(draws.values())))
            return summarize(jax.lax.map(components, draws, batch_size=min(size, number)), *rows[1:], *options)

        return program


# -- components: means and standard deviations (M, R) or (M, R, K); of classes, probabilities (M, R, K) -----


def _moments(parts: tuple) -> tuple:
    """Mean and standard deviation of an observation: variances of the noise and of the function add up."""
    means, sds = parts
    return means.mean(0), jnp.sqrt((sds**2).mean(0) + means.var(0))


def _quantiles(parts: tuple, levels: jax.Array) -> tuple:
    """Quantiles of the mixture at each level, by bisection between the extreme quantiles of its components."""
    means, sds = parts

    def at(level: jax.Array) -> jax.Array:
        each = means + ndtri(level) * sds

        def halve(_: Any, bracket: tuple) -> tuple:
            low, high = bracket
            middle = (low + high) / 2
            below = ndtr((middle - means) / sds).mean(0) < level
            return jnp.where(below, middle, low), jnp.where(below, high, middle)

        low, high = jax.lax.fori_loop(0, HALVINGS, halve, (each.min(0), each.max(0)))
        return (low + high) / 2

    return tuple(jax.lax.map(at, levels))


def _normal_log_density(parts: tuple, y: jax.Array) -> tuple:
    """Log density of the mixture at y; all outputs of a row together."""
    means, sds = parts
    each = -0.5 * ((y - means) / sds) ** 2 - jnp.log(sds) - 0.5 * jnp.log(2 * jnp.pi)
    each = each.sum(-1) if each.ndim == 3 else each
    return (logsumexp(each, axis=0) - jnp.log(len(each)),)


# Name -> the axis of the rows in its results, and the function of the components.
SUMMARIES: dict[str, tuple[int, Callable]] = {
    "moments": (0, _moments),
    "quantiles": (0, _quantiles),
    "log_density": (0, _normal_log_density),
    "components": (1, lambda parts: parts),
    "probabilities": (0, lambda parts: (parts[0].mean(0),)),
}
