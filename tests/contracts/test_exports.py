"""`to_inference_data`: what every group holds, against the model evaluated by hand."""

import contextlib
from types import SimpleNamespace

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from helpers import group, group_names, results
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, BarkerMH, log_likelihood
from numpyro.infer.autoguide import AutoNormal

import numpyro_bnn as bnn

pytestmark = pytest.mark.core

N, M = 30, 7
CHAINS, DRAWS = 2, 12
NET = bnn.nn.MLP([6, 1], activation="tanh")


def bnn_model(x, y=None, batch_size=None):
    net = bnn.random_network("net", NET, x.shape[1:], bnn.priors.Hierarchical())
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        f = numpyro.deterministic("f", net(x[i])[..., 0])
        numpyro.sample("y", dist.Normal(f, sigma), obs=None if y is None else y[i])


def sample(model, *args, draws=DRAWS, warmup=10, chains=CHAINS, key=None, kernel=BarkerMH, extra_fields=(), **kwargs):
    """A short run; Barker's kernel compiles several times faster than NUTS, and the export does not care."""
    mcmc = MCMC(
        kernel(model),
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method="sequential",
        progress_bar=False,
    )
    key = jax.random.key(0) if key is None else key
    mcmc.run(key, *args, extra_fields=extra_fields, **kwargs)
    return mcmc


@pytest.fixture(scope="module")
def data():
    x = jax.random.normal(jax.random.key(1), (N + M, 2))
    y = jnp.sin(x[:, 0]) + 0.1 * x[:, 1]
    return {"x": x[:N], "y": y[:N], "x_test": x[N:], "y_test": y[N:]}


@pytest.fixture(scope="module")
def mcmc(data):
    return sample(bnn_model, data["x"], data["y"], kernel=NUTS, extra_fields=("potential_energy", "num_steps"))


@pytest.fixture(scope="module")
def idata(mcmc, data):
    new = {"x": data["x_test"], "y": data["y_test"]}
    return bnn.to_inference_data(
        mcmc, predictions=new, attrs={"dataset": "toy"}, coords={"data": range(100, 100 + N)}
    )


def params_of(draws):
    return {
        k.removeprefix("net/"): v for k, v in draws.items() if k.startswith("net/") and "_" not in k.split(".")[1]
    }


def test_groups_dims_and_coords(idata):
    assert set(group_names(idata)) == {
        "posterior", "sample_stats", "log_likelihood", "posterior_predictive",
        "predictions", "observed_data", "constant_data", "predictions_constant_data",
    }  # fmt: skip
    posterior = group(idata, "posterior")
    kernel = posterior["net.Dense_0.kernel"]
    assert kernel.dims == ("chain", "draw", "net.Dense_0.kernel_in", "net.Dense_0.kernel_out")
    assert kernel.shape == (CHAINS, DRAWS, 2, 6)
    assert not any("/" in name for name in posterior)
    likelihood = group(idata, "log_likelihood")["y"]
    assert likelihood.dims == ("chain", "draw", "data")
    assert likelihood["data"].to_numpy().tolist() == list(range(100, 100 + N))
    predictions = group(idata, "predictions")
    assert dict(predictions["y_mean"].sizes) == {"chain": CHAINS, "draw": DRAWS, "data": M}
    assert predictions["data"].to_numpy().tolist() == list(range(M))
    assert set(predictions) == {"y", "y_mean", "f", "y_log_likelihood"}
    assert group(idata, "predictions_constant_data")["x"].dims == ("data", "x_dim_1")


@pytest.mark.parametrize("plated", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_coords_of_training_rows_are_not_those_of_new_rows(plated, data):
    """Also of as many rows; coordinates of classes hold for both."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with numpyro.plate("data", len(x)) if plated else contextlib.nullcontext():
            numpyro.sample("y", dist.Categorical(logits=x[:, :1] * w), obs=y)

    run = sample(model, data["x"], jnp.arange(N) % 3, draws=3, chains=1)
    row, rows = ("data", "data") if plated else ("y_dim_0", "y_probs_dim_0")
    coords = {"y_probs_dim_1": ["a", "b", "c"], row: range(100, 100 + N), rows: range(100, 100 + N)}

    def labels(name, variable="y", **options):
        new = {"x": -data["x"]}
        idata = bnn.to_inference_data(run, new, log_likelihood=False, coords=coords, **options)
        return [values.to_numpy().tolist() for values in group(idata, name)[variable].coords.values()][2:]

    assert labels("posterior_predictive") == [list(range(100, 100 + N))]
    assert labels("predictions") == [list(range(N))]
    assert labels("predictions", "y_probs")[-1] == ["a", "b", "c"]
    assert labels("predictions", prediction_coords={row: range(N, 2 * N)}) == [list(range(N, 2 * N))]


def test_coords_of_new_rows_of_processes():
    x = np.linspace(-1, 1, 4)[:, None]
    gp = bnn.infinite.gp_regression(bnn.nn.Dense(1), x, x[:, 0], noise_sd=0.1)
    options = {"predictions": {"x": x}, "num_samples": 3, "coords": {"data": [5, 6, 7, 8]}}
    for more, expected in [({}, [0, 1, 2, 3]), ({"prediction_coords": {"data": [1, 3, 5, 7]}}, [1, 3, 5, 7])]:
        idata = bnn.to_inference_data(gp, **options, **more)
        assert group(idata, "posterior")["data"].to_numpy().tolist() == [5, 6, 7, 8]
        assert group(idata, "predictions")["data"].to_numpy().tolist() == expected


def test_observed_and_constant_data_are_the_arguments(idata, data):
    np.testing.assert_array_equal(group(idata, "observed_data")["y"], data["y"])
    constants = group(idata, "constant_data")
    np.testing.assert_array_equal(constants["x"], data["x"])
    assert "y" not in constants
    np.testing.assert_array_equal(group(idata, "predictions_constant_data")["y"], data["y_test"])


def test_predictions_are_the_network_at_the_draws(idata, mcmc, data):
    draws = mcmc.get_samples(group_by_chain=True)
    params, sigma = params_of(draws), np.asarray(draws["sigma"])
    f = jax.vmap(jax.vmap(lambda p: NET.apply(p, data["x_test"])[..., 0]))(params)
    predictions = group(idata, "predictions")
    np.testing.assert_allclose(predictions["y_mean"], f, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(predictions["f"], f, rtol=1e-5, atol=1e-5)
    exact = dist.Normal(f, sigma[..., None]).log_prob(data["y_test"])
    np.testing.assert_allclose(predictions["y_log_likelihood"], exact, rtol=1e-4, atol=1e-4)
    # 168 standardized residuals y - f: a standard normal's |mean| stays below 5 / sqrt(168), failure rate 6e-7.
    z = (predictions["y"].to_numpy() - f) / sigma[..., None]
    assert abs(float(z.mean())) < 5 / z.size**0.5
    assert abs(float((z**2).mean()) - 1) < 5 * (2 / z.size) ** 0.5


def test_new_rows_have_noise_of_their_own(mcmc, data):
    """Predicted at the training inputs, the residuals of 24 draws of 30 rows are uncorrelated: failure rate 6e-7."""
    idata = bnn.to_inference_data(mcmc, predictions={"x": data["x"]}, log_likelihood=False)
    residuals = []
    for name in ("posterior_predictive", "predictions"):
        exported = group(idata, name)
        sigma = group(idata, "posterior")["sigma"].to_numpy()[..., None]
        residuals.append(((exported["y"].to_numpy() - exported["y_mean"].to_numpy()) / sigma).ravel())
    assert abs(np.corrcoef(residuals)[0, 1]) < 5 / residuals[0].size ** 0.5


def numpyro_log_likelihood(run, data):
    draws = {name: value for name, value in run.get_samples().items() if name != "f"}
    values = log_likelihood(bnn_model, draws, data["x"], data["y"])["y"]
    return values.reshape(CHAINS, DRAWS, N)


def test_log_likelihood_agrees_with_numpyro(idata, mcmc, data):
    exported = group(idata, "log_likelihood")["y"]
    np.testing.assert_allclose(exported, numpyro_log_likelihood(mcmc, data), rtol=1e-4, atol=1e-4)


def test_sample_stats_have_arviz_names(idata, mcmc):
    stats = group(idata, "sample_stats")
    fields = mcmc.get_extra_fields(group_by_chain=True)
    np.testing.assert_array_equal(stats["lp"], -np.asarray(fields["potential_energy"]))
    np.testing.assert_array_equal(stats["n_steps"], fields["num_steps"])
    depth, steps = stats["tree_depth"].to_numpy(), stats["n_steps"].to_numpy()
    assert ((2 ** (depth - 1) <= steps) & (steps < 2**depth)).all()  # a complete tree has 2^depth - 1 steps
    assert "acceptance_rate" not in stats  # it was not collected, so it is not there


def test_attrs_tell_algorithm_settings_versions_and_key(idata):
    attrs = idata.attrs
    assert attrs["algorithm"] == "NUTS"
    assert (attrs["num_warmup"], attrs["num_samples"], attrs["num_chains"]) == (10, DRAWS, CHAINS)
    assert attrs["dataset"] == "toy"
    assert attrs["numpyro_bnn_version"] == bnn.__version__
    assert attrs["predictive_rng_key"] == "[0, 0]"
    assert "jax_version" in attrs


def test_round_trip_through_netcdf(idata, tmp_path):
    idata.to_netcdf(str(tmp_path / "fit.nc"))
    loaded = az.from_netcdf(str(tmp_path / "fit.nc"))
    for name in group_names(idata):
        assert group(loaded, name).equals(group(idata, name)), name
    assert loaded.attrs == idata.attrs


def test_arviz_reads_it(idata):
    assert "sigma" in az.summary(idata, var_names=["sigma"]).index


def test_results_do_not_depend_on_the_chunk(mcmc, data, idata):
    new = {"x": data["x_test"], "y": data["y_test"]}
    chunked = bnn.to_inference_data(mcmc, predictions=new, draws_per_chunk=5)
    for part in ("predictions", "posterior_predictive", "log_likelihood"):
        for name, values in group(chunked, part).items():
            # One more or fewer draw per call changes how XLA orders sums, nothing else.
            np.testing.assert_allclose(values, group(idata, part)[name], rtol=2e-5, atol=2e-5)


def test_subsampled_plate_is_exported_in_full_and_in_order(data):
    frozen = handlers.seed(bnn_model, 3)  # these kernels need a frozen minibatch; the export must not inherit it
    run = sample(frozen, data["x"], data["y"], batch_size=8)
    exported = bnn.to_inference_data(run)
    np.testing.assert_array_equal(group(exported, "observed_data")["y"], data["y"])
    assert run.get_samples()["f"].shape == (CHAINS * DRAWS, 8)  # what NumPyro kept: the minibatch
    np.testing.assert_allclose(
        group(exported, "log_likelihood")["y"], numpyro_log_likelihood(run, data), rtol=1e-4, atol=1e-4
    )
    predictive = group(exported, "posterior_predictive")
    assert "f" not in group(exported, "posterior")
    np.testing.assert_array_equal(predictive["f"], predictive["y_mean"])


def test_keys_may_be_typed_or_legacy(mcmc, data):
    for key in (jax.random.key(4), jax.random.PRNGKey(4)):
        options = {"log_likelihood": False, "posterior_predictive": False, "rng_key": key}
        exported = bnn.to_inference_data(mcmc, {"x": data["x_test"]}, **options)
        assert exported.attrs["predictive_rng_key"] == "[0, 4]"
        assert "y_log_likelihood" not in group(exported, "predictions")  # no targets, no score


@pytest.mark.slow
def test_batch_norm_predicts_with_training_statistics_of_each_draw(data):
    net = bnn.nn.MLP([5, 1], "tanh", norm=bnn.nn.BatchNorm())
    model = bnn.models.regression(net)
    run = sample(model, data["x"], data["y"], draws=20, warmup=200, chains=1)
    exported = bnn.to_inference_data(run, {"x": data["x_test"], "y": data["y_test"]})

    def predict(params):
        return net.apply(params, data["x_test"], net.statistics(params, data["x"]))[..., 0]

    params = {k.removeprefix("net/"): v for k, v in run.get_samples().items() if k.startswith("net/")}
    mean = group(exported, "predictions")["y_mean"][0]
    assert len(np.unique(run.get_samples()["sigma"])) > 5  # the chain moves
    np.testing.assert_allclose(mean, jax.vmap(predict)(params), rtol=1e-5, atol=1e-5)
    density = scipy.stats.norm.logpdf(data["y_test"], mean, run.get_samples()["sigma"][:, None])
    scores = group(exported, "predictions")["y_log_likelihood"][0]
    np.testing.assert_allclose(scores, density, rtol=1e-4, atol=1e-4)
    # A prediction is about one point: alone or among others it is the same, and so is its score.
    alone = bnn.to_inference_data(run, {"x": data["x_test"][:1], "y": data["y_test"][:1]})
    for name, among in {"y_mean": mean, "y_log_likelihood": scores}.items():
        value = group(alone, "predictions")[name][0]
        np.testing.assert_allclose(value, among[:, :1], rtol=1e-4, atol=1e-5)


def test_predict_reads_a_model_without_judging_new_rows(data):
    """One row has no batch statistics of its own, and a few new targets may well be equal under heavy tails."""
    net = bnn.nn.MLP([2, 1], "tanh", norm=bnn.nn.BatchNorm())
    model = bnn.models.regression(net, heavy_tails=True)
    run = sample(model, data["x"], data["y"], draws=3, warmup=3, chains=1)
    exported = bnn.to_inference_data(run, log_likelihood=False, posterior_predictive=False)
    among = bnn.predict(model, exported, data["x_test"][:4], np.ones(4))
    alone = bnn.predict(model, exported, data["x_test"][:1])["y_mean"]
    params = {k.removeprefix("net/"): v for k, v in run.get_samples().items() if k.startswith("net/")}

    def predict(params):
        return net.apply(params, data["x_test"][:4], net.statistics(params, data["x"]))[..., 0]

    np.testing.assert_allclose(among["y_mean"][0], jax.vmap(predict)(params), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(alone, among["y_mean"][..., :1], rtol=1e-5, atol=1e-5)
    assert among["y_log_likelihood"].shape == (1, 3, 4)


def masked_handler(f, y, mask):
    with numpyro.plate("data", N), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


def masked_distribution(f, y, mask):
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f, 0.5).mask(mask), obs=y)


def masked_imputed(f, y, mask):
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y, obs_mask=mask)


def masked_events(f, y, mask):
    pairs = dist.Normal(f[:, None], np.sqrt(0.5)).expand([N, 2]).to_event(1)
    with numpyro.plate("data", N):
        numpyro.sample("y", pairs.mask(mask), obs=jnp.stack([y, y], -1))


def masked_elements(f, y, mask):
    """The second element of every event is left out, and of some events the first one too."""
    both = jnp.stack([mask, jnp.zeros(N, bool)], -1)
    pairs = dist.Normal(f[:, None], 0.5).expand([N, 2]).mask(both).to_event(1)
    with numpyro.plate("data", N):
        numpyro.sample("y", pairs, obs=jnp.stack([y, y], -1))


def masked_table(f, y, mask):
    rows, columns = numpyro.plate("rows", N // 2, dim=-2), numpyro.plate("columns", 2, dim=-1)
    with rows, columns, handlers.mask(mask=mask.reshape(-1, 2)):
        numpyro.sample("y", dist.Normal(f.reshape(-1, 2), 0.5), obs=y.reshape(-1, 2))


MASKED = [
    masked_handler, masked_distribution, masked_imputed, masked_events, masked_elements, masked_table
]  # fmt: skip
KEPT = {"all": np.ones(N, bool), "some": np.arange(N) % 3 > 0, "none": np.zeros(N, bool)}


@pytest.mark.filterwarnings("ignore:Estimated shape parameter")  # of both sides alike
@pytest.mark.parametrize(
    "kept", [pytest.param(name, marks=[] if name == "some" else pytest.mark.slow) for name in KEPT]
)
@pytest.mark.parametrize("observe", MASKED)
def test_masked_observations_are_no_data(observe, kept, data):
    """LOO of the observations that a mask leaves is that of a model that holds nothing else."""

    def model(x, y, mask):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        observe(w * x[:, 0], y, mask)
        with numpyro.plate("data", N):  # a complete site beside it
            numpyro.sample("v", dist.Normal(w, 1.0), obs=x[:, 1])

    mask, name = KEPT[kept], "y_observed" if observe is masked_imputed else "y"
    guide, params = AutoNormal(model), {"w_auto_loc": 0.7, "w_auto_scale": 0.02}
    params |= {"y_unobserved_auto_loc": jnp.zeros(N), "y_unobserved_auto_scale": jnp.ones(N)}
    idata = bnn.to_inference_data(
        SimpleNamespace(params=params),
        guide=guide,
        args=(data["x"], data["y"], jnp.asarray(mask)),
        num_samples=60,
        posterior_predictive=False,
        coords={"data": range(100, 100 + N)},
    )
    found = group(idata, "log_likelihood")
    assert found["v"].shape == (1, 60, N)
    if kept == "none":
        assert name not in found
        return
    w = group(idata, "posterior")["w"].to_numpy()
    x, y = np.asarray(data["x"])[mask, 0], np.asarray(data["y"])[mask]
    density = scipy.stats.norm.logpdf(y, w[..., None] * x, 0.5)
    if observe is masked_events:
        density = 2 * scipy.stats.norm.logpdf(y, w[..., None] * x, np.sqrt(0.5))
    by_hand = results(
        {"posterior": group(idata, "posterior"), "log_likelihood": {"y": (("chain", "draw", "row"), density)}}
    )
    one, other = az.loo(idata, var_name=name), az.loo(by_hand, var_name="y")
    assert one.n_data_points == other.n_data_points == mask.sum()
    np.testing.assert_allclose(one.se, other.se, rtol=1e-4)
    np.testing.assert_allclose(found[name].to_numpy().reshape(density.shape), density, rtol=1e-4, atol=1e-5)
    if kept == "some" and observe in (masked_handler, masked_events):
        assert found[f"{name}_observed"].to_numpy().tolist() == (100 + np.flatnonzero(mask)).tolist()


CENSORED = np.arange(N) % 3 == 0


def censored_by_factor(f, y):
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f, 0.5).mask(~CENSORED), obs=y)
        numpyro.factor("beyond", jnp.where(CENSORED, jax.scipy.stats.norm.logsf(y, f, 0.5), 0.0))


def censored_by_distribution(f, y):
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.RightCensoredDistribution(dist.Normal(f, 0.5), CENSORED), obs=y)


def penalized(f, y):
    numpyro.factor("penalty", -(f[0] ** 2))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


def export_of(observe, data):
    def model(x, y):
        observe(numpyro.sample("w", dist.Normal(0.0, 1.0)) * x[:, 0], y)

    run = sample(model, data["x"], data["y"], draws=4, chains=1)
    return bnn.to_inference_data(run), np.asarray(run.get_samples()["w"])[:, None] * np.asarray(data["x"])[:, 0]


@pytest.mark.parametrize("observe", [censored_by_factor, censored_by_distribution])
def test_censored_rows_have_a_log_likelihood_and_a_mean(observe, data):
    """Also if the density of a row is a factor in the plate of the data; draws and means are of uncensored values."""
    idata, f = export_of(observe, data)
    y = np.asarray(data["y"])
    norm = scipy.stats.norm(f, 0.5)
    expected = np.where(CENSORED, norm.logsf(y), norm.logpdf(y))
    found = group(idata, "log_likelihood")
    if observe is censored_by_factor:
        assert found["beyond"].shape == (1, 4, CENSORED.sum())
        found = np.concatenate([found["y"].to_numpy(), found["beyond"].to_numpy()], axis=-1)[0]
        expected = np.concatenate([expected[:, ~CENSORED], expected[:, CENSORED]], axis=-1)
    else:
        found = found["y"].to_numpy()[0]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(group(idata, "posterior_predictive")["y_mean"][0], f, rtol=1e-5, atol=1e-6)


def test_what_a_log_likelihood_or_a_mean_lacks_is_said(data):
    def all_rows(f, y):
        numpyro.factor("total", jax.scipy.stats.norm.logpdf(y, f, 0.5).sum())
        penalized(f, y)

    def without_mean(f, y):
        with numpyro.plate("data", N):
            fn = dist.TransformedDistribution(dist.Normal(f, 0.5), dist.transforms.SoftplusTransform())
            numpyro.sample("y", fn, obs=jnp.exp(y))

    with pytest.warns(UserWarning, match=r"`log_likelihood` lacks the factor 'total'.*inside the plate of the data"):
        export_of(all_rows, data)
    with pytest.warns(UserWarning, match="no `y_mean`, as NumPyro has no mean of a TransformedDistribution"):
        export_of(without_mean, data)


def test_placeholders_behind_a_mask_are_no_targets(data):
    """NaN or -999 for a missing target: the scale of the targets is that of the others."""

    def model(x, y, known):
        net = bnn.random_network("net", NET, x.shape[1:])
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(net(x)[..., 0], 1.0).mask(known), obs=y)

    for placeholder in (jnp.nan, -999.0):
        run = sample(model, data["x"], jnp.where(CENSORED, placeholder, data["y"]), jnp.asarray(~CENSORED), chains=1)
        findings = {finding.name: finding for finding in bnn.metrics.health(bnn.to_inference_data(run)).findings}
        assert findings["standardized"].verdict == "ok", findings["standardized"]
        assert findings["standardized"].value == pytest.approx(np.abs(np.asarray(data["x"])).std(), abs=1.0)


def optional_rows(kind):
    """A line of x with an optional argument with one entry per row, of some effect, and targets of a series."""

    def model(x, y=None, extra=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        given = extra is not None
        fn = dist.Normal(w * x[:, 0] + (extra if given and kind == "offset" else 0.0), 0.5)
        scale = extra if given and kind == "weights" else 1.0
        mask = extra > 0 if given and kind == "mask" else True
        with numpyro.plate("data", len(x)), handlers.scale(scale=scale):
            numpyro.sample("y", fn.mask(mask), obs=y)

    return model


@pytest.mark.parametrize("kind", ["weights", "mask", "offset"])
def test_optional_arguments_have_their_default_at_new_rows(kind, data):
    """What changes the prediction must be said; `None` is a value."""
    extra = jnp.asarray(1.0 + np.arange(N) % 2)
    run = sample(optional_rows(kind), data["x"], data["y"], extra=extra, draws=3, chains=1)
    options = {"log_likelihood": False, "posterior_predictive": False}
    new = {"x": data["x_test"]}
    if kind == "offset":
        with pytest.raises(ValueError, match=r"no value for 'extra'.*`'extra': None`"):
            bnn.to_inference_data(run, new, **options)
        new["extra"] = None
    mean = group(bnn.to_inference_data(run, new, **options), "predictions")["y_mean"][0]
    np.testing.assert_allclose(mean, run.get_samples()["w"][:, None] * data["x_test"][:, 0], rtol=1e-5)


def test_arguments_that_the_run_left_out_can_be_given():
    def series(start, y=None, length=None):
        length = length if y is None else len(y)
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("time", length):
            numpyro.sample("y", dist.Normal(w * start * jnp.arange(length), 1.0), obs=y)

    run = sample(series, jnp.ones(()), jnp.ones(4), draws=3, chains=1)
    assert group(bnn.to_inference_data(run, {"length": 6}), "predictions")["y"].shape == (1, 3, 6)
    with pytest.raises(ValueError, match=r"Did you mean 'length'.*Known: start, y, length"):
        bnn.to_inference_data(run, {"lenght": 6})


def test_masked_new_observations_are_not_scored(data):
    def model(x, y, mask):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(x)), handlers.mask(mask=mask):
            numpyro.sample("y", dist.Normal(w * x[:, 0], 0.5), obs=y)

    run = sample(model, data["x"], data["y"], jnp.ones(N, bool))
    mask = np.arange(M) != 2
    new = {"x": data["x_test"], "y": data["y_test"], "mask": jnp.asarray(mask)}
    found = group(bnn.to_inference_data(run, new, log_likelihood=False), "predictions")
    w = np.asarray(run.get_samples(group_by_chain=True)["w"])[..., None]
    x, y = np.asarray(data["x_test"])[mask, 0], np.asarray(data["y_test"])[mask]
    score = bnn.metrics.lppd(found["y_log_likelihood"])
    assert score.value == pytest.approx(bnn.metrics.lppd(scipy.stats.norm.logpdf(y, w * x, 0.5)).value, rel=1e-5)
    assert found["y_mean"].shape == (CHAINS, DRAWS, M)


def test_classification_exports_probabilities(data):
    labels = (data["x"][:, 0] > 0).astype(int) + (data["x"][:, 1] > 1)
    model = bnn.models.classification(bnn.nn.MLP([4, 3]), num_classes=3)
    run = sample(model, data["x"], labels, draws=5)
    test_labels = jnp.zeros(M, int)
    predictions = group(bnn.to_inference_data(run, {"x": data["x_test"], "y": test_labels}), "predictions")
    probs = predictions["y_probs"]
    assert probs.dims == ("chain", "draw", "data", "y_probs_dim_1")
    np.testing.assert_allclose(probs.sum("y_probs_dim_1"), 1, rtol=1e-5)
    np.testing.assert_allclose(np.log(probs[..., 0]), predictions["y_log_likelihood"], rtol=1e-4, atol=1e-4)
    assert predictions["y"].dtype.kind == "i"


def test_parameters_frozen_at_random_values_are_refused(data):
    def model(x, y=None):
        w = numpyro.param("w", lambda key: jax.random.normal(key, (2,)))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)

    run = sample(model, data["x"], data["y"], draws=2, chains=1)
    with pytest.raises(ValueError, match=r"parameter site 'w'.*handlers\.substitute"):
        bnn.to_inference_data(run)
    fixed = handlers.substitute(model, data={"w": jnp.ones(2)})
    bnn.to_inference_data(sample(fixed, data["x"], data["y"], draws=2, chains=1))


def covariate_model(x, groups, y=None, **options):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x[:, 0] * slope[groups] + options["shift"], 0.5), obs=y)


def test_keyword_arguments_and_further_covariates(data):
    groups = jnp.arange(N) % 2
    run = sample(covariate_model, data["x"], groups, y=data["y"], shift=jnp.zeros(1), draws=3, chains=1)
    with pytest.raises(ValueError, match="no value for 'groups'"):
        bnn.to_inference_data(run, {"x": data["x_test"]})
    new = {"x": data["x_test"], "groups": groups[:M], "shift": jnp.ones(1)}
    mean = group(bnn.to_inference_data(run, new), "predictions")["y_mean"][0]
    slope = run.get_samples()["slope"]
    np.testing.assert_allclose(mean, data["x_test"][:, 0] * slope[:, groups[:M]] + 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"X": np.ones((3, 2))}, r"predictions.*Did you mean 'x'"),
        ({"x": np.full((3, 2), np.nan)}, r"6 NaN or infinite values"),
        ({"x": np.ones((3, 5))}, r"shape \(3, 5\).*one row per new point"),
        ({"x": np.ones((3, 2)), "y": np.ones(4)}, r"mismatched lengths \(x has 3, y has 4\)"),
    ],
)
def test_bad_predictions_are_refused(mcmc, new, message):
    with pytest.raises(ValueError, match=message):
        bnn.to_inference_data(mcmc, new)


def test_bad_results_are_refused(mcmc):
    with pytest.raises(ValueError, match=r"has not run.*mcmc\.run.*jnp\.asarray"):
        bnn.to_inference_data(MCMC(NUTS(bnn_model), num_warmup=1, num_samples=1))
    with pytest.raises(TypeError, match="dict"):
        bnn.to_inference_data(mcmc.get_samples())
    run = MCMC(NUTS(potential_fn=lambda z: z**2), num_warmup=1, num_samples=1, progress_bar=False)
    run.run(jax.random.key(0), init_params=jnp.zeros(()))
    with pytest.raises(ValueError, match="potential function"):
        bnn.to_inference_data(run)


@pytest.mark.slow
def test_observed_data_keep_their_precision():
    """The model sees float32, in which these values are all 1,000,000."""

    def model(y):
        w = numpyro.sample("w", dist.Normal(1e6, 1.0))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Normal(w, 1.0), obs=y)

    y = 1e6 + np.arange(4) / 100
    run = MCMC(bnn.infer.SGLD(model, 1e-3), num_warmup=0, num_samples=2, progress_bar=False)
    run.run(jax.random.key(0), y)
    np.testing.assert_array_equal(bnn.to_inference_data(run)["observed_data"]["y"], y)
