"""Rows on disk: the draws of the same data in memory, few rows read at once, refused where all rows are needed."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS, SVI
from numpyro.infer.autoguide import AutoNormal

import numpyro_bnn as bnn
from numpyro_bnn import guides, infer, models, nn, priors, runs
from numpyro_bnn.guides import fitting
from numpyro_bnn.program import rows as module

pytestmark = pytest.mark.core
KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32)
Y = np.sin(X[:, 0])


def model(x, y=None, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(jnp.tanh(x[i] @ w), 0.3), obs=None if y is None else y[i])


class Counted:
    """An array that knows how many rows have been read, and the most at once."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.reads, self.most = 0, 0

    def __getitem__(self, index):
        self.reads, self.most = self.reads + 1, max(self.most, len(index))
        return self.values[index]


def on_disk(kind, folder):
    """Both arrays on disk, as memory maps or Zarr arrays, or counted in memory."""
    if kind == "memmap":
        for name, values in (("x", X), ("y", Y)):
            np.save(folder / f"{name}.npy", values)
        return tuple(runs.Rows(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in "xy")
    if kind == "zarr":
        import zarr

        pairs = (("x", X), ("y", Y))
        return tuple(runs.Rows(zarr.create_array(folder / n, data=v, chunks=(50, *v.shape[1:]))) for n, v in pairs)
    return runs.Rows(Counted(X)), runs.Rows(Counted(Y))


def draws(kernel, *data, chains=2, method="vectorized", **options):
    run = {"num_warmup": 6, "num_samples": 6, "num_chains": chains, "chain_method": method, "progress_bar": False}
    mcmc = MCMC(kernel(model, **{"steps_per_draw": 20, **options}), **run)
    mcmc.run(KEY, *data, batch_size=10)
    return mcmc


@pytest.mark.parametrize(
    ("kernel", "kind", "chains", "method"),
    [
        (infer.PSGLD, "memmap", 2, "vectorized"),
        (infer.PSGLD, "zarr", 1, "vectorized"),
        pytest.param(infer.SGNHT, "memmap", 2, infer.parallel_vectorized, marks=pytest.mark.slow),
        pytest.param(infer.SGHMC, "memmap", 2, "sequential", marks=pytest.mark.slow),
        pytest.param(infer.MCLMC, "memmap", 1, "vectorized", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:Disabling progress bar")
def test_chains_are_those_of_data_in_memory(tmp_path, kernel, kind, chains, method):
    wanted = draws(kernel, X, Y, chains=chains, method=method).get_samples()["w"]
    found = draws(kernel, *on_disk(kind, tmp_path), chains=chains, method=method).get_samples()["w"]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("minibatches", ["with_replacement", "epochs"])
def test_rows_of_many_steps_are_read_at_once(tmp_path, monkeypatch, minibatches):
    """One call into Python for all steps of a transition: twice as many steps need no more; few rows at once."""
    monkeypatch.setattr(module, "HEAD", 20)  # rows that are hashed
    reads = []
    for steps in (20, 40):
        x, y = on_disk("counted", tmp_path)
        draws(
            infer.SGLD, x, y, chains=1, step_size=1e-4, warm_start=0.0, minibatches=minibatches, steps_per_draw=steps
        )
        assert x._source.most == y._source.most == steps * 10
        reads.append(x._source.reads)
    assert reads[0] == reads[1]


def test_a_fit_is_that_of_data_in_memory(tmp_path, monkeypatch):
    def svi():
        return SVI(model, AutoNormal(model), numpyro.optim.Adam(0.02), numpyro.infer.Trace_ELBO())

    monkeypatch.setattr(module, "HEAD", 20)  # rows that are hashed
    options = {"batch_size": 10, "progress_bar": False}
    wanted = guides.fit(svi(), KEY, 50, X, Y, **options)
    x, y = on_disk("counted", tmp_path)
    found = guides.fit(svi(), KEY, 50, x, y, **options)
    np.testing.assert_allclose(found.params["w_auto_loc"], wanted.params["w_auto_loc"], rtol=1e-5)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-4)
    assert x._source.most == fitting.AHEAD * 10  # of all steps of a block at once
    assert x._source.reads < 10


def test_a_run_in_a_folder(tmp_path):
    def run(folder, *data, samples=6):
        kernel = infer.SGLD(model, 1e-4, steps_per_draw=5, warm_start=0.0)
        mcmc = MCMC(kernel, num_warmup=4, num_samples=samples, progress_bar=False)
        return runs.start(tmp_path / folder, mcmc, KEY, *data, batch_size=10, progress_bar=False)

    whole = run("whole", X, Y, samples=9)
    run("run", *on_disk("memmap", tmp_path))
    found = run("run", *on_disk("memmap", tmp_path), samples=9)
    np.testing.assert_allclose(found.get_samples()["w"], whole.get_samples()["w"], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"argument \[0\]\[0\] was"):
        run("run", runs.Rows(X + 1), runs.Rows(Y))
    idata = bnn.to_inference_data(found, predictions={"x": X[:7], "y": Y[:7]})
    inside = bnn.to_inference_data(whole, predictions={"x": X[:7], "y": Y[:7]})
    for name in ("y_mean", "y_log_likelihood"):
        np.testing.assert_allclose(idata["predictions"][name], inside["predictions"][name], rtol=1e-3, atol=1e-4)
    for group in ("log_likelihood", "observed_data", "constant_data", "posterior_predictive"):
        assert not hasattr(idata, group), group
    with pytest.raises(ValueError, match="argument `posterior_predictive` got True for rows that stay on disk"):
        bnn.to_inference_data(found, posterior_predictive=True)


def test_predictions_of_a_guide(tmp_path):
    x, y = on_disk("memmap", tmp_path)
    guide = AutoNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(0.02), numpyro.infer.Trace_ELBO())
    found = guides.fit(svi, KEY, 50, x, y, batch_size=10, progress_bar=False)
    given = {"guide": guide, "args": (x, y), "kwargs": {"batch_size": 10}, "num_samples": 20}
    idata = bnn.to_inference_data(found, predictions={"x": X[:5]}, **given)
    assert idata["predictions"]["y_mean"].shape == (1, 20, 5)
    assert "lp" not in idata["posterior"]


# --------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, y: draws(infer.SGLD, x, y, chains=1, gradient="control_variates"),
            "Without `subsample_size` .* all are needed",
        ),
        (lambda x, y: draws(infer.MALA, x, y), "all are needed"),
        (lambda x, y: draws(infer.GGMC, x, y), "all are needed"),
        (
            lambda x, y: draws(infer.MCLMC, x, y, warm_start=infer.WarmStart(0.3, held_out=0.1)),
            "or `held_out` all are needed",
        ),
        (lambda x, y: guides.AutoADF(ADF).run(KEY, x, y, progress_bar=False), "Every epoch takes all rows"),
        (
            lambda x, y: guides.AutoLaplace(model).run(KEY, x, y, progress_bar=False),
            "a sum over all rows: pass an array",
        ),
    ],
    ids=["control variates", "MALA", "GGMC", "held out", "ADF", "Laplace"],
)
def test_what_needs_all_rows_is_refused(tmp_path, call, message):
    with pytest.raises(ValueError, match=message):
        call(*on_disk("counted", tmp_path))


ADF = models.regression(nn.MLP([3, 1], "relu"), priors.Normal())


def test_an_evaluation_on_all_rows_is_refused_if_they_are_many(tmp_path, monkeypatch):
    """NumPyro's kernels take no minibatches."""
    monkeypatch.setattr(module, "MOST_BYTES", 400 * 3 * 4 - 1)
    mcmc = MCMC(NUTS(model), num_warmup=2, num_samples=2, progress_bar=False)
    with pytest.raises(Exception, match=r"400 rows .* at once.*use minibatches, or pass an array"):
        mcmc.run(KEY, *on_disk("memmap", tmp_path))


def test_batch_normalization_cannot_be_exported(tmp_path):
    def normalized(x, y=None, batch_size=None):
        net = bnn.random_network("net", nn.MLP([3, 1], "relu", norm=nn.BatchNorm()), x.shape[1:], priors.Normal())
        with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(net(x[i])[..., 0], 0.3), obs=None if y is None else y[i])

    mcmc = MCMC(infer.SGLD(normalized, 1e-5, warm_start=0.0), num_warmup=2, num_samples=2, progress_bar=False)
    mcmc.run(KEY, *on_disk("memmap", tmp_path), batch_size=10)
    with pytest.raises(ValueError, match="batch normalization and rows on disk"):
        bnn.to_inference_data(mcmc, predictions={"x": X[:3]})


@pytest.mark.parametrize("source", [[1.0, 2.0], np.array("a"), np.float32(1.0), None, "x.npy"])
def test_no_source_of_rows(source):
    with pytest.raises(TypeError, match=r"runs.Rows: argument `source` .*memory map"):
        runs.Rows(source)


@pytest.mark.parametrize(
    "use",
    [lambda x: x[:3], lambda x: x[:, 0], lambda x: x["a"], lambda x: jnp.sum(x), np.asarray, lambda x: x[X[:, 0]]],
)
def test_other_uses_of_rows(use):
    with pytest.raises(TypeError, match=r"runs\.Rows.*[Ii]ndex it by|Rows"):
        use(runs.Rows(X))


def test_rows_that_are_not_there():
    with pytest.raises(Exception, match=r"row 400 of 400\. Pass as many rows as the plate has indices"):
        jax.block_until_ready(runs.Rows(X)[jnp.array([0, 400])])


def test_text_is_no_number():
    with pytest.raises(TypeError, match="dtype <U1"):
        runs.Rows(np.array(["a", "b"]))
