"""Evidence of collapsed linear models: derivatives of two orders, single precision, several outputs, `vmap`."""

import time
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import log_density

from numpyro_bnn import infer

EPS = np.finfo(np.float32).eps
SHAPES = [(12, 4), (4, 12)]


def fits(matrix, residuals, scales):
    """(N, K) r ~ N(R w, 1) with (P, K) w ~ N(0, s^2), and a site without an effect, which stays in the sampler."""
    numpyro.sample("other", dist.Normal(0.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.0, scales).expand([matrix.shape[1], len(scales)]).to_event(2))
    numpyro.sample("y", dist.Normal(matrix @ w, 1.0).to_event(2), obs=residuals)


@cache
def evidence_of(shape, outputs):
    """log N(r; 0, I + s^2 R R') of all outputs without its constant, a function of (N, P) R, (N, K) r, and (K,) s."""
    example = np.ones(shape, np.float32), np.ones((shape[0], outputs), np.float32), np.ones(outputs, np.float32)
    collapsed = infer.collapse(fits, ["w"], *example)

    def log_evidence(matrix, residuals, scales):
        log = log_density(collapsed, (matrix, residuals, scales), {}, {"other": 0.0})[0]
        return log + 0.5 * (1 + residuals.size) * jnp.log(2 * jnp.pi)

    return log_evidence


def of_one(shape):
    """Of one output, as a function of R and (N, 1) r."""
    return lambda matrix, residual: evidence_of(shape, 1)(matrix, residual, jnp.ones(1, matrix.dtype))


@cache
def slopes_of(shape):
    return jax.jit(jax.value_and_grad(of_one(shape), (0, 1)))


def textbook(matrix, residual):
    """By the covariance of the data, which loses digits and is differentiated by JAX."""
    covariance = jnp.eye(matrix.shape[-2]) + matrix @ matrix.mT
    squares = residual.mT @ jnp.linalg.solve(covariance, residual)
    return -0.5 * (jnp.linalg.slogdet(covariance)[1] + squares[..., 0, 0])


def loses_digits(matrix):
    """Whether the precision of (N, P) R, P <= N, has no Cholesky decomposition with half of the digits."""
    gram = np.eye(matrix.shape[1]) + np.asarray(matrix, float).T @ np.asarray(matrix, float)
    return np.sum(np.diag(gram) * np.diag(np.linalg.inv(gram))) >= np.finfo(matrix.dtype).eps ** -0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_all_second_derivatives(shape, x64):
    rng = np.random.default_rng(0)
    point = jnp.asarray(rng.normal(size=shape)), jnp.asarray(rng.normal(size=(shape[0], 1)))
    expected, derivatives = (jax.jit(jax.hessian(fn, (0, 1)))(*point) for fn in (textbook, of_one(shape)))
    for a, b in zip(jax.tree.leaves(derivatives), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


def features(inputs, noise, prior, rows=1100):
    """R and r of a network of 50 tanh units in single precision; so many rows are decomposed in chunks."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, inputs))
    h = np.tanh(x @ rng.normal(size=(inputs, 50)) + rng.normal(size=50))
    r = np.sin(x[:, :1]) + noise * rng.normal(size=(rows, 1))
    matrix = np.column_stack([prior * h, np.ones(rows)]) / noise
    return jnp.asarray(matrix, jnp.float32), jnp.asarray(r / noise, jnp.float32)


CASES = [(1, 1.0, 0.14), (1, 0.1, 1.0), (1, 1e-3, 100.0), (8, 0.1, 1.0), (8, 1e-3, 0.14), (8, 1e-3, 100.0)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_single_precision(case):
    """As exact as rounded features allow: errors are compared with those of double precision at rounded features."""
    _, noise, prior = case
    matrix, residual = features(*case)
    value_and_slopes = slopes_of(matrix.shape)
    single, slopes = value_and_slopes(matrix, residual)
    with jax.enable_x64(True):
        point = [jnp.asarray(np.asarray(part, float)) for part in (matrix, residual)]
        value, exact = value_and_slopes(*point)
        rng = np.random.default_rng(1)
        rounded = [value_and_slopes(point[0] * (1 + EPS * rng.normal(size=matrix.shape)), point[1]) for _ in range(4)]
    inherent = np.sqrt(np.mean([(float(at) - float(value)) ** 2 for at, _ in rounded]))
    digits = EPS**0.5  # what the Cholesky decomposition may lose, per weight in the log determinant
    assert abs(float(single) - float(value)) < 10 * inherent + 10 * EPS * abs(float(value)) + digits
    if not loses_digits(matrix):  # the error of the data has all digits, after a second pass
        error = np.asarray(exact[1])
        assert np.linalg.norm(np.asarray(slopes[1], float) - error) < 20 * EPS * np.linalg.norm(error)
    # Slopes along changes of the features, as of the first layer: (1 - h^2) times a smooth function.
    h = np.asarray(matrix, float) * noise / prior
    for part, change in enumerate((prior / noise * (1 - h**2) * np.sin(np.arange(51)), np.ones(residual.shape))):

        def along(slopes, part=part, change=change):
            return float(np.sum(np.asarray(slopes[part], float) * change))

        scale = np.sqrt(np.sum((np.asarray(exact[part], float) * change) ** 2))
        inherent = np.sqrt(np.mean([(along(at) - along(exact)) ** 2 for _, at in rounded]))
        assert abs(along(slopes) - along(exact)) < 10 * inherent + digits * scale


@pytest.mark.slow
@pytest.mark.parametrize("equal", [True, False], ids=["one layer", "scales of their own"])
def test_several_outputs_have_the_values_and_slopes_of_each(equal):
    """Also of several chains at once."""
    matrix, _ = features(8, 0.1, 1.0)
    residuals = jnp.asarray(np.random.default_rng(2).normal(size=(2, len(matrix), 3)), jnp.float32)
    scales = jnp.ones((2, 3)) if equal else jnp.asarray([[1.0, 1.0, 2.0], [1.0, 0.5, 1.0]])
    together = jax.vmap(jax.value_and_grad(evidence_of(matrix.shape, 3), (1, 2)), (None, 0, 0))
    values, slopes = jax.jit(together)(matrix, residuals, scales)
    for chain in range(2):
        total = 0.0
        for k in range(3):
            scale, residual = float(scales[chain, k]), residuals[chain, :, k : k + 1]
            value, (by_matrix, by_residual) = slopes_of(matrix.shape)(scale * matrix, residual)
            total += float(value)
            np.testing.assert_allclose(
                slopes[0][chain, :, k : k + 1], by_residual, atol=1e-4 * np.abs(by_residual).max()
            )
            np.testing.assert_allclose(slopes[1][chain, k], jnp.sum(by_matrix * matrix), rtol=1e-3)
        np.testing.assert_allclose(values[chain], total, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.optimized
def test_outputs_of_equal_scales_cost_one_decomposition_for_all():
    """Seconds of a processor of one program, at equal and at other scales: 40 decompositions cost more than two."""
    shape, outputs = (400, 120), 40
    rng = np.random.default_rng(0)
    matrix, residuals = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in (shape, (shape[0], outputs)))
    program, seconds = jax.jit(evidence_of(shape, outputs)), {}
    for kind, scales in (("equal", jnp.ones(outputs)), ("other", jnp.linspace(0.5, 2.0, outputs))):
        program(matrix, residuals, scales).block_until_ready()
        repeated = []
        for _ in range(5):
            start = time.process_time()
            program(matrix, residuals, scales).block_until_ready()
            repeated.append(time.process_time() - start)
        seconds[kind] = min(repeated)
    assert seconds["equal"] < 0.5 * seconds["other"], seconds


@pytest.mark.slow
def test_one_model_that_needs_more_digits_takes_all_along():
    """Under `vmap`, also twice, values and slopes are those of each."""
    hard, easy = features(1, 0.01, 1.0), features(8, 0.1, 1.0)
    assert [bool(loses_digits(matrix)) for matrix, _ in (hard, easy)] == [True, False]
    fn = slopes_of(easy[0].shape)
    each = [fn(*point) for point in (hard, easy, easy, hard)]
    matrix, residual = (jnp.stack([a, b, b, a]).reshape(2, 2, *a.shape) for a, b in zip(hard, easy, strict=True))
    value, slopes = jax.vmap(jax.vmap(fn))(matrix, residual)
    np.testing.assert_allclose(value.ravel(), [alone for alone, _ in each], rtol=1e-5)
    for part, together in enumerate(slopes):
        for a, (_, b) in zip(together.reshape(4, *together.shape[2:]), each, strict=True):
            np.testing.assert_allclose(a, b[part], atol=3e-4 * np.abs(b[part]).max())
