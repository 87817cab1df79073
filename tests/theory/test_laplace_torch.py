"""AutoLaplace against laplace-torch 0.3 on the same weights: linearized outputs and
evidence.

The numbers of `laplace_torch.json` are made by `examples/benchmarks/laplace_torch.py`,
which also makes the data.
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
from numpyro_bnn import guides, nn

# Dense precisions are those of NumPy (test_random_models.py).
CASES = ["normal kron", "normal last", "categorical kron", "categorical diag"]


@pytest.mark.filterwarnings("ignore:.*posterior sds from the mode")
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_evidence_are_those_of_laplace_torch(name, x64):
    from examples.benchmarks import laplace_torch as made

    likelihood, structure = name.split()
    widths = made.WIDTHS[likelihood]

    def model(x, y=None):
        sd = made.PRIOR_PRECISION**-0.5
        net = bnn.random_network(
            "net",
            nn.MLP(widths[1:], "tanh"),
            x.shape[1:],
            lambda _, shape: dist.Normal(0.0, sd).expand(shape).to_event(),
        )
        with numpyro.plate("data", x.shape[0]):
            f = net(x)
            fn = (
                dist.Normal(f[:, 0], made.NOISE)
                if likelihood == "normal"
                else dist.Categorical(logits=f)
            )
            numpyro.sample("y", fn, obs=y)

    x, y, layers = made.data(likelihood, widths, made.ROWS)
    parts = [
        (f"net/Dense_{i}.{part}", value)
        for i, layer in enumerate(layers)
        for part, value in zip(("kernel", "bias"), layer, strict=True)
    ]
    sites = "net/Dense_2.*" if structure == "last" else None
    guide = guides.AutoLaplace(
        model, "full" if structure == "last" else structure, sites
    )
    args = jnp.asarray(x, float), jnp.asarray(y[:, 0] if likelihood == "normal" else y)
    fit = guide.run(
        jax.random.key(0),
        *args,
        num_epochs=0,
        init_params=dict(parts),
        progress_bar=False,
    )
    found = guide.predictive(
        fit.params,
        jnp.asarray(made.data(likelihood, widths, made.NEW, seed=1)[0], float),
    )
    outputs = found.outputs["loc" if likelihood == "normal" else "logits"]
    expected = json.loads((Path(__file__).parent / "laplace_torch.json").read_text())[
        name
    ]
    np.testing.assert_allclose(
        outputs.reshape(made.NEW, -1), expected["mean"], rtol=1e-4
    )
    np.testing.assert_allclose(
        found.covariance, expected["covariance"], rtol=1e-4, atol=1e-8
    )
    np.testing.assert_allclose(fit.log_evidence, expected["log_evidence"], rtol=1e-4)
    if structure == "last":  # all other layers are held
        draws = guide.sample_posterior(jax.random.key(0), fit.params, sample_shape=(2,))
        np.testing.assert_array_equal(
            draws["net/Dense_0.kernel"][1], jnp.asarray(layers[0][0], float)
        )
