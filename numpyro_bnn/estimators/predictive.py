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
import numpyro.distributions as dist
from jax.scipy.special import entr, logsumexp, ndtr

from numpyro_bnn._distributions import unwrapped
from numpyro_bnn.guides.laplace.likelihoods import given_log_scales, likelihood_of
from numpyro_bnn.guides.laplace.prediction import gaussian_outputs
from numpyro_bnn.guides.laplace.rows import Batch
from numpyro_bnn.program.compiled import CHUNK_BYTES, draws_per_chunk, shared
from numpyro_bnn.program.posterior import Posterior

# Rows of a chunk: few programs, bounded memory.
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 32, 1024
HALVINGS = 40  # of the bracket of a quantile
# Of the table of a Student's t: largest asinh of a value, and number of nodes.
MAX_ASINH, NUM_NODES = 20.0, 2049
# Of the integral of a CRPS: predictive standard deviations beyond the mean, and nodes.
MAX_DISTANCE_SD, NUM_CRPS_NODES = 100.0, 256


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
            axis, _ = SUMMARIES[summary]
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

    def _selected(self, draw_index: Any) -> dict[str, jax.Array]:
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
        summarize = SUMMARIES[summary][1]

        def program(
            draws: Any, params: Any, rows: list[jax.Array], options: Any
        ) -> tuple:
            reading = Posterior(self.model_of(params), (rows[0],))
            latent = [name for name in reading.latent if name in draws]

            def components(draw: Mapping[str, jax.Array]) -> Any:
                values = {name: draw[name] for name in latent}
                return _component(reading.at(values, only=("y",))["y"]["fn"])

            size = draws_per_chunk(
                components, jax.tree.map(lambda value: value[0], draws)
            )
            number = len(next(iter(draws.values())))
            mixture = jax.lax.map(components, draws, batch_size=min(size, number))
            return summarize(mixture, jnp.full(number, 1 / number), *rows[1:], *options)

        return program

    def model_of(self, params: Any) -> Callable:
        """The model whose observation the draws predict."""
        return self.model


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

        def program(_: Any, params: Any, rows: list[jax.Array], options: Any) -> tuple:
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
            means, cov, weights = given_log_scales(f, cov)
            sds = jnp.sqrt(jnp.diagonal(cov, axis1=2, axis2=3))
            means, sds = (means[..., 0], sds[..., 0]) if single else (means, sds)
            return SUMMARIES[summary][1]((means, sds), weights, *rows[1:], *options)

        return program


def linearized_model(x: jax.Array, y: Any = None, *, guide: Any, params: Any) -> None:
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

    def outputs_at(v: dict[str, jax.Array]) -> dict[str, jax.Array]:
        site = batch.at(posterior.values(batch, v), only=["y"])["y"]
        return likelihood.natural(site["fn"])

    outputs, change = jax.jvp(outputs_at, (mode,), (difference,))
    fn = likelihood.distribution(jax.tree.map(jnp.add, outputs, change))
    fn = fn.to_event(trace["y"]["fn"].event_dim)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", fn, obs=y)


# -- components: means, standard deviations and, of a Student's t, degrees of freedom,
# (M, R) or (M, R, K); of classes, probabilities (M, R, K)
# -----------------------------------------------------------------------------


def _component(fn: Any) -> tuple:
    """The arrays that a component of the mixture consists of."""
    if hasattr(fn, "logits"):
        return (fn.probs,)
    kind = unwrapped(fn)
    component = (fn.mean, jnp.sqrt(fn.variance))
    if isinstance(kind, dist.StudentT):
        return *component, jnp.broadcast_to(kind.df, fn.mean.shape)
    return component


def _moments(mixture: tuple, weights: jax.Array) -> tuple:
    """Mean of an observation, mean variance of the noise, and variance of the function,
    which add up.
    """
    means, sds = mixture[:2]
    mean = jnp.tensordot(weights, means, 1)
    return (
        mean,
        jnp.tensordot(weights, sds**2, 1),
        jnp.tensordot(weights, (means - mean) ** 2, 1),
    )


def _quantiles(mixture: tuple, weights: jax.Array, levels: jax.Array) -> tuple:
    """Quantiles of the mixture at each level, by bisection between bounds of those of
    its components (Cantelli).
    """
    (means, sds), cdf = mixture[:2], _cdf(mixture)

    def at(level: jax.Array) -> jax.Array:
        def halve(_: Any, bracket: tuple) -> tuple:
            low, high = bracket
            middle = (low + high) / 2
            below = jnp.tensordot(weights, cdf((middle - means) / sds), 1) < level
            return jnp.where(below, middle, low), jnp.where(below, high, middle)

        odds = jnp.sqrt(level / (1 - level))
        bracket = (means - sds / odds).min(0), (means + odds * sds).max(0)
        low, high = jax.lax.fori_loop(0, HALVINGS, halve, bracket)
        return (low + high) / 2

    return tuple(jax.lax.map(at, levels))


def _cdf(mixture: tuple) -> Callable:
    """Distribution functions of the standardized components, at values (M, R) or (M, R,
    K).

    That of a Student's t, whose degrees of freedom are the same for all rows of a draw,
    is read from a table: linear in asinh(z), so its error is below 2e-5.
    """
    if len(mixture) == 2:
        return ndtr
    df = mixture[2].reshape((len(mixture[2]), -1))[:, :1]
    table = dist.StudentT(df).cdf(
        jnp.sinh(jnp.linspace(-MAX_ASINH, MAX_ASINH, NUM_NODES))
    )
    draw = jnp.arange(len(df)).reshape((-1, *[1] * (mixture[2].ndim - 1)))

    def cdf(z: jax.Array) -> jax.Array:
        place = jnp.arcsinh(z / jnp.sqrt(1 - 2 / mixture[2])) / MAX_ASINH
        place = (jnp.clip(place, -1, 1) + 1) * (NUM_NODES - 1) / 2
        below = jnp.clip(place.astype(int), 0, NUM_NODES - 2)
        low, high = table[draw, below], table[draw, below + 1]
        return low + (place - below) * (high - low)

    return cdf


def _log_density(mixture: tuple, weights: jax.Array, y: jax.Array) -> tuple:
    """Log density of the mixture at y; all outputs of a row together."""
    means, sds = mixture[:2]
    tails = [dist.StudentT(df, means, sds * jnp.sqrt(1 - 2 / df)) for df in mixture[2:]]
    each = (*tails, dist.Normal(means, sds))[0].log_prob(y)
    each = each.sum(-1) if each.ndim == 3 else each
    return (logsumexp(each, axis=0, b=weights[:, None]),)


def _distribution(mixture: tuple, weights: jax.Array, y: jax.Array) -> tuple:
    """Distribution function of the mixture at y, of each output alone."""
    means, sds = mixture[:2]
    return (jnp.tensordot(weights, _cdf(mixture)((y - means) / sds), 1),)


def _crps(mixture: tuple, weights: jax.Array, y: jax.Array) -> tuple:
    """Continuous ranked probability score of the mixture at y, of each output alone.

    F^2 below y and (1 - F)^2 above it are smooth: Gauss-Legendre in asinh of the
    distance from y, in predictive standard deviations, as far as tails matter. Where
    components are a hundred times narrower than the mixture, errors reach a percent.
    """
    means, sds = mixture[:2]
    mean, noise, spread = _moments(mixture, weights)
    sd = jnp.sqrt(noise + spread)
    cdf = _cdf(mixture)
    # Beyond the mean, too, which may be far from y.
    reach = jnp.arcsinh(jnp.abs(y - mean) / sd + MAX_DISTANCE_SD)

    def add(total: jax.Array, node: tuple[jax.Array, jax.Array]) -> tuple:
        place, weight = node
        distance = sd * jnp.sinh(reach * place)
        below = jnp.tensordot(weights, cdf((y - distance - means) / sds), 1)
        above = 1 - jnp.tensordot(weights, cdf((y + distance - means) / sds), 1)
        step = weight * reach * sd * jnp.cosh(reach * place)
        return total + step * (below**2 + above**2), None

    places, node_weights = np.polynomial.legendre.leggauss(NUM_CRPS_NODES)
    nodes = jnp.asarray((places + 1) / 2), jnp.asarray(node_weights / 2)
    return (jax.lax.scan(add, jnp.zeros_like(mean), nodes)[0],)


def _entropies(mixture: tuple, weights: jax.Array) -> tuple:
    """Entropy of the mean probabilities, and mean entropy of the draws."""
    mean = jnp.tensordot(weights, mixture[0], 1)
    return entr(mean).sum(-1), jnp.tensordot(weights, entr(mixture[0]).sum(-1), 1)


# Name -> the axis of the rows in its results, and the function of the components.
SUMMARIES: dict[str, tuple[int, Callable]] = {
    "moments": (0, _moments),
    "quantiles": (0, _quantiles),
    "log_density": (0, _log_density),
    "cdf": (0, _distribution),
    "crps": (0, _crps),
    "components": (1, lambda mixture, _: mixture),
    "probabilities": (
        0,
        lambda mixture, weights: (jnp.tensordot(weights, mixture[0], 1),),
    ),
    "entropies": (0, _entropies),
}
