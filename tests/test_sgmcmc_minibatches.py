"""Minibatch streams: bijections, exact coverage, uniformity, cost flat in N."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_bnn.sgmcmc import Epochs, FullData, Keys, ProductStream, Rows, WithReplacement, noise
from numpyro_bnn.sgmcmc.minibatches import permute


@pytest.fixture(scope="module")
def words():
    return noise.seeds(jax.random.key(21), 1)[0]


def draws(stream, words, steps):
    return np.asarray(jax.jit(jax.vmap(stream.draw, (None, 0)))(words, jnp.arange(steps, dtype=jnp.uint32)))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100, 1009, 4096, 100_003])
def test_permutation_is_a_bijection(words, size):
    image = permute(words, jnp.uint32(3), jnp.arange(size, dtype=jnp.uint32), size)
    np.testing.assert_array_equal(np.sort(image), np.arange(size))


def test_all_orders_of_four_are_equally_likely(words):
    epochs, place = jnp.arange(12_000, dtype=jnp.uint32), jnp.arange(4, dtype=jnp.uint32)
    images = np.asarray(jax.vmap(lambda e: permute(words, e, place, 4))(epochs))
    counts = [np.all(images == order, axis=1).sum() for order in itertools.permutations(range(4))]
    assert stats.chisquare(counts).pvalue > 1e-4  # 23 degrees of freedom, failure rate 1e-4


def test_places_and_neighbors_are_uniform(words):
    size, epochs = 50, jnp.arange(20_000, dtype=jnp.uint32)
    place = jnp.array([0, 1, 25], jnp.uint32)
    images = np.asarray(jax.vmap(lambda e: permute(words, e, place, size))(epochs))
    for column in images.T:
        assert stats.chisquare(np.bincount(column, minlength=size)).pvalue > 1e-4
    # Distance between the images of neighbors: uniform on 1..size-1 modulo size.
    for other in (1, 2):
        distance = (images[:, other] - images[:, 0]) % size
        assert stats.chisquare(np.bincount(distance, minlength=size)[1:]).pvalue > 1e-4
    # Successive epochs are unrelated.
    lag = (images[1:, 0] - images[:-1, 0]) % size
    assert stats.chisquare(np.bincount(lag, minlength=size)).pvalue > 1e-4


@pytest.mark.parametrize(("num_data", "batch_size"), [(12, 4), (10, 4), (7, 3), (5, 5), (1, 1), (9, 6)])
def test_epochs_cover_the_data_exactly(words, num_data, batch_size):
    covered = math.lcm(num_data, batch_size)
    blocks = draws(Epochs(num_data, batch_size), words, 3 * covered // batch_size)
    assert blocks.shape[1] == batch_size
    epochs = blocks.reshape(-1, num_data)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(num_data), (len(epochs), 1)))
    if num_data > 5:
        assert len(np.unique(epochs, axis=0)) > 1


def test_with_replacement_is_uniform_and_independent(words):
    indices = draws(WithReplacement(37, 5), words, 20_000)
    assert stats.chisquare(np.bincount(indices.ravel(), minlength=37)).pvalue > 1e-4
    pairs = np.bincount(indices[:, 0] * 37 + indices[:, 1], minlength=37**2)
    assert stats.chisquare(pairs).pvalue > 1e-4
    lagged = np.bincount(indices[1:, 0] * 37 + indices[:-1, 0], minlength=37**2)
    assert stats.chisquare(lagged).pvalue > 1e-4


@pytest.mark.parametrize("kind", [WithReplacement, Epochs])
def test_work_does_not_grow_with_the_data(words, kind):
    """The traced programs for N = 10^4 and 10^6 have the same operations on arrays of the same shapes."""

    def operations(num_data):
        jaxpr = jax.make_jaxpr(kind(num_data, 20).draw)(words, jnp.uint32(0)).jaxpr
        return [(str(eqn.primitive), [v.aval.shape for v in eqn.outvars]) for eqn in jaxpr.eqns]

    assert operations(10**4) == operations(10**6)


def test_several_plates_draw_independently(words):
    stream = ProductStream({"a": WithReplacement(1000, 500), "b": WithReplacement(1000, 500), "key": Keys()})
    block = stream.draw(words, jnp.uint32(4))
    assert set(block) == {"a", "b", "key"}
    assert abs(np.corrcoef(block["a"], block["b"])[0, 1]) < 4.5 / 500**0.5
    assert stream.independent
    assert not ProductStream({"a": Epochs(10, 2)}).independent


def test_rows_are_the_rows_of_the_indices(words):
    data = {"x": jnp.arange(20.0).reshape(10, 2), "y": jnp.arange(10)}
    index = WithReplacement(10, 4).draw(words, jnp.uint32(1))
    rows = Rows(WithReplacement(10, 4), data).draw(words, jnp.uint32(1))
    np.testing.assert_array_equal(rows["x"], data["x"][index])
    np.testing.assert_array_equal(rows["y"], index)
    assert FullData().draw(words, jnp.uint32(0)) == ()


@pytest.mark.parametrize("kind", [WithReplacement, Epochs])
@pytest.mark.parametrize(
    ("sizes", "argument"),
    [
        ((10, 11), "batch_size"),
        ((10, 0), "batch_size"),
        ((0, 1), "num_data"),
        ((10.0, 2), "num_data"),
        ((2**31, 1), "num_"),
    ],
)
def test_sizes_are_checked(kind, sizes, argument):
    with pytest.raises(ValueError, match=argument):
        kind(*sizes)


def test_epochs_too_long_to_count_are_refused():
    with pytest.raises(ValueError, match="divisor"):
        Epochs(2**30 + 1, 32)
