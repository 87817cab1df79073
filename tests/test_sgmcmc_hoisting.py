"""The part of a minibatch potential that is hoisted out of the steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_bnn import sgmcmc
from numpyro_bnn.sgmcmc.gradients import separate

pytestmark = pytest.mark.core

DATA = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
X = jnp.asarray(DATA)


def plain(q, i):
    return 25.0 * jnp.mean((X[i] @ q) ** 2)


def with_jit(q, i):
    return jax.jit(plain)(q, i) + jnp.sum(q)


def without_rows(q, i):
    return jnp.sum(q**2)


def with_loop(q, i):
    return jax.lax.fori_loop(0, 3, lambda k, total: total + jnp.sum(jnp.sin(q) * X[i[k]]), 0.0)


def of_a_tree(q, batch):
    return jnp.sum((X[batch["rows"]] - q) ** 2) * batch["weight"]


INDICES = jnp.array([4, 49, 0, 4])
CASES = {
    "rows": (plain, INDICES),
    "inside jit": (with_jit, INDICES),
    "no rows": (without_rows, INDICES),
    "inside a loop": (with_loop, INDICES),
    "several parts": (of_a_tree, {"rows": INDICES, "weight": jnp.float32(2.0)}),
}


@pytest.mark.parametrize("name", CASES)
def test_two_parts_make_the_whole(name):
    potential, batch = CASES[name]
    q = jnp.array([0.3, -1.0, 2.0])
    prepare, finish = separate(potential, jnp.zeros(3), jax.tree.map(jnp.zeros_like, batch))
    value, gradient = jax.jit(jax.value_and_grad(lambda q: finish(q, prepare(batch))))(q)
    expected = jax.value_and_grad(potential)(q, batch)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-6)


def test_rows_are_picked_ahead_and_nothing_else_is_handed_over():
    prepare, finish = separate(plain, jnp.zeros(3), INDICES)
    (rows,) = prepare(INDICES)
    np.testing.assert_array_equal(rows, DATA[np.asarray(INDICES)])
    assert "gather" not in str(jax.make_jaxpr(finish)(jnp.zeros(3), [rows]))


def test_parts_that_are_not_needed_are_left_out():
    def potential(q, i):
        _ = jnp.sum(X[i] ** 2)  # a traced model holds much that its density does not need
        return jnp.sum(q**2)

    prepare, _ = separate(potential, jnp.zeros(3), INDICES)
    assert prepare(INDICES) == []


def test_works_inside_jit_and_vmap_on_traced_data():
    @jax.jit
    def through(x, batches, q):
        prepare, finish = separate(lambda q, i: jnp.sum(x[i] @ q), q, batches[0])
        return jax.vmap(lambda rows: finish(q, rows))(jax.vmap(prepare)(batches))

    batches = jnp.array([[0, 1], [2, 3]])
    np.testing.assert_allclose(through(X, batches, jnp.ones(3)), DATA[:4].reshape(2, 2, 3).sum((1, 2)), rtol=1e-5)


def test_calls_into_python_stay_in_the_step():
    """They need not know how to run for many steps at once."""

    def potential(q, i):
        shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
        rows = jax.pure_callback(lambda i: DATA[np.asarray(i)], shape, i)
        return jnp.sum((rows - q) ** 2)

    def end(potential):
        gradient = sgmcmc.Minibatch(potential, sgmcmc.WithReplacement(50, 2))
        sampler = sgmcmc.build(gradient, sgmcmc.Overdamped(), schedule=0.01)
        return sampler.run(sampler.init(jnp.zeros(3), jax.random.key(0)), 10).position

    np.testing.assert_allclose(end(potential), end(lambda q, i: jnp.sum((X[i] - q) ** 2)), rtol=1e-5)


def test_work_of_a_step_does_not_depend_on_the_size_of_the_data():
    """What the compiler counts inside the step loop: no operand is as long as the data."""
    x = jnp.zeros((100_000, 3))
    gradient = sgmcmc.Minibatch(lambda q, i: jnp.sum((x[i] - q) ** 2), sgmcmc.WithReplacement(x.shape[0], 8))
    sampler = sgmcmc.build(gradient, sgmcmc.Overdamped(), schedule=0.01)
    prepare, separated, _ = sampler._separated(sampler.init(jnp.zeros(3), jax.random.key(0)))
    rows = jax.tree.map(lambda part: part[0], prepare(jnp.zeros((1, 8), jnp.int32)))
    step = jax.make_jaxpr(lambda q, rows: separated.gradient((), q, rows))(jnp.zeros(3), rows)
    assert "100000" not in str(step)
