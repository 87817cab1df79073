"""AutoLaplace on its way: the search for the mode, tuned priors and noise, and the
models it refuses.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from helpers import each
from numpy.testing import assert_allclose as close
from scipy import stats
from zoo import NOISE, ZOO, X, Y

from numpyro_bnn import guides

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:.*posterior sds from the mode"),
]


def run(model, structure, *args, **settings):
    guide = guides.AutoLaplace(model, structure)
    return guide, guide.run(jax.random.key(0), *args, progress_bar=False, **settings)


def data():
    return jnp.asarray(X, float), jnp.asarray(Y, float)


def smooth():
    """Targets without noise."""
    return jnp.asarray(X, float), jnp.asarray(np.sin(2 * X[:, 0]) + X[:, 1], float)


# -- the search ------------------------------------------------------------------------


def network(x, y=None, unit=jnp.tanh, noise=0.01, w=1.0, v=1.0):
    """With little noise the mode is in a narrow curved valley."""
    first = numpyro.sample("w", dist.Normal(0.0, w).expand([2, 4]).to_event(2))
    last = numpyro.sample("v", dist.Normal(0.0, v).expand([4]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(unit(x @ first) @ last, noise), obs=y)


@pytest.mark.slow
def test_a_dense_precision_finds_the_mode():
    """Twenty steps of L-BFGS are far from it, those of Newton are not."""
    _, fit = run(network, "full", *smooth(), num_epochs=20)
    assert fit.converged
    assert fit.losses[-1] < fit.losses[:20].min() - 10
    assert np.all(np.diff(fit.losses[20:]) < 0)


@pytest.mark.slow
def test_a_search_that_overflows_ends_at_its_lowest_point():
    """The density is NaN beyond 2, where the first steps go."""

    def model(y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.sample(
            "y", dist.Normal(jnp.where(w > 2.0, jnp.nan, 50.0 * w), 30.0), obs=y
        )

    guide, fit = run(model, "diag", jnp.asarray(140.0))
    assert np.all(np.isfinite(fit.losses))
    w = guide.median(fit.params)["w"]
    lowest = -stats.norm.logpdf(w) - stats.norm.logpdf(140.0, 50.0 * w, 30.0)
    close(lowest, np.min(fit.losses), rtol=1e-6)


def test_epochs_and_rounds_draw_other_rows():
    """The optimizer stays where it starts: losses differ only by their rows."""
    _, fit = run(
        ZOO["line"].model,
        "diag",
        *data(),
        5,
        optimizer=optax.sgd(0.0),
        num_epochs=2,
        tune_prior=True,
        num_rounds=1,  # and another search at the end
    )
    assert len(set(fit.losses.tolist())) == 4


def test_a_start_far_from_the_mode_is_marked():
    with pytest.warns(UserWarning, match="posterior sds from the mode"):
        _, fit = run(
            ZOO["line"].model,
            "full",
            *data(),
            init_params={"w": jnp.full(2, 9.0)},
            num_epochs=0,
        )
    assert not fit.converged
    x, y = data()
    gradient = x.T @ (x @ np.full(2, 9.0) - y) / NOISE**2 + 9.0
    close(fit.grad_norm, np.linalg.norm(gradient), rtol=1e-9)
    # One step of L-BFGS does not reach the mode; those of Newton that follow do.
    start = {"w": jnp.full(2, 9.0)}
    _, fit = run(ZOO["line"].model, "full", *data(), init_params=start, num_epochs=1)
    assert fit.distance < 0.01


def nearly_equal_inputs():
    """Inputs that differ by a thousandth; the exact mode and precision."""
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 1)) + 1e-3 * random.normal(size=(200, 3))
    y = x @ np.array([1.0, -1.0, 0.5]) + 0.01 * random.normal(size=200)
    precision = x.T @ x / 0.01**2 + np.eye(3)
    return x, y, np.linalg.solve(precision, x.T @ y / 0.01**2), precision


def precise(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 0.01), obs=y)


@each("structure", ["diag", "kron"], fast=1)
def test_the_distance_counts_directions_that_a_structure_leaves_out(structure):
    """20 sds away where the posterior is wide: no diagonal sees it."""
    x, y, mode, precision = nearly_equal_inputs()
    variances, vectors = np.linalg.eigh(np.linalg.inv(precision))
    away = 20.0 * np.sqrt(variances[-1]) * vectors[:, -1]
    with pytest.warns(UserWarning, match="posterior sds from the mode"):
        _, fit = run(
            precise, structure, x, y, init_params={"w": mode + away}, num_epochs=0
        )
    assert not fit.converged
    close(fit.distance, 20.0 / 3**0.5, rtol=0.06)  # a tenth of the square is left open


def test_lost_digits_are_announced():
    """In float32 the sds are up to 17 percent wrong."""
    x, y, mode, _ = nearly_equal_inputs()
    args, options = (
        [jnp.asarray(v, jnp.float32) for v in (x, y)],
        {"init_params": {"w": mode}, "num_epochs": 0},
    )
    with (
        jax.enable_x64(False),
        pytest.warns(UserWarning, match=r"rounding changes variances.*Use float64"),
    ):
        run(precise, "low_rank", *args, **options)


# -- tuned priors and noise ------------------------------------------------------------


def log_marginal(prior_sd, noise=NOISE, rows=24):
    """Of a line whose weights have the prior N(0, prior_sd^2)."""
    x, y = X[:rows].astype(float), Y[:rows].astype(float)
    return stats.multivariate_normal(
        np.zeros(len(y)), noise**2 * np.eye(len(y)) + prior_sd**2 * x @ x.T
    ).logpdf(y)


def test_tuned_prior_maximizes_the_evidence():
    """Of the line by five rows: no other prior sd has more, on a grid of 1 percent."""
    rows = [part[:5] for part in data()]
    _, fit = run(ZOO["line"].model, "full", *rows, tune_prior=True, num_rounds=50)
    assert fit.effective_parameters < 1.9  # of two: the prior matters
    evidences = [
        log_marginal(fit.prior_precision["w"] ** -0.5 * factor, rows=5)
        for factor in np.exp(GRID)
    ]
    assert abs(int(np.argmax(evidences)) - 20) <= 1
    close(fit.log_evidence, max(evidences), atol=1e-3)


GRID = np.linspace(-0.2, 0.2, 41)


def normal(name, loc, scale, size=2):
    return numpyro.sample(name, dist.Normal(loc, scale).expand([size]).to_event(1))


def by_parents():
    """A scale whose own prior has a scale."""
    top = numpyro.sample("top", dist.HalfNormal(1.0))
    return numpyro.sample("scale", dist.HalfNormal(top))


def one_scale():
    return numpyro.sample("scale", dist.HalfNormal(1.0))


def base(scale, sd=1.0):
    return numpyro.deterministic("w", scale * normal("w_base", 0.0, sd))


def half_centered(scale):
    return numpyro.deterministic("w", scale**0.5 * normal("w_base", 0.0, scale**0.5))


def shared(scale):
    first = normal("first", 0.0, scale, 1)
    second = numpyro.deterministic("second", scale * normal("second_base", 0.0, 1.0, 1))
    return jnp.concatenate([first, second])


# Weights from their scale, what these have for a scale of 1, and the scales.
LEARNED = {
    "narrow": (lambda scale: base(scale, 0.3), 0.3, one_scale),
    "half": (half_centered, 1.0, one_scale),
    "shared": (shared, 1.0, one_scale),
    "base, parents": (base, 1.0, by_parents),
}


FAST = ("half", "shared", "base, parents")  # shared: a centered one and a base


@each("name", LEARNED, fast=FAST)
def test_learned_prior_scales_maximize_the_evidence_and_their_prior(name):
    """Weights of the line are integrated; the joint mode is elsewhere."""
    weights, sd, scales = LEARNED[name]

    def model(x, y=None):
        f = x @ weights(scales())
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide, fit = run(model, "full", *[part[:5] for part in data()], num_rounds=100)
    median = guide.median(fit.params)
    learned = {site: float(median[site]) for site in ("scale", "top") if site in median}

    def log_density(values):
        """In the coordinates log scale, of which the mode is."""
        total = log_marginal(values["scale"] * sd, rows=5) + sum(
            map(np.log, values.values())
        )
        top = values.get("top", 1.0)
        if "top" in values:
            total += stats.halfnorm.logpdf(top)
        return total + stats.halfnorm.logpdf(values["scale"], scale=top)

    for site, value in learned.items():
        densities = []
        for factor in np.exp(GRID):
            densities.append(log_density(learned | {site: value * factor}))
        assert abs(int(np.argmax(densities)) - 20) <= 1, site


@pytest.mark.slow
def test_tuned_priors_of_a_network_are_at_a_maximum_of_the_evidence():
    """At the same weights another prior sd of any site has less."""
    random = np.random.default_rng(5)
    options = {
        "init_params": {"w": random.normal(size=(2, 4)), "v": random.normal(size=4)},
        "noise": NOISE,
    }
    _, fit = run(
        network, "kron", *data(), tune_prior=True, num_rounds=2, num_epochs=1, **options
    )
    tuned = {name: value**-0.5 for name, value in fit.prior_precision.items()}

    def evidence(sds):
        return run(network, "kron", *data(), num_epochs=0, **options, **sds)[
            1
        ].log_evidence

    best = evidence(tuned)
    close(best, fit.log_evidence, atol=1e-6)
    for name, value in tuned.items():
        for factor in (0.9, 1.1):
            assert evidence(tuned | {name: factor * value}) < best


@pytest.mark.slow
def test_tuned_noise_maximizes_the_evidence():
    """No other noise sd (times its prior) has more; the joint mode has."""
    guide, fit = run(
        ZOO["spread"].model, "full", *data(), tune_prior=True, num_rounds=100
    )
    scale, sigma = (
        fit.prior_precision["w"] ** -0.5,
        float(guide.median(fit.params)["sigma"]),
    )
    # The mode is that of the coordinate log sigma.
    joint = [
        log_marginal(scale, s) + stats.halfnorm.logpdf(s) + np.log(s)
        for s in sigma * np.exp(GRID)
    ]
    assert abs(int(np.argmax(joint)) - 20) <= 1
    other, plain = run(ZOO["spread"].model, "full", *data())
    assert other.median(plain.params)["sigma"] < 0.98 * sigma
    assert fit.converged


# -- models ----------------------------------------------------------------------------


def with_param(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    shift = numpyro.param("shift", jax.random.normal)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w + shift, 1.0), obs=y)


def test_parameters_of_the_model_stay_as_given():
    x, y = data()
    exact = jnp.linalg.solve(x.T @ x + jnp.eye(2), x.T @ (y - 1.0))
    given = {"shift": jnp.asarray(1.0), "w": exact}
    guide, fit = run(with_param, "full", x, y, init_params=given, num_epochs=0)
    assert fit.grad_norm < 1e-9
    assert fit.params["shift"] == 1.0
    close(guide.predictive(fit.params, x).mean, x @ exact + 1.0)


def test_prediction_needs_the_model_of_the_run():
    def model(x, y=None, moved=True):
        shift = numpyro.sample("shift", dist.Normal(0.0, 1.0)) if moved else 0.0
        ZOO["line"].model(x - shift, y)

    guide, fit = run(model, "diag", *data(), num_epochs=0)
    with pytest.raises(ValueError, match=r"without the site .shift. of the run"):
        guide.predictive(fit.params, data()[0], moved=False)


def noise(f):
    return dist.Normal(f, 1.0)


def observed(
    likelihood=noise, prior=lambda: dist.Normal(0.0, 1.0), also=lambda w: None
):
    """y ~ likelihood(x w)."""

    def model(x, y=None):
        w = numpyro.sample("w", prior().expand([x.shape[1]]).to_event(1))
        also(w)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", likelihood(x @ w), obs=y)

    return model


def local(x, y=None):
    with numpyro.plate("data", x.shape[0], subsample_size=4) as i:
        numpyro.sample(
            "y", dist.Normal(numpyro.sample("z", dist.Normal(0.0, 1.0)), 1.0), obs=y[i]
        )


def discrete(w):
    numpyro.sample("on", dist.Bernoulli(0.5))


def student(scale=1.0):
    return dist.StudentT(3.0, 0.0, scale)


def heavy():
    return student(numpyro.sample("scale", dist.HalfNormal(1.0)))


# Model, structure and options, and the refusal.
REFUSED = {
    "likelihood": (
        observed(lambda f: dist.Cauchy(f, 1.0)),
        "full",
        {},
        "a Cauchy likelihood.*AutoLaplaceApprox",
    ),
    "heavy tails": (
        observed(lambda f: dist.StudentT(2.0 + jnp.exp(f), f, 1.0)),
        "full",
        {},
        "'y' with a random `df`. Give a number for `df`",
    ),
    "factor": (
        observed(also=lambda w: numpyro.factor("extra", -jnp.sum(w**4))),
        "full",
        {},
        "'extra' with a factor",
    ),
    "discrete": (observed(also=discrete), "full", {}, "the discrete latent site 'on'"),
    "local": (local, "full", {}, "the local site 'z' in plate 'data'"),
    "Laplace prior": (
        observed(prior=dist.Laplace),
        "full",
        {},
        "'w' with a Laplace prior, which has no second",
    ),
    "scale of another family": (
        observed(prior=heavy),
        "full",
        {},
        "'w', whose StudentT prior depends on {'scale'}",
    ),
    "other prior in kron": (
        observed(prior=student),
        "kron",
        {},
        "'w', whose prior is not Normal with one scale",
    ),
    "parameter": (
        with_param,
        "full",
        {},
        "a model with the parameter 'shift', and no value for it",
    ),
    "random numbers": (
        ZOO["random inside"].model,
        "full",
        {},
        "random numbers of its own",
    ),
    "nothing to tune": (
        observed(prior=student),
        "full",
        {"tune_prior": True},
        "without a site that has a Normal",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_it_cannot_take_are_refused(name):
    model, structure, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        run(model, structure, *data(), **options)


def test_too_many_unknowns_of_a_dense_precision_are_refused():
    with pytest.raises(
        ValueError,
        match=(
            r"'full' for 10001 unknowns.*Use .kron., .low_rank. or .diag., or `sites=`"
        ),
    ):
        run(observed(), "full", jnp.ones((3, 10_001)), jnp.ones(3))


def test_a_refused_run_leaves_the_predictions_of_the_fit():
    def model(x, y=None):
        slope = numpyro.param("slope", jnp.array(1.0))
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(slope * w * x, 0.5), obs=y)

    x, y = jnp.arange(6.0), 2 * jnp.arange(6.0)
    guide, fit = run(model, "full", x, y, init_params={"slope": jnp.array(1.0)})
    before = guide.predictive(fit.params, x).mean
    start = {"slope": jnp.array(5.0), "bogus": jnp.array(1.0)}
    with pytest.raises(ValueError, match="bogus"):
        guide.run(jax.random.key(1), x, y, init_params=start, progress_bar=False)
    np.testing.assert_array_equal(guide.predictive(fit.params, x).mean, before)
