"""Integrate sites that enter a model linearly out of it, so that a sampler moves only
the others.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array, lax, random
from jax.custom_batching import custom_vmap
from jax.scipy.linalg import solve_triangular
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import affine_normal, is_latent
from numpyro_bnn._keys import key_from
from numpyro_bnn._options import Model, checked
from numpyro_bnn._types import Arrays, PyTree, Site
from numpyro_bnn.infer.linear_blocks import JacobianBlocks
from numpyro_bnn.infer.linear_structure import (
    LinearGaussian,
    LinearModel,
    LinearStructure,
    read,
)
from numpyro_bnn.program.arguments import as_arrays
from numpyro_bnn.program.plates import PARAMETERS, isolated
from numpyro_bnn.program.posterior import Posterior

CALL = "infer.collapse"
FACTOR = "_collapsed_log_likelihood"


@checked("infer.collapse")
def collapse(model: Model, sites: Sequence[str], *args: Any, **kwargs: Any) -> Callable:
    r"""Integrate out weights that enter a model linearly, exactly; draws of them come
    back with each sample.

    For data and weights :math:`y \sim N(f + A w, S)`, :math:`w \sim N(m, D)`, where f,
    A, m, S and D depend on all other sites :math:`\theta`, a sampler needs only the
    latter,

    .. math:: p(\theta \mid y) \propto p(\theta)\, N(y;\ f + A m,\ A D A^\top + S),

    and w is drawn from its normal conditional for each draw afterwards. The output
    layer of a network given the layers below is such a site: once it is integrated out,
    no ridge remains between the scales of two layers, hidden units that are not needed
    move freely, and modes that differ only in output weights become one.

    In draws, ``Predictive(model, ...)`` and :func:`~numpyro_bnn.to_inference_data` the
    sites appear as if they had been sampled: the new model has them as deterministic
    sites. Their random numbers come from the bits of the other sites, so the model
    stays a function of its latent sites.

    The features A of dense layers are read from the program; other linear maps cost
    min(N, P) directional derivatives (or gradients). With N rows and p features of an
    output, a gradient then costs 4 N p^2 operations more, for all outputs together if
    their scales of prior and noise are equal, else for each; 2.5 times as many where
    features are so collinear that the precision needs a QR decomposition. Memory is
    that of a few copies of A. Of heteroscedastic data the weights of the mean can be
    integrated out if those of the scale are another site.
    ``examples.benchmarks.collapse_cost`` measures the cost.

    :param model: a NumPyro model.
    :param sites: names of sites with independent normal priors, in which the means of
        normal data are linear.
    :param args: positional arguments of the model, with the data.
    :param kwargs: its keyword arguments.
    :return: a model with the signature of ``model``; it returns nothing.
    :raises ValueError: if the model is not linear in the sites, if noise or prior are
        not normal, or if latent sites depend on them.
    :raises TypeError: if ``sites`` is not a sequence of distinct names.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro.infer import MCMC, NUTS
    >>> from numpyro_bnn import models, nn
    >>> x = jnp.linspace(-1, 1, 8)[:, None]
    >>> model = models.regression(nn.MLP([3, 1], "tanh"))
    >>> hidden = collapse(model, ["net/Dense_1.kernel", "net/Dense_1.bias"], x, x[:, 0])
    >>> mcmc = MCMC(NUTS(hidden), num_warmup=5, num_samples=5, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), x, x[:, 0])
    >>> mcmc.get_samples()["net/Dense_1.kernel"].shape
    (5, 3, 1)
    """
    names, (args, kwargs) = _check_names(sites), as_arrays(args, kwargs)
    with isolated():
        reading = Posterior(model, args, kwargs)
        structure = read(CALL, reading, names)
    free_sites = set(reading.latent).difference(names)
    if not free_sites:
        instead = (
            "Leave at least one to the sampler: given all data, the posterior of these "
            "is normal."
        )
        raise argument_error(CALL, "sites", "all sites that are sampled", instead)

    @wraps(model)
    def collapsed(*args: Any, **kwargs: Any) -> None:
        run = _WithoutLinear(structure)
        with run:
            model(*args, **kwargs)
        if run.values.keys() >= free_sites:  # not while an outer handler hides sites
            placed = handlers.substitute(model, data=run.parameters)
            with isolated():  # anew: what it takes from outside may have changed
                reading = Posterior(placed, args, kwargs)
            _integrate(reading, structure, run.values)

    collapsed.predictive_model = model  # type: ignore[attr-defined]
    return collapsed


def _check_names(sites: object) -> tuple[str, ...]:
    """Refuse anything but a sequence of distinct names."""
    names: tuple[Any, ...] = ()
    if isinstance(sites, Iterable) and not isinstance(sites, str):
        names = tuple(sites)
    are_names = all(isinstance(name, str) for name in names)
    if not names or not are_names or len(set(names)) < len(names):
        instead = "Pass a nonempty sequence of distinct site names, e.g. `['beta']`."
        raise argument_error(CALL, "sites", sites, instead, TypeError)
    return names


class _WithoutLinear(Messenger):
    """Run a model with its linear sites at their prior means, hidden like the data;
    record other latent values.
    """

    def __init__(self, structure: LinearStructure) -> None:
        self.structure = structure
        self.values: dict[str, Array] = {}
        self.parameters: dict[str, PyTree] = {}
        super().__init__(None)

    def process_message(self, msg: Site) -> None:
        if msg["type"] == "deterministic":
            msg["stop"] = True  # recorded once the linear sites have been drawn
        elif msg["type"] == "sample" and msg["name"] in self.structure.shapes:
            msg["value"], _ = affine_normal(msg["fn"]) or (None, None)
            msg["stop"] = True
        elif msg["type"] == "sample" and msg["name"] in self.structure.data:
            msg["stop"] = True

    def postprocess_message(self, msg: Site) -> None:
        if msg["type"] in PARAMETERS:
            self.parameters[msg["name"]] = msg["value"]
        if is_latent(msg) and msg["name"] not in self.structure.shapes:
            self.values[msg["name"]] = msg["value"]


def _integrate(reading: Posterior, structure: LinearStructure, values: Arrays) -> None:
    """Declare the factor that replaces the data, and the sites that were integrated
    out.
    """
    with isolated():
        linear = LinearModel(reading, structure, values)
        gaussian, blocks = linear.gaussian(), linear.blocks()
        factor = log_marginal(gaussian, blocks)
        constants = {}
        for name, value in values.items():
            constants[name] = lax.stop_gradient(jnp.asarray(value))
        key = key_from(constants)
        traced = linear.trace(sample(key, *lax.stop_gradient((gaussian, blocks))))
    numpyro.factor(FACTOR, factor)
    for name, site in traced.items():
        if name in structure.shapes or site["type"] == "deterministic":
            numpyro.deterministic(name, site["value"])


def log_marginal(model: LinearGaussian, blocks: JacobianBlocks) -> Array:
    r"""Log of the integral over u of :math:`N(y; f + A u, S)^\beta N(u; 0, D)^\gamma`,
    A the ``blocks``.
    """

    def log_norm(sd: Array) -> Array:
        return 0.5 * jnp.log(2 * jnp.pi) + jnp.log(sd)

    gamma = model.prior_weight
    powered = jnp.sum((1 - gamma) * log_norm(model.prior_sd) - 0.5 * jnp.log(gamma))
    prior = jnp.where(jnp.all(gamma == 1), 0.0, powered)  # sds may be 0
    return (
        jnp.sum(log_evidence(*_scaled(model, blocks)))
        - jnp.sum(model.weight * log_norm(model.sd))
        + prior
    )


def sample(rng_key: Array, model: LinearGaussian, blocks: JacobianBlocks) -> Array:
    """(P,) innovations drawn from their exact conditional given the data.

    For p <= n in a block directly from their normal distribution in p dimensions;
    otherwise in n dimensions, by correcting a draw of the prior (Bhattacharya,
    Chakraborty & Mallick 2016, algorithm 1). That rounds in units of the prior sd: in
    single precision it should be below 10^6 posterior sds.
    """
    matrix, residual = _scaled(model, blocks)
    *batch, n, p = matrix.shape
    noise = random.normal(rng_key, (*batch, p if p <= n else p + n, 1), matrix.dtype)
    if p <= n:
        fit = linear_fit(matrix, residual)
        drawn = fit.weights + fit.root @ noise
    else:
        prior, error = noise[..., :p, :], noise[..., p:, :]
        fit = linear_fit(matrix.mT, jnp.zeros_like(prior))
        drawn = prior + matrix.mT @ (
            fit.root @ (fit.root.mT @ (residual - matrix @ prior - error))
        )
    flat = jnp.zeros_like(model.prior_sd)
    flat = flat.at[blocks.columns].set(drawn[..., 0], unique_indices=True)
    return model.prior_sd / jnp.sqrt(model.prior_weight) * flat


def _scaled(model: LinearGaussian, blocks: JacobianBlocks) -> tuple[Array, Array]:
    """The model in units of noise and prior, r ~ N(R w, I) with w ~ N(0, I): (..., n,
    p) R and (..., n, 1) r.
    """
    root = jnp.sqrt(model.weight) / model.sd
    # Masked data may be NaN.
    residual = jnp.where(model.weight > 0, root * (model.value - model.mean), 0.0)
    prior_sd = model.prior_sd / jnp.sqrt(model.prior_weight)
    if not np.array_equal(blocks.columns, np.arange(blocks.columns.size)):
        # no gather where none is needed
        prior_sd = prior_sd[blocks.columns]
    if blocks.rows.ndim > 1:
        root, residual = root[blocks.rows], residual[blocks.rows]
    return root[..., None] * blocks.matrix * prior_sd[..., None, :], residual[..., None]


class LinearFit(NamedTuple):
    """The posterior N(w, S S') of models with p weights and n data, C = I + R'R;
    leading axes are independent models.

    :param root: (..., p, p) S, upper triangular with S S' = C^-1.
    :param weights: (..., p, 1) w, the posterior mean.
    :param error: (..., n, 1) r - R w.
    :param gain: (..., n, p) R C^-1.
    """

    root: Array
    weights: Array
    error: Array
    gain: Array


@jax.custom_jvp
def log_evidence(matrix: Array, residual: Array) -> Array:
    """log N(r; 0, I + R R') without its constant, of (..., n, p) R and (..., n, 1) r,
    by the smaller of n and p.
    """
    return _evidence(matrix, residual)[0]


@log_evidence.defjvp
def _slope(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """In closed form: nothing is differentiated through a decomposition."""
    value, fit = _evidence(*primals)
    by_matrix = fit.error @ fit.weights.mT - fit.gain
    return value, jnp.sum(by_matrix * tangents[0], (-2, -1)) - jnp.sum(
        fit.error * tangents[1], (-2, -1)
    )


def _evidence(matrix: Array, residual: Array) -> tuple[Array, LinearFit]:
    if matrix.shape[-1] <= matrix.shape[-2]:
        fit = linear_fit(matrix, residual)
    else:  # (I + R R')^-1 R = R (I + R'R)^-1
        root, _, _, gain = linear_fit(matrix.mT, jnp.zeros_like(matrix[..., :1, :].mT))
        error = root @ (root.mT @ residual)
        fit = LinearFit(root, matrix.mT @ error, error, gain.mT)
    log_root = jnp.sum(jnp.log(jnp.abs(jnp.diagonal(fit.root, axis1=-2, axis2=-1))), -1)
    squares = jnp.sum(fit.error**2, (-2, -1)) + jnp.sum(fit.weights**2, (-2, -1))
    return log_root - 0.5 * squares, fit


@jax.custom_jvp
def linear_fit(matrix: Array, residual: Array) -> LinearFit:
    """The posterior of (..., n, p) R and (..., n, 1) r.

    By a Cholesky decomposition of C where that loses at most half of the digits, as in
    most networks; else by a QR decomposition of R stacked on the identity, of 2.5 times
    the cost: prior scales in one model can differ by many orders of magnitude, or
    features be nearly collinear, and single precision copes with the condition number
    of R, but not with its square. Derivatives of all orders are in closed form.
    """
    return LinearFit(*_fit(matrix, residual))


@linear_fit.defjvp
def _change(primals: tuple, tangents: tuple) -> tuple[LinearFit, LinearFit]:
    (matrix, residual), (d_matrix, d_residual) = primals, tangents
    fit = linear_fit(matrix, residual)
    root, weights, error, gain = fit
    orthonormal, d_orthonormal = matrix @ root, d_matrix @ root
    half = orthonormal.mT @ d_orthonormal
    change = half + half.mT  # S' dC S
    d_root = -root @ (
        jnp.triu(change) - 0.5 * change * jnp.eye(change.shape[-1], dtype=change.dtype)
    )
    d_error = d_residual - d_matrix @ weights
    d_weights = root @ (d_orthonormal.mT @ error) + gain.mT @ d_error
    d_gain = (d_orthonormal - orthonormal @ change) @ root.mT
    return fit, LinearFit(d_root, d_weights, d_error - matrix @ d_weights, d_gain)


@custom_vmap
def _fit(matrix: Array, residual: Array) -> tuple[Array, ...]:
    if matrix.ndim == 2:
        return _each(matrix, residual)
    # outputs of one layer, with equal scales of prior and noise
    same = jnp.all(matrix == matrix[..., :1, :, :])
    return lax.cond(same, _shared, _each, matrix, residual)


@_fit.def_vmap
def _together(size: int, batched: list[bool], *inputs: Array) -> tuple[Any, Any]:
    """Under ``vmap`` one branch for all models, not both branches for each."""
    arrays = []
    for array, is_batched in zip(inputs, batched, strict=True):
        if not is_batched:
            array = jnp.broadcast_to(array, (size, *array.shape))
        arrays.append(array)
    return _fit(*arrays), (True,) * 4


def _shared(matrix: Array, residual: Array) -> tuple[Array, ...]:
    """Several columns r for one R."""
    root, weights, error, gain = _each(matrix[..., 0, :, :], residual[..., 0].mT)

    def repeated(array: Array) -> Array:
        shape = (*matrix.shape[:-2], *array.shape[-2:])
        return jnp.broadcast_to(array[..., None, :, :], shape)

    weights, error = weights.mT[..., None], error.mT[..., None]
    return repeated(root), weights, error, repeated(gain)


def _each(matrix: Array, residual: Array) -> tuple[Array, ...]:
    eye = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    gram = matrix.mT @ matrix + eye
    root = _inverse(jnp.linalg.cholesky(gram, symmetrize_input=False).mT)
    # The sum of the inverse eigenvalues of C in units of its diagonal; not a number if
    # C has lost its smallest ones.
    lost = jnp.sum(
        jnp.diagonal(gram, axis1=-2, axis2=-1)[..., None] * root**2, (-2, -1)
    )
    sound = jnp.all(lost < jnp.finfo(gram.dtype).eps ** -0.5)
    return lax.cond(sound, _by_cholesky, _by_qr, matrix, residual, root)


def _by_cholesky(matrix: Array, residual: Array, root: Array) -> tuple[Array, ...]:
    covariance = root @ root.mT
    weights = covariance @ (matrix.mT @ residual)
    error = residual - matrix @ weights
    step = covariance @ (matrix.mT @ error - weights)  # zero but for rounding
    return root, weights + step, error - matrix @ step, matrix @ covariance


def _by_qr(matrix: Array, residual: Array, _: Array) -> tuple[Array, ...]:
    orthonormal, triangle = _decompose(matrix)
    root, projected = _inverse(triangle), orthonormal.mT @ residual
    weights, error = root @ projected, residual - orthonormal @ projected
    # a second pass of Gram and Schmidt
    step = orthonormal.mT @ error - root.mT @ weights
    gain = orthonormal @ root.mT
    return root, weights + root @ step, error - orthonormal @ step, gain


def _inverse(triangle: Array) -> Array:
    eye = jnp.broadcast_to(
        jnp.eye(triangle.shape[-1], dtype=triangle.dtype), triangle.shape
    )
    return solve_triangular(triangle, eye)


def _decompose(matrix: Array) -> tuple[Array, Array]:
    """(..., n, p) Q and (..., p, p) T with R = Q T and T'T = I + R'R."""
    *batch, n, p = matrix.shape
    eye = jnp.broadcast_to(jnp.eye(p, dtype=matrix.dtype), (*batch, p, p))
    factor, triangle = jnp.linalg.qr(jnp.concatenate([matrix, eye], -2))
    return factor[..., :n, :], triangle
