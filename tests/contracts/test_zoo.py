"""The zoo itself: its exact answers agree with the densities of its models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer.util import log_density
from zoo import ZOO

DRAWS = 20_000
EXACT = ["line", "logistic", "counts", "groups", "masked", "several"]


@pytest.mark.parametrize("name", EXACT)
def test_exact_answers_are_those_of_the_model(name):
    """Importance weights of normals twice as wide: evidence, means and variances within
    five standard errors.
    """
    entry, random = ZOO[name], np.random.default_rng(0)
    exact, draws, log_proposal = entry.exact, {}, np.zeros(DRAWS)
    for site, mean in exact.mean.items():
        unit = random.normal(size=(DRAWS, len(mean)))
        draws[site] = mean + 2 * exact.sd[site] * unit
        log_proposal += (
            -0.5 * unit**2 - np.log(2 * exact.sd[site] * np.sqrt(2 * np.pi))
        ).sum(1)
    values = {site: jnp.asarray(value, jnp.float32) for site, value in draws.items()}
    log_joint = jax.jit(
        jax.vmap(lambda z: log_density(entry.model, entry.args, {}, z)[0])
    )(values)
    weights = np.exp(
        np.asarray(log_joint, np.float64) - log_proposal - exact.log_evidence
    )
    error = weights.std() / DRAWS**0.5
    assert error < 0.05
    assert abs(weights.mean() - 1) < 5 * error + 1e-4  # float32
    for site, mean in exact.mean.items():
        scaled = (draws[site] - mean) / exact.sd[site]
        for power, expected in ((1, 0.0), (2, 1.0)):
            terms = weights[:, None] * (scaled**power - expected)
            assert np.all(np.abs(terms.mean(0)) < 5 * terms.std(0) / DRAWS**0.5 + 1e-3)


def test_every_exact_answer_is_checked():
    assert set(EXACT) == {name for name, entry in ZOO.items() if entry.has_exact}
    assert all(np.isfinite(entry.exact.log_evidence) for entry in map(ZOO.get, EXACT))
