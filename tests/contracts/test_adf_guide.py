"""AutoADF as a NumPyro guide: summaries, many runs, interruption, refusals."""

import pickle
from contextlib import nullcontext
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tqdm
from helpers import each, group, refused
from scipy import stats
from zoo import ZOO

import numpyro_bnn as bnn
from numpyro_bnn import guides, nn, priors

KERNEL = "net/Dense_0.kernel"


def network(x, y=None, batch_size=None, prior=None, noise=lambda: dist.HalfNormal(1.0)):
    net = bnn.random_network("net", nn.MLP([5, 1], "relu"), x.shape[1:], prior)
    sigma = numpyro.sample("sigma", noise())
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample(
            "y", dist.Normal(net(x[i])[..., 0], sigma), obs=None if y is None else y[i]
        )


def model(x, y=None, batch_size=None):
    """A Gamma precision of the first kernel, and of the noise."""
    prior = {"Dense_0.kernel": priors.GammaPrecision(1.0, 6.0), "*": priors.Normal()}
    net = bnn.random_network("net", nn.MLP([5, 1], "relu"), x.shape[1:], prior)
    tau = numpyro.sample("tau", dist.Gamma(6.0, 1.0))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample(
            "y",
            dist.Normal(net(x[i])[..., 0], tau**-0.5),
            obs=None if y is None else y[i],
        )


NOISE_OF_ARD = {"noise": lambda: dist.LogNormal(-1.0, 0.5), "batch_size": 10}
NETWORKS = {
    "Gamma precisions": model,
    "Laplace": partial(network, prior=priors.Laplace()),
    "ARD and subsampling": partial(network, prior=priors.ARD(), **NOISE_OF_ARD),
}


def make_rows(num_rows=60, seed=0):
    """A bend under noise of sd 0.3."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(num_rows, 2))
    return jnp.asarray(x), jnp.asarray(
        np.abs(x[:, 0]) - 0.8 + 0.3 * random.normal(size=num_rows)
    )


@cache
def fit_of(name):
    guide = guides.AutoADF(NETWORKS[name])
    return guide, guide.run(
        jax.random.key(0), *make_rows(), num_epochs=12, progress_bar=False
    )


@pytest.fixture
def fitted():
    return fit_of("Gamma precisions")


@pytest.fixture
def rows():
    return make_rows()


def some_orders(count):
    return np.stack([np.random.default_rng(k).permutation(60) for k in range(count)])


def same(one, two, rtol=1e-10):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12)


# -- what a fit says -------------------------------------------------------------------


@each("name", NETWORKS, fast=1)
def test_networks_learn_and_every_summary_and_draw_agrees(name):
    """A bend of sd 0.6 under noise of sd 0.3; quantiles are those of the fitted
    normals, and draws have them.
    """
    (guide, fit), (x, y) = fit_of(name), make_rows()

    @jax.jit
    def summaries(params):
        key = jax.random.key(2)
        draws = guide.sample_posterior(key, params, sample_shape=(2000,))
        return draws, guide.median(params), guide.quantiles(params, [0.1, 0.9])

    predicted, spread = guide.predictive_moments(fit.params, x)
    assert float(jnp.sqrt(jnp.mean((predicted - y) ** 2))) < 0.5
    assert bool((spread > 0).all())
    assert fit.losses[-1] < fit.losses[0]
    assert 0.6 < float(((y - predicted) / jnp.sqrt(spread)).std()) < 1.6
    draws, median, ends = jax.device_get(summaries(fit.params))
    assert set(median) == set(draws) == set(ends)
    assert draws[KERNEL].shape == (2000, 2, 5)
    mean, var = fit.state.weights[KERNEL]
    np.testing.assert_allclose(
        ends[KERNEL][1], stats.norm.ppf(0.9, mean, np.sqrt(var)), rtol=1e-4, atol=1e-5
    )
    for site in [KERNEL, *fit.state.hyperparameters]:
        # The share of draws below a quantile: a binomial sd is 0.011 at the median and
        # 0.0067 at 0.1; 5.5 sd allowed.
        assert np.abs((draws[site] < median[site]).mean(0) - 0.5).max() < 0.061
        assert np.abs((draws[site] < ends[site][0]).mean(0) - 0.1).max() < 0.037
        assert np.abs((draws[site] > ends[site][1]).mean(0) - 0.1).max() < 0.037


@pytest.mark.core
def test_results_survive_pickling_and_become_arviz(fitted, rows):
    (guide, fit), (x, y) = fitted, rows
    mean, var = guide.predictive_moments(fit.params, x[:5])
    again = pickle.loads(pickle.dumps(guide))
    np.testing.assert_allclose(again.predictive_moments(fit.params, x[:5])[0], mean)
    idata = bnn.to_inference_data(
        fit, {"x": x[:5], "y": y[:5]}, guide=guide, args=(x, y), num_samples=30
    )
    assert group(idata, "posterior")["net.Dense_0.kernel"].shape == (1, 30, 2, 5)
    assert group(idata, "log_likelihood")["y"].shape == (1, 30, 60)
    assert (idata.attrs["algorithm"], idata.attrs["num_steps"]) == ("AutoADF", 12)
    # 30 draws: the mean is off by sd / sqrt(30); 5 of these.
    found = np.asarray(group(idata, "predictions")["y"]).mean((0, 1))
    assert np.all(np.abs(found - mean) < 5 * np.sqrt(var / 30))


# -- SVI -------------------------------------------------------------------------------


# -- many runs, streaming, precision ---------------------------------------------------


@pytest.mark.slow
def test_runs_at_once_are_the_runs_one_by_one(fitted, x64):
    """Data sets along ``in_axes`` and random starts are as single runs."""
    guide, keys = fitted[0], jax.random.split(jax.random.key(5), 2)
    x, y = (
        jnp.stack(parts)
        for parts in zip(make_rows(60, 0), make_rows(60, 1), strict=True)
    )
    together = guide.run(keys, x, y, in_axes=(0, 0), num_epochs=2, progress_bar=False)
    assert together.losses.shape == together.refused.shape == (2, 2)
    starts = guide.run(keys, x[1], y[1], num_epochs=2, progress_bar=False)
    for k in range(2):
        single = guide.run(keys[k], x[k], y[k], num_epochs=2, progress_bar=False).params
        same(
            {name: value[k] for name, value in together.params.items()},
            single,
            rtol=1e-9,
        )
        assert {value.dtype for value in single.values()} == {jnp.dtype("float64")}
    same(
        {n: v[1] for n, v in starts.params.items()},
        {n: v[1] for n, v in together.params.items()},
        rtol=1e-9,
    )


def test_streaming_is_one_pass(x64):
    """Absorbing all rows in two pieces, in order, equals one epoch in that order, where
    no scale is learned.
    """
    line = ZOO["line"]
    guide, (x, y) = (
        guides.AutoADF(line.model),
        (jnp.asarray(part, float) for part in line.data),
    )
    options = {
        "num_epochs": 1,
        "orders": np.arange(len(x))[None],
        "progress_bar": False,
    }
    whole = guide.run(
        jax.random.key(7), x, y, init_means={"w": np.zeros(2)}, **options
    ).params
    prior = {"w_auto_loc": jnp.zeros(2), "w_auto_scale": jnp.ones(2)}
    same(
        guide.update(guide.update(prior, x[:10], y[:10]), x[10:], y[10:]),
        whole,
        rtol=1e-6,
    )


def test_a_run_continues_from_its_state(fitted, rows, x64):
    guide, orders = fitted[0], some_orders(3)
    whole = guide.run(
        jax.random.key(8), *rows, num_epochs=3, orders=orders, progress_bar=False
    )
    first = guide.run(
        jax.random.key(8), *rows, num_epochs=2, orders=orders[:2], progress_bar=False
    )
    options = {"num_epochs": 1, "orders": orders[2:], "progress_bar": False}
    rest = guide.run(jax.random.key(9), *rows, init_state=first.state, **options)
    same(rest.params, whole.params)
    options |= {"init_state": first.state, "recount": False}
    with refused("init_state", "on other rows"):
        guide.run(jax.random.key(9), rows[0], rows[1] + 1.0, **options)


def test_float64_inside_and_settings_untouched(fitted, rows):
    """With x64 off parameters are float32, the state float64, and the run that of a
    session with x64 on.

    Keys may be of both kinds.
    """
    guide, options = fitted[0], {"num_epochs": 2, "progress_bar": False}
    fit = guide.run(jax.random.key(0), *rows, **options)
    assert not jax.config.jax_enable_x64
    assert {value.dtype for value in fit.params.values()} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(fit.state)} == {jnp.dtype("float64")}
    with jax.enable_x64(True):
        wide = guides.AutoADF(model).run(jax.random.PRNGKey(0), *rows, **options)
    for one, two in zip(
        jax.tree.leaves(fit.state), jax.tree.leaves(wide.state), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


def test_a_compiled_float32_program_is_refused(fitted, rows):
    """JAX would cut float64 to float32 there; vmap alone runs in float64."""
    guide, fit = fitted
    with pytest.raises(ValueError, match="compiled float32 program"):
        jax.jit(lambda x: guide.predictive_moments(fit.params, x))(rows[0])
    mapped = jax.vmap(lambda x: guide.predictive_moments(fit.params, x)[0])(
        rows[0][None]
    )
    np.testing.assert_allclose(
        mapped[0], guide.predictive_moments(fit.params, rows[0])[0], rtol=1e-6
    )


def test_a_fit_that_gets_worse_warns():
    """Three layers of ReLU on inputs with heavy tails, counted in each epoch."""

    def deep(x, y=None):
        layers = nn.MLP([8, 8, 8, 1], "relu")
        net = bnn.random_network("net", layers, x.shape[1:], priors.ARD())
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.StudentT(4.0, net(x)[..., 0], sigma), obs=y)

    random = np.random.default_rng(0)
    x = random.standard_t(2.5, size=(32, 100, 8))
    x = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    hidden = x @ (random.normal(size=(32, 8, 4)) / 8**0.5)
    y = np.sin(2 * hidden) @ random.normal(size=4)
    y += 0.03 * random.standard_t(3, size=(32, 100))
    y = (y - y.mean(1, keepdims=True)) / y.std(1, keepdims=True)
    key = jax.random.split(jax.random.key(0), 32)[28]
    with pytest.warns(UserWarning, match=r"a row costs 0\.1\d* nats more"):
        fit = guides.AutoADF(deep).run(
            key, x[28], y[28], num_epochs=4, recount=True, progress_bar=False
        )
    assert 5 < fit.losses[-1] - fit.losses[0] < 50


# -- while it runs ---------------------------------------------------------------------


def watched(monkeypatch, stop_after=None):
    """What the progress bar shows; the user interrupts after so many epochs."""
    shown = []

    class Bar(tqdm.std.tqdm):
        def set_postfix_str(self, text="", refresh=True):
            shown.append(text)

        def __iter__(self):
            for epoch in super().__iter__():
                if epoch == stop_after:
                    raise KeyboardInterrupt
                yield epoch

    monkeypatch.setattr(tqdm, "trange", lambda n, **options: Bar(range(n)))
    return shown


def test_the_bar_counts_epochs_and_interruption_keeps_those_that_are_finished(
    fitted, rows, monkeypatch, x64
):
    guide, orders = fitted[0], some_orders(9)
    shown = watched(monkeypatch)
    two = guide.run(jax.random.key(8), *rows, num_epochs=2, orders=orders[:2])
    assert [text.startswith("log evidence") for text in shown] == [True] * 2
    watched(monkeypatch, stop_after=2)
    with pytest.warns(UserWarning, match="2 of 9 epochs"):
        fit = guide.run(jax.random.key(8), *rows, num_epochs=9, orders=orders)
    assert fit.losses.shape == (2,)
    same(fit.params, two.params)
    watched(monkeypatch, stop_after=0)
    with pytest.raises(KeyboardInterrupt):
        guide.run(jax.random.key(8), *rows, num_epochs=9, progress_bar=False)


# -- refusals --------------------------------------------------------------------------


def drawn(name, fn):
    return numpyro.sample(name, fn())


def half(name="scale"):
    return numpyro.sample(name, dist.HalfNormal(1.0))


def standard(name):
    return numpyro.sample(name, dist.Normal(0.0, 1.0))


def seen(fn, y, name="y", **options):
    numpyro.sample(name, fn, obs=y, **options)


def of_prior(prior):
    """A model of one weight with this prior."""

    def built(x, y=None):
        w = numpyro.sample("w", prior())
        with numpyro.plate("data", x.shape[0]):
            seen(dist.Normal(w * x, 1.0), y)

    return built


def of_rows(observe, size=()):
    """A model of standard normal weights, whose rows are observed so."""

    def built(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand(size).to_event(len(size)))
        with numpyro.plate("data", x.shape[0]):
            observe(w, x, y)

    return built


def of_mean(mean):
    return of_rows(lambda w, x, y: seen(dist.Normal(mean(w, x), 1.0), y))


def noise_and_scale(x, y=None):
    sd = numpyro.sample("tau", dist.Gamma(6.0, 6.0)) ** -0.5
    seen(dist.Normal(numpyro.sample("w", dist.Normal(0.0, sd)) * x, sd), y)


def twice(w, x, y):
    seen(dist.Normal(w * x, 1.0), y)
    seen(dist.Normal(w * x, 1.0), y, "again")


def classes(logits):
    return of_rows(
        lambda w, x, y: seen(dist.Categorical(logits=logits(w, x)), 0 * y), (2,)
    )


def joint(w, x, y):
    seen(
        dist.MultivariateNormal((w * x)[:, None] * jnp.ones(2), jnp.eye(2)),
        jnp.zeros((4, 2)),
    )


def scaled_by_hand(x, y=None):
    local = numpyro.sample("local", dist.HalfCauchy(1.0).expand([2]).to_event(1))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    seen(dist.Normal(jnp.stack([x, x**2], -1) @ (local * w), 1.0), y)


REFUSED = [
    (of_prior(lambda: dist.Normal(0.0, half("a") * half("b"))), "'w', scaled by 'a'"),
    (of_prior(lambda: dist.Normal(half("center"), 1.0)), "'w', whose prior mean"),
    (
        of_prior(
            lambda: dist.Normal(
                0.0, drawn("inner", lambda: dist.HalfNormal(half("outer")))
            )
        ),
        "site 'inner', whose prior depends on 'outer'",
    ),
    (
        of_prior(
            lambda: dist.Normal(0.0, drawn("tau", lambda: dist.Gamma(0.5, 1.0)) ** -0.5)
        ),
        "site 'tau', a Gamma with concentration 0.5",
    ),
    (of_prior(lambda: dist.Normal(0.0, jnp.exp(half()))), "a constant times a power"),
    (noise_and_scale, "site 'tau', which scales 'w' and also enters the likelihood"),
    (lambda x, y=None: seen(dist.Normal(x, half()), y), "no weights"),
    (of_mean(lambda w, x: w * x + standard("z")), "site 'z', inside the plate 'data'"),
    (of_rows(twice), "2 observed sites \\('y', 'again'\\)"),
    (of_rows(lambda w, x, y: numpyro.factor("y", -((y - w * x) ** 2))), "site 'y', a"),
    (of_mean(lambda w, x: w * x + numpyro.param("shift", 1.0)), "site 'shift', a"),
    (
        of_mean(lambda w, x: w * x + drawn("k", lambda: dist.Bernoulli(0.5))),
        "'k', which is discrete",
    ),
    (scaled_by_hand, "site 'local', a HalfCauchy from which the pred"),
    (of_prior(lambda: dist.Normal(0.0, jnp.exp(standard("log")))), "'w', whose prior"),
    (of_prior(lambda: dist.StudentT(2.0)), "'w', whose prior has no finite variance"),
    (of_rows(lambda w, x, y: seen(dist.Normal(w * x), y - w)), "values, or mask,"),
    (
        classes(lambda w, x: jnp.stack([x * w[0], x * w[1], x * w.sum()], -1)),
        "3 linear predictors for one row are functions of each other",
    ),
    (
        of_rows(
            lambda w, x, y: seen(
                dist.Categorical(probs=jax.nn.softmax(x[:, None] * w)), 0 * y
            ),
            (2,),
        ),
        "not an elementwise function of a linear predictor",
    ),
    (
        of_rows(lambda w, x, y: seen(dist.Normal(w * x), y, obs_mask=x > 0)),
        "'y_unobserved' of `obs_mask`",
    ),
    (of_prior(lambda: dist.Normal().mask(False)), "site 'w', whose prior is masked or"),
    (of_rows(lambda w, x, y: seen(dist.Normal(w * x), jnp.arange(4.0))), r"of shape"),
    (
        of_rows(lambda w, x, y: seen(dist.Normal(w * x).mask(jnp.arange(4) < 2), y)),
        r"of shape \(4,\) for one row of the data",
    ),
    (of_rows(joint), "site 'y', a MultivariateNormal"),
    (of_mean(lambda w, x: (x - x.mean()) * w), "rows influence each other"),
]


@pytest.mark.parametrize(
    ("branch", "argument"),
    [
        (lambda x, count: 1.0 if x.mean() > 0 else 2.0, "args"),
        (lambda x, count: jnp.ones(int(count)).sum(), "count"),
    ],
)
def test_models_that_branch_on_their_data_are_refused(branch, argument):
    def branching(x, count, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(w * x, branch(x, count)), obs=y)

    call = (jnp.ones(4), np.array(2), jnp.ones(4))
    with refused(argument, "values by which the model branches"):
        guides.AutoADF(branching).run(jax.random.key(0), *call, num_epochs=1)


@pytest.mark.parametrize(("unfit", "message"), REFUSED)
def test_models_that_adf_cannot_learn_are_refused_with_the_reason(unfit, message):
    x = jnp.array([1.0, 2.0, -1.0, 0.5])
    with pytest.raises(ValueError, match=message):
        guides.AutoADF(unfit).run(
            jax.random.key(0), x, jnp.ones(4), num_epochs=1, progress_bar=False
        )


def test_arrays_as_long_as_the_data_are_not_taken_for_rows():
    """A table of which each row looks up its group, and a prior scale for each column;
    the first two groups would hide the table.
    """

    def by_group(x, group, y=None, *, table, scales, plate=True):
        w = numpyro.sample("w", dist.Normal(0.0, scales).to_event(1))
        rows = numpyro.plate("data", len(x)) if plate else nullcontext()
        with rows:
            numpyro.sample("y", dist.Normal(x @ w + table[group], 1.0), obs=y)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)
    rows = (x, jnp.array([0, 1, 0, 3]), x[:, 0])
    others = {
        "table": jnp.array([0.0, 5.0, 1.0, -2.0]),
        "scales": jnp.array([0.1, 1.0, 2.0, 0.5]),
    }
    quiet = {"num_epochs": 2, "progress_bar": False}
    fits = []
    for model, options in ((by_group, others), (partial(by_group, **others), {})):
        guide = guides.AutoADF(model)
        fit = guide.run(jax.random.key(0), *rows, **quiet, **options)
        mean = guide.predictive_moments(fit.params, *rows[:2], **options)[0]
        fits.append({"w": fit.params["w_auto_loc"], "mean": mean})
    same(*fits, rtol=1e-6)
    # without a plate, the program does not tell that the table has no rows
    with refused("model", "rows influence each other"):
        guides.AutoADF(partial(by_group, plate=False)).run(
            jax.random.key(0), *rows, **quiet, **others
        )


def test_data_it_cannot_use_are_refused(fitted, rows):
    (guide, fit), (x, y), key = fitted, rows, jax.random.key(0)
    run = partial(guide.run, progress_bar=False)
    for call, message in (
        (lambda: run(key, x, y, in_axes=(0, 0)), "one key per data set"),
        (lambda: run(jax.random.split(key, 2), x, y, in_axes=(0,)), "an axis or None"),
        (lambda: run(key, x, y.at[3].set(jnp.nan)), "NaN or infinite"),
        (lambda: run(key, x), "0 observed sites"),
        (
            lambda: guides.AutoADF(model).predictive_moments({}, x),
            "Call `run` of this guide first",
        ),
        (
            lambda: guide.predictive_moments(fit.params, x[:, :1]),
            r"Pass \(N, 2\), rows as in the run",
        ),
        (lambda: guide.update(fit.params, x[:3], y[:2]), "mismatched lengths"),
        (
            lambda: guide.log_predictive_density(
                fit.params, x.at[0, 0].set(jnp.inf), y
            ),
            "NaN or infinite",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
