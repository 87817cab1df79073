"""``infer.ensemble``: what it spends, an exact posterior, members, symmetries."""

import jax
import numpy as np
import pytest
from helpers import group, refused
from numpyro.infer import MCMC
from zoo import NEW_X, ZOO

import numpyro_bnn as bnn
from numpyro_bnn import infer, symmetry

pytestmark = pytest.mark.core


def run(entry, num_gradients, **options):
    mcmc = infer.ensemble(entry.model, num_gradients, progress_bar=False, **options)
    mcmc.run(jax.random.key(2), *entry.args)
    return mcmc


@pytest.mark.slow
@pytest.mark.optimized
def test_gradients_are_spent_on_draws_of_the_exact_posterior():
    """Those of draws and optimizer are exact; measurements come on top."""
    entry, num_gradients = ZOO["line"], 40_000
    mcmc = run(entry, num_gradients, num_chains=4, num_samples=500)
    spent = np.asarray(mcmc.last_state.num_gradients)
    assert np.all(spent > 0.95 * num_gradients), spent
    assert np.all(spent < 1.05 * num_gradients + 100), spent
    # what the recipe ends with
    assert np.mean(mcmc.get_extra_fields()["energy_variance"]) < 2 * 0.0005
    draws = mcmc.get_samples(group_by_chain=True)["w"]
    assert draws.shape == (4, 500, 2)
    white = (np.asarray(draws, float) - entry.exact.mean["w"]) / entry.exact.sd["w"]
    # 2000 draws, 29 steps apart: five standard errors of a mean; 5 % for the bias of a
    # variance, and five of its own.
    np.testing.assert_allclose(white.mean((0, 1)), 0.0, atol=5 / 2000**0.5)
    np.testing.assert_allclose(
        white.var((0, 1)), 1.0, atol=0.05 + 5 * (2 / 2000) ** 0.5
    )


@pytest.mark.slow
def test_few_gradients_are_spent_too_on_members_and_moves_along_symmetries():
    entry = ZOO["hierarchical"]
    found = symmetry.find(entry.model, *entry.args)
    mcmc = run(entry, 500, num_chains=2, num_samples=20, symmetries=found)
    assert isinstance(mcmc, MCMC)
    assert isinstance(mcmc.sampler, infer.OrbitMoves)
    idata = bnn.to_inference_data(mcmc, predictions={"x": NEW_X}, members=True)
    assert group(idata, "predictions")["y_mean"].shape == (2, 1, len(NEW_X))
    plain = run(entry, 500, num_chains=2, num_samples=20)
    assert np.all(np.abs(np.asarray(plain.last_state.num_gradients) / 500 - 1) < 0.25)


def test_what_is_no_symmetry_is_refused():
    with refused("symmetries"):
        infer.ensemble(ZOO["line"].model, symmetries=["sign"])
