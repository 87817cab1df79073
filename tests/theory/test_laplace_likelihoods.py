"""Each likelihood of AutoLaplace against sums over all values of an observation: its
density, the Fisher information of its outputs, and its moments.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree

from numpyro_bnn.guides.laplace.likelihoods import LIKELIHOODS, observed_rows

pytestmark = pytest.mark.usefixtures("x64")

# Distributions of two rows, in the forms a model may write them.
EXAMPLES = {
    "NormalOutputs": {
        "loc and scale": lambda: dist.Normal(LOCS, np.array([0.5, 2.0])),
        "affine": lambda: dist.TransformedDistribution(
            dist.Normal(LOCS, 2.0), dist.transforms.AffineTransform(1.0, -0.5)
        ),
    },
    "BernoulliOutputs": {
        "logits": lambda: dist.Bernoulli(logits=LOCS),
        "probs": lambda: dist.Bernoulli(probs=np.array([0.3, 0.9])),
    },
    "CategoricalOutputs": {
        "logits": lambda: dist.Categorical(logits=5 * PROBS),
        "probs": lambda: dist.Categorical(probs=PROBS),
    },
    "PoissonOutputs": {"rate": lambda: dist.Poisson(np.array([0.4, 7.0]))},
}
LOCS = np.array([0.3, -1.0])
PROBS = np.array([[0.3, 0.2, 0.5], [0.1, 0.8, 0.1]])


def values_of(fn, likelihood):
    """(Q, 2) values of each row, and their probabilities."""
    if fn.support.is_discrete:
        count = 100 if isinstance(fn, dist.Poisson) else 3
        count = 2 if fn.support is dist.constraints.boolean else count
        values = np.repeat(np.arange(count)[:, None], 2, axis=1)
        return values, np.exp(fn.log_prob(values))
    points, weights = np.polynomial.hermite_e.hermegauss(30)
    loc, log_scale = likelihood.natural(fn).values()
    values = loc + np.exp(log_scale) * points[:, None]
    return values, np.repeat((weights / weights.sum())[:, None], 2, axis=1)


def examples():
    """Every likelihood in every form; one without an example fails by name."""
    rows = []
    for likelihood in LIKELIHOODS:
        name = type(likelihood).__name__
        for form, make in EXAMPLES[name].items():
            rows.append(pytest.param(likelihood, make, id=f"{name} by {form}"))
    return rows


@pytest.mark.parametrize(("likelihood", "make"), examples())
def test_a_likelihood_is_that_of_its_distribution(likelihood, make):
    fn = make()
    site = {"name": "y", "fn": fn, "scale": None}
    names = tuple(likelihood.natural(fn))
    rows = observed_rows(site, 0, names)
    assert rows.likelihood is likelihood
    values, weights = values_of(fn, likelihood)
    log_probs = likelihood.distribution(likelihood.natural(fn)).log_prob(values)
    np.testing.assert_allclose(log_probs, fn.log_prob(values), rtol=1e-9, atol=1e-12)
    information = np.einsum("bde,bdf->bef", rows.roots(), rows.roots())
    _, back = ravel_pytree({name: rows.outputs[name][0, 0] for name in names})

    @jax.jit
    @jax.hessian
    def mean_curvature(flat, values, weights):
        density = likelihood.distribution(back(flat)).log_prob(values)
        return -jnp.sum(weights * density)

    for row in range(2):
        flat, _ = ravel_pytree({name: rows.outputs[name][row, 0] for name in names})
        expected = mean_curvature(flat, values[:, row], weights[:, row])
        np.testing.assert_allclose(information[row], expected, rtol=1e-8, atol=1e-10)
    mean, variance = likelihood.predicted(
        rows.outputs, {name: jnp.zeros(()) for name in names}
    )
    if isinstance(fn, dist.CategoricalProbs | dist.CategoricalLogits):
        np.testing.assert_allclose(mean[:, 0], weights.T, rtol=1e-9)
        return
    exact = np.sum(weights * values, axis=0)
    np.testing.assert_allclose(mean[:, 0], exact, rtol=1e-9)
    spread = np.sum(weights * (values - exact) ** 2, axis=0)
    np.testing.assert_allclose(variance[:, 0], spread, rtol=1e-9)
