"""Predictive distributions: mixtures over the draws, summarized on the device in chunks
of rows.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array

from numpyro_bnn.estimators.mixtures import SUMMARIES, component_of
from numpyro_bnn.guides.laplace.likelihoods import given_log_scales, likelihood_of
from numpyro_bnn.guides.laplace.prediction import gaussian_outputs
from numpyro_bnn.guides.laplace.rows import Batch
from numpyro_bnn.program.compiled import CHUNK_BYTES, draws_per_chunk, shared
from numpyro_bnn.program.posterior import Posterior

# Rows of a chunk: few programs, bounded memory.
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 32, 1024


class Predictive:
    """The mixture over M draws of what a model says of new rows.

    :param model: ``model(x)`` with the observation ``y``.
    :param draws: values (C, S, ...) by site.
    """

    params: Any = None  # further inputs of all programs
    closed_form: frozenset[str] = frozenset()  # summaries that use no draws
    precision: Callable = nullcontext  # of all computations

    def __init__(self, model: Callable, draws: Mapping[str, np.ndarray]) -> None:
        self.model = model
        self.draws = draws
        self.num_draws = int(np.prod(next(iter(draws.values())).shape[:2]))
        self._programs: dict[str, Callable] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_programs": {}}

    def __call__(
        self,
        summary: str,
        x: np.ndarray,
        *by_row: np.ndarray,
        draw_index: Any = None,
        options: Any = (),
    ) -> Any:
        """A summary of :data:`SUMMARIES` for rows x (N, D), and further arrays with one
        row each.

        :param draw_index: indices of the draws that are used; by default all.
        :param options: arrays that are the same for all rows.
        :return: a tuple of arrays, whose rows are on the axis that the table says.
        """
        with self.precision():
            axis = int(summary.endswith("components"))
            program = self._programs.setdefault(summary, shared(self._program(summary)))
            draws = {} if summary in self.closed_form else self._selected(draw_index)
            num_draws = self.num_draws if draw_index is None else len(draw_index)
            chunk = self._rows(len(x), num_draws)
            chunks = []
            for first in range(0, len(x), chunk):
                size = min(chunk, len(x) - first)
                # One shape: one program.
                index = np.minimum(np.arange(first, first + chunk), len(x) - 1)
                rows = []
                for values in (x, *by_row):
                    kind = float if values.dtype.kind == "f" else int
                    rows.append(jnp.asarray(values[index], kind))
                results = jax.device_get(program(draws, self.params, rows, options))
                chunks.append([np.take(value, range(size), axis) for value in results])
            joined = []
            for pieces in zip(*chunks, strict=True):
                joined.append(np.concatenate(pieces, axis).astype(np.float64))
            return tuple(joined)

    def _selected(self, draw_index: Any) -> dict[str, Array]:
        """The draws of all chains, or those of the indices."""
        draws = {}
        for name, value in self.draws.items():
            merged = value.reshape((-1, *value.shape[2:]))
            draws[name] = jnp.asarray(
                merged if draw_index is None else merged[draw_index]
            )
        return draws

    def _rows(self, num_rows: int, num_draws: int) -> int:
        """Rows of a chunk: a power of two, so that the components of all draws fit into
        the memory of a chunk.
        """
        fitting = 2 ** (max(1, CHUNK_BYTES // (64 * num_draws)).bit_length() - 1)
        return max(
            MIN_CHUNK_ROWS,
            min(MAX_CHUNK_ROWS, fitting, 2 ** (num_rows - 1).bit_length()),
        )

    def _program(self, summary: str) -> Callable:
        summarize = SUMMARIES[summary]

        def program(draws: Any, params: Any, rows: list[Array], options: Any) -> tuple:
            reading = Posterior(self.model_of(params), (rows[0],))
            latent = [name for name in reading.latent if name in draws]

            def components(draw: Mapping[str, Array]) -> Any:
                values = {name: draw[name] for name in latent}
                return component_of(reading.at(values, only=("y",))["y"]["fn"])

            size = draws_per_chunk(
                components, jax.tree.map(lambda value: value[0], draws)
            )
            number = len(next(iter(draws.values())))
            mixture = jax.lax.map(components, draws, batch_size=even_part(number, size))
            return summarize(mixture, jnp.full(number, 1 / number), *rows[1:], *options)

        return program

    def model_of(self, params: Any) -> Callable:
        """The model whose observation the draws predict."""
        return self.model


def even_part(number: int, most: int) -> int:
    """The largest part of at most ``most`` that leaves no rest, for which a program
    would hold the network once more; ``most`` if that is more than twice as large.

    >>> [even_part(2000, 440), even_part(2000, 4000), even_part(1999, 440)]
    [400, 2000, 440]
    """
    most = min(most, number)
    largest = next(part for part in range(most, 0, -1) if number % part == 0)
    return largest if 2 * largest >= most else most


class LinearizedPredictive(Predictive):
    """The linearized network of a Laplace approximation: summaries in closed form,
    draws of the same network.
    """

    closed_form = frozenset({"moments", "quantiles", "log_density", "cdf", "crps"})
    # A posterior with little noise is ill-conditioned.
    precision = staticmethod(partial(jax.enable_x64, True))

    def __init__(
        self, guide: Any, params: Mapping[str, Any], draws: Mapping[str, np.ndarray]
    ) -> None:
        super().__init__(guide.model, draws)
        self.guide = guide
        self.params = {name: np.asarray(value) for name, value in params.items()}

    def model_of(self, params: Any) -> Callable:
        return partial(linearized_model, guide=self.guide, params=params)

    def _program(self, summary: str) -> Callable:
        if summary not in self.closed_form:
            return super()._program(summary)

        def program(_: Any, params: Any, rows: list[Array], options: Any) -> tuple:
            posterior = self.guide._posterior.on((rows[0],), {})
            batch = Batch(posterior.rows.reading())
            outputs = gaussian_outputs(self.guide, posterior, batch, params, "y")
            output, cov = outputs.rows, outputs.covariance
            f, variance = output.outputs, output.variances(cov)
            single = len(output.shape) == 1
            if summary == "moments":
                noise = jnp.exp(2 * f["log_scale"] + 2 * variance["log_scale"])
                moments = f["loc"], noise, variance["loc"]
                return tuple(value[:, 0] for value in moments) if single else moments
            if summary == "log_density":
                y = rows[1].reshape(f["loc"].shape)
                return (output.likelihood.log_density(output, cov, y),)
            means, cov, shares = given_log_scales(f, cov)
            weights = jnp.asarray(shares, float)
            sds = jnp.sqrt(jnp.diagonal(cov, axis1=2, axis2=3))
            means, sds = (means[..., 0], sds[..., 0]) if single else (means, sds)
            return SUMMARIES[summary]((means, sds), weights, *rows[1:], *options)

        return program


def linearized_model(x: Array, y: Any = None, *, guide: Any, params: Any) -> None:
    """The model of a guide with outputs that are linear in its coordinates, whose
    posterior the Gaussian is.
    """
    posterior = guide._posterior.on((x,), {})
    mode = guide._coordinates(params)
    batch = Batch(posterior.rows.reading())
    trace = batch.at(posterior.values(batch, mode))
    values = {name: numpyro.sample(name, trace[name]["fn"]) for name in mode}
    coordinates = posterior.coordinates(batch, values)
    difference = {name: coordinates[name] - value for name, value in mode.items()}
    likelihood = likelihood_of(trace["y"])

    def outputs_at(v: dict[str, Array]) -> dict[str, Array]:
        site = batch.at(posterior.values(batch, v), only=["y"])["y"]
        return likelihood.natural(site["fn"])

    outputs, change = jax.jvp(outputs_at, (mode,), (difference,))
    fn = likelihood.distribution(jax.tree.map(jnp.add, outputs, change))
    fn = fn.to_event(trace["y"]["fn"].event_dim)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", fn, obs=y)
