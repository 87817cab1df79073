"""Tasks as a user would do them, held to their standard errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpyro.infer import MCMC, SVI

import numpyro_bnn as bnn
from examples import loaders
from numpyro_bnn import guides, infer, metrics, nn, priors

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


def smooth(key, rows, noise=0.1):
    """Rows of a smooth function of three inputs."""
    x = jax.random.normal(key, (rows, 3))
    f = jnp.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2]
    return x, f + noise * jax.random.normal(jax.random.fold_in(key, 1), (rows,)), f


@pytest.mark.data
@pytest.mark.filterwarnings(r"ignore:to_inference_data. 1 of \d+ checks failed.\n- ess")
def test_tabular_with_intervals():
    """Concrete: far better than a line, with intervals that hold what they promise."""
    data = loaders.standardize(loaders.load_uci("concrete", 0))
    model = bnn.models.regression(nn.MLP([50, 1], "relu"), priors.Hierarchical())
    kernel = infer.MCLMC(
        model, steps_per_draw=200, warm_start=infer.WarmStart(0.25, num_steps=2000)
    )
    options = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=800, num_samples=400, **options)
    mcmc.run(jax.random.key(0), data.x_train, data.y_train)
    new = {"x": data.x_test, "y": data.y_test}
    exported = bnn.to_inference_data(
        mcmc, predictions=new, log_likelihood=False, posterior_predictive=False
    )
    test = exported["predictions"]
    rmse = metrics.rmse(test["y_mean"].mean(("chain", "draw")), data.y_test).value
    inputs, new_inputs = (
        np.c_[x, np.ones(len(x))] for x in (data.x_train, data.x_test)
    )
    weights = np.linalg.lstsq(inputs, data.y_train, rcond=None)[0]
    assert rmse < 0.6 * metrics.rmse(new_inputs @ weights, data.y_test).value
    # 103 rows: three binomial standard errors of .9.
    covered = metrics.interval_coverage(test["y"], data.y_test, level=0.9).coverage
    assert abs(covered - 0.9) < 3 * np.sqrt(0.09 / len(data.y_test))


def test_a_million_rows():
    """Mean field on a million rows in minibatches."""
    x, y, _ = smooth(jax.random.key(4), 1_000_000)
    x_new, y_new, f_new = smooth(jax.random.key(5), 1000)
    model = bnn.models.regression(nn.MLP([32, 1], "tanh"), priors.Hierarchical())
    guide = guides.AutoMeanField(model)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.01, 10_000))
    svi = SVI(model, guide, optimizer, guides.TraceLocalReparam_ELBO())
    fit = guides.fit(
        svi, jax.random.key(0), 10_000, x, y, batch_size=256, progress_bar=False
    )
    data = {"args": (x, y), "kwargs": {"batch_size": 256}, "num_samples": 200}
    options = {"log_likelihood": False, "posterior_predictive": False, **data}
    new = {"x": x_new, "y": y_new}
    test = bnn.to_inference_data(fit, new, guide=guide, **options)["predictions"]
    assert metrics.rmse(test["y_mean"].mean(("chain", "draw")), f_new).value < 0.1
