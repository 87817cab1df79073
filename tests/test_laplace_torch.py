"""AutoLaplace against laplace-torch 0.3 on the same weights: linearized outputs and evidence.

The numbers of `laplace_torch.json` are made by `examples/benchmarks/laplace_torch.py`, which also makes the data.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_bnn as bnn
from examples.benchmarks.laplace_torch import NEW, NOISE, PRIOR_PRECISION, ROWS, WIDTHS, data
from numpyro_bnn import guides, nn

REFERENCE = json.loads((Path(__file__).parent / "laplace_torch.json").read_text())
pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.filterwarnings("ignore:.*posterior sds from the mode")]


def prior(name, shape):
    return dist.Normal(0.0, PRIOR_PRECISION**-0.5).expand(shape).to_event()


def model(x, y=None, likelihood="normal"):
    widths = WIDTHS[likelihood]
    net = bnn.random_network("net", nn.MLP(list(widths[1:]), "tanh"), x.shape[1:], prior)
    with numpyro.plate("data", x.shape[0]):
        f = net(x)
        fn = dist.Normal(f[:, 0], NOISE) if likelihood == "normal" else dist.Categorical(logits=f)
        numpyro.sample("y", fn, obs=y)


CASES = [pytest.param(name, marks=[] if name == "categorical kron" else [pytest.mark.slow]) for name in REFERENCE]


@pytest.mark.parametrize("name", CASES)
def test_linearized_predictive_and_evidence(name):
    likelihood, structure = name.split()
    x, y, layers = data(likelihood, WIDTHS[likelihood], ROWS)
    start = {}
    for i, (w, b) in enumerate(layers):
        start |= {f"net/Dense_{i}.kernel": w, f"net/Dense_{i}.bias": b}
    y = y[:, 0] if likelihood == "normal" else y
    sites = "net/Dense_2.*" if structure == "last" else None
    guide = guides.AutoLaplace(model, "full" if structure == "last" else structure, sites)
    options = {"likelihood": likelihood, "num_epochs": 0, "init_params": start, "progress_bar": False}
    fit = guide.run(jax.random.key(0), jnp.asarray(x, float), jnp.asarray(y), **options)
    new = jnp.asarray(data(likelihood, WIDTHS[likelihood], NEW, seed=1)[0], float)
    found = guide.predictive(fit.params, new, likelihood=likelihood)
    (outputs,) = (value for output, value in found.outputs.items() if output != "log_scale")
    expected = REFERENCE[name]
    np.testing.assert_allclose(outputs.reshape(NEW, -1), expected["mean"], rtol=1e-4)
    np.testing.assert_allclose(found.covariance, expected["covariance"], rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(fit.log_evidence, expected["log_evidence"], rtol=1e-4)
