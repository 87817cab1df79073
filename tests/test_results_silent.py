"""`to_inference_data`: fixed weights, names, coordinates and arguments that would go wrong without an error."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, BarkerMH
from numpyro.infer.autoguide import AutoNormal

import numpyro_bnn as bnn
from numpyro_bnn import _arviz

pytestmark = pytest.mark.core

N, DRAWS, W = 12, 4, jnp.asarray(-7.0)
X = jnp.linspace(1.0, 2.0, N)
Y = 3 * X


def line(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 10.0))
    b = numpyro.sample("b", dist.Normal(0.0, 10.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(w * x + b, 0.5), obs=y)


def sample(model, *args, **kwargs):
    mcmc = MCMC(BarkerMH(model), num_warmup=5, num_samples=DRAWS, progress_bar=False)
    mcmc.run(jax.random.key(0), *args, **kwargs)
    return mcmc


@pytest.fixture(scope="module")
def run():
    return sample(line, X, Y)


def names(idata, group):
    return {str(name) for name in _arviz.group(idata, group).data_vars}


# ------------------------------------------------------------------------------------------- fixed values


def within(x, y=None):
    with handlers.condition(data={"w": W}):
        return line(x, y)


def constant(x, y=None):
    numpyro.sample("y", dist.Normal(numpyro.sample("w", dist.Normal(0.0, 10.0), obs=W) * x + noise(), 0.5), obs=y)


def noise():
    return numpyro.sample("b", dist.Normal(0.0, 10.0))


FIXED = {
    "data": handlers.condition(line, {"w": W}),
    "function": handlers.condition(line, condition_fn=lambda site: W if site["name"] == "w" else None),
    "within": within,
    "constant": constant,
    "seed outside": handlers.seed(handlers.condition(line, {"w": W}), 0),
    "seed inside": handlers.condition(handlers.seed(line, 0), {"w": W}),
    "block": handlers.block(handlers.condition(line, {"w": W}), hide=["w"]),
    "scope outside": handlers.scope(handlers.condition(line, {"w": W}), prefix="a"),
    "scope inside": handlers.condition(handlers.scope(line, prefix="a"), {"a/w": W}),
    "do": handlers.do(line, {"w": W}),
}


@pytest.mark.parametrize("how", FIXED)
def test_fixed_weights_are_part_of_the_model(how):
    idata = bnn.to_inference_data(sample(FIXED[how], X, Y), {"x": X[:5], "y": Y[:5]})
    at = "a." if "scope" in how else ""
    b = _arviz.group(idata, "posterior")[f"{at}b"].to_numpy()[..., None]
    assert names(idata, "observed_data") == names(idata, "log_likelihood") == {f"{at}y"}
    assert names(idata, "predictions") == {f"{at}y", f"{at}y_mean", f"{at}y_log_likelihood"}
    for group, x in {"posterior_predictive": X, "predictions": X[:5]}.items():
        np.testing.assert_allclose(_arviz.group(idata, group)[f"{at}y_mean"], W * x + b, rtol=1e-5, atol=1e-5)


def test_substituted_weights_follow_the_sampler():
    """NumPyro's kernels sample a site in spite of `substitute`; a parameter keeps the value."""
    idata = bnn.to_inference_data(sample(handlers.substitute(line, {"w": W}), X, Y), {"x": X[:5]})
    held = _arviz.group(idata, "posterior")
    expected = held["w"].to_numpy()[..., None] * X[:5] + held["b"].to_numpy()[..., None]
    np.testing.assert_allclose(_arviz.group(idata, "predictions")["y_mean"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["data", "block"])
def test_fixed_weights_of_guides(how):
    guide = AutoNormal(FIXED[how])
    result = SimpleNamespace(params={"b_auto_loc": 0.2, "b_auto_scale": 0.1})
    idata = bnn.to_inference_data(result, {"x": X[:5]}, guide=guide, args=(X, Y), num_samples=DRAWS)
    b = _arviz.group(idata, "posterior")["b"].to_numpy()[..., None]
    assert names(idata, "observed_data") == {"y"}
    np.testing.assert_allclose(_arviz.group(idata, "predictions")["y_mean"], W * X[:5] + b, rtol=1e-5, atol=1e-5)


def test_fixed_weights_of_assumed_density_filtering():
    net = bnn.nn.MLP([3, 1], "relu")
    plain = bnn.models.regression(net, bnn.priors.Normal(1.0), noise=0.5)
    bias = jnp.asarray([4.0])
    model = handlers.condition(plain, {"net/Dense_1.bias": bias})
    try:
        guide = bnn.guides.AutoADF(model)
        result = guide.run(jax.random.key(0), X[:, None], Y)
    except (TypeError, ValueError):
        return  # refused, not wrong
    idata = bnn.to_inference_data(result, {"x": X[:5, None]}, guide=guide, args=(X[:, None], Y), num_samples=3)
    assert names(idata, "observed_data") == {"y"}


def test_observations_may_be_conditioned_on():
    """Nothing else depends on them, so they are no fixed values; neither are data that are not arguments."""

    def closed():
        line(X, Y)

    for model, args in [(handlers.condition(line, {"y": Y}), (X,)), (closed, ())]:
        idata = bnn.to_inference_data(sample(model, *args), {"x": X[:5]} if args else None)
        np.testing.assert_array_equal(_arviz.group(idata, "observed_data")["y"], Y)
        assert names(idata, "log_likelihood") == {"y"}
        residuals = _arviz.group(idata, "posterior_predictive")["y"].to_numpy() - np.asarray(Y)
        assert len(np.unique(residuals)) == residuals.size
    assert names(idata, "posterior_predictive") == {"y", "y_mean"}


def test_observed_inputs_are_those_that_were_given():
    def model(x, y=None):
        x = numpyro.sample("x", dist.Normal(0.0, noise() ** 2 + 1).expand([len(x)]).to_event(1), obs=x)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(W * x, 0.5), obs=y)

    idata = bnn.to_inference_data(sample(model, X, Y), {"x": X[:5] + 3})
    np.testing.assert_allclose(_arviz.group(idata, "predictions")["y_mean"][0, 0], W * (X[:5] + 3), rtol=1e-6)
    assert names(idata, "log_likelihood") == {"x", "y"}
