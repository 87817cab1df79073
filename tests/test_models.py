"""Ready-made models: the density they state, and the data they refuse; NUTS on a network mixes in function space."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density
from scipy import stats

import numpyro_bnn as bnn
from numpyro_bnn import _jaxprs
from numpyro_bnn.infer import MCLMC, SGLD
from numpyro_bnn.models import repeats_values

pytestmark = pytest.mark.core

X = jax.random.normal(jax.random.key(0), (12, 2))
Y = jnp.sin(X[:, 0])
NET = bnn.nn.MLP([4, 1], "tanh")


def test_regression_density_is_the_one_it_states():
    trace = handlers.trace(handlers.seed(bnn.models.regression(NET), 0)).get_trace(X, Y)
    values = {name: site["value"] for name, site in trace.items() if site["type"] == "sample" and name != "y"}
    density, _ = log_density(bnn.models.regression(NET), (X, Y), {}, values)
    f = NET.apply({name.removeprefix("net/"): v for name, v in values.items() if name != "sigma"}, X)[:, 0]
    sds = {"net/Dense_0.kernel": 2**-0.5, "net/Dense_1.kernel": 0.5}
    prior = sum(dist.Normal(0, sds.get(k, 1.0)).log_prob(v).sum() for k, v in values.items() if k != "sigma")
    prior += dist.HalfNormal(1).log_prob(values["sigma"])
    np.testing.assert_allclose(density, prior + dist.Normal(f, values["sigma"]).log_prob(Y).sum(), rtol=1e-5)


@pytest.mark.parametrize("targets", [1, 2])
def test_heavy_tails_are_those_of_a_t(targets):
    net, y = bnn.nn.MLP([4, targets], "tanh"), Y if targets == 1 else jnp.stack([Y, -Y], 1)
    model = bnn.models.regression(net, heavy_tails=True)
    site = handlers.trace(handlers.substitute(handlers.seed(model, 0), {"excess_df": 1.5, "sigma": 0.3}))
    trace = site.get_trace(X, y)
    f = net.apply({k.removeprefix("net/"): v["value"] for k, v in trace.items() if k.startswith("net/")}, X)
    expected = stats.t(3.5, np.asarray(f), 0.3).logpdf(np.asarray(y).reshape(12, targets)).sum(1)
    np.testing.assert_allclose(trace["y"]["fn"].log_prob(y), expected, rtol=1e-4)
    assert trace["excess_df"]["fn"].log_prob(7.0) == dist.Gamma(2.0, 0.1).log_prob(7.0)


@pytest.mark.parametrize(("share", "grows"), [(0.7, True), (0.6, False)])
def test_heavy_tails_need_two_thirds_of_exact_rows_to_have_no_bound(share, grows):
    residuals = np.where(np.arange(100) < 100 * share, 0.0, 1.0)
    large, small = (stats.t(2.0, residuals, scale).logpdf(0.0).sum() for scale in (1e-3, 1e-5))
    assert (small > large) == grows


RATINGS = np.random.default_rng(0).choice([3.0, 5.0, 6.0, 7.0, 8.0], 200)
AMOUNTS = np.where(np.arange(200) % 3 > 0, 0.0, RATINGS * np.linspace(1, 2, 200))
CENSORED = np.where(np.arange(200) % 3 > 0, np.linspace(0, 50, 200), 50.0)


@pytest.mark.parametrize(
    ("y", "repeats"),
    [
        (RATINGS, True),
        (AMOUNTS, True),
        (CENSORED, False),
        (np.linspace(0, 1, 200), False),
        (np.arange(51) / 9, False),
    ],
    ids=["ratings", "amounts", "censored", "continuous", "few rows"],
)
def test_heavy_tails_of_repeated_targets_are_refused(y, repeats):
    """At a value that most rows share the density of a t grows without bound as its scale falls."""
    assert repeats_values(y) == repeats
    assert repeats_values(np.stack([np.linspace(0, 1, len(y)), y], 1)) == repeats
    model = handlers.seed(bnn.models.regression(bnn.nn.MLP([4, 1]), heavy_tails=True), 0)
    x = np.linspace(-1, 1, len(y))[:, None]
    if repeats:
        with pytest.raises(ValueError, match=r"argument `heavy_tails` got True.*repeated values"):
            model(x, y)
    else:
        model(x, y)


def test_new_rows_of_heavy_tails_may_repeat_values():
    """Three equal targets at which a fit is scored are no ratings."""
    model = bnn.models.regression(NET, heavy_tails=True)
    mcmc = MCMC(NUTS(model, max_tree_depth=3), num_warmup=5, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    idata = bnn.to_inference_data(mcmc, predictions={"x": X[:3], "y": np.zeros(3)}, posterior_predictive=False)
    assert np.isfinite(idata["predictions"]["y_log_likelihood"]).all()
    with pytest.raises(ValueError, match="argument `heavy_tails` got True"):
        mcmc.run(jax.random.key(0), X, jnp.round(Y))


LATE = np.arange(30) == 29  # the last row of thirty, which the first minibatches need not hold
SLOPE = np.linspace(-1.0, 1.0, 30)
WRONG_DATA = {
    "ratings": (bnn.models.regression(NET, heavy_tails=True), SLOPE.round(), "argument `heavy_tails` got True"),
    "a missing target": (bnn.models.regression(NET), np.where(LATE, np.nan, SLOPE), "argument `y` got 1 NaN"),
    "a wrong label": (
        bnn.models.classification(bnn.nn.MLP([4, 3]), 3),
        np.where(LATE, 3, np.arange(30) % 3),
        "argument `y` got labels from 0 to 3",
    ),
}
METHODS = {
    "SGLD": lambda model, *data: MCMC(SGLD(model), num_warmup=5, num_samples=2, progress_bar=False).run(*data),
    "minibatches": lambda model, *data: MCMC(SGLD(model), num_warmup=5, num_samples=2, progress_bar=False).run(
        *data, batch_size=2
    ),
    "MCLMC": lambda model, *data: MCMC(MCLMC(model), num_warmup=5, num_samples=2, progress_bar=False).run(*data),
    "AutoADF": lambda model, *data: bnn.guides.AutoADF(model).run(*data, num_epochs=1, progress_bar=False),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", WRONG_DATA)
def test_wrong_data_are_refused_where_they_are_traced(fault, method):
    """A minibatch need not hold the wrong row, and AutoADF took a label beyond the last class."""
    model, y, message = WRONG_DATA[fault]
    with pytest.raises(ValueError, match=message):
        METHODS[method](model, jax.random.key(0), np.stack([SLOPE, SLOPE**2], 1), y)


def test_minibatch_of_a_ready_made_model_is_scaled_to_the_data():
    model = handlers.seed(bnn.models.regression(NET), 0)
    site = handlers.trace(model).get_trace(X, Y, batch_size=3)["y"]
    assert site["value"].shape == (3,)
    assert float(site["scale"]) == 4.0


def test_integer_targets_are_numbers():
    trace = handlers.trace(handlers.seed(bnn.models.regression(NET), 0)).get_trace(X, np.arange(12))
    assert trace["y"]["value"].dtype == jnp.zeros(()).dtype


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X.at[3, 1].set(jnp.nan), Y, r"`x` got 1 NaN or infinite values \(the first at index \(3, 1\)\)"),
        (X, Y.at[2].set(jnp.inf), r"`y` got 1 NaN or infinite"),
        (X, Y[:5], r"mismatched lengths \(x has 12, y has 5\)"),
        (X[:, 0], Y, r"`x` got shape \(12,\).*x\[:, None\]"),
        (X, Y[:, None], r"`y` got shape \(12, 1\).*rank 1"),
        (X[:0], Y[:0], r"empty data"),
        (X[..., None], Y, r"nn\.Dense at 'Dense_0'.*input shape \(2, 1\).*Flatten"),
    ],
)
def test_bad_regression_data_is_refused(x, y, message):
    with pytest.raises(ValueError, match=message):
        handlers.seed(bnn.models.regression(NET), 0)(x, y)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.full(12, 3), r"labels from 3 to 3.*labels 0\.\.2"),
        (np.full(12, -1), r"labels from -1"),
        (np.full(12, 0.5), r"dtype float64.*integer class labels"),
        (np.zeros((12, 3), int), r"shape \(12, 3\)"),
    ],
)
def test_bad_labels_are_refused(y, message):
    model = bnn.models.classification(bnn.nn.MLP([4, 3]), num_classes=3)
    with pytest.raises(ValueError, match=message):
        handlers.seed(model, 0)(X, y)


def test_heads_and_batch_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"output shape \(3,\).*2 outputs"):
        handlers.seed(bnn.models.regression(bnn.nn.MLP([3]), heteroscedastic=True), 0)(X, Y)
    with pytest.raises(ValueError, match=r"output shape \(1,\).*3 outputs"):
        handlers.seed(bnn.models.classification(NET, 3), 0)(X, np.zeros(12, int))
    with pytest.raises(ValueError, match=r"`batch_size` got 13.*1 to N = 12"):
        handlers.seed(bnn.models.regression(NET), 0)(X, Y, batch_size=13)
    with pytest.raises(ValueError, match=r"num_classes"):
        bnn.models.classification(NET, 1)


@pytest.mark.parametrize("height", [-1e4, 0.0, 3.0])
def test_noise_of_each_row_is_positive_for_any_output(height):
    """In float32 a softplus below -104 is 0, which would be no scale: samplers and optimizers do get there."""
    model = bnn.models.regression(bnn.nn.MLP([2]), heteroscedastic=True)
    weights = {"net/Dense_0.kernel": jnp.zeros((X.shape[1], 2)), "net/Dense_0.bias": jnp.array([0.5, height])}
    trace = handlers.trace(handlers.seed(handlers.substitute(model, data=weights), 0)).get_trace(X, Y)
    fn = trace["y"]["fn"]
    np.testing.assert_allclose(fn.scale, 1e-6 + np.logaddexp(0, height), rtol=1e-5)
    assert np.isfinite(fn.log_prob(Y)).all()


@pytest.mark.slow
def test_nuts_on_a_neal_style_network_mixes_in_function_space():
    """One input, tanh, Gamma precisions on every weight group: R-hat of the function below 1.02 from 4 chains."""
    x = jnp.linspace(-1.5, 1.5, 40)[:, None]
    y = jnp.sin(2 * x[:, 0]) + 0.1 * jax.random.normal(jax.random.key(1), (40,))
    prior = bnn.priors.GammaPrecision(scale=1.0, alpha=5.0)
    model = bnn.models.regression(bnn.nn.MLP([8, 1], "tanh"), prior, noise=0.1)
    kernel = NUTS(model, target_accept_prob=0.9)
    mcmc = MCMC(kernel, num_warmup=400, num_samples=500, num_chains=4, chain_method="sequential", progress_bar=False)
    mcmc.run(jax.random.key(2), x, y)
    idata = bnn.to_inference_data(mcmc, {"x": jnp.linspace(-2, 2, 21)[:, None]}, log_likelihood=False)
    mixing = bnn.metrics.function_space(idata["predictions"]["y_mean"])
    assert mixing.max_rhat < 1.02
    assert mixing.min_ess > 100  # the noise of R-hat is about 1 / ESS: it is known to 0.01


def test_indexed_lengths_follow_nested_programs():
    def fn(i):
        inner = jax.jit(lambda j: jnp.ones((9, 2))[j])
        return inner(i) + jnp.ones(5)[i][:, None] + jnp.ones(100)[:3][:, None]

    assert _jaxprs.indexed_lengths(fn, jnp.arange(3)) == {5, 9}


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda fn: jax.jit(jax.checkpoint(fn))])
def test_dependence_follows_each_output_of_a_nested_program(wrap):
    def fn(arguments):
        return dict(zip("st", wrap(lambda x, y: (2 * x, y + 1))(arguments["x"], arguments["y"]), strict=True))

    assert _jaxprs.dependence(fn, {"x": jnp.ones(2), "y": 1.0}) == {"s": {"x"}, "t": {"y"}}


def test_dependence_counts_every_argument_of_a_loop():
    def fn(arguments):
        def swapped(_, pair):
            return pair[::-1]

        return dict(zip("st", jax.lax.fori_loop(0, 3, swapped, tuple(arguments.values())), strict=True))

    assert _jaxprs.dependence(fn, {"x": 1.0, "y": 2.0}) == {"s": {"x", "y"}, "t": {"x", "y"}}
