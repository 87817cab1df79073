"""Evidence of linear models: values, derivatives of two orders, single precision, and what `vmap` does to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from numpyro_bnn.infer import linear_fit
from numpyro_bnn.infer.linear_fit import log_evidence

EPS = np.finfo(np.float32).eps
SHAPES = [(12, 4), (4, 12)]


def textbook(matrix, residual):
    """By the covariance of the data, which loses digits and is differentiated by JAX."""
    covariance = jnp.eye(matrix.shape[-2]) + matrix @ matrix.mT
    squares = residual.mT @ jnp.linalg.solve(covariance, residual)
    return -0.5 * (jnp.linalg.slogdet(covariance)[1] + squares[..., 0, 0])


def problem(shape, collinear, batch=()):
    """R and r in double precision; nearly collinear columns have no Cholesky decomposition of half of the digits."""
    rng = np.random.default_rng(sum(shape))
    matrix = rng.normal(size=(*batch, *shape))
    if collinear:
        base = rng.normal(size=(*batch, *shape)).sum(int(np.argmin(shape)) - 2, keepdims=True)
        matrix = 1e5 * (base + 1e-5 * matrix)
    return jnp.asarray(matrix), jnp.asarray(rng.normal(size=(*batch, shape[0], 1)))


def branches(matrix):
    """What a fit of (n, p) R does, p <= n."""
    gram = np.eye(matrix.shape[1]) + np.asarray(matrix, float).T @ np.asarray(matrix, float)
    lost = np.sum(np.diag(gram) * np.diag(np.linalg.inv(gram)))
    return "cholesky" if lost < np.finfo(matrix.dtype).eps ** -0.5 else "qr"


@pytest.mark.parametrize("collinear", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_derivatives_of_two_orders(shape, collinear):
    with jax.enable_x64(True):
        matrix, residual = problem(shape, collinear)
        assert branches(matrix if shape[0] > shape[1] else matrix.T) == ("qr" if collinear else "cholesky")
        # What the textbook formula loses: squares of the condition number.
        rtol = 1e-4 if collinear else 1e-9
        direction = problem(shape, False)[0] + 0.3, jnp.ones_like(residual)

        def along(fn):
            """Value, slope and curvature on a line."""

            def value(t):
                return fn(matrix + t * direction[0], residual + t * direction[1])

            return jax.jvp(jax.value_and_grad(value), (0.0,), (1.0,))

        np.testing.assert_allclose(*map(np.hstack, map(along, (log_evidence, textbook))), rtol=rtol)
        if not collinear:
            check_grads(log_evidence, (matrix, residual), order=2, modes=["fwd", "rev"], rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_all_second_derivatives(shape):
    """Forward over reverse, reverse over reverse, and reverse over forward."""
    with jax.enable_x64(True):
        point = problem(shape, False)
        expected = jax.hessian(textbook, (0, 1))(*point)
        for outer, inner in ((jax.jacfwd, jax.grad), (jax.jacrev, jax.grad), (jax.jacrev, jax.jacfwd)):
            found = outer(inner(log_evidence, (0, 1)), (0, 1))(*point)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


def features(inputs, spread, noise, prior):
    """R and r of a network of 50 tanh units and 1000 rows in single precision."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, inputs))
    h = np.tanh(x @ (spread * rng.normal(size=(inputs, 50))) + rng.normal(size=50))
    r = np.sin(x[:, :1]) + noise * rng.normal(size=(1000, 1))
    matrix = np.column_stack([prior * h, np.ones(1000)]) / noise
    return jnp.asarray(matrix, jnp.float32), jnp.asarray(r / noise, jnp.float32)


@pytest.mark.parametrize("prior", [0.14, 1.0, 100.0])
@pytest.mark.parametrize("noise", [1.0, 0.1, 1e-2, 1e-3])
@pytest.mark.parametrize("inputs", [1, 8])
def test_single_precision(inputs, noise, prior):
    """As exact as rounded features allow: errors are compared with those of double precision at rounded features."""
    matrix, residual = features(inputs, 1.0, noise, prior)
    found, slopes = jax.value_and_grad(log_evidence, (0, 1))(matrix, residual)
    with jax.enable_x64(True):
        exact_at = jax.jit(jax.value_and_grad(log_evidence, (0, 1)))
        point = [jnp.asarray(np.asarray(part, np.float64)) for part in (matrix, residual)]
        value, exact = exact_at(*point)
        rng = np.random.default_rng(1)
        rounded = [exact_at(point[0] * (1 + EPS * rng.normal(size=matrix.shape)), point[1]) for _ in range(4)]
    inherent = np.sqrt(np.mean([(float(at) - float(value)) ** 2 for at, _ in rounded]))
    digits = EPS**0.5  # what the Cholesky decomposition may lose, per weight in the log determinant
    assert abs(float(found) - float(value)) < 10 * inherent + 10 * EPS * abs(float(value)) + digits
    if branches(np.asarray(matrix)) == "cholesky":  # the error of the data has all digits, after a second pass
        error = np.asarray(exact[1])
        assert np.linalg.norm(np.asarray(slopes[1], float) - error) < 20 * EPS * np.linalg.norm(error)
    # Slopes along changes of the features, as of the first layer: (1 - h^2) times a smooth function.
    with jax.enable_x64(True):
        h = np.asarray(matrix, float) * noise / prior
    for part, change in enumerate((prior / noise * (1 - h**2) * np.sin(np.arange(51)), np.ones((1000, 1)))):

        def along(slopes, part=part, change=change):
            return float(np.sum(np.asarray(slopes[part], float) * change))

        scale = np.sqrt(np.sum((np.asarray(exact[part], float) * change) ** 2))
        inherent = np.sqrt(np.mean([(along(at) - along(exact)) ** 2 for _, at in rounded]))
        assert abs(along(slopes) - along(exact)) < 10 * inherent + digits * scale


@pytest.mark.parametrize("shape", [(40, 3), (41, 3), (7, 3)])
def test_chunks_of_rows_change_nothing(shape, monkeypatch):
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(2, *shape)), jnp.float32)
    monkeypatch.setattr(linear_fit, "CHUNK", 5)
    factor, triangle = linear_fit._decompose(matrix)
    assert jax.make_jaxpr(linear_fit._decompose)(matrix).pretty_print().count("scan") == 2
    np.testing.assert_allclose(factor @ triangle, matrix, atol=1e-5)
    inverse = np.linalg.inv(np.asarray(triangle, float))
    stacked = np.concatenate([factor, inverse], -2)  # orthonormal: T'T = I + R'R
    np.testing.assert_allclose(stacked.swapaxes(-1, -2) @ stacked, np.broadcast_to(np.eye(3), (2, 3, 3)), atol=1e-5)


@pytest.mark.parametrize("equal", [True, False], ids=["one layer", "scales of their own"])
def test_several_outputs_share_what_is_equal(equal, monkeypatch):
    """Values and gradients are those of each output, also of several chains."""
    matrix, _ = features(8, 1.0, 0.1, 1.0)
    scales = jnp.ones(6) if equal else jnp.asarray([1.0, 1.0, 2.0, 1.0, 0.5, 1.0])
    matrices = scales.reshape(2, 3, 1, 1) * matrix
    residuals = jnp.asarray(np.random.default_rng(2).normal(size=(2, 3, 1000, 1)), jnp.float32)
    used = []
    shared = linear_fit._shared
    monkeypatch.setattr(
        linear_fit, "_shared", lambda *given: jax.debug.callback(lambda: used.append(1)) or shared(*given)
    )
    mapped = jax.vmap(jax.value_and_grad(lambda a, b: jnp.sum(log_evidence(a, b)), (0, 1)))
    values, slopes = mapped(matrices, residuals)
    jax.effects_barrier()
    assert bool(used) == equal
    for chain in range(2):
        found = [jax.value_and_grad(log_evidence, (0, 1))(matrices[chain, k], residuals[chain, k]) for k in range(3)]
        np.testing.assert_allclose(values[chain], sum(value for value, _ in found), rtol=1e-5)
        for k, (_, each) in enumerate(found):
            for a, b in zip(slopes, each, strict=True):
                np.testing.assert_allclose(a[chain, k], b, atol=1e-4 * np.abs(b).max())


def test_one_model_that_needs_more_digits_takes_all_along():
    """Under `vmap`, also twice, values and gradients are those of each; only one branch is computed."""
    hard, easy = features(1, 1.0, 0.01, 1.0), features(8, 1.0, 0.1, 1.0)
    assert [branches(matrix) for matrix, _ in (hard, easy)] == ["qr", "cholesky"]
    each = [jax.value_and_grad(log_evidence, (0, 1))(*point) for point in (hard, easy, easy, hard)]
    matrix, residual = (jnp.stack([a, b, b, a]).reshape(2, 2, *a.shape) for a, b in zip(hard, easy, strict=True))
    mapped = jax.vmap(jax.vmap(jax.value_and_grad(log_evidence, (0, 1))))
    value, slopes = mapped(matrix, residual)
    np.testing.assert_allclose(value.ravel(), [found for found, _ in each], rtol=1e-5)
    for part, found in enumerate(slopes):
        for a, (_, b) in zip(found.reshape(4, *found.shape[2:]), each, strict=True):
            np.testing.assert_allclose(a, b[part], atol=3e-4 * np.abs(b[part]).max())
    printed = str(jax.make_jaxpr(mapped)(matrix, residual))
    assert "cond[" in printed
    one = jax.vmap(jax.value_and_grad(log_evidence), (0, None))(jnp.stack([easy[0]] * 2), easy[1])
    np.testing.assert_allclose(one[0], each[1][0], rtol=1e-5)
