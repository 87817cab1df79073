"""Each likelihood of AutoLaplace against sums over all values of an observation: its
density, the Fisher information of its outputs, and its moments.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree
from jax.scipy import special as special_jax
from numpy.testing import assert_allclose as close
from scipy import special, stats

from numpyro_bnn import guides
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
    "StudentTOutputs": {
        "scale": lambda: dist.StudentT(np.array([4.0, 30.0]), LOCS, 0.5),
    },
    "BinomialOutputs": {
        "logits": lambda: dist.Binomial(TRIALS, logits=LOCS),
        "probs": lambda: dist.Binomial(TRIALS, probs=np.array([0.3, 0.9])),
    },
    "NegativeBinomialOutputs": {
        "mean": lambda: dist.NegativeBinomial2(np.array([0.4, 7.0]), 0.8),
        "rate": lambda: dist.GammaPoisson(np.array([1.5, 30.0]), 2.0),
        "nearly Poisson": lambda: dist.NegativeBinomial2(np.array([0.4, 7.0]), 2e3),
    },
    "PoissonOutputs": {"rate": lambda: dist.Poisson(np.array([0.4, 7.0]))},
    "GammaOutputs": {
        "shape and rate": lambda: dist.Gamma(np.array([0.7, 4.0]), 2.0),
        "large shapes": lambda: dist.Gamma(np.array([29.9, 30.1]), 2.0),
    },
}
LOCS = np.array([0.3, -1.0])
TRIALS = np.array([20, 3])
PROBS = np.array([[0.3, 0.2, 0.5], [0.1, 0.8, 0.1]])


def values_of(fn, likelihood):
    """(Q, 2) values of each row, and their probabilities."""
    if fn.support.is_discrete:
        if isinstance(fn, dist.BinomialLogits | dist.BinomialProbs):
            counts = np.repeat(np.arange(21)[:, None], 2, axis=1)
            values = np.minimum(counts, TRIALS)
            return values, np.exp(fn.log_prob(values)) * (counts <= TRIALS)
        count = 100 if isinstance(fn, dist.Poisson) else 3
        count = 400 if isinstance(fn, dist.GammaPoisson) else count
        count = 2 if fn.support is dist.constraints.boolean else count
        values = np.repeat(np.arange(count)[:, None], 2, axis=1)
        return values, np.exp(log_density(fn, values))
    if fn.support is dist.constraints.positive:  # their logs on a fine grid
        values = np.exp(np.linspace(-60, 8, 20_001))[:, None] * fn.mean
        weights = np.exp(fn.log_prob(values)) * values
        return values, weights / weights.sum(0)
    if isinstance(fn, dist.StudentT):  # their sinh on a fine grid
        grid = np.linspace(-30, 30, 20_001)[:, None]
        values = fn.loc + np.sinh(grid)
        weights = np.exp(fn.log_prob(values)) * np.cosh(grid)
        return values, weights / weights.sum(0)
    points, weights = np.polynomial.hermite_e.hermegauss(30)
    loc, log_scale = likelihood.natural(fn).values()
    values = loc + np.exp(log_scale) * points[:, None]
    return values, np.repeat((weights / weights.sum())[:, None], 2, axis=1)


def log_density(fn, y):
    """That of NumPyro; of GammaPoisson by gamma functions: its beta function is exact
    to nine digits only, and its curvature to seven.
    """
    if not isinstance(fn, dist.GammaPoisson):
        return fn.log_prob(y)
    a, log_total = fn.concentration, jnp.log1p(fn.rate)
    counted = special_jax.gammaln(y + a) - special_jax.gammaln(y + 1)
    return counted - special_jax.gammaln(a) + a * jnp.log(fn.rate) - (y + a) * log_total


def examples():
    """Every likelihood in every form."""
    rows = []
    for likelihood in LIKELIHOODS:
        name = type(likelihood).__name__
        assert name in EXAMPLES, f"add distributions of {name} to EXAMPLES"
        for form, make in EXAMPLES[name].items():
            rows.append(pytest.param(likelihood, make, id=f"{name} by {form}"))
    return rows


@pytest.mark.parametrize(("likelihood", "make"), examples())
def test_a_likelihood_is_that_of_its_distribution(likelihood, make):
    fn = make()
    site = {"name": "y", "fn": fn, "scale": None}
    names = tuple(sorted(likelihood.natural(fn).keys() - set(likelihood.constants)))
    rows = observed_rows(site, 0, names)
    assert rows.likelihood is likelihood
    values, weights = values_of(fn, likelihood)
    log_probs = likelihood.distribution(likelihood.natural(fn)).log_prob(values)
    close(log_probs, fn.log_prob(values), rtol=1e-9, atol=1e-12)
    information = np.einsum("bde,bdf->bef", rows.roots(), rows.roots())
    _, back = ravel_pytree({name: rows.outputs[name][0, 0] for name in names})

    @jax.jit
    @jax.hessian
    def mean_curvature(flat, known, values, weights):
        density = log_density(likelihood.distribution(known | back(flat)), values)
        return -jnp.sum(weights * density)

    for row in range(2):
        outputs = {name: f[row, 0] for name, f in rows.outputs.items()}
        flat, _ = ravel_pytree({name: outputs[name] for name in names})
        expected = mean_curvature(flat, outputs, values[:, row], weights[:, row])
        close(information[row], expected, rtol=1e-8, atol=1e-10)
    mean, variance = likelihood.predicted(
        rows.outputs, {name: jnp.zeros(()) for name in names}
    )
    if isinstance(fn, dist.CategoricalProbs | dist.CategoricalLogits):
        close(mean[:, 0], weights.T, rtol=1e-9)
        return
    exact = np.sum(weights * values, axis=0)
    close(mean[:, 0], exact, rtol=1e-9)
    spread = np.sum(weights * (values - exact) ** 2, axis=0)
    close(variance[:, 0], spread, rtol=1e-9)


# -- two random outputs per element ----------------------------------------------------

# Means and covariances of the log mean and the log shape of two rows.
MEANS = {"log_mean": np.array([0.2, -0.5]), "log_shape": np.array([0.4, 1.5])}
COV = np.array([[[0.3, 0.15], [0.15, 0.2]], [[0.1, -0.1], [-0.1, 0.4]]])


def test_a_density_is_averaged_over_both_outputs_and_their_covariance():
    """Against a fine grid over both; the second row is masked."""
    site = {"name": "y", "fn": gammas(**MEANS).mask(np.array([True, False]))}
    rows = observed_rows({**site, "scale": None}, 0, tuple(MEANS))
    value = np.array([[0.7], [3.0]])
    found = rows.likelihood.log_density(rows, jnp.asarray(COV), value)
    z = np.linspace(-7, 7, 401)
    grid = np.stack(np.meshgrid(z, z), -1).reshape(-1, 2)
    weights = np.exp(-0.5 * np.sum(grid**2, 1))
    f = np.array([m[0] for m in MEANS.values()]) + grid @ np.linalg.cholesky(COV[0]).T
    density = np.exp(gammas(*f.T).log_prob(0.7))
    exact = np.log(weights @ density / weights.sum())
    close(found, [exact, 0.0], rtol=1e-6, atol=1e-12)


def test_a_number_far_away_has_a_density_in_float32():
    """Only a node reaches it whose weight would be 0."""
    densities = []
    for x64 in (True, False):
        with jax.enable_x64(x64):
            fn = dist.Normal(jnp.zeros(1), jnp.exp(-6.0))
            names = "loc", "log_scale"
            rows = observed_rows({"name": "y", "fn": fn, "scale": None}, 0, names)
            cov = jnp.diag(jnp.array([1e-6, 0.2]))[None]
            value = jnp.full((1, 1), 5.0)
            densities.append(rows.likelihood.log_density(rows, cov, value))
    assert densities[1].dtype == np.float32
    close(densities[1], densities[0], rtol=1e-3)


def test_counts_of_a_huge_concentration_are_poisson_in_float32():
    """A network that learns it from Poisson counts finds no end."""
    with jax.enable_x64(False):
        logs = jnp.array([20.0, 60.0, 95.0])
        fn = dist.GammaPoisson(jnp.exp(logs), jnp.exp(logs) / 3.0)
        (likelihood,) = [each for each in LIKELIHOODS if each.takes(fn)]
        f = {"log_mean": jnp.full(3, jnp.log(3.0)), "log_shape": logs}
        information = likelihood.information(f)
    close(information["log_mean"], 3**0.5, rtol=1e-5)
    close(information["log_shape"], 0.0, atol=0.01)


def test_moments_of_positive_numbers_are_averaged_over_both_outputs():
    """Independent log-normal mean and shape, against a grid over both."""
    rows = observed_rows({"name": "y", "fn": gammas(**MEANS), "scale": None}, 0)
    variances = {"log_mean": jnp.full((2, 1), 0.3), "log_shape": jnp.full((2, 1), 0.2)}
    mean, variance = rows.likelihood.predicted(rows.outputs, variances)
    z = np.linspace(-7, 7, 401)
    first, second = np.meshgrid(z, z)
    weights = np.exp(-0.5 * (first**2 + second**2))
    weights /= weights.sum()
    for row in range(2):
        log_mean = MEANS["log_mean"][row] + 0.3**0.5 * first
        fn = gammas(log_mean, MEANS["log_shape"][row] + 0.2**0.5 * second)
        exact = np.sum(weights * fn.mean)
        spread = np.sum(weights * (fn.variance + fn.mean**2)) - exact**2
        close(mean[row, 0], exact, rtol=1e-6)
        close(variance[row, 0], spread, rtol=1e-6)


def gammas(log_mean, log_shape):
    shape = jnp.exp(log_shape)
    return dist.Gamma(shape, shape * jnp.exp(-log_mean))


GROUPS, ROWS = 8, 3


def grouped(x, y=None):
    """Groups of a few positive numbers, each with a mean of its own."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([GROUPS]).to_event(1))
    shape = numpyro.sample("shape", dist.LogNormal(0.0, 3.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Gamma(shape, shape * jnp.exp(-x @ w)), obs=y)


def test_a_learned_shape_is_that_of_the_evidence_and_predictions_are_right():
    """At the joint mode it is too large by about the share of degrees of freedom that
    the means take, 24 / 16; with ``tune_prior`` most of that is gone. The exact answer
    integrates each mean over a grid.
    """
    random = np.random.default_rng(0)
    x = np.repeat(np.eye(GROUPS), ROWS, axis=0)
    y = random.gamma(4.0, np.exp(x @ random.normal(size=GROUPS)) / 4.0)
    guide = guides.AutoLaplace(grouped, "full", sites=None)
    logs = []
    for tuned in (False, True):
        fit = guide.run(jax.random.key(0), x, y, tune_prior=tuned, progress_bar=False)
        assert fit.converged
        logs.append(float(jnp.log(guide.median(fit.params)["shape"])))
    sd = fit.prior_precision["w"] ** -0.5
    w = np.linspace(-7, 7, 2001)
    shapes = np.linspace(-0.5, 3.0, 351)
    prior = -0.5 * (w / sd) ** 2
    total = stats.norm.logpdf(shapes / 3.0)
    for group in range(GROUPS):
        rows = y[ROWS * group : ROWS * (group + 1)]
        a = np.exp(shapes)[:, None, None]
        density = stats.gamma.logpdf(rows, a, scale=np.exp(w)[:, None] / a).sum(-1)
        total += special.logsumexp(density + prior, axis=1)
    exact = shapes[np.argmax(total)]
    assert logs[0] - exact > 0.25
    assert abs(logs[1] - exact) < 0.1
    closed = guide.predictive(fit.params, x[:1])
    drawn = guide.predictive(
        fit.params, x[:1], link="sample", rng_key=jax.random.key(1), num_samples=50_000
    )
    close(drawn.mean, closed.mean, rtol=0.02)
    close(drawn.variance, closed.variance, rtol=0.1)
