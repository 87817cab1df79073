"""`to_inference_data`: what would go wrong without an error."""

from contextlib import contextmanager
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from helpers import each, group, results
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


def by_guide(model, predictions):
    """The export of a guide that was not fitted, which compiles less than chains do."""
    params = {f"{site}_auto_loc": 0.2 for site in ("w", "b", "a/b", "a.b")}
    params |= {name.replace("loc", "scale"): 0.1 for name in params}
    options = {"guide": AutoNormal(model), "args": (X, Y), "num_samples": DRAWS}
    return bnn.to_inference_data(SimpleNamespace(params=params), predictions, **options)


@pytest.fixture(scope="module")
def run():
    """A run, after a refusal compiled the tiny programs that read a model."""
    done = sample(line, X, Y)
    with pytest.raises(ValueError, match="`dims` got 'v'"):
        bnn.to_inference_data(done, {"x": X[:5]}, dims={"v": ["unit"]})
    return done


def names(idata, name):
    return {str(variable) for variable in group(idata, name).data_vars}


@pytest.fixture
def draws_not_evaluated(compiled):
    """A context in which no program is compiled: no draw is evaluated."""

    @contextmanager
    def context():
        before = len(compiled)
        yield
        assert len(compiled) == before, "something was computed before the refusal"

    return context


# -- fixed values ----------------------------------------------------------------------


def within(x, y=None):
    with handlers.condition(data={"w": W}):
        return line(x, y)


FIXED = {
    "data": lambda: handlers.condition(line, {"w": W}),
    "function": lambda: handlers.condition(
        line, condition_fn=lambda site: W if site["name"] == "w" else None
    ),
    "within": lambda: within,
    "block": lambda: handlers.block(handlers.condition(line, {"w": W}), hide=["w"]),
    "scope outside": lambda: handlers.scope(
        handlers.condition(line, {"w": W}), prefix="a"
    ),
}


@each(
    ("how", "guide"),
    [("data", False), *((how, True) for how in FIXED)],
    fast=[("data", False), ("within", True)],
)
def test_fixed_weights_are_part_of_the_model(how, guide):
    model, new = FIXED[how](), {"x": X[:5], "y": Y[:5]}
    idata = (
        by_guide(model, new)
        if guide
        else bnn.to_inference_data(sample(model, X, Y), new)
    )
    at = "a." if "scope" in how else ""
    b = group(idata, "posterior")[f"{at}b"].to_numpy()[..., None]
    assert names(idata, "observed_data") == names(idata, "log_likelihood") == {f"{at}y"}
    expected = {f"{at}{name}" for name in ("y", "y_mean", "y_log_likelihood")}
    assert names(idata, "predictions") == expected
    for part, x in {"posterior_predictive": X, "predictions": X[:5]}.items():
        mean = group(idata, part)[f"{at}y_mean"]
        np.testing.assert_allclose(mean, W * x + b, rtol=1e-5, atol=1e-5)
    if how == "data" and not guide:
        again = bnn.predict(model, idata, X[:5], y=Y[:5])
        assert again.equals(group(idata, "predictions"))


def closed():
    line(X, Y)


@pytest.mark.parametrize(
    ("model", "args"), [(handlers.condition(line, {"y": Y}), (X,)), (closed, ())]
)
def test_observations_may_be_conditioned_on(model, args):
    """Nothing else depends on them, so they are no fixed values."""
    idata = bnn.to_inference_data(sample(model, *args))
    np.testing.assert_array_equal(group(idata, "observed_data")["y"], Y)
    assert names(idata, "log_likelihood") == {"y"}
    assert names(idata, "posterior_predictive") == {"y", "y_mean"}
    residuals = group(idata, "posterior_predictive")["y"].to_numpy() - Y
    assert len(np.unique(residuals)) == residuals.size


def inputs_observed(x, y=None):
    spread = numpyro.sample("b", dist.Normal(0.0, 10.0)) ** 2 + 1
    x = numpyro.sample(
        "x", dist.Normal(0.0, spread).expand([len(x)]).to_event(1), obs=x
    )
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(W * x, 0.5), obs=y)


def test_observed_inputs_are_those_that_were_given_and_scored_with_their_targets():
    x, y = X[:5] + 3, Y[:5]
    idata = by_guide(inputs_observed, {"x": x, "y": y})
    found = group(idata, "predictions")
    np.testing.assert_allclose(found["y_mean"][0, 0], W * x, rtol=1e-6)
    scores = scipy.stats.norm.logpdf(y, W * x, 0.5)
    np.testing.assert_allclose(found["y_log_likelihood"][0, 0], scores, rtol=1e-4)
    assert names(idata, "log_likelihood") == {"x", "y"}


# -- names and arguments ---------------------------------------------------------------


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
        (beside("f", plate="draw"), r"'draw'.*axis of the draws"),
    ],
    ids=["dots", "y_mean", "plate"],
)
def test_names_that_would_be_lost_are_refused(model, message):
    with pytest.raises(ValueError, match=message):
        by_guide(model, {"x": X, "y": Y})


@pytest.mark.parametrize(
    ("options", "message", "kind"),
    [
        ({"draws_per_chunk": 0}, "`draws_per_chunk` got 0", ValueError),
        (
            {"coords": {"data": [1, 2]}},
            "2 labels of 'data', which has 5 or 12",
            ValueError,
        ),
        (
            {"coords": {"date": range(N)}},
            "`coords` got 'date'.*Did you mean 'data'",
            ValueError,
        ),
        ({"coords": {"draw": [1]}}, "1 labels of 'draw', which has 4", ValueError),
        (
            {"prediction_coords": {"data": range(N)}},
            "12 labels of 'data', which has 5",
            ValueError,
        ),
        ({"dims": {"v": ["unit"]}}, "`dims` got 'v'", ValueError),
        ({"dims": {"w": ["unit"]}}, r"\('unit',\) for 'w' of shape \(\)", ValueError),
        (
            {"predictions": X[:5]},
            r"`predictions` got ndarray.*\{\"x\": x_test\}",
            TypeError,
        ),
    ],
)
def test_options_without_effect_are_refused(
    run, options, message, kind, draws_not_evaluated
):
    with draws_not_evaluated(), pytest.raises(kind, match=message):
        bnn.to_inference_data(run, **{"predictions": {"x": X[:5]}, **options})


def test_new_arguments_with_which_the_model_fails_are_refused(draws_not_evaluated):
    def model(x, y=None):
        with numpyro.plate("data", N):
            numpyro.sample(
                "y", dist.Normal(numpyro.sample("w", dist.Normal()) * x, 0.5), obs=y
            )

    done = sample(model, X, Y)
    message = r"`predictions` got arguments with which the model fails.*one row per new"
    with pytest.raises(ValueError, match=message):
        # compiles the tiny programs with which a model is read
        bnn.to_inference_data(done, {"x": X[:4]})
    with draws_not_evaluated(), pytest.raises(ValueError, match=message):
        bnn.to_inference_data(done, {"x": X[:5]})


def test_sites_of_single_training_rows_do_not_fit_others():
    def model(x, y=None):
        with numpyro.plate("data", len(x)):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(z * x, 0.5), obs=y)

    message = r"model fails \('z' is \(5,\), its draws \(12,\)\)"
    with pytest.raises(ValueError, match=message):
        bnn.to_inference_data(sample(model, X, Y), {"x": X[:5]})


def over_time(x, knots, offset, y=None):
    """Bumps at as many knots as training rows, of inputs (T, N)."""
    kernel = numpyro.sample(
        "net/kernel", dist.Normal(0.0, 10.0).expand([len(knots)]).to_event(1)
    )
    bumps = jnp.exp(-((x.mean(0)[:, None] - knots[:, 0]) ** 2))
    with numpyro.plate("data", x.shape[1]) as i:
        numpyro.sample("y", dist.Normal((bumps @ kernel)[i] + offset[i], 0.5), obs=y)


def export_over_time(new, model=over_time):
    args = np.stack([X, X + 1, X - 1]), np.stack([X, np.ones(N)], 1), Y, Y
    loc, scale = np.linspace(-1, 1, N), np.full(N, 0.1)
    params = {"net/kernel_auto_loc": loc, "net/kernel_auto_scale": scale}
    options = {"guide": AutoNormal(model), "args": args, "num_samples": DRAWS}
    return bnn.to_inference_data(SimpleNamespace(params=params), new, **options)


@pytest.mark.parametrize(
    "knots", [{}, {"knots": np.stack([X, np.ones(N)], 1)}], ids=["kept", "given"]
)
def test_rows_are_followed_through_the_model_and_not_found_by_length(knots):
    new = {"x": np.stack([X, X + 1, X - 1])[:, :5], "offset": Y[:5], **knots}
    idata = export_over_time(new)
    kernel = group(idata, "posterior")["net.kernel"].to_numpy()
    expected = (
        np.einsum("mk,csk->csm", np.exp(-((X[:5, None] - X) ** 2)), kernel) + Y[:5]
    )
    np.testing.assert_allclose(
        group(idata, "predictions")["y_mean"], expected, rtol=1e-4, atol=1e-4
    )
    # The guide's draws and the noise of rows share no random numbers.
    rows = group(idata, "posterior_predictive")
    noise, weights = (rows["y"] - rows["y_mean"])[0], kernel[0] - np.linspace(-1, 1, N)
    assert np.abs(np.corrcoef(noise, weights)[:DRAWS, DRAWS:]).max() < 0.99
    for part, rows in {"constant_data": N, "predictions_constant_data": 5}.items():
        data = group(idata, part)
        assert data["x"].dims == ("x_dim_0", "data")
        assert data["x"].shape == (3, rows)
        assert data.get("knots", data["x"]).dims in [
            ("knots_dim_0", "knots_dim_1"),
            ("x_dim_0", "data"),
        ]
    found = {
        finding.name: finding.value for finding in bnn.metrics.health(idata).findings
    }
    assert found["constant_inputs"] == 0  # of inputs, and not of knots


def by_mean(x, knots, offset, y=None):
    over_time(x, knots, jnp.full(x.shape[1], offset.mean()), y)


@pytest.mark.parametrize("model", [over_time, by_mean])
def test_old_rows_beside_as_many_new_ones_are_refused(model):
    with pytest.raises(
        ValueError, match="no value for 'offset', which has one row per training point"
    ):
        export_over_time({"x": np.stack([X, X, X])}, model)


# -- predict ---------------------------------------------------------------------------


def network(activation="tanh", factor=1.0):
    def model(x, y=None):
        f = bnn.random_network(
            "net", bnn.nn.MLP([3, 1], activation), (1,), bnn.priors.Normal(1.0)
        )
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(factor * f(x)[:, 0], 0.5), obs=y)

    return model


@pytest.fixture(scope="module")
def exported():
    return bnn.to_inference_data(
        sample(network(), X[:, None], Y), {"x": X[:5, None], "y": Y[:5]}
    )


def test_predictions_of_an_export_are_those_of_the_run(exported, tmp_path):
    exported.to_netcdf(str(tmp_path / "fit.nc"))
    expected = group(exported, "predictions")
    assert bnn.predict(
        network(), str(tmp_path / "fit.nc"), X[:5, None], y=Y[:5]
    ).equals(expected)
    assert bnn.predict(network(), exported, X[:5, None]).equals(
        expected.drop_vars("y_log_likelihood")
    )


def test_another_model_of_the_same_sites_is_refused(exported):
    """By what a result holds of some draws at the training rows."""
    idata, compared = exported, "log_likelihood"
    part = idata.isel(draw=slice(1, None))
    assert bnn.predict(network(), part, X[:5, None]).attrs["model_compared"] == compared
    another = rf"predict: argument `model` got a model with another `{compared}` of 'y"
    for other in (network("relu"), network("tanh", 1.1)):
        with pytest.raises(ValueError, match=another):
            bnn.predict(other, part, X[:5, None])
    kept = ("posterior", "observed_data", "constant_data")
    groups = results({name: group(idata, name) for name in kept})
    assert bnn.predict(network(), groups, X[:5, None]).attrs["model_compared"] == "no"
    # Densities are compared relative to their size: float32 rounds those of outliers.
    mean, far = group(idata, "posterior_predictive")["y_mean"], Y + 1e4
    density = mean.copy(data=scipy.stats.norm.logpdf(far, mean, 0.5))
    groups = {
        "posterior": group(idata, "posterior"),
        "constant_data": group(idata, "constant_data"),
        "observed_data": group(idata, "observed_data").assign(y=("data", far)),
        "log_likelihood": density.to_dataset(name="y"),
    }
    found = bnn.predict(network(), results(groups), X[:5, None])
    assert found.attrs["model_compared"] == "log_likelihood"


def test_sites_and_draws_that_do_not_match_are_refused(run, exported):
    def learned(x, y=None):
        numpyro.param("s", 0.5)
        line(x, y)

    def wide(x):
        return numpyro.sample("b", dist.Normal(jnp.zeros(2), 1.0)) + numpyro.sample(
            "w", dist.Normal()
        )

    idata = bnn.to_inference_data(run, log_likelihood=False, posterior_predictive=False)
    for model, result, message in (
        (
            line,
            exported,
            (
                r"no draws of the sites b, w; variables that are no sites "
                r"net\.Dense_0\.bias"
            ),
        ),
        (learned, idata, "no values of the parameters s"),
        (wide, idata, r"'b' is \(\), not \(2,\)"),
        (
            line,
            results({"posterior": group(idata, "posterior")}),
            "sites y. It has no group `observed_data`.*what `runs.start` returns",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            bnn.predict(model, result, X[:5])
    fixed = handlers.substitute(learned, data={"s": 0.5})
    assert bnn.predict(fixed, idata, X[:5]).equals(bnn.predict(line, idata, X[:5]))


# -- what other kernels do not refuse --------------------------------------------------


def test_state_that_the_model_changes_is_refused():
    def stateful(x, y=None):
        state = numpyro.primitives.mutable(
            "net$state", {"key": jax.random.key(0), "count": jnp.zeros(())}
        )
        state["count"] = state["count"] + 1
        line(x + state["count"], y)

    run = sample(stateful, X, Y)
    message = r"`result` got the state .*net\$state\['count'\].*the model changes"
    with pytest.raises(ValueError, match=message):
        bnn.to_inference_data(run)


def test_sites_that_only_the_prediction_has_are_refused():
    """The future of a series, which `Predictive` of NumPyro draws."""

    def ahead(x, y=None, steps=0):
        line(x, y)
        if steps:
            numpyro.sample("future", dist.Normal(0.0, 1.0).expand([steps]))

    for options in ({"steps": 3}, {"x": X[:5], "steps": 3}):
        with pytest.raises(ValueError, match=r"`predictions` .*'future'.*Predictive"):
            by_guide(ahead, options)
    exported = by_guide(ahead, None)
    with pytest.raises(ValueError, match=r"sites future\. .*`numpyro.infer.Predictive"):
        bnn.predict(ahead, exported, X, steps=3)
