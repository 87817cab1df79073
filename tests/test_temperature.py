"""The temperature band against SciPy's quantiles; the density that a temperature other than 1 has."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.util import constrain_fn, log_density
from scipy import stats

from numpyro_bnn import infer
from numpyro_bnn.infer.target import bind

pytestmark = pytest.mark.core


@pytest.mark.parametrize("size", [3, 20, 500, 10_000])
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_band_is_the_one_of_chi_squared(size, level):
    exact = 0.5 * stats.chi2.ppf([0.5 - level / 2, 0.5 + level / 2], size) / size
    # Wilson and Hilferty's cube root is good to about 0.02 / P on this scale.
    np.testing.assert_allclose(infer.temperature_band(size, 0.5, level), exact, atol=0.05 / size)


def test_bad_band_is_refused():
    with pytest.raises(ValueError, match="temperature_band"):
        infer.temperature_band(0)
    with pytest.raises(ValueError, match="level"):
        infer.temperature_band(5, level=1.0)


OBSERVED = np.array([1.5, -2.5])


def constrained():
    s = numpyro.sample("s", dist.Gamma(0.5, 1.0))
    u = numpyro.sample("u", dist.Uniform(-1.0, 2.0))
    numpyro.sample("p", dist.Dirichlet(jnp.array([0.5, 2.0, 3.0])))
    with numpyro.plate("data", 2):
        numpyro.sample("y", dist.Normal(u, s), obs=jnp.asarray(OBSERVED))


@pytest.mark.parametrize("temperature", [0.0, 0.3, 2.0])
def test_potential_holds_jacobians_times_the_temperature(temperature):
    """So that exp(-U / T) is p(theta, D)^(1 / T) times the Jacobian."""

    def potential(temperature):
        target, z = bind("test", constrained, random.key(0), init_to_uniform(), (), {}, temperature)
        return target.potential((), {}, {})(z), z

    (tempered, z), (plain, _) = potential(temperature), potential(1.0)
    log_joint, _ = log_density(constrained, (), {}, constrain_fn(constrained, (), {}, z))
    jacobian = -plain - log_joint
    assert abs(jacobian) > 0.1
    assert float(tempered) == pytest.approx(float(-log_joint - temperature * jacobian), rel=1e-5)


def bounded(inside=None):
    s = numpyro.sample("s", dist.Gamma(0.5, 1.0))
    with numpyro.plate("groups", 3), inside or handlers.scale(scale=1.0):
        u = numpyro.sample("u", dist.Uniform(-1.0, 2.0))
    with numpyro.plate("data", 2):
        numpyro.sample("y", dist.Normal(u.sum(), s), obs=jnp.asarray(OBSERVED))


HANDLED = {
    "scale": handlers.scale(bounded, scale=0.3),
    "scale in a scope": handlers.scope(handlers.scale(bounded, scale=3.0), prefix="net"),
    "no density": handlers.mask(bounded, mask=False),
    "scale and mask": handlers.mask(handlers.scale(bounded, scale=0.3), mask=jnp.array(True)),
    "one site": lambda: bounded(handlers.scale(scale=jnp.array([0.2, 1.0, 3.0]))),
    "elements": lambda: bounded(handlers.mask(mask=jnp.array([True, False, True]))),
}


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("name", HANDLED)
def test_handlers_scale_and_mask_densities_but_no_jacobian(name, temperature):
    """As densities of constrained values do not depend on how their sites are transformed."""
    model = HANDLED[name]
    target, z = bind("test", model, random.key(0), init_to_uniform(), (), {}, temperature)
    z = {site: jnp.asarray(0.5 + np.arange(value.size).reshape(value.shape)) for site, value in z.items()}
    values = target.constrain((), {})(z)
    log_joint, _ = log_density(model, (), {}, values)
    s, u = (np.asarray(next(z[site] for site in z if site.endswith(end))) for end in ("s", "u"))
    # Of exp, and of 3 sigmoid - 1.
    jacobian = s + np.sum(np.log(3.0) + stats.logistic.logpdf(u))
    assert float(target.potential((), {}, {})(z)) == pytest.approx(
        float(-log_joint - temperature * jacobian), rel=1e-5
    )


@pytest.mark.parametrize("temperature", [0.4, 3.0])
def test_a_positive_site_at_another_temperature(temperature):
    """Mean and variance of its log, by quadrature, within 5 MCSE: failure rate 6e-7 each."""

    def model():
        s = numpyro.sample("s", dist.Gamma(0.5, 1.0))
        with numpyro.plate("data", 2):
            numpyro.sample("y", dist.Normal(0.0, s), obs=jnp.asarray(OBSERVED))

    z = np.linspace(-12, 8, 50_001)
    s = np.exp(z)
    log_joint = stats.gamma(0.5).logpdf(s) + stats.norm(0.0, s[:, None]).logpdf(OBSERVED).sum(1)
    weight = np.exp((log_joint - log_joint.max()) / temperature + z)
    weight /= weight.sum()
    mean = (weight * z).sum()
    sd = (weight * (z - mean) ** 2).sum() ** 0.5

    kernel = infer.MALA(model, temperature=temperature, steps_per_draw=10)
    mcmc = MCMC(kernel, num_warmup=300, num_samples=4000, progress_bar=False)
    mcmc.run(random.key(0))
    found = (np.log(np.asarray(mcmc.get_samples()["s"])) - mean) / sd
    for quantity, exact in ((found, 0.0), (found**2, 1.0)):
        error = (quantity.var() / effective_sample_size(quantity[None])) ** 0.5
        assert abs(quantity.mean() - exact) < 5 * error
