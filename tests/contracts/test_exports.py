"""`to_inference_data`: what every group holds, against the model evaluated by hand."""

from functools import cache
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
from numpy.testing import assert_allclose, assert_array_equal
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, BarkerMH
from numpyro.infer.autoguide import AutoNormal
from zoo import CLASSES, NET, NEW_X, ZOO, N, X, Y

import numpyro_bnn as bnn

pytestmark = pytest.mark.core

CHAINS, DRAWS, LABELS = 2, 12, range(100, 100 + N)
NEW = {"x": X[::-1] + 0.5, "y": Y + 0.1}  # as many rows as there are for training


def network(x, y=None, batch_size=None):
    net = bnn.random_network("net", NET, x.shape[1:], bnn.priors.Hierarchical())
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        f = numpyro.deterministic("f", net(x[i])[..., 0])
        numpyro.sample("y", dist.Normal(f, sigma), obs=None if y is None else y[i])


def sample(
    model,
    *args,
    draws=3,
    warmup=10,
    chains=1,
    kernel=BarkerMH,
    extra_fields=(),
    **kwargs,
):
    """A short run; Barker's kernel compiles several times faster than NUTS."""
    options = {
        "num_chains": chains,
        "chain_method": "sequential",
        "progress_bar": False,
    }
    mcmc = MCMC(kernel(model), num_warmup=warmup, num_samples=draws, **options)
    mcmc.run(jax.random.key(0), *args, extra_fields=extra_fields, **kwargs)
    return mcmc


@cache
def mcmc():
    """Of a frozen minibatch, which is no part of the model for new data."""
    sizes = {"batch_size": 8, "draws": DRAWS, "chains": CHAINS, "kernel": NUTS}
    sizes["extra_fields"] = ("potential_energy", "num_steps")
    return sample(handlers.seed(network, 3), *ZOO["network"].args, **sizes)


@cache
def exported():
    return bnn.to_inference_data(
        mcmc(), NEW, attrs={"dataset": "toy"}, coords={"data": LABELS}
    )


# -- groups ----------------------------------------------------------------------------


def test_groups_dims_and_coords():
    idata = exported()
    names = "posterior sample_stats log_likelihood posterior_predictive predictions "
    names += "observed_data constant_data predictions_constant_data"
    assert set(group_names(idata)) == set(names.split())
    posterior = group(idata, "posterior")
    kernel = posterior["net.Dense_0.kernel"]
    axes = "net.Dense_0.kernel_in", "net.Dense_0.kernel_out"
    assert kernel.dims == ("chain", "draw", *axes)
    assert kernel.shape == (CHAINS, DRAWS, 2, 3)
    assert not any("/" in name for name in posterior)
    assert group(idata, "log_likelihood")["y"].dims == ("chain", "draw", "data")
    assert set(group(idata, "predictions")) == {"y", "y_mean", "f", "y_log_likelihood"}
    assert group(idata, "predictions_constant_data")["x"].dims == ("data", "x_dim_1")
    for name, labels in {
        "log_likelihood": LABELS,
        "posterior_predictive": LABELS,
        "predictions": range(N),
    }.items():
        assert group(idata, name)["data"].to_numpy().tolist() == list(labels)


def test_observed_and_constant_data_are_the_arguments():
    idata = exported()
    assert_array_equal(group(idata, "observed_data")["y"], Y)
    constants = group(idata, "constant_data")
    assert_array_equal(constants["x"], X)
    assert "y" not in constants
    assert_array_equal(group(idata, "predictions_constant_data")["y"], NEW["y"])


@pytest.mark.parametrize("part", ["posterior_predictive", "predictions"])
def test_predictions_and_densities_are_those_of_the_network_at_the_draws(part):
    """Of all rows in order, although NumPyro kept the minibatch only."""
    idata, draws = exported(), mcmc().get_samples(group_by_chain=True)
    assert draws["f"].shape == (CHAINS, DRAWS, 8)
    assert "f" not in group(idata, "posterior")
    params = {name.removeprefix("net/"): draws[name] for name in ZOO["network"].shapes}
    x, y = (X, Y) if part == "posterior_predictive" else NEW.values()
    f = jax.vmap(jax.vmap(lambda p: NET.apply(p, x)[..., 0]))(params)
    sigma = np.asarray(draws["sigma"])[..., None]
    found = group(idata, part)
    for name in ("f", "y_mean"):
        assert_allclose(found[name], f, rtol=1e-5, atol=1e-5)
    densities = (
        group(idata, "log_likelihood")["y"] if x is X else found["y_log_likelihood"]
    )
    assert_allclose(
        densities, scipy.stats.norm.logpdf(y, f, sigma), rtol=1e-4, atol=1e-4
    )


def test_noise_of_training_and_new_rows_is_standard_and_independent():
    """Of 24 draws of 24 rows: means, variances, correlation within five errors."""
    idata = exported()
    sigma = group(idata, "posterior")["sigma"].to_numpy()[..., None]
    parts = [group(idata, name) for name in ("posterior_predictive", "predictions")]
    z = np.stack(
        [
            ((part["y"].to_numpy() - part["y_mean"].to_numpy()) / sigma).ravel()
            for part in parts
        ]
    )
    bound = 5 / z.shape[1] ** 0.5
    assert np.all(np.abs(z.mean(1)) < bound)
    assert np.all(np.abs((z**2).mean(1) - 1) < bound * 2**0.5)
    assert abs(np.corrcoef(z)[0, 1]) < bound


def test_observations_that_others_depend_on_are_redrawn_before_them():
    """And scored; of one argument, so that neither is an input of the other."""

    def model(x, pairs=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        first, second = (None, None) if pairs is None else pairs.T
        with numpyro.plate("data", len(x)):
            middle = numpyro.sample("z", dist.Normal(w * x[:, 0], 1.0), obs=first)
            numpyro.sample("y", dist.Normal(middle, 0.01), obs=second)

    run, pairs = sample(model, X, np.stack([Y, Y], 1)), np.ones((5, 2), np.float32)
    found = group(
        bnn.to_inference_data(run, {"x": NEW_X, "pairs": pairs}), "predictions"
    )
    assert_array_equal(found["y_mean"], found["z"])
    assert np.abs(found["y"] - found["z"]).max() < 0.06
    assert np.abs(found["z"] - found["z_mean"]).max() > 0.3
    assert_allclose(
        found["y_log_likelihood"], scipy.stats.norm.logpdf(1, 1, 0.01), rtol=1e-5
    )


def test_sample_stats_have_arviz_names():
    stats = group(exported(), "sample_stats")
    fields = mcmc().get_extra_fields(group_by_chain=True)
    assert_array_equal(stats["lp"], -np.asarray(fields["potential_energy"]))
    assert_array_equal(stats["n_steps"], fields["num_steps"])
    depth, steps = stats["tree_depth"].to_numpy(), stats["n_steps"].to_numpy()
    # a complete tree has 2^depth - 1 steps
    assert ((2 ** (depth - 1) <= steps) & (steps < 2**depth)).all()
    assert "acceptance_rate" not in stats  # it was not collected, so it is not there


def test_attrs_tell_algorithm_settings_versions_and_key():
    attrs = exported().attrs
    assert attrs["algorithm"] == "NUTS"
    assert (attrs["num_warmup"], attrs["num_samples"], attrs["num_chains"]) == (
        10,
        DRAWS,
        CHAINS,
    )
    assert (attrs["dataset"], attrs["numpyro_bnn_version"]) == ("toy", bnn.__version__)
    assert attrs["predictive_rng_key"] == "[0, 0]"
    assert "jax_version" in attrs


def test_files_and_arviz_take_it(tmp_path):
    idata = exported()
    idata.to_netcdf(str(tmp_path / "fit.nc"))
    loaded = az.from_netcdf(str(tmp_path / "fit.nc"))
    for name in group_names(idata):
        assert group(loaded, name).equals(group(idata, name)), name
    assert loaded.attrs == idata.attrs
    assert "sigma" in az.summary(idata, var_names=["sigma"]).index


def test_results_do_not_depend_on_the_chunk():
    chunked = bnn.to_inference_data(mcmc(), NEW, draws_per_chunk=5)
    for part in ("predictions", "posterior_predictive", "log_likelihood"):
        for name, values in group(chunked, part).items():
            # One more or fewer draw per call changes how XLA orders sums, nothing else.
            assert_allclose(values, group(exported(), part)[name], rtol=2e-5, atol=2e-5)


def test_keys_may_be_typed_or_legacy():
    found = []
    for key in (jax.random.key(4), jax.random.PRNGKey(4)):
        options = {
            "log_likelihood": False,
            "posterior_predictive": False,
            "rng_key": key,
        }
        idata = bnn.to_inference_data(mcmc(), {"x": NEW_X}, **options)
        assert idata.attrs["predictive_rng_key"] == "[0, 4]"
        found.append(group(idata, "predictions"))
    assert "y_log_likelihood" not in found[0]  # no targets, no score
    assert found[0].equals(found[1])


def test_classes_have_probabilities_and_new_rows_no_coords_of_training_rows():
    """Also of as many rows; coordinates of classes hold for both."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Categorical(logits=x[:, :1] * w), obs=y)

    run = sample(model, X, CLASSES)
    coords = {"y_probs_dim_1": ["a", "b", "c"], "data": LABELS}
    options = {"log_likelihood": False, "coords": coords}
    idata = bnn.to_inference_data(run, {"x": -X, "y": 0 * CLASSES}, **options)

    def labels(idata, name, variable="y"):
        return [
            values.to_numpy().tolist()
            for values in group(idata, name)[variable].coords.values()
        ][2:]

    assert labels(idata, "posterior_predictive") == [list(LABELS)]
    assert labels(idata, "predictions") == [list(range(N))]
    assert labels(idata, "predictions", "y_probs")[-1] == ["a", "b", "c"]
    others = {"data": range(N, 2 * N)}
    labeled = bnn.to_inference_data(run, {"x": -X}, prediction_coords=others, **options)
    assert labels(labeled, "predictions") == [list(range(N, 2 * N))]
    found = group(idata, "predictions")
    logits = -X[:, :1] * np.asarray(run.get_samples()["w"])[:, None]
    assert_allclose(found["y_probs"][0], jax.nn.softmax(logits), rtol=1e-4)
    densities = np.log(found["y_probs"][..., 0])
    assert_allclose(densities, found["y_log_likelihood"], atol=1e-4)
    assert found["y"].dtype.kind == "i"


# -- masks, censoring, factors ---------------------------------------------------------

KEPT = {"some": np.arange(N) % 3 > 0, "none": np.zeros(N, bool)}
MASKED = ["handler", "distribution", "imputed_observed", "events", "elements", "table"]


def masked(x, y, mask):
    f = numpyro.sample("w", dist.Normal(0.0, 1.0)) * x[:, 0]
    # the second element is left out everywhere
    both = jnp.stack([mask, jnp.zeros(N, bool)], -1)
    pairs = dist.Normal(f[:, None], 0.5).expand([N, 2])
    with numpyro.plate("data", N):
        numpyro.sample("complete", dist.Normal(f, 1.0), obs=y)
        with handlers.mask(mask=mask):
            numpyro.sample("handler", dist.Normal(f, 0.5), obs=y)
        numpyro.sample("distribution", dist.Normal(f, 0.5).mask(mask), obs=y)
        numpyro.sample("imputed", dist.Normal(f, 0.5), obs=y, obs_mask=mask)
        numpyro.sample(
            "events", pairs.to_event(1).mask(mask), obs=jnp.stack([y, y], -1)
        )
        numpyro.sample(
            "elements", pairs.mask(both).to_event(1), obs=jnp.stack([y, y], -1)
        )
    with numpyro.plate("rows", N // 2, dim=-2), numpyro.plate("columns", 2, dim=-1):
        fn = dist.Normal(f.reshape(-1, 2), 0.5).mask(mask.reshape(-1, 2))
        numpyro.sample("table", fn, obs=y.reshape(-1, 2))


@cache
def export_of_masked(kept):
    imputed = "imputed_unobserved_auto"
    params = {"w_auto_loc": 0.7, "w_auto_scale": 0.02}
    params |= {f"{imputed}_loc": jnp.zeros(N), f"{imputed}_scale": jnp.ones(N)}
    options = {"guide": AutoNormal(masked), "args": (X, Y, jnp.asarray(KEPT[kept]))}
    options |= {"num_samples": 60, "posterior_predictive": False}
    result, coords = SimpleNamespace(params=params), {"data": LABELS}
    return bnn.to_inference_data(result, coords=coords, **options)


@pytest.mark.filterwarnings("ignore:Estimated shape parameter")  # of both sides alike
@pytest.mark.parametrize("name", MASKED)
def test_masked_observations_are_no_data(name):
    """LOO of the observations that a mask leaves is that of a model of these."""
    mask, idata = KEPT["some"], export_of_masked("some")
    found = group(idata, "log_likelihood")
    assert found["complete"].shape == (1, 60, N)
    w = group(idata, "posterior")["w"].to_numpy()
    density = scipy.stats.norm.logpdf(Y[mask], w[..., None] * X[mask, 0], 0.5)
    density = 2 * density if name == "events" else density
    densities = {"y": (("chain", "draw", "row"), density)}
    groups = {"posterior": group(idata, "posterior"), "log_likelihood": densities}
    by_hand = results(groups)
    one, other = az.loo(idata, var_name=name), az.loo(by_hand, var_name="y")
    assert one.n_data_points == other.n_data_points == mask.sum()
    assert_allclose(one.se, other.se, rtol=1e-4)
    assert_allclose(
        found[name].to_numpy().reshape(density.shape), density, rtol=1e-4, atol=1e-5
    )
    if name in ("handler", "events"):
        labels = found[f"{name}_observed"].to_numpy()
        assert_array_equal(labels, 100 + np.flatnonzero(mask))


@pytest.mark.slow
def test_a_mask_of_all_rows_leaves_no_log_likelihood():
    found = group(export_of_masked("none"), "log_likelihood")
    assert set(found.data_vars) == {"complete"}


CENSORED = np.arange(N) % 3 == 0


def test_censored_rows_have_a_log_likelihood_and_a_mean():
    """Also if the density of a row is a factor in the plate of the data."""

    def model(x, y):
        f = numpyro.sample("w", dist.Normal(0.0, 1.0)) * x[:, 0]
        fn = dist.Normal(f, 0.5)
        above = jax.scipy.stats.norm.logsf(y, f, 0.5)
        with numpyro.plate("data", N):
            numpyro.sample("y", fn.mask(~CENSORED), obs=y)
            numpyro.factor("beyond", jnp.where(CENSORED, above, 0.0))
            censored = dist.RightCensoredDistribution(fn, CENSORED)
            numpyro.sample("censored", censored, obs=y)

    run = sample(model, X, Y)
    f = np.asarray(run.get_samples()["w"])[:, None] * X[:, 0]
    norm, idata = scipy.stats.norm(f, 0.5), bnn.to_inference_data(run)
    above, at, found = norm.logsf(Y), norm.logpdf(Y), group(idata, "log_likelihood")
    for name, expected in {
        "censored": np.where(CENSORED, above, at),
        "y": at[:, ~CENSORED],
        "beyond": above[:, CENSORED],
    }.items():
        assert_allclose(found[name][0], expected, rtol=1e-3, atol=1e-4)
    means = group(idata, "posterior_predictive")
    for name in ("y_mean", "censored_mean"):
        assert_allclose(means[name][0], f, rtol=1e-5, atol=1e-6)


def test_what_a_log_likelihood_or_a_mean_lacks_is_said():
    """A factor of the prior is no row."""

    def model(x, y):
        f = numpyro.sample("w", dist.Normal(0.0, 1.0)) * x[:, 0]
        numpyro.factor("total", jax.scipy.stats.norm.logpdf(y, f, 0.5).sum())
        numpyro.factor("penalty", -(f[0] ** 2))
        positive = dist.transforms.SoftplusTransform()
        with numpyro.plate("data", N):
            fn = dist.TransformedDistribution(dist.Normal(f, 0.5), positive)
            numpyro.sample("y", fn, obs=jnp.exp(y))

    run = sample(model, X, Y)
    lacks = r"`log_likelihood` lacks the factor 'total'.*inside the plate of the data"
    no_mean = "no `y_mean`, as NumPyro has no mean of a TransformedDistribution"
    with (
        pytest.warns(UserWarning, match=lacks),
        pytest.warns(UserWarning, match=no_mean),
    ):
        bnn.to_inference_data(run)


def test_placeholders_behind_a_mask_are_no_targets():
    """NaN or -999 for a missing target: the scale is that of the other targets."""

    def model(x, y, known):
        net = bnn.random_network("net", NET, x.shape[1:])
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(net(x)[..., 0], 1.0).mask(known), obs=y)

    missing = np.where(np.arange(N) % 2, np.nan, -999.0)
    run = sample(model, X, np.where(CENSORED, missing, Y), ~CENSORED, chains=CHAINS)
    findings = {
        finding.name: finding
        for finding in bnn.metrics.health(bnn.to_inference_data(run)).findings
    }
    assert findings["standardized"].verdict == "ok", findings["standardized"]
    assert findings["standardized"].value == pytest.approx(np.abs(X).std(), abs=1.0)


# -- arguments at new rows -------------------------------------------------------------


def covariates(x, groups, y=None, weights=None, mask=None, offset=None, **options):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    f = x[:, 0] * slope[groups] + options["shift"] + (0.0 if offset is None else offset)
    with (
        numpyro.plate("data", len(x)),
        handlers.scale(scale=1.0 if weights is None else weights),
    ):
        numpyro.sample(
            "y", dist.Normal(f, 0.5).mask(True if mask is None else mask), obs=y
        )


def test_new_rows_need_the_arguments_that_change_their_prediction():
    """Weights and masks have their default; hidden rows are not scored."""
    kind, ones = np.arange(N) % 2, np.ones(N, np.float32)
    extra = {
        "weights": ones + kind,
        "mask": ones > 0,
        "offset": ones,
        "shift": np.zeros(1),
    }
    run = sample(covariates, X, kind, y=Y, **extra, chains=CHAINS)
    options = {"log_likelihood": False, "posterior_predictive": False}
    new = {"x": NEW_X, "shift": np.ones(1)}
    with pytest.raises(ValueError, match="no value for 'groups'"):
        bnn.to_inference_data(run, new, **options)
    new["groups"] = kind[:5]
    with pytest.raises(ValueError, match=r"no value for 'offset'.*`'offset': None`"):
        bnn.to_inference_data(run, new, **options)
    new["offset"] = None
    slope = np.asarray(run.get_samples(group_by_chain=True)["slope"])
    mean = NEW_X[:, 0] * slope[..., kind[:5]] + 1
    found = group(bnn.to_inference_data(run, new, **options), "predictions")
    assert_allclose(found["y_mean"], mean, rtol=1e-5, atol=1e-5)
    mask, targets = np.arange(5) != 2, np.linspace(-1, 1, 5)
    scored = bnn.to_inference_data(run, new | {"y": targets, "mask": mask}, **options)
    score = bnn.metrics.lppd(group(scored, "predictions")["y_log_likelihood"])
    exact = scipy.stats.norm.logpdf(targets, mean, 0.5)[..., mask]
    assert score.value == pytest.approx(bnn.metrics.lppd(exact).value, rel=1e-5)
    assert group(scored, "predictions")["y_mean"].shape == (CHAINS, 3, 5)


def test_arguments_that_the_run_left_out_can_be_given():
    def series(start, y=None, length=None):
        length = length if y is None else len(y)
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("time", length):
            numpyro.sample("y", dist.Normal(w * start * jnp.arange(length), 1.0), obs=y)

    run = sample(series, jnp.ones(()), jnp.ones(4))
    assert group(bnn.to_inference_data(run, {"length": 6}), "predictions")[
        "y"
    ].shape == (1, 3, 6)
    with pytest.raises(
        ValueError, match=r"Did you mean 'length'.*Known: start, y, length"
    ):
        bnn.to_inference_data(run, {"lenght": 6})


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"X": np.ones((3, 2))}, r"predictions.*Did you mean 'x'"),
        ({"x": np.full((3, 2), np.nan)}, r"6 NaN or infinite values"),
        ({"x": np.ones((3, 5))}, r"shape \(3, 5\).*\(M, 2\), one row per new point"),
        ({"x": np.ones((3, 2)), "y": np.ones(4)}, r"mismatched lengths \(x has 3, y"),
    ],
)
def test_bad_predictions_are_refused(new, message):
    with pytest.raises(ValueError, match=message):
        bnn.to_inference_data(mcmc(), new)


def test_bad_results_are_refused():
    with pytest.raises(ValueError, match=r"has not run.*mcmc\.run.*jnp\.asarray"):
        bnn.to_inference_data(MCMC(NUTS(network), num_warmup=1, num_samples=1))
    with pytest.raises(TypeError, match="dict"):
        bnn.to_inference_data(mcmc().get_samples())
    kernel = BarkerMH(potential_fn=lambda z: z**2)
    run = MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False)
    run.run(jax.random.key(0), init_params=jnp.zeros(()))
    with pytest.raises(ValueError, match="potential function"):
        bnn.to_inference_data(run)


def test_parameters_frozen_at_random_values_are_refused():
    def model(x, y=None):
        w = numpyro.param("w", lambda key: jax.random.normal(key, (2,)))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)

    with pytest.raises(ValueError, match=r"parameter site 'w'.*handlers\.substitute"):
        bnn.to_inference_data(sample(model, X, Y))


@pytest.mark.slow
def test_observed_data_keep_their_precision():
    """The model sees float32, in which these values are all 1,000,000."""

    def model(y):
        w = numpyro.sample("w", dist.Normal(1e6, 1.0))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Normal(w, 1.0), obs=y)

    y = 1e6 + np.arange(4) / 100
    run = MCMC(
        bnn.infer.SGLD(model, 1e-3), num_warmup=0, num_samples=2, progress_bar=False
    )
    run.run(jax.random.key(0), y)
    assert_array_equal(bnn.to_inference_data(run)["observed_data"]["y"], y)
