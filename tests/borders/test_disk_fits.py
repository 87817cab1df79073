"""Fits in folders, which go on bit for bit, and rows of data that stay on disk."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from disk import recorder, same
from helpers import each, group, group_names, mala, refused
from numpyro import handlers
from numpyro.infer import MCMC, SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density
from zoo import BATCH, CLASSES, NEW_X, ZOO, X, Y, line

import numpyro_bnn as bnn
from numpyro_bnn import guides, infer, models, nn, runs

pytestmark = pytest.mark.core


def svi_of(optimizer=None, guide=AutoNormal, model=line, loss=Trace_ELBO):
    optimizer = optimizer or optax.adam(optax.cosine_decay_schedule(0.02, 100))
    return SVI(model, guide(model), optimizer, loss())


# A method, how many steps it takes, and keywords of the model.
FITS = {
    "optax, moments of bfloat16": (
        lambda: svi_of(optax.adam(0.02, mu_dtype=jnp.bfloat16)),
        60,
        {"batch_size": BATCH},
    ),
    "AutoADF": (lambda: guides.AutoADF(line), 5, {}),
    "optax, schedule": (svi_of, 60, {"batch_size": BATCH}),
}


def fit(path, name, steps=None):
    make, most, kwargs = FITS[name]
    given = {"block_seconds": 1e-9, "progress_bar": False, **kwargs}
    return runs.fit(
        path, make(), jax.random.key(1), steps or most, *ZOO["line"].args, **given
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Fits by name, in the smallest blocks."""
    return recorder(lambda: tmp_path_factory.mktemp("fits"), fit, every=3)


@each("name", FITS, fast=1)
def test_a_fit_that_is_killed_anywhere_goes_on_bit_for_bit(recorded, tmp_path, name):
    """Also one that had all its steps; it is what it would be without a folder."""
    make, steps, kwargs = FITS[name]
    given = {"progress_bar": False, **kwargs}
    if isinstance(method := make(), SVI):
        whole = guides.fit(method, jax.random.key(1), steps, *ZOO["line"].args, **given)
    else:
        whole = method.run(
            jax.random.key(1), *ZOO["line"].args, num_epochs=steps, **given
        )
    fit(tmp_path, name, steps // 2)
    cuts = recorded(name).cuts
    assert same(recorded(name).result, whole)
    assert len(cuts) >= 2
    for path in (tmp_path, *cuts[:: max(1, len(cuts) // 3)], tmp_path):
        assert same(fit(path, name), whole), path


def with_factor(x, y, batch_size=None):
    """One more site, of no effect."""
    line(x, y, batch_size)
    numpyro.factor("none", 0.0 * jnp.ones(()))


def test_another_fit_is_refused_by_name(recorded, tmp_path):
    name = "optax, moments of bfloat16"
    path = recorded(name).copy(tmp_path / "run")

    def begin(method=FITS[name][0], seed=1, data=(X, Y), **options):
        given = {"progress_bar": False, "batch_size": BATCH, **options}
        key, data = jax.random.key(seed), map(jnp.asarray, data)
        return runs.fit(path, method(), key, 3, *data, **given)

    def other(**parts):
        return {"method": lambda: svi_of(**parts)}

    optimizer = optax.adam(0.03, mu_dtype=jnp.bfloat16)
    for change, named in [
        (other(optimizer=optimizer), "optimizer"),
        (other(guide=guides.AutoMeanField), "guide was"),
        (other(loss=TraceMeanField_ELBO), "loss was"),
        (other(model=with_factor), "model was"),
        ({"seed": 9}, "rng_key was"),
        ({"data": (X, Y + 1)}, "argument"),
        ({"init_params": {"w_auto_loc": np.ones(2)}}, "init_params was"),
        ({"batch_size": 5}, "argument"),
        ({"stable_update": True}, "stable_update was False, is True"),
    ]:
        message = f"runs.fit: .* the run of something else: .*{named}"
        with pytest.raises(ValueError, match=message):
            begin(**change)
    with refused("method", "for an `MCMC` call `runs.start`"):
        begin(method=lambda: MCMC(mala(line), num_warmup=1, num_samples=1))


# -- rows on disk ----------------------------------------------------------------------


class Counted:
    """An array that notes how many rows are read at once."""

    def __init__(self, source):
        self.source, self.shape, self.dtype, self.sizes = (
            source,
            source.shape,
            source.dtype,
            [],
        )

    def __getitem__(self, index):
        self.sizes.append(len(index))
        return self.source[index]


def on_disk(folder):
    """Inputs in a Zarr array, targets in a memory map; how many are read at once."""
    import zarr

    x = zarr.create_array(folder / "x", data=X, chunks=(10, 2), overwrite=True)
    np.save(folder / "y.npy", Y)
    y = Counted(np.load(folder / "y.npy", mmap_mode="r"))
    return runs.Rows(x), runs.Rows(y), y.sizes


def sampler(kernel=infer.SGLD, samples=6, chains=2, method="vectorized", **options):
    options = {
        "steps_per_draw": 20,
        **({"step_size": 1e-4, "warm_start": 0.0} if kernel is infer.SGLD else {}),
        **options,
    }
    sizes = {"num_warmup": 6, "num_samples": samples, "num_chains": chains}
    kernel = kernel(line, **options)
    return MCMC(kernel, chain_method=method, progress_bar=False, **sizes)


KERNELS = {
    "SGLD": lambda: sampler(chains=1),
    "SGNHT on two devices": lambda: sampler(
        infer.SGNHT, method=infer.parallel_vectorized
    ),
    "SGHMC in turn": lambda: sampler(infer.SGHMC, method="sequential"),
}


@each("name", KERNELS, fast=["SGLD"])
@pytest.mark.filterwarnings("ignore:Disabling progress bar")
def test_chains_on_rows_on_disk_are_those_in_memory(tmp_path, name):
    """The rows of all steps of a transition are read by one call into Python."""
    mcmc, expected = KERNELS[name](), KERNELS[name]()
    x, y, sizes = on_disk(tmp_path)
    mcmc.run(jax.random.key(0), x, y, batch_size=BATCH)
    expected.run(jax.random.key(0), *ZOO["line"].args, batch_size=BATCH)
    np.testing.assert_allclose(
        mcmc.get_samples()["w"], expected.get_samples()["w"], rtol=1e-5, atol=1e-6
    )
    if name == "SGLD":
        assert sizes.count(20 * BATCH) == 12
        # the noise of the gradient is measured on all of its minibatches at once
        assert sizes.count(128 * BATCH) > 0
        assert len(sizes) < 50


def test_models_of_the_package_take_rows_on_disk(tmp_path):
    """Their checks of values read all rows once."""
    robust = models.regression(nn.Dense(1), heavy_tails=True)
    classes = models.classification(nn.Dense(3), 3)
    for model, y, wrong in [
        (robust, Y, np.where(Y > 0, np.nan, Y)),
        (classes, CLASSES, CLASSES + 1),
    ]:

        @handlers.seed(rng_seed=0)
        def seeded(x, y, model=model):
            return log_density(model, (x, y), {"batch_size": BATCH}, {})[0]

        found, expected = (
            jax.jit(lambda rows=rows, seeded=seeded: seeded(*rows))()
            for rows in ((runs.Rows(X), runs.Rows(y)), (X, y))
        )
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        for rows in ((X, wrong), (np.where(X[20] == X, np.inf, X), y)):
            with pytest.raises(
                ValueError,
                match=r"models\.\w+: argument `[xy]` got (labels from 1 to 3|Rows)",
            ):
                jax.eval_shape(
                    lambda rows=rows, seeded=seeded: seeded(*map(runs.Rows, rows))
                )


@pytest.mark.slow
def test_a_run_on_rows_on_disk_goes_on_and_is_exported(tmp_path):
    expected, (x, y, _) = sampler(), on_disk(tmp_path)
    expected.run(jax.random.key(0), *ZOO["line"].args, batch_size=BATCH)

    def start(samples, *data):
        mcmc, given = sampler(samples=samples), {"batch_size": BATCH}
        run = tmp_path / "run", mcmc, jax.random.key(0), *data
        return runs.start(*run, progress_bar=False, **given)

    start(3, x, y)
    run = start(6, *on_disk(tmp_path)[:2])
    np.testing.assert_allclose(
        run.get_samples()["w"], expected.get_samples()["w"], rtol=1e-5, atol=1e-6
    )
    with refused("folder", "argument [0][0] was"):
        start(6, runs.Rows(X + 1), y)
    found, whole = (
        bnn.to_inference_data(done, {"x": NEW_X, "y": Y[:5]})
        for done in (run, expected)
    )
    for name in ("y_mean", "y_log_likelihood"):
        value = group(whole, "predictions")[name]
        np.testing.assert_allclose(
            group(found, "predictions")[name], value, rtol=1e-3, atol=1e-4
        )
    of_all_rows = {
        "log_likelihood",
        "observed_data",
        "constant_data",
        "posterior_predictive",
    }
    assert not of_all_rows & group_names(found)
    with refused("posterior_predictive", "got True for rows that stay on disk"):
        bnn.to_inference_data(run, posterior_predictive=True)


@pytest.mark.slow
def test_a_fit_on_rows_on_disk_is_that_of_rows_in_memory(tmp_path):
    """Rows of many steps are read at once; the guide predicts from a few new rows."""
    given = {"batch_size": BATCH, "progress_bar": False}
    svi = svi_of()
    expected = guides.fit(svi_of(), jax.random.key(0), 200, *ZOO["line"].args, **given)
    x, y, sizes = on_disk(tmp_path)
    found = guides.fit(svi, jax.random.key(0), 200, x, y, **given)
    np.testing.assert_allclose(
        found.params["w_auto_loc"], expected.params["w_auto_loc"], rtol=1e-5
    )
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-4)
    assert max(sizes[2:]) >= 10 * BATCH
    assert len(sizes) < 20
    of = {"guide": svi.guide, "args": (x, y), "kwargs": {"batch_size": BATCH}}
    of["num_samples"] = 20
    idata = bnn.to_inference_data(found, predictions={"x": NEW_X}, **of)
    assert group(idata, "predictions")["y_mean"].shape == (1, 20, 5)
    assert "lp" not in group(idata, "posterior")


def test_what_needs_all_rows_refuses_rows_on_disk(tmp_path):
    x, y, _ = on_disk(tmp_path)

    def sample(kernel, **options):
        sampler(kernel, **options).run(jax.random.key(0), x, y, batch_size=BATCH)

    for call, message in [
        (
            lambda: sample(infer.SGLD, chains=1, gradient="control_variates"),
            "Without `subsample_size` .* all are",
        ),
        (lambda: sample(mala), "all are needed"),
        (
            lambda: sample(infer.MCLMC, warm_start=infer.WarmStart(0.3, held_out=0.1)),
            "or `held_out` all are needed",
        ),
        (
            lambda: guides.AutoADF(line).run(
                jax.random.key(0), x, y, progress_bar=False
            ),
            "Every epoch takes all rows",
        ),
        (
            lambda: guides.AutoLaplace(line).run(
                jax.random.key(0), x, y, progress_bar=False
            ),
            "a sum over all rows",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.slow
def test_batch_normalization_over_rows_on_disk_is_not_exported(tmp_path):
    normalized = models.regression(nn.MLP([3, 1], norm=nn.BatchNorm()))
    kernel = infer.SGLD(normalized, 1e-5, warm_start=0.0)
    mcmc = MCMC(kernel, num_warmup=2, num_samples=2, progress_bar=False)
    mcmc.run(jax.random.key(0), *on_disk(tmp_path)[:2], batch_size=BATCH)
    with pytest.raises(ValueError, match="batch normalization and rows on disk"):
        bnn.to_inference_data(mcmc, predictions={"x": NEW_X})


def test_wrong_uses_of_rows_are_refused():
    rows = runs.Rows(X)
    for use in (
        lambda x: x[:3],
        lambda x: x[:, 0],
        lambda x: x["a"],
        jnp.sum,
        np.asarray,
        lambda x: x[X[:, 0]],
    ):
        with pytest.raises(TypeError, match=r"runs\.Rows.*[Ii]ndex it by|Rows"):
            use(rows)
    for source in ([1.0, 2.0], np.array("a"), np.float32(1.0), None, "x.npy"):
        with refused("source", "memory map"):
            runs.Rows(source)
    with refused("source", "dtype <U1"):
        runs.Rows(np.array(["a", "b"]))
    with pytest.raises(
        Exception, match=r"row 24 of 24\. Pass as many rows as the plate has indices"
    ):
        jax.block_until_ready(rows[jnp.array([0, 24])])
    many = runs.Rows(np.broadcast_to(np.float32(0), (400, 200_000)))
    with pytest.raises(
        Exception, match=r"400 rows .* at once.*use minibatches, or pass an array"
    ):
        many.fetch(np.arange(400))
