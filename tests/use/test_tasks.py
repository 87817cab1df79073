"""Tasks as a user would do them, and what the examples claim, held to their standard errors.

Figures and findings are printed (`-s`), and warnings not expected fail.
"""

import re
import signal
import threading
import time
import warnings
from contextlib import contextmanager

import arviz as az
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import nnx
from numpyro.contrib.module import random_flax_module, random_nnx_module
from numpyro.infer import MCMC, NUTS, SVI

import numpyro_bnn as bnn
from examples import active_learning, groups, loaders, lotka_volterra, nnx_module, unknown_digits
from numpyro_bnn import guides, infer, metrics, nn, priors, runs, symmetry

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


def sampled(kernel, *args, warmup=200, draws=200, chains=4, **kwargs):
    mcmc = MCMC(
        kernel, num_warmup=warmup, num_samples=draws, num_chains=chains, chain_method="vectorized", progress_bar=False
    )
    mcmc.run(jax.random.key(0), *args, **kwargs)
    return mcmc


def report(task, **figures):
    print(f"\n{task}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))


@contextmanager
def findings(*expected):
    """Print what a health report finds, and let only the checks named here fail."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        print(f"\n{warning.message}")
    assert {warning.category for warning in caught} <= {metrics.HealthWarning}
    assert set(re.findall(r"^- (\w+):", "\n".join(str(w.message) for w in caught), re.MULTILINE)) <= set(expected)


def smooth(key, rows, noise=0.1):
    """Rows of a smooth function of three inputs."""
    x = jax.random.normal(key, (rows, 3))
    f = jnp.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2]
    return x, f + noise * jax.random.normal(jax.random.fold_in(key, 1), (rows,)), f


@pytest.mark.data
def test_tabular_with_intervals():
    """Concrete: better than linear regression by far, intervals that hold what they promise."""
    data = loaders.standardize(loaders.load_uci("concrete", 0))
    model = bnn.models.regression(nn.MLP([50, 1], "relu"), priors.Hierarchical())
    kernel = infer.MCLMC(model, steps_per_draw=200, warm_start=infer.WarmStart(0.25, num_steps=2000))
    mcmc = sampled(kernel, data.x_train, data.y_train, warmup=800, draws=400)
    new = {"x": data.x_test, "y": data.y_test}
    with findings("ess"):  # few independent draws for this time, enough for the figures below
        exported = bnn.to_inference_data(mcmc, predictions=new, log_likelihood=False, posterior_predictive=False)
    test = exported["predictions"]
    scale = float(data.y_scaler.scale_factor)
    rmse = scale * metrics.rmse(test["y_mean"].mean(("chain", "draw")), data.y_test).value
    covered = metrics.interval_coverage(test["y"], data.y_test, level=0.9)
    weights = np.linalg.lstsq(np.c_[data.x_train, np.ones(len(data.x_train))], data.y_train, rcond=None)[0]
    linear = scale * float(
        np.sqrt(np.mean((np.c_[data.x_test, np.ones(len(data.x_test))] @ weights - data.y_test) ** 2))
    )
    report("tabular", rmse=rmse, linear=linear, coverage=covered.coverage, width=scale * covered.mean_width)
    assert rmse < 0.6 * linear
    # 103 rows: three binomial standard errors of .9.
    assert abs(covered.coverage - 0.9) < 3 * np.sqrt(0.09 / len(data.y_test))


def test_digits_with_unknown_classes():
    """Trained on 0 to 7: the known are recognized, the unknown 8 and 9 stand out."""
    digits = loaders.load_sklearn("digits", seed=0)
    known, test = digits.y_train < 8, digits.y_test < 8
    x, x_test = (np.float32(a.reshape(-1, 8, 8, 1)) / 16 for a in (digits.x_train, digits.x_test))
    model = bnn.models.classification(nn.CNN([8], [32, 8], window=3), 8, priors.Normal())
    kernel = infer.MCLMC(model, steps_per_draw=20, warm_start=infer.WarmStart(0.5, num_steps=1000))
    mcmc = sampled(kernel, x[known], digits.y_train[known], warmup=60, draws=60, chains=2)
    options = {"log_likelihood": False, "posterior_predictive": False}
    probs = bnn.to_inference_data(mcmc, predictions={"x": x_test}, **options)["predictions"]["y_probs"]
    probs = np.asarray(probs).reshape(-1, len(x_test), 8)
    accuracy = metrics.accuracy(probs[:, test], digits.y_test[test]).value
    total = np.asarray(metrics.uncertainty(probs).total)
    auroc = metrics.auroc(total[test], total[~test])
    report("digits", accuracy=accuracy, auroc=getattr(auroc, "value", auroc))
    assert accuracy > 0.97
    assert getattr(auroc, "value", auroc) > 0.85


def grouped(x, group, groups, y=None, batch_size=None):
    """A network and an intercept for each group, written by hand."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 8]).to_event(2))
    v = numpyro.sample("v", dist.Normal(0, 8**-0.5).expand([8]).to_event(1))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("groups", groups):
        intercept = numpyro.sample("intercept", dist.Normal(0, spread))
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        mean = jnp.tanh(x[i] @ w) @ v + intercept[group[i]]
        numpyro.sample("y", dist.Normal(mean, sigma), obs=None if y is None else y[i])


def test_groups_and_minibatches_by_hand():
    """Intercepts of groups from minibatches agree with those of NUTS on all data."""
    x, y, _ = smooth(jax.random.key(1), 600)
    group = jnp.arange(600) % 6
    truth = 0.8 * jnp.array([-1.5, -1, -0.3, 0.3, 1, 1.5])
    y = y + truth[group]
    exact = sampled(NUTS(grouped), x, group, 6, y, warmup=300, draws=300)
    noisy = sampled(infer.SGHMC(grouped, steps_per_draw=50), x, group, 6, y, batch_size=100, warmup=300, draws=300)
    means, sds = ([f(m.get_samples()["intercept"], axis=0) for m in (exact, noisy)] for f in (np.mean, np.std))
    # The intercepts share what the network's constant function leaves free, so contrasts are compared.
    contrast = [mean - mean.mean() for mean in means]
    worst = float(np.max(np.abs(contrast[0] - contrast[1]) / sds[0]))
    symmetries = symmetry.find(grouped, x, group, 6, y)
    report("groups", worst=worst, sd_ratio=float(np.mean(sds[1] / sds[0])), symmetries=len(symmetries))
    assert worst < 1.0
    assert {type(s) for s in symmetries} == {symmetry.Permutation, symmetry.SignFlip}


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(1)(jnp.tanh(flax.linen.Dense(8)(x)))[..., 0]


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.out = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))[..., 0]


def of_module(kind):
    def model(x, y=None):
        if kind == "linen":
            net = random_flax_module("net", Linen(), prior=priors.Hierarchical(), input_shape=(1, 3))
        else:
            net = random_nnx_module("net", NNX(nnx.Rngs(0)), prior=priors.Hierarchical())
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(net(x), sigma), obs=y)

    return model


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_modules_of_flax(kind):
    """Our prior, symmetries and kernel on somebody's module: the noise is found, predictions are right."""
    x, y, _ = smooth(jax.random.key(2), 300)
    x_new, _, f_new = smooth(jax.random.key(3), 200)
    model = priors.noncenter(of_module(kind))
    symmetries = symmetry.find(model, x, y)
    kernel = infer.OrbitMoves(
        infer.MCLMC(model, steps_per_draw=400, warm_start=infer.WarmStart(0.25, num_steps=1000)), symmetries
    )
    mcmc = sampled(kernel, x, y, warmup=800, draws=400)
    with findings("ess", "energy_variance"):  # as above; the energy errors of a hierarchy have heavy tails
        exported = bnn.to_inference_data(mcmc)
    mean = np.asarray(bnn.predict(model, exported, x_new)["y_mean"]).reshape(-1, 200).mean(0)
    rmse, sigma = float(np.sqrt(np.mean((mean - np.asarray(f_new)) ** 2))), float(mcmc.get_samples()["sigma"].mean())
    report(kind, rmse=rmse, sigma=sigma, symmetries=len(symmetries))
    assert {type(s) for s in symmetries} >= {symmetry.Permutation, symmetry.SignFlip}
    assert rmse < 0.15


def test_a_million_rows():
    """Mean field on a million rows in minibatches: the noise is found, and the function better than the noise."""
    x, y, _ = smooth(jax.random.key(4), 1_000_000)
    x_new, y_new, f_new = smooth(jax.random.key(5), 1000)
    model = bnn.models.regression(nn.MLP([32, 1], "tanh"), priors.Hierarchical())
    guide = guides.AutoMeanField(model)
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.01, 10_000)), guides.TraceLocalReparam_ELBO())
    start = time.process_time()
    fit = guides.fit(svi, jax.random.key(0), 10_000, x, y, batch_size=256, progress_bar=False)
    seconds = time.process_time() - start
    options = {"log_likelihood": False, "posterior_predictive": False, "num_samples": 200}
    test = bnn.to_inference_data(
        fit, guide=guide, args=(x, y), kwargs={"batch_size": 256}, predictions={"x": x_new, "y": y_new}, **options
    )["predictions"]
    rmse = metrics.rmse(test["y_mean"].mean(("chain", "draw")), f_new).value
    report("million", rmse=rmse, lppd=metrics.lppd(test["y_log_likelihood"]).value, seconds=seconds)
    assert rmse < 0.1


def test_an_interrupted_fit_goes_on(tmp_path):
    """Ctrl-C in the middle keeps what was computed; the same call goes on and ends as if it had never stopped."""
    x, y, _ = smooth(jax.random.key(6), 500)
    model = bnn.models.regression(nn.MLP([32, 1], "tanh"), priors.Hierarchical())

    def fit(folder):
        svi = SVI(model, guides.AutoMeanField(model), optax.adam(0.01), guides.TraceLocalReparam_ELBO())
        options = {"block_seconds": 0.1, "progress_bar": False}
        return runs.fit(folder, svi, jax.random.key(0), 60_000, x, y, **options)

    whole, ended = fit(tmp_path / "whole"), threading.Event()

    def press_once_it_runs():
        while not list(tmp_path.glob("stopped/state-*.npz")):
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)
        while not ended.wait(5.0):  # Python drops an interrupt that comes while it collects garbage
            signal.raise_signal(signal.SIGINT)

    pressing = threading.Thread(target=press_once_it_runs)
    pressing.start()
    with pytest.warns(UserWarning, match="interrupted: the result is that of"):
        part = fit(tmp_path / "stopped")
    ended.set()
    pressing.join()
    rest = fit(tmp_path / "stopped")
    report("interrupted", steps=len(part.losses), total=len(rest.losses))
    assert 0 < len(part.losses) < 60_000
    for name, value in whole.params.items():
        np.testing.assert_array_equal(value, rest.params[name])


# ArviZ says for how many rows its estimate is rough.
@pytest.mark.filterwarnings("ignore:Estimated shape parameter", "ignore:The inplace keyword in DataFrame")
def test_arviz_reads_everything(tmp_path):
    """Summary, LOO, comparison and files of two widths of network."""
    x, y, _ = smooth(jax.random.key(7), 150)
    results = {}
    for width in (1, 8):
        model = bnn.models.regression(nn.MLP([width, 1], "tanh"), priors.Hierarchical())
        mcmc = sampled(NUTS(model), x, y, warmup=300, draws=300, chains=2)
        results[f"width {width}"] = bnn.to_inference_data(mcmc)
    table = az.compare(results)
    better = results["width 8"]
    path = tmp_path / "better.nc"
    better.to_netcdf(path)
    again = bnn.predict(bnn.models.regression(nn.MLP([8, 1], "tanh"), priors.Hierarchical()), path, x)
    sigma = az.summary(better, var_names=["sigma"])
    report("ArviZ", elpd_gain=table["elpd_diff"].abs().max(), sigma=float(sigma["mean"].iloc[0]))
    assert table.index[0] == "width 8"
    np.testing.assert_allclose(
        np.asarray(again["y_mean"]).mean(), np.asarray(better["posterior_predictive"]["y_mean"]).mean(), atol=1e-4
    )


# -- what the examples claim ---------------------------------------------------------------------------------


def test_physical_parameters_stay_calibrated_where_the_physics_is_wrong(tmp_path):
    """Of 12 independent calibrated intervals of 90 % fewer than 8 hold the truth with probability .004."""
    figures = lotka_volterra.main(["--data-sets", "3", "--output", str(tmp_path)])
    covered = {kind: sum(counts.values()) for kind, counts in figures["covered"].items()}
    assert covered["with a network"] >= 8
    assert covered["physical"] <= 4
    errors = {kind: np.abs(values) for kind, values in figures["errors"].items()}
    assert errors["with a network"].max() < errors["physical"].min()  # relative errors of the posterior means


def test_a_module_predicts_better_if_it_is_sampled(tmp_path):
    """Log likelihood over ten splits: above the trained module by two standard errors of the paired difference."""
    figures = nnx_module.main(["--output", str(tmp_path)])
    gain = np.subtract(figures["Bayesian"]["log_likelihood"], figures["trained by optax"]["log_likelihood"])
    assert gain.mean() > 2 * gain.std(ddof=1) / len(gain) ** 0.5


@pytest.mark.data
@pytest.mark.filterwarnings("ignore:.*posterior sds from the mode")
def test_rows_of_which_the_network_knows_least_teach_more(tmp_path):
    """Ten seeds: a smaller error after all rounds than with random rows, and programs that serve all of them."""
    figures = active_learning.main(["--output", str(tmp_path)])
    assert np.mean(figures["uncertain"], 0)[-1] < np.mean(figures["random"], 0)[-1]
    assert sum(figures["programs"][2:]) == 0


@pytest.mark.filterwarnings("ignore:to_inference_data. 1 of 8 checks failed.\n- standardized")  # pixels share a scale
def test_sampled_weights_separate_unknown_digits_best(tmp_path):
    """AUROC over five pairs of classes: above one network and the ensemble by three standard errors of the gain.

    Accuracy on known digits is within three standard errors of that of the ensemble, or above; NLL is not claimed.
    """
    figures = unknown_digits.main(["--output", str(tmp_path)])
    for way in ("one network", "ensemble"):
        gain = np.subtract(figures["MCLMC"]["auroc"], figures[way]["auroc"])
        assert gain.mean() > 3 * gain.std(ddof=1) / len(gain) ** 0.5
    change = np.subtract(figures["MCLMC"]["accuracy"], figures["ensemble"]["accuracy"])
    assert change.mean() > -3 * change.std(ddof=1) / len(change) ** 0.5


@pytest.mark.filterwarnings("ignore:to_inference_data")  # 300 draws; Monte Carlo errors are part of the comparison
def test_effects_on_minibatches_are_those_of_nuts(tmp_path):
    """The model with network and effects predicts best; means within twice the Monte Carlo errors, sds within 5 %."""
    figures = groups.main(["--output", str(tmp_path)])
    best = figures["log_likelihood"]["network, groups"]
    # A standard error of the difference over 600 rows is below 0.05.
    assert best > max(value for name, value in figures["log_likelihood"].items() if name != "network, groups") + 0.2
    rms, expected, ratio = figures["agreement"]
    assert rms < 2 * expected
    assert ratio == pytest.approx(1, abs=0.05)
