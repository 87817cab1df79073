"""`to_inference_data`: fixed weights, names, coordinates and arguments that would go wrong without an error."""

from contextlib import contextmanager
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import group, results
from numpyro import handlers
from numpyro.infer import MCMC, BarkerMH
from numpyro.infer.autoguide import AutoNormal

import numpyro_bnn as bnn

pytestmark = pytest.mark.core

N, DRAWS, W = 12, 4, np.float32(-7.0)
X = np.linspace(1.0, 2.0, N, dtype=np.float32)
Y = 3 * X


def line(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 10.0))
    b = numpyro.sample("b", dist.Normal(0.0, 10.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(w * x + b, 0.5), obs=y)


def sample(model, *args, **kwargs):
    mcmc = MCMC(BarkerMH(model), num_warmup=5, num_samples=DRAWS, progress_bar=False)
    mcmc.run(jax.random.key(0), *args, **kwargs)
    return mcmc


@pytest.fixture(scope="module")
def run():
    return sample(line, X, Y)


def names(idata, name):
    return {str(variable) for variable in group(idata, name).data_vars}


@pytest.fixture
def draws_not_evaluated(compiled):
    """A context in which at most the tiny programs of reading a model are compiled: no draw is evaluated."""

    @contextmanager
    def context():
        before = len(compiled)
        yield
        assert len(compiled) == before, "something was computed before the refusal"

    return context


# ------------------------------------------------------------------------------------------- fixed values


def within(x, y=None):
    with handlers.condition(data={"w": W}):
        return line(x, y)


def constant(x, y=None):
    numpyro.sample("y", dist.Normal(numpyro.sample("w", dist.Normal(0.0, 10.0), obs=W) * x + noise(), 0.5), obs=y)


def noise():
    return numpyro.sample("b", dist.Normal(0.0, 10.0))


FIXED = {
    "data": lambda: handlers.condition(line, {"w": W}),
    "function": lambda: handlers.condition(line, condition_fn=lambda site: W if site["name"] == "w" else None),
    "within": lambda: within,
    "constant": lambda: constant,
    "seed outside": lambda: handlers.seed(handlers.condition(line, {"w": W}), 0),
    "seed inside": lambda: handlers.condition(handlers.seed(line, 0), {"w": W}),
    "block": lambda: handlers.block(handlers.condition(line, {"w": W}), hide=["w"]),
    "scope outside": lambda: handlers.scope(handlers.condition(line, {"w": W}), prefix="a"),
    "scope inside": lambda: handlers.condition(handlers.scope(line, prefix="a"), {"a/w": W}),
    "do": lambda: handlers.do(line, {"w": W}),
}


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=[] if how in ("data", "within", "scope inside") else pytest.mark.slow) for how in FIXED],
)
def test_fixed_weights_are_part_of_the_model(how):
    idata = bnn.to_inference_data(sample(FIXED[how](), X, Y), {"x": X[:5], "y": Y[:5]})
    at = "a." if "scope" in how else ""
    b = group(idata, "posterior")[f"{at}b"].to_numpy()[..., None]
    assert names(idata, "observed_data") == names(idata, "log_likelihood") == {f"{at}y"}
    assert names(idata, "predictions") == {f"{at}y", f"{at}y_mean", f"{at}y_log_likelihood"}
    for part, x in {"posterior_predictive": X, "predictions": X[:5]}.items():
        np.testing.assert_allclose(group(idata, part)[f"{at}y_mean"], W * x + b, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:init_to_uniform")
def test_substituted_weights_follow_the_sampler():
    """NumPyro's kernels sample a site in spite of `substitute`; a parameter keeps the value."""
    idata = bnn.to_inference_data(sample(handlers.substitute(line, {"w": W}), X, Y), {"x": X[:5]})
    held = group(idata, "posterior")
    expected = held["w"].to_numpy()[..., None] * X[:5] + held["b"].to_numpy()[..., None]
    np.testing.assert_allclose(group(idata, "predictions")["y_mean"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["data", "block"])
def test_fixed_weights_of_guides(how):
    guide = AutoNormal(FIXED[how]())
    result = SimpleNamespace(params={"b_auto_loc": 0.2, "b_auto_scale": 0.1})
    idata = bnn.to_inference_data(result, {"x": X[:5]}, guide=guide, args=(X, Y), num_samples=DRAWS)
    b = group(idata, "posterior")["b"].to_numpy()[..., None]
    assert names(idata, "observed_data") == {"y"}
    np.testing.assert_allclose(group(idata, "predictions")["y_mean"], W * X[:5] + b, rtol=1e-5, atol=1e-5)


def test_assumed_density_filtering_refuses_fixed_weights():
    plain = bnn.models.regression(bnn.nn.MLP([3, 1], "relu"), bnn.priors.Normal(1.0), noise=0.5)
    guide = bnn.guides.AutoADF(handlers.condition(plain, {"net/Dense_1.bias": jnp.asarray([4.0])}))
    with pytest.raises(ValueError, match="2 observed sites"):
        guide.run(jax.random.key(0), X[:, None], Y)


def test_observations_may_be_conditioned_on():
    """Nothing else depends on them, so they are no fixed values; neither are data that are not arguments."""

    def closed():
        line(X, Y)

    for model, args in [(handlers.condition(line, {"y": Y}), (X,)), (closed, ())]:
        idata = bnn.to_inference_data(sample(model, *args), {"x": X[:5]} if args else None)
        np.testing.assert_array_equal(group(idata, "observed_data")["y"], Y)
        assert names(idata, "log_likelihood") == {"y"}
        residuals = group(idata, "posterior_predictive")["y"].to_numpy() - np.asarray(Y)
        assert len(np.unique(residuals)) == residuals.size
    assert names(idata, "posterior_predictive") == {"y", "y_mean"}


def test_observed_inputs_are_those_that_were_given():
    def model(x, y=None):
        x = numpyro.sample("x", dist.Normal(0.0, noise() ** 2 + 1).expand([len(x)]).to_event(1), obs=x)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(W * x, 0.5), obs=y)

    idata = bnn.to_inference_data(sample(model, X, Y), {"x": X[:5] + 3})
    np.testing.assert_allclose(group(idata, "predictions")["y_mean"][0, 0], W * (X[:5] + 3), rtol=1e-6)
    assert names(idata, "log_likelihood") == {"x", "y"}


# -------------------------------------------------------------------------------------- names and arguments


def beside(name, plate="data", site=numpyro.deterministic):
    """A line with one more site, and another name of its plate."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 10.0))
        site(name, w * x)
        with numpyro.plate(plate, len(x)):
            numpyro.sample("y", dist.Normal(w * x, 0.5), obs=y)

    return model


def both(x, y=None):
    numpyro.sample("a/b", dist.Normal(0.0, 1.0))
    line(x, y)
    numpyro.sample("a.b", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (both, r"'a/b' and 'a\.b'.*rename one"),
        (beside("y_mean"), r"site 'y_mean'.*computed from 'y'"),
        (beside("y_log_likelihood"), r"site 'y_log_likelihood'.*computed from 'y'"),
        (beside("chain"), r"'chain'.*axis of the draws"),
        (beside("f", plate="draw"), r"'draw'.*axis of the draws"),
        (beside("f", plate="chain"), r"'chain'.*axis of the draws"),
    ],
    ids=["dots", "y_mean", "y_log_likelihood", "site chain", "plate draw", "plate chain"],
)
def test_names_that_would_be_lost_are_refused(model, message):
    run = sample(model, X, Y)
    with pytest.raises(ValueError, match=message):
        bnn.to_inference_data(run, {"x": X, "y": Y})


def test_a_latent_site_may_be_called_like_a_mean():
    def model(x, y=None):
        w = numpyro.sample("y_mean", dist.Normal(0.0, 10.0))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(w * x, 0.5), obs=y)

    idata = bnn.to_inference_data(sample(model, X, Y))
    w, mean = (group(idata, part)["y_mean"] for part in ("posterior", "posterior_predictive"))
    assert mean.dims == ("chain", "draw", "data")
    np.testing.assert_allclose(mean, w.to_numpy()[..., None] * X, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message", "kind"),
    [
        ({"draws_per_chunk": -1}, "`draws_per_chunk` got -1", ValueError),
        ({"draws_per_chunk": 0}, "`draws_per_chunk` got 0", ValueError),
        ({"coords": {"data": [1, 2]}}, "2 labels of 'data', which has 5 or 12", ValueError),
        ({"coords": {"date": range(N)}}, "`coords` got 'date'.*Did you mean 'data'", ValueError),
        ({"coords": {"draw": [1]}}, "1 labels of 'draw', which has 4", ValueError),
        ({"prediction_coords": {"data": range(N)}}, "12 labels of 'data', which has 5", ValueError),
        ({"prediction_coords": {"rows": range(5)}}, "`prediction_coords` got 'rows'", ValueError),
        ({"dims": {"v": ["unit"]}}, "`dims` got 'v'", ValueError),
        ({"dims": {"w": ["unit"]}}, r"\('unit',\) for 'w' of shape \(\)", ValueError),
        ({"predictions": X[:5]}, r"`predictions` got ndarray.*\{\"x\": x_test\}", TypeError),
    ],
)
def test_options_without_effect_are_refused(run, options, message, kind, draws_not_evaluated):
    with draws_not_evaluated(), pytest.raises(kind, match=message):
        bnn.to_inference_data(run, **{"predictions": {"x": X[:5]}, **options})


def test_new_arguments_with_which_the_model_fails_are_refused(draws_not_evaluated):
    def model(x, y=None):
        b = noise()
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(b * x, 0.5), obs=y)

    done = sample(model, X, Y)
    with (
        draws_not_evaluated(),
        pytest.raises(ValueError, match=r"`predictions` got arguments with which the model fails.*one row per new"),
    ):
        bnn.to_inference_data(done, {"x": X[:5]})


# ------------------------------------------------------------------------------------------------- predict


def network(x, y=None):
    f = bnn.random_network("net", bnn.nn.MLP([3, 1], "tanh", norm=bnn.nn.BatchNorm()), (1,), bnn.priors.Normal(1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(numpyro.deterministic("f", f(x)[:, 0]), 0.5), obs=y)


@pytest.fixture(scope="module")
def exported():
    return bnn.to_inference_data(sample(network, X[:, None], Y), {"x": X[:5, None], "y": Y[:5]})


@pytest.mark.parametrize("file", [False, True])
def test_predictions_of_an_export_are_those_of_the_run(exported, file, tmp_path):
    if file:
        exported.to_netcdf(str(tmp_path / "fit.nc"))
    found = bnn.predict(network, str(tmp_path / "fit.nc") if file else exported, X[:5, None], y=Y[:5])
    expected = group(exported, "predictions")
    assert found.equals(expected)
    without = bnn.predict(network, exported, X[:5, None])
    assert without.equals(expected.drop_vars("y_log_likelihood"))


def test_predictions_with_fixed_weights_and_observed_inputs():
    model = FIXED["data"]()
    idata = bnn.to_inference_data(sample(model, X, Y), {"x": X[:5]})
    assert bnn.predict(model, idata, X[:5]).equals(group(idata, "predictions"))


def activated(activation, factor=1.0):
    def model(x, y=None, known=None):
        f = bnn.random_network("net", bnn.nn.MLP([3, 1], activation), (1,), bnn.priors.Normal(1.0))
        with numpyro.plate("data", len(x)), handlers.mask(mask=True if known is None else known):
            numpyro.sample("y", dist.Normal(factor * f(x)[:, 0], 0.5), obs=y)

    return model


@pytest.mark.parametrize("masked", [False, True])
def test_another_model_of_the_same_sites_is_refused(masked):
    """By what the result holds of some draws at the training rows, also of a part of the draws."""
    known = {"known": jnp.arange(N) > 2} if masked else {}
    idata = bnn.to_inference_data(sample(activated("tanh"), X[:, None], Y, **known), {"x": X[:5, None]})
    part = idata.isel(draw=slice(1, None))
    compared = "posterior_predictive" if masked else "log_likelihood"
    assert bnn.predict(activated("tanh"), part, X[:5, None]).attrs["model_compared"] == compared
    for other in (activated("relu"), activated("tanh", 1.1)):
        with pytest.raises(
            ValueError, match=rf"predict: argument `model` got a model with another `{compared}` of 'y"
        ):
            bnn.predict(other, part, X[:5, None])
    groups = results({name: group(idata, name) for name in ("posterior", "observed_data", "constant_data")})
    assert bnn.predict(activated("tanh"), groups, X[:5, None]).attrs["model_compared"] == "no"


def test_sites_and_draws_that_do_not_match_are_refused(run, exported):
    def learned(x, y=None):
        numpyro.param("s", 0.5)
        line(x, y)

    idata = bnn.to_inference_data(run)
    with pytest.raises(
        ValueError, match=r"no draws of the sites b, w; variables that are no sites net\.BatchNorm_0\.bias"
    ):
        bnn.predict(line, exported, X[:5])
    with pytest.raises(ValueError, match="no values of the parameters s"):
        bnn.predict(learned, idata, X[:5])
    fixed = handlers.substitute(learned, data={"s": 0.5})
    assert bnn.predict(fixed, idata, X[:5]).equals(bnn.predict(line, idata, X[:5]))

    def wide(x):
        return numpyro.sample("b", dist.Normal(jnp.zeros(2), 1.0)) + numpyro.sample("w", dist.Normal())

    with pytest.raises(ValueError, match=r"'b' is \(\), not \(2,\)"):
        bnn.predict(wide, idata, X)
    posterior = results({n: group(exported, n) for n in ("posterior", "observed_data")})
    with pytest.raises(ValueError, match=r"no `constant_data` of \['x'\]"):
        bnn.predict(network, posterior, X[:5, None])


# --------------------------------------------------------------------- what other kernels do not refuse


def column(x, y=None):
    """Observations (N,) of a distribution (N, 1): the forgotten ``[..., 0]``."""
    w = numpyro.sample("w", dist.Normal(0.0, 10.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(w * x[:, None], 0.5), obs=y)


@pytest.mark.filterwarnings("ignore:Missing a plate")
def test_observations_that_count_once_for_each_other_row_are_refused():
    with pytest.raises(ValueError, match=r"`obs` got the site 'y' with a distribution of shape \(12, 1\) and data"):
        bnn.to_inference_data(sample(column, X, Y))


@pytest.mark.parametrize("step", [0, 1])
def test_state_that_the_model_changes_is_refused(step):
    """MCMC held it, and so a key or a count that stays as it is does no harm."""

    def stateful(x, y=None):
        state = numpyro.primitives.mutable("net$state", {"key": jax.random.key(0), "count": jnp.zeros(())})
        state["count"] = state["count"] + step
        line(x + state["count"], y)

    run = sample(stateful, X, Y)
    if step:
        with pytest.raises(ValueError, match=r"`result` got the state .*net\$state\['count'\].*the model changes"):
            bnn.to_inference_data(run)
    else:
        assert "y_mean" in names(bnn.to_inference_data(run), "posterior_predictive")
