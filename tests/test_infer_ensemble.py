"""``infer.ensemble``: what it spends, what it returns, an exact posterior, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

import numpyro_bnn as bnn
from numpyro_bnn import infer, symmetry

pytestmark = pytest.mark.core

X = jax.random.normal(jax.random.key(0), (40, 3))
Y = X @ jnp.array([1.0, -0.5, 0.0]) + 0.5 * jax.random.normal(jax.random.key(1), (40,))


def linear(x, y=None):
    """A linear regression with known noise, whose posterior is normal."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("data", len(x)) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=None if y is None else y[i])


def run(mcmc):
    mcmc.run(jax.random.key(2), X, Y)
    return mcmc


@pytest.mark.parametrize("num_gradients", [500, 5000])
def test_it_spends_the_gradients_it_was_given(num_gradients):
    """Those of the draws and the optimizer are exact; curvature and the settling of the step size come on top."""
    mcmc = run(infer.ensemble(linear, num_gradients, num_chains=2, num_samples=20, progress_bar=False))
    spent = np.asarray(mcmc.last_state.num_gradients)
    assert np.all(spent > 0.95 * num_gradients), spent
    assert np.all(spent < 1.05 * num_gradients + 100), spent
    assert mcmc.get_samples(group_by_chain=True)["w"].shape == (2, 20, 3)


@pytest.mark.parametrize(
    ("num_gradients", "optimized"), [(100, 25), (4000, 1000), (12_000, 3000), (60_000, 4000), (100_000, 5000)]
)
def test_how_gradients_are_divided(num_gradients, optimized):
    kernel = infer.ensemble(linear, num_gradients, num_samples=10, held_out=0.2).sampler
    assert kernel._warm_start.num_steps == optimized
    assert kernel._warm_start.held_out == 0.2
    assert kernel.energy_targets == (0.5, 0.0005)
    draws = 2 * 10 * kernel._steps_per_draw
    assert draws == pytest.approx(0.6 * (num_gradients - optimized), rel=0.05, abs=20)


def test_draws_have_the_exact_posterior():
    mcmc = run(infer.ensemble(linear, 40_000, num_chains=4, num_samples=500, progress_bar=False))
    cov = jnp.linalg.inv(jnp.eye(3) + X.T @ X / 0.25)
    mean = cov @ X.T @ Y / 0.25
    draws = mcmc.get_samples()["w"]
    # 2000 draws, 29 steps apart: five standard errors of a mean; 5 % for the bias of a variance, and five of its own.
    np.testing.assert_allclose((draws.mean(0) - mean) / jnp.sqrt(jnp.diag(cov)), 0.0, atol=5 / 2000**0.5)
    np.testing.assert_allclose(draws.var(0) / jnp.diag(cov), 1.0, atol=0.05 + 5 * (2 / 2000) ** 0.5)


def test_members_and_symmetries():
    model = bnn.models.regression(bnn.nn.MLP([4, 1], "tanh"), bnn.priors.Hierarchical())
    found = symmetry.find(model, X, Y)
    options = {"num_chains": 2, "num_samples": 10, "symmetries": found, "progress_bar": False}
    mcmc = run(infer.ensemble(model, 1000, **options))
    assert isinstance(mcmc, MCMC)
    assert isinstance(mcmc.sampler, infer.OrbitMoves)
    members = bnn.to_inference_data(mcmc, predictions={"x": X}, members=True)["predictions"]["y_mean"]
    assert members.shape == (2, 1, 40)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gradients": 99}, r"infer\.ensemble: argument `num_gradients` got 99.*at least 100"),
        ({"num_gradients": 1e4}, r"`num_gradients` got 10000\.0"),
        ({"num_chains": 0}, r"`num_chains` got 0"),
        ({"num_samples": 2.5}, r"`num_samples` got 2\.5"),
        ({"held_out": 1.0}, r"infer\.WarmStart: argument `held_out` got 1\.0"),
        ({"symmetries": ["sign"]}, r"infer\.OrbitMoves: argument `symmetries`"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        infer.ensemble(linear, **options)
