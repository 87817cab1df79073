"""Random numbers of the SG-MCMC engine: exact bits, exact normals down to the tails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import stats

from numpyro_bnn.sgmcmc import noise


@pytest.fixture(scope="module")
def words():
    return noise.seeds(jax.random.key(20), 1)[0]


def test_bits_are_those_of_jax(words):
    index = jnp.arange(500, dtype=jnp.uint32)
    ours = noise.threefry(words, index, index + jnp.uint32(7))
    theirs = threefry_2x32(words, jnp.concatenate([index, index + jnp.uint32(7)]))
    np.testing.assert_array_equal(jnp.concatenate(ours), theirs)


def test_typed_and_legacy_keys_give_the_same_seeds():
    np.testing.assert_array_equal(noise.seeds(jax.random.key(3), 4), noise.seeds(jax.random.PRNGKey(3), 4))
    assert noise.seeds(jax.random.key(3, impl="rbg"), 4).shape == (4, 2)


@pytest.mark.parametrize("wrong", [0, None, jnp.zeros(2), "batched"])
def test_wrong_keys_are_refused(wrong):
    wrong = jax.random.split(jax.random.key(0)) if wrong == "batched" else wrong
    with pytest.raises(TypeError, match="rng_key"):
        noise.seeds(wrong, 2)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_normals_have_the_normal_law(words, dtype):
    with jax.enable_x64(dtype == "float64"):
        n = 400_001
        z = np.asarray(noise.normal(words, jnp.uint32(5), n, jnp.dtype(dtype)), np.float64)
    assert z.shape == (n,)
    # Standard errors of the raw moments 1..4 of N(0, 1); 4.5 sigma, failure rate 7e-6 each (the seed is fixed).
    for power, mean, sd in ((1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)):
        assert abs((z**power).mean() - mean) < 4.5 * sd / n**0.5, power
    assert stats.kstest(z, "norm").pvalue > 1e-4
    assert len(np.unique(z)) > 0.98 * n


def test_normals_of_a_pair_and_of_neighboring_steps_are_independent(words):
    n = 200_000
    z = noise.normal(words, jnp.uint32(1), 2 * n, jnp.float32)
    pairs = {
        "one Box-Muller pair": (z[:n], z[n:]),
        "neighbors": (z[: n - 1], z[1:n]),
        "steps": (z[:n], noise.normal(words, jnp.uint32(2), 2 * n, jnp.float32)[:n]),
        "seeds": (z[:n], noise.normal(words + jnp.uint32(1), jnp.uint32(1), 2 * n, jnp.float32)[:n]),
    }
    for name, (a, b) in pairs.items():
        for power in (1, 2):  # squares would show a common radius
            correlation = np.corrcoef(np.asarray(a) ** power, np.asarray(b) ** power)[0, 1]
            assert abs(correlation) < 4.5 / n**0.5, (name, power)


@pytest.mark.parametrize(("sigmas", "tolerance"), [(3.0, 1e-4), (4.0, 1e-4), (5.0, 5e-4), (6.0, 0.02)])
def test_float32_tail_probability_is_right(sigmas, tolerance):
    """No sampling: the atoms of the radius are enumerated, the angle is uniform to 2^-30."""
    k = (
        np.unique(
            np.round(np.geomspace(1, 2**32 * np.exp(-(sigmas**2) / 2) * 1.01, 200_000)).astype(np.uint64)
        )
        - 1
    )
    width = np.diff(np.append(k, k[-1] + 1)).astype(float)
    no_turn = jnp.zeros(len(k), jnp.uint32)
    radius = np.hypot(*np.asarray(noise.box_muller(jnp.asarray(k.astype(np.uint32)), no_turn), np.float64))
    share = np.where(radius > sigmas, 2 / np.pi * np.arccos(np.minimum(sigmas / radius, 1)), 0)
    # Between the sampled k the share is smooth and monotone: trapezoids, plus the first atom in full.
    middle = share if (width == 1).all() else (share + np.append(share[1:], share[-1])) / 2
    probability = (np.where(width == 1, share, middle) * width).sum() * 2.0**-32
    assert abs(probability / (2 * stats.norm.sf(sigmas)) - 1) < tolerance


def test_angles_follow_the_circle_in_order():
    bits = jnp.arange(0, 2**32, 2**20, dtype=jnp.uint32)
    # One radius; the exact cosine and sine of the angle that the two parts of the word stand for.
    x, y = (np.asarray(v, np.float64) for v in noise.box_muller(jnp.full_like(bits, 2**31), bits))
    radius = np.sqrt(2 * np.log(2))
    part = np.asarray((bits << 2).astype(jnp.int32), np.float64) * 2.0**-31
    turns = np.array([0, 1, 2, 3])[np.asarray(bits >> 30)]
    angle = np.pi / 4 * part + np.where(turns % 2 == 1, np.pi / 2, 0) + np.where(turns >= 2, np.pi, 0)
    np.testing.assert_allclose(x, radius * np.cos(angle), atol=3e-7)
    np.testing.assert_allclose(y, radius * np.sin(angle), atol=3e-7)


def test_extreme_bits_stay_finite():
    ends = jnp.array([0, 2**32 - 1], jnp.uint32)
    values = np.asarray(noise.box_muller(ends, jnp.zeros(2, jnp.uint32)))
    assert np.isfinite(values).all()
    np.testing.assert_allclose(np.abs(values).max(), np.sqrt(2 * 33 * np.log(2)), rtol=1e-6)
    uniform = np.asarray(
        [float(noise.uniform(jnp.uint32([1, 2]), jnp.uint32(i), jnp.float32)) for i in range(3)]
    )
    assert ((uniform > 0) & (uniform <= 1)).all()


@pytest.mark.parametrize("bound", [1, 2, 10, 12345, 2**31 - 1])
def test_integers_equal_exact_arithmetic(bound):
    bits = np.random.default_rng(0).integers(0, 2**32, (2, 300), dtype=np.uint64).astype(np.uint32)
    bits[:, 0], bits[:, 1] = 0, 2**32 - 1
    expected = [(bound * (int(h) * 2**32 + int(low))) >> 64 for h, low in bits.T]
    np.testing.assert_array_equal(noise.integers(jnp.asarray(bits[0]), jnp.asarray(bits[1]), bound), expected)


def test_step_keys_differ_and_serve_jax(words):
    draws = jax.vmap(lambda step: jax.random.normal(noise.typed_key(words, step)))(jnp.arange(1000))
    assert len(np.unique(draws)) == 1000
    assert abs(float(draws.mean())) < 4.5 / 1000**0.5
