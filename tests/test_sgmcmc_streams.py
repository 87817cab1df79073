"""Random numbers and minibatches of the engine: exact bits, normals right into the tails, exact coverage."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import stats

from numpyro_bnn.sgmcmc import Epochs, WithReplacement, streams
from numpyro_bnn.sgmcmc.streams import FullData, Keys, ProductStream, permute


@pytest.fixture(scope="module")
def words():
    return streams.seeds(jax.random.key(20), 1)[0]


def test_bits_are_those_of_jax(words):
    index = jnp.arange(500, dtype=jnp.uint32)
    ours = streams.threefry(words, index, index + jnp.uint32(7))
    theirs = threefry_2x32(words, jnp.concatenate([index, index + jnp.uint32(7)]))
    np.testing.assert_array_equal(jnp.concatenate(ours), theirs)


def test_typed_and_legacy_keys_give_the_same_seeds():
    np.testing.assert_array_equal(streams.seeds(jax.random.key(3), 4), streams.seeds(jax.random.PRNGKey(3), 4))
    assert streams.seeds(jax.random.key(3, impl="rbg"), 4).shape == (4, 2)


@pytest.mark.parametrize("wrong", [0, None, jnp.zeros(2), "batched"])
def test_wrong_keys_are_refused(wrong):
    wrong = jax.random.split(jax.random.key(0)) if wrong == "batched" else wrong
    with pytest.raises(TypeError, match="rng_key"):
        streams.seeds(wrong, 2)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_normals_have_the_normal_law(words, dtype):
    with jax.enable_x64(dtype == "float64"):
        n = 400_001
        z = np.asarray(streams.normal(words, jnp.uint32(5), n, jnp.dtype(dtype)), np.float64)
    assert z.shape == (n,)
    # Standard errors of the raw moments 1..4 of N(0, 1); 4.5 sigma, failure rate 7e-6 each (the seed is fixed).
    for power, mean, sd in ((1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)):
        assert abs((z**power).mean() - mean) < 4.5 * sd / n**0.5, power
    assert stats.kstest(z, "norm").pvalue > 1e-4
    assert len(np.unique(z)) > 0.98 * n


def test_normals_of_a_pair_and_of_neighboring_steps_are_independent(words):
    n = 200_000
    z = streams.normal(words, jnp.uint32(1), 2 * n, jnp.float32)
    pairs = {
        "one Box-Muller pair": (z[:n], z[n:]),
        "neighbors": (z[: n - 1], z[1:n]),
        "steps": (z[:n], streams.normal(words, jnp.uint32(2), 2 * n, jnp.float32)[:n]),
        "seeds": (z[:n], streams.normal(words + jnp.uint32(1), jnp.uint32(1), 2 * n, jnp.float32)[:n]),
    }
    for name, (a, b) in pairs.items():
        for power in (1, 2):  # squares would show a common radius
            correlation = np.corrcoef(np.asarray(a) ** power, np.asarray(b) ** power)[0, 1]
            assert abs(correlation) < 4.5 / n**0.5, (name, power)


@pytest.mark.parametrize(("sigmas", "tolerance"), [(3.0, 1e-4), (4.0, 1e-4), (5.0, 5e-4), (6.0, 0.02)])
def test_float32_tail_probability_is_right(sigmas, tolerance):
    """No sampling: the atoms of the radius are enumerated, the angle is uniform to 2^-30."""
    k = np.unique(np.round(np.geomspace(1, 2**32 * np.exp(-(sigmas**2) / 2) * 1.01, 200_000)).astype(np.uint64)) - 1
    width = np.diff(np.append(k, k[-1] + 1)).astype(float)
    no_turn = jnp.zeros(len(k), jnp.uint32)
    radius = np.hypot(*np.asarray(streams.box_muller(jnp.asarray(k.astype(np.uint32)), no_turn), np.float64))
    share = np.where(radius > sigmas, 2 / np.pi * np.arccos(np.minimum(sigmas / radius, 1)), 0)
    # Between the sampled k the share is smooth and monotone: trapezoids, plus the first atom in full.
    middle = share if (width == 1).all() else (share + np.append(share[1:], share[-1])) / 2
    probability = (np.where(width == 1, share, middle) * width).sum() * 2.0**-32
    assert abs(probability / (2 * stats.norm.sf(sigmas)) - 1) < tolerance


def test_angles_follow_the_circle_in_order():
    bits = jnp.arange(0, 2**32, 2**20, dtype=jnp.uint32)
    # One radius; the exact cosine and sine of the angle that the two parts of the word stand for.
    x, y = (np.asarray(v, np.float64) for v in streams.box_muller(jnp.full_like(bits, 2**31), bits))
    radius = np.sqrt(2 * np.log(2))
    part = np.asarray((bits << 2).astype(jnp.int32), np.float64) * 2.0**-31
    turns = np.array([0, 1, 2, 3])[np.asarray(bits >> 30)]
    angle = np.pi / 4 * part + np.where(turns % 2 == 1, np.pi / 2, 0) + np.where(turns >= 2, np.pi, 0)
    np.testing.assert_allclose(x, radius * np.cos(angle), atol=3e-7)
    np.testing.assert_allclose(y, radius * np.sin(angle), atol=3e-7)


def test_extreme_bits_stay_finite():
    ends = jnp.array([0, 2**32 - 1], jnp.uint32)
    values = np.asarray(streams.box_muller(ends, jnp.zeros(2, jnp.uint32)))
    assert np.isfinite(values).all()
    np.testing.assert_allclose(np.abs(values).max(), np.sqrt(2 * 33 * np.log(2)), rtol=1e-6)
    uniform = np.asarray([float(streams.uniform(jnp.uint32([1, 2]), jnp.uint32(i), jnp.float32)) for i in range(3)])
    assert ((uniform > 0) & (uniform <= 1)).all()


@pytest.mark.parametrize("bound", [1, 2, 10, 12345, 2**31 - 1])
def test_integers_equal_exact_arithmetic(bound):
    bits = np.random.default_rng(0).integers(0, 2**32, (2, 300), dtype=np.uint64).astype(np.uint32)
    bits[:, 0], bits[:, 1] = 0, 2**32 - 1
    expected = [(bound * (int(h) * 2**32 + int(low))) >> 64 for h, low in bits.T]
    np.testing.assert_array_equal(streams.integers(jnp.asarray(bits[0]), jnp.asarray(bits[1]), bound), expected)


def test_step_keys_differ_and_serve_jax(words):
    draws = jax.vmap(lambda step: jax.random.normal(Keys().draw(words, step)))(jnp.arange(1000))
    assert len(np.unique(draws)) == 1000
    assert abs(float(draws.mean())) < 4.5 / 1000**0.5


# --------------------------------------------------------------------------------------- minibatches


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


def test_full_data_draw_nothing(words):
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
