"""Networks as sample sites: density, handlers, batch statistics, ready-made models."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from flax import linen
from helpers import results, run_chains, traced_sites
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.infer import Predictive
from numpyro.infer.util import log_density
from zoo import CLASSES, LABELS, NET, NEW_X, NOISE, N, X, Y

from numpyro_bnn import guides, infer, models, nn, predict, priors, random_network

pytestmark = pytest.mark.core

D = X.shape[1]


def model(x, y=None, prior=None):
    network = random_network("net", NET, x.shape[1:], prior)
    numpyro.deterministic("f", network(x)[..., 0])
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(network(x)[..., 0], NOISE), obs=y)


def trace_of(fn, *args, **options):
    return handlers.trace(handlers.seed(fn, 0)).get_trace(*args, **options)


def values_of(fn, *args):
    """A positive value of every latent site."""
    random = np.random.default_rng(0)
    latent = {
        name: s
        for name, s in traced_sites(fn, *args).items()
        if s["type"] == "sample" and not s["is_observed"]
    }
    return {
        name: random.uniform(0.1, 1.0, site["value"].shape)
        for name, site in latent.items()
    }


# -- sites -----------------------------------------------------------------------------


def test_sites_lie_outside_every_plate():
    sites = traced_sites(model, X, Y, priors.Hierarchical())
    names = ("kernel_scale", "kernel_base", "kernel", "bias")
    assert list(sites) == [
        *(f"net/Dense_{layer}.{name}" for layer in (0, 1) for name in names),
        "f",
        "data",
        "y",
    ]
    for name in list(sites)[:8]:
        assert not sites[name].get("cond_indep_stack")
        assert sites[name]["type"] != "sample" or sites[name]["fn"].batch_shape == ()
    assert [frame.name for frame in sites["y"]["cond_indep_stack"]] == ["data"]


KINDS_OF_PRIOR = {
    "default": (lambda: None, 2**-0.5),
    "distribution": (lambda: dist.Normal(0.0, 2.0), 2.0),
    "function": (lambda: lambda name, shape: dist.Laplace(0.0, 3.0), 3.0),
    "dictionary": (
        lambda: {"Dense_0.kernel": dist.Cauchy(0.0, 4.0), "*": priors.Normal()},
        4.0,
    ),
    "part of the shape": (
        lambda: {"*.kernel": dist.Normal(np.zeros((1, 1)), 5.0), "*": dist.Normal()},
        5.0,
    ),
}


@pytest.mark.parametrize(("make", "scale"), KINDS_OF_PRIOR.values(), ids=KINDS_OF_PRIOR)
def test_a_prior_may_be_a_distribution_a_function_or_a_dictionary(make, scale):
    fn = trace_of(model, X, Y, make())["net/Dense_0.kernel"]["fn"]
    assert fn.event_shape == (2, 3)
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    assert np.all(fn.scale == scale)


def test_distribution_with_the_parameters_own_event_shape():
    prior = {
        "Dense_0.bias": dist.MultivariateNormal(np.zeros(3), np.eye(3)),
        "*": priors.Normal(),
    }
    assert traced_sites(model, X, Y, prior)["net/Dense_0.bias"]["value"].shape == (3,)


# -- under handlers and transformations ------------------------------------------------


def test_scope_block_substitute_and_condition():
    prior = priors.Hierarchical()
    scoped = traced_sites(handlers.scope(model, prefix="a", divider="."), X, Y, prior)
    assert {f"a.{name}" for name in traced_sites(model, X, Y, prior)} == set(scoped)
    assert list(traced_sites(handlers.block(model, expose=["y"]), X, Y, prior)) == ["y"]
    ones = {
        name: np.ones(value.shape, np.float32)
        for name, value in values_of(model, X, Y, prior).items()
    }
    for handler in (handlers.substitute, handlers.condition):
        trace = trace_of(handler(model, ones), X, None, prior)
        assert_allclose(
            trace["f"]["value"], 3**0.5 * np.tanh(X.sum(1) / 2**0.5 + 1) + 1, rtol=1e-5
        )
        assert trace["net/Dense_0.kernel_base"]["is_observed"] == (
            handler is handlers.condition
        )


def test_predictive_repeats_the_functions_of_its_draws():
    """With both kinds of keys, given base and deterministic sites together."""
    prior = priors.Hierarchical()
    drawn = Predictive(model, num_samples=5)(jax.random.PRNGKey(0), X, None, prior)
    assert drawn["net/Dense_0.kernel"].shape == (5, 2, 3)
    assert len(np.unique(drawn["f"][:, 0])) == 5
    posterior = {name: value for name, value in drawn.items() if name not in ("f", "y")}
    again = Predictive(model, posterior, return_sites=["f"])(
        jax.random.key(1), X[:4], None, prior
    )
    assert_allclose(again["f"], drawn["f"][:, :4], rtol=1e-5, atol=1e-5)


def test_float64_is_kept(x64):
    sites = traced_sites(
        model, X.astype(np.float64), Y.astype(np.float64), priors.RegularizedHorseshoe()
    )
    assert {
        site["value"].dtype for site in sites.values() if site["type"] != "plate"
    } == {np.dtype("float64")}


def test_networks_of_one_model_have_weights_of_their_own():
    trace = trace_of(
        lambda: [random_network(name, NET, (D,)) for name in ("mean", "sd")]
    )
    assert {name.split("/")[0] for name in trace} == {"mean", "sd"}
    assert not np.allclose(
        trace["mean/Dense_0.kernel"]["value"], trace["sd/Dense_0.kernel"]["value"]
    )


# -- batch statistics ------------------------------------------------------------------

NORMED = nn.Sequential([nn.Dense(1), nn.BatchNorm(False, False)])


def test_predictions_use_the_statistics_of_each_call_in_order():
    """Also inside scopes, for a model that calls networks twice (for four rows three
    times). One new row has no statistics of its own; equal targets are no ratings.
    """

    def inside(x, y=None):
        models.regression(NORMED, heavy_tails=True)(x, y)
        other = random_network("other", NORMED, (D,))
        f = [other(k * x)[:, 0] for k in (2, 3)[: 2 if len(x) == 4 else 1]]
        numpyro.deterministic("g", f[0])

    model = handlers.block(handlers.scope(inside, prefix="a"), hide=["none"])
    random = np.random.default_rng(0)
    draws, posterior = {}, {}
    for name, value in values_of(model, X, Y).items():
        draws[name] = random.uniform(0.1, 1.0, (3, *value.shape))
        axes = ["chain", "draw", *(f"{name}_{axis}" for axis in range(value.ndim))]
        posterior[name.replace("/", ".")] = (axes, draws[name][None])
    inputs = {"x": (("data", "input"), X)}
    data = {"observed_data": {"a.y": ("data", Y)}, "constant_data": inputs}
    idata = results({"posterior": posterior, **data})
    found = predict(model, idata, NEW_X, np.ones(5))
    assert np.isfinite(found["a.y_log_likelihood"]).all()
    alone = predict(model, idata, NEW_X[:1])["a.y_mean"]
    assert_allclose(alone, found["a.y_mean"][..., :1], rtol=1e-5, atol=1e-5)
    for name, factor, site in (("net", 1, "a.y_mean"), ("other", 2, "a.g")):
        scope = f"a/{name}/"
        of_net = {n.removeprefix(scope): v for n, v in draws.items() if scope in n}

        def outputs(params, factor=factor):
            statistics = NORMED.statistics(params, factor * X)
            return NORMED.apply(params, factor * NEW_X, statistics)[:, 0]

        expected = jax.vmap(outputs)(of_net)
        assert_allclose(found[site].to_numpy()[0], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"other calls than training rows.* equally often"
    ):
        predict(model, idata, NEW_X[:4])


# -- ready-made models -----------------------------------------------------------------


def prior_of_noise(values):
    tails = (
        scipy.stats.gamma(2, scale=10).logpdf(values["excess_df"])
        if "excess_df" in values
        else 0
    )
    return tails + (
        scipy.stats.halfnorm.logpdf(values["sigma"]) if "sigma" in values else 0
    )


def log_t(y, f, values):
    return scipy.stats.t(2 + values["excess_df"], f, values["sigma"]).logpdf(y)


BOTH, TWO = np.stack([Y, -Y], 1), nn.MLP([3, 2], "tanh")
STATED = {  # model, targets, log likelihood of outputs and other values
    "normal": (
        lambda: models.regression(NET),
        Y,
        lambda f, values: scipy.stats.norm(f[:, 0], values["sigma"]).logpdf(Y),
    ),
    "known noise": (
        lambda: models.regression(NET, noise=0.3),
        Y,
        lambda f, values: scipy.stats.norm(f[:, 0], 0.3).logpdf(Y),
    ),
    "noise of each row": (
        lambda: models.regression(TWO, heteroscedastic=True),
        Y,
        lambda f, values: scipy.stats.norm(
            f[:, 0], 1e-6 + np.logaddexp(0, f[:, 1])
        ).logpdf(Y),
    ),
    "heavy tails": (
        lambda: models.regression(NET, heavy_tails=True),
        Y,
        lambda f, values: log_t(Y, f[:, 0], values),
    ),
    "two targets": (
        lambda: models.regression(TWO, heavy_tails=True),
        BOTH,
        lambda f, values: log_t(BOTH, f, values),
    ),
    "classes": (
        lambda: models.classification(nn.MLP([3, 3], "tanh"), 3),
        CLASSES,
        lambda f, values: f[np.arange(N), CLASSES] - np.logaddexp.reduce(f, axis=1),
    ),
}


@pytest.mark.parametrize(("make", "y", "log_likelihood"), STATED.values(), ids=STATED)
def test_density_of_a_model_is_the_one_it_states(make, y, log_likelihood):
    """Of t noise with 2 + d degrees of freedom, d ~ Gamma(2, 0.1)."""
    model = make()
    values = values_of(model, X, y)
    found = jax.jit(lambda values: log_density(model, (X, y), {}, values)[0])(values)
    weights = {
        name.removeprefix("net/"): value
        for name, value in values.items()
        if name.startswith("net/")
    }
    sd = {
        name: 1.0 if "bias" in name else value.shape[0] ** -0.5
        for name, value in weights.items()
    }
    prior = sum(
        scipy.stats.norm(0, sd[name]).logpdf(value).sum()
        for name, value in weights.items()
    )
    hidden = np.tanh(X @ weights["Dense_0.kernel"] + weights["Dense_0.bias"])
    outputs = hidden @ weights["Dense_1.kernel"] + weights["Dense_1.bias"]
    expected = prior + prior_of_noise(values) + log_likelihood(outputs, values).sum()
    assert_allclose(found, expected, rtol=1e-5)


def test_noise_of_each_row_is_positive_for_any_output():
    """In float32 a softplus below -104 is 0, which would be no scale."""
    weights = {
        "net/Dense_0.kernel": np.zeros((D, 2)),
        "net/Dense_0.bias": np.array([0.5, -1e4]),
    }
    model = handlers.substitute(
        models.regression(nn.MLP([2]), heteroscedastic=True), weights
    )
    fn = trace_of(model, X, Y)["y"]["fn"]
    assert_allclose(fn.scale, 1e-6, rtol=1e-5)
    assert np.isfinite(fn.log_prob(Y)).all()


def test_minibatch_of_a_ready_made_model_is_scaled_to_the_data():
    site = traced_sites(models.regression(NET), X, np.arange(N), batch_size=3)["y"]
    assert site["value"].shape == (3,)
    assert site["scale"] == N / 3
    assert site["value"].dtype == np.float32  # integer targets are numbers


RATINGS = np.random.default_rng(0).choice([3.0, 5.0, 6.0, 7.0, 8.0], 200)
THIRD = np.arange(200) % 3 > 0
TARGETS = {  # name: targets, whether most are a few repeated values
    "ratings": (RATINGS, True),
    "amounts": (np.where(THIRD, 0.0, RATINGS * np.linspace(1, 2, 200)), True),
    "censored": (np.where(THIRD, np.linspace(0, 50, 200), 50.0), False),
    "continuous": (np.linspace(0, 1, 200), False),
    "few rows": (np.arange(51) / 9, False),
}


@pytest.mark.parametrize(("y", "repeats"), TARGETS.values(), ids=TARGETS)
def test_heavy_tails_of_repeated_targets_are_refused(y, repeats):
    """At a value of most rows the density of a t grows without bound."""
    model = models.regression(nn.MLP([4, 2]), heavy_tails=True)
    line = np.linspace(-1, 1, len(y))
    y = np.stack([line, y], 1)
    if not repeats:
        assert "y" in traced_sites(model, line[:, None], y)
        return
    with pytest.raises(
        ValueError, match=r"argument `heavy_tails` got True.*repeated values"
    ):
        traced_sites(model, line[:, None], y)


def plain():
    return models.regression(NET)


def three_classes():
    return models.classification(nn.MLP([4, 3]), 3)


LATE = np.arange(N) == N - 1  # the last row, which the first minibatches need not hold
WRONG_DATA = {
    "ratings": (
        STATED["heavy tails"][0],
        X[:, 0].round(),
        "argument `heavy_tails` got True",
    ),
    "a missing target": (plain, np.where(LATE, np.nan, Y), "argument `y` got 1 NaN"),
    "a wrong label": (
        three_classes,
        np.where(LATE, 3, CLASSES),
        "argument `y` got labels from 0 to 3",
    ),
}
METHODS = {
    "SGLD": lambda model, y: run_chains(infer.SGLD(model), X, y),
    "minibatches": lambda model, y: run_chains(infer.SGLD(model), X, y, batch_size=2),
    "MCLMC": lambda model, y: run_chains(infer.MCLMC(model), X, y),
    "AutoADF": lambda model, y: guides.AutoADF(model).run(
        jax.random.key(0), X, y, num_epochs=1, progress_bar=False
    ),
}


@pytest.mark.parametrize(
    ("fault", "method"),
    [
        *((fault, "SGLD") for fault in WRONG_DATA),
        *(("a missing target", method) for method in [*METHODS][1:]),
    ],
)
def test_wrong_data_are_refused_where_they_are_traced(fault, method):
    """A minibatch need not hold the wrong row."""
    make, y, message = WRONG_DATA[fault]
    with pytest.raises(ValueError, match=message):
        METHODS[method](make(), y)


# -- errors that teach -----------------------------------------------------------------

WRONG_SHAPES = [
    (plain, (np.where(LATE[:, None], np.nan, X), Y), "NaN or infinite values (the"),
    (plain, (X, Y[:5]), "mismatched lengths (x has 24, y has 5)"),
    (plain, (X[:, 0], Y), "`x[:, None]`"),
    (plain, (X, Y[:, None]), "`y` got shape (24, 1)"),
    (plain, (X[:0], Y[:0]), "empty data"),
    (plain, (X[..., None], Y), "nn.Dense at 'Dense_0'"),
    (lambda: models.regression(nn.MLP([3]), heteroscedastic=True), (X, Y), "must have"),
    (plain, (X, Y, 25), "`batch_size` got 25. Pass a number from 1 to N = 24"),
    (three_classes, (X, LABELS + 3), "labels 0..2"),
    (three_classes, (X, LABELS - 1), "labels from -1"),
    (three_classes, (X, np.full(N, 0.5)), "integer class labels"),
    (three_classes, (X, np.zeros((N, 3), int)), "shape (24, 3)"),
    (lambda: models.classification(NET, 3), (X, LABELS), "must have 3 outputs"),
]


@pytest.mark.parametrize(("make", "data", "message"), WRONG_SHAPES)
def test_data_and_heads_that_do_not_fit_a_model_are_refused(make, data, message):
    with pytest.raises(ValueError, match=r"argument|mismatched") as error:
        traced_sites(make(), *data)
    assert message in str(error.value)


def in_plate():
    with numpyro.plate("data", 3):
        random_network("net", NET, (D,))


def with_prior(make):
    return lambda: random_network("net", NET, (D,), make())


MISSPELLED = {"Dense0.kernel": priors.Laplace(), "*": priors.Normal()}
REFUSED = [
    (in_plate, "argument `name` got 'net' inside plate 'data'. Call it before the"),
    (lambda: random_network("net", linen.Dense(1), (D,)), "use NumPyro's"),
    (lambda: random_network(NET, NET, (D,)), 'Pass a string, e.g. `"net"`'),
    (lambda: random_network("net", NET, D), "`input_shape` got 2. Pass the shape"),
    (lambda: random_network("net", NET, (6, 6, 1)), "It takes one axis of features"),
    (lambda: random_network("net", NET, (D,))(X[:, :1]), "got input shape (24, 1). It"),
    (with_prior(lambda: "Horshoe"), "`prior` got 'Horshoe'. Did you mean 'Horseshoe'"),
    (with_prior(lambda: 1.0), "random_network: argument `prior` got '1.0'"),
    (with_prior(lambda: priors.ARD), "Pass an object, `priors.ARD()`"),
    (with_prior(lambda: MISSPELLED), "'Dense0.kernel'. Did you mean 'Dense_0.kernel'"),
    (with_prior(lambda: {"*.kernel": priors.Normal()}), "no pattern for parameter"),
    (with_prior(lambda: lambda name, shape: 1.0), "got 1.0 for parameter"),
    (
        with_prior(lambda: dist.Normal(np.zeros(5), 1.0)),
        (
            "a Normal of shape (5,) for parameter 'Dense_0.kernel'. The parameter has "
            "shape (2, 3)"
        ),
    ),
    (
        with_prior(lambda: dist.MultivariateNormal(np.zeros(1), np.eye(1))),
        "a MultivariateNormal of shape (1,)",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_networks_that_do_not_fit_are_refused(call, message):
    with pytest.raises((ValueError, TypeError)) as error, handlers.seed(rng_seed=0):
        jax.eval_shape(call)
    assert message in str(error.value)


def test_a_network_outside_of_a_model_is_refused():
    with pytest.raises(ValueError, match=r"'net' outside of a model.*handlers\.seed"):
        random_network("net", NET, (D,))
