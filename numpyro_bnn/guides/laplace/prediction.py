"""Predictions of a network that is linearized at the mode."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer.autoguide import AutoGuide

from numpyro_bnn._checks import argument_error
from numpyro_bnn._types import Trees
from numpyro_bnn.guides.laplace.jacobians import Jacobians
from numpyro_bnn.guides.laplace.likelihoods import CALL, ObservedRows, covariance_root
from numpyro_bnn.guides.laplace.posterior import LaplacePosterior, Values
from numpyro_bnn.guides.laplace.rows import Batch
from numpyro_bnn.guides.laplace.structures import (
    Blocks,
    output_covariance,
    output_halves,
)

MAX_LEVERAGE = 0.5  # of a row in its own prediction, if it is to be left out
Rows = np.ndarray | slice  # positions in a batch


class LaplacePredictive(NamedTuple):
    """Prediction of one observed site.

    :param mean: mean of the observation: of the number, the count, or the probability
        of each class (N, ..., K).
    :param variance: its variance, with the noise.
    :param outputs: means of the natural outputs f (``loc``, ``log_scale``, ``logits``,
        ``log_rate``, ``log_mean``, ``log_shape``), and what is given (``df``,
        ``trials``).
    :param output_variance: variances of these.
    :param covariance: (N, E, E) of the E outputs of a row; (N, E, N, E) with
        ``covariance=True``.
    """

    mean: Array
    variance: Array
    outputs: Values
    output_variance: Values
    covariance: Array


class PredictiveOptions(NamedTuple):
    """Of :meth:`AutoLaplace.predictive`."""

    site: str
    linearized: bool
    link: str
    covariance: bool
    num_samples: int


class LinearizedOutputs(NamedTuple):
    """An observed site at the mode, and the Gaussian of its outputs."""

    rows: ObservedRows
    jacobians: Jacobians
    blocks: Blocks

    @property
    def covariance(self) -> Array:
        """(B, E, E) of each row."""
        return output_covariance(self.jacobians, self.blocks)

    def at(self, index: Rows) -> tuple[ObservedRows, Array]:
        """Some rows, and the covariances of their outputs."""
        rows, jacobians = self.rows, dict(self.jacobians)
        outputs = {name: values[index] for name, values in rows.outputs.items()}
        weight = rows.weight[index]
        shape = (len(weight), *rows.shape[1:])
        rows = rows._replace(shape=shape, outputs=outputs, weight=weight)
        for name, jacobian in jacobians.items():
            jacobians[name] = jacobian.at(index)
        return rows, output_covariance(jacobians, self.blocks)

    def covariance_of_all(self) -> Array:
        """(B, E, B, E) of all rows."""
        half = output_halves(self.jacobians, self.blocks)
        return jnp.einsum("bdp,cep->bdce", half, half)


def gaussian_outputs(
    guide: AutoGuide,
    posterior: LaplacePosterior,
    batch: Batch,
    params: Trees,
    name: str,
) -> LinearizedOutputs:
    """The outputs of an observed site, linearized at the mode."""
    v = guide._coordinates(params)
    for site in v:
        if site not in batch.reading.sites:
            got = f"arguments without the site {site!r} of the run"
            instead = "Pass all the model's arguments of the run, except the targets."
            raise argument_error(CALL, "args", got, instead)
    rows = posterior.outputs(batch, v, name)[name]
    jacobians = posterior.output_jacobians(batch, v, name)
    return LinearizedOutputs(rows, jacobians, guide._gaussian_blocks(params))


def log_density(
    guide: AutoGuide,
    posterior: LaplacePosterior,
    batch: Batch,
    params: Trees,
    name: str,
) -> Array:
    """(N,) log density of the rows of a site, averaged over its outputs."""
    site = batch.reading.sites[name]
    if not site["is_observed"]:
        call = f"{CALL}.log_predictive_density"
        raise argument_error(call, "args", "no targets", "Pass the targets as well.")
    outputs = gaussian_outputs(guide, posterior, batch, params, name)
    value = _observed_value(posterior, batch, outputs.rows, name)
    return outputs.rows.likelihood.log_density(outputs.rows, outputs.covariance, value)


def _observed_value(
    posterior: LaplacePosterior, batch: Batch, rows: ObservedRows, name: str
) -> Array:
    """(B, M) what was observed."""
    value = batch.at({}, only=[name])[name]["value"]
    value = jnp.broadcast_to(value, batch.reading.sites[name]["fn"].shape())
    return rows.rows_of(value, posterior.observed[name].axis)


class LeftOutRows(NamedTuple):
    """Rows n that are predicted from all others.

    :param scores: (n,) log densities.
    :param value: (n, M) what was observed.
    :param weight: (n, M) powers of its densities: 0 where it was not.
    """

    scores: Array
    value: Array
    weight: Array


def left_out(
    guide: AutoGuide,
    posterior: LaplacePosterior,
    batch: Batch,
    params: Trees,
    name: str,
    index: Rows,
) -> LeftOutRows:
    r"""Rows of a site predicted without their own part of the Gaussian.

    A row with outputs f ~ N(f^*, V), the gradient g of its log likelihood and the
    Fisher information F = R^T R leaves behind N(f^* - V' g, V') with

    .. math:: V' = V + V R^\top (I - R V R^\top)^{-1} R V.

    This is a step of Newton to the mode of the others: exact for a linear model with
    known noise. Rows with leverages, eigenvalues of R V R^T, above a half keep their
    part, so that the scores are rather too good.

    Reference: Opper & Winther (2000); Vehtari et al. (2016), section 3.

    :param index: the positions among the rows of the batch.
    """
    outputs = gaussian_outputs(guide, posterior, batch, params, name)
    value = _observed_value(posterior, batch, outputs.rows, name)[index]
    rows, covariance = outputs.at(index)
    roots = rows.roots()
    half = roots @ covariance
    shares, basis = jnp.linalg.eigh(half @ jnp.swapaxes(roots, 1, 2))
    turned = jnp.swapaxes(basis, 1, 2) @ half
    # Of others a step of Newton says nothing, and the structure may give them more
    # than there is: they stay as they are.
    small = jnp.all(shares < MAX_LEVERAGE, axis=1)[:, None]
    factors = jnp.where(small, 1 / (1 - jnp.minimum(shares, MAX_LEVERAGE)), 0.0)
    covariance += jnp.einsum("bde,bd,bdf->bef", turned, factors, turned)

    def log_prob(flat: Array) -> Array:
        fn = rows.likelihood.distribution({**rows.outputs, **rows.cut(flat)})
        return jnp.sum(rows.weight * fn.log_prob(value))

    slope = jnp.where(small, jax.grad(log_prob)(rows.flat()), 0.0)
    away = rows.flat() - jnp.einsum("bef,bf->be", covariance, slope)
    rows = rows._replace(outputs={**rows.outputs, **rows.cut(away)})
    scores = rows.likelihood.log_density(rows, covariance, value)
    return LeftOutRows(scores, value, rows.weight)


def predict(
    guide: AutoGuide,
    posterior: LaplacePosterior,
    batch: Batch,
    params: Trees,
    key: Array,
    options: PredictiveOptions,
) -> LaplacePredictive:
    """The prediction of :meth:`AutoLaplace.predictive`."""
    outputs = gaussian_outputs(guide, posterior, batch, params, options.site)
    rows = outputs.rows
    if options.covariance:
        all_rows = outputs.covariance_of_all()
        number = jnp.arange(len(all_rows))
        cov = all_rows[number, :, number]
    else:
        all_rows = cov = outputs.covariance
    f, variance = rows.outputs, rows.variances(cov)
    if not options.linearized:
        draws = guide._draw(key, params, (options.num_samples,))

        def of_network(v: Values) -> Values:
            return posterior.outputs(batch, v, options.site)[options.site].outputs

        f = jax.lax.map(of_network, draws)
        mean, spread = _mixture(rows, f)
        variance = {name: jnp.var(values, axis=0) for name, values in f.items()}
        f = {name: jnp.mean(values, axis=0) for name, values in f.items()}
    elif options.link == "sample":
        noise = jax.random.normal(key, (options.num_samples, *cov.shape[:2]))
        flat = rows.flat() + jnp.einsum("bde,sbe->sbd", covariance_root(cov), noise)
        mean, spread = _mixture(rows, rows.cut(flat))
    else:
        mean, spread = rows.likelihood.predicted(f, variance)

    def shaped(value: Array) -> Array:
        return value.reshape(rows.shape + value.shape[2:])

    mean, spread, f, variance = jax.tree.map(shaped, (mean, spread, f, variance))
    return LaplacePredictive(mean, spread, f, variance, all_rows)


def _mixture(rows: ObservedRows, draws: Values) -> tuple[Array, Array]:
    """Mean and variance of an observation, averaged over draws of its outputs."""
    known = dict.fromkeys(rows.outputs, jnp.zeros(()))

    def predicted(f: Values) -> tuple[Array, Array]:
        return rows.likelihood.predicted(rows.outputs | f, known)

    means, variances = jax.vmap(predicted)(draws)
    return jnp.mean(means, 0), jnp.mean(variances, 0) + jnp.var(means, 0)
