"""Regression with infinitely wide networks: exactness, trained ensembles, scales from the data, results for ArviZ."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from scipy import stats

from numpyro_bnn import _arviz, nn, priors, random_network, to_inference_data
from numpyro_bnn.infinite import empirical_ntk, gp_regression, nngp, ntk, prior_fit
from numpyro_bnn.infinite.regression import factorize, with_noise, zero_mean_log_density

NET = nn.MLP([8, 8, 1], "erf")
PRIOR = priors.Normal(1.5, bias_scale=0.5)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(25, 2))
    return x, np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=25)


# ------------------------------------------------------------------------------------------- exact regression


def test_regression_is_conditioning(data):
    """Against the joint normal of training and new targets, conditioned by dense linear algebra."""
    x, y = data
    gp = gp_regression(NET, x[:20], y[:20], noise_sd=0.3, prior=PRIOR)
    with jax.enable_x64(True):
        k = np.asarray(nngp(NET, x, prior=PRIOR))
    a = k[:20, :20] + 0.09 * np.eye(20)
    mean, covariance = gp.predict(x[20:])
    np.testing.assert_allclose(mean, k[20:, :20] @ np.linalg.solve(a, y[:20]), rtol=1e-9)
    expected = k[20:, 20:] - k[20:, :20] @ np.linalg.solve(a, k[:20, 20:])
    np.testing.assert_allclose(covariance, expected, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(gp.predict(x[20:], diagonal=True).covariance, np.diagonal(expected), rtol=1e-8)
    joint = stats.multivariate_normal(np.zeros(20), a)
    np.testing.assert_allclose(gp.log_marginal_likelihood, joint.logpdf(y[:20]), rtol=1e-10)
    density = stats.norm(mean, np.sqrt(np.diagonal(expected) + 0.09)).logpdf(y[20:])
    np.testing.assert_allclose(gp.log_density(x[20:], y[20:]), density, rtol=1e-8)
    assert gp.jitter == 0


def test_outputs_share_the_kernel(data):
    x, y = data
    both = gp_regression(NET, x, np.stack([y, -2 * y], 1), noise_sd=0.3)
    one, other = (gp_regression(NET, x, scale * y, noise_sd=0.3) for scale in (1, -2))
    new = x[:4] + 0.1
    np.testing.assert_allclose(both.predict(new).mean[:, 1], other.predict(new).mean, rtol=1e-9)
    np.testing.assert_allclose(
        both.log_marginal_likelihood, one.log_marginal_likelihood + other.log_marginal_likelihood, rtol=1e-10
    )
    assert both.sample(jax.random.key(0), new, (3,)).shape == (3, 4, 2)


def test_draws_have_the_moments_of_the_prediction(data):
    """Six standard errors of 4000 draws, for 4 means and 10 second moments."""
    x, y = data
    gp = gp_regression(NET, x, y, noise_sd=0.3)
    new = x[:4] + 0.5
    mean, covariance = gp.predict(new)
    draws = gp.sample(jax.random.key(1), new, (4000,))
    variance = np.diagonal(covariance)
    assert (np.abs(draws.mean(0) - mean) < 6 * np.sqrt(variance / 4000)).all()
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / 4000)
    assert (np.abs(np.cov(draws.T) - covariance) < 6 * error).all()
    both = gp_regression(NET, x, np.stack([y, -2 * y], 1), noise_sd=0.3).sample(jax.random.key(2), new, (4000,))
    assert (np.abs(both.mean(0) - np.stack([mean, -2 * mean], 1)) < 6 * np.sqrt(variance / 4000)[:, None]).all()
    for output in (0, 1):
        assert (np.abs(np.cov(both[..., output].T) - covariance) < 6 * error).all()


def test_marginal_likelihood_in_hyperparameters(data):
    x, y = data

    def evidence(values):
        prior = {"*.bias": dist.Normal(0.0, values[0]), "*": priors.Hierarchical()}
        scales = {f"Dense_{i}.kernel_scale": values[1] for i in range(3)}
        covariance = with_noise(nngp(NET, x, prior=prior, scales=scales), values[2])
        return zero_mean_log_density(covariance, jnp.asarray(y))[0]

    with jax.enable_x64(True):
        at = jnp.array([0.5, 1.5, 0.3])
        expected = gp_regression(NET, x, y, noise_sd=0.3, prior=PRIOR).log_marginal_likelihood
        np.testing.assert_allclose(evidence(at), expected, rtol=1e-10)
        steps = 1e-5 * jnp.eye(3)
        differences = [(evidence(at + step) - evidence(at - step)) / 2e-5 for step in steps]
        np.testing.assert_allclose(jax.jit(jax.grad(evidence))(at), differences, rtol=1e-6)


def test_jitter_is_reported(data):
    """Two copies of every input and next to no noise: the kernel is singular to rounding."""
    x, y = data
    double = gp_regression(NET, np.repeat(x, 2, 0), np.repeat(y, 2), noise_sd=1e-12)
    assert 0 < double.jitter < 1e-10
    with jax.enable_x64(True):
        singular = jnp.ones((3, 3))
        lower, jitter = factorize(singular)
        np.testing.assert_allclose(lower @ lower.T, singular + jitter * jnp.eye(3), rtol=1e-12)
        assert jnp.isnan(factorize(-singular).lower).any()
        # N rounding errors of the mean of the diagonal are enough here.
        least = factorize(jnp.diag(jnp.array([1.0, 1.0, 0.0]))).jitter
        np.testing.assert_allclose(least, 2 * np.finfo(float).eps, rtol=1e-12)


def test_gradient_of_the_density_of_several_outputs(x64):
    """Of -tr(Y' A^-1 Y) / 2 - K log |A| / 2, by autodiff of the formula, in a symmetric direction."""
    rng = np.random.default_rng(0)
    root, direction, y = (jnp.asarray(rng.normal(size=shape)) for shape in ((4, 4), (4, 4), (4, 3)))
    matrix, direction = root @ root.T + jnp.eye(4), direction + direction.T

    def formula(step):
        moved = matrix + step * direction
        return -0.5 * jnp.sum(y * jnp.linalg.solve(moved, y)) - 1.5 * jnp.linalg.slogdet(moved)[1]

    found = jax.grad(lambda step: zero_mean_log_density(matrix + step * direction, y)[0])(0.0)
    np.testing.assert_allclose(found, jax.grad(formula)(0.0), rtol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_sd": 0.0}, "noise_sd"),
        ({"noise_sd": 0.1, "y": np.zeros(3)}, "mismatched"),
        ({"noise_sd": 0.1, "y": np.full(25, np.inf)}, "NaN or infinite"),
        ({"noise_sd": 0.1, "y": np.zeros((25, 1, 1))}, r"\(N, K\)"),
    ],
)
def test_errors_of_regression(data, options, message):
    x, y = data
    with pytest.raises(ValueError, match=message):
        gp_regression(NET, x, options.pop("y", y), **options)


@pytest.mark.parametrize("shape", [(4, 1), (3,), (1,), ()])
def test_observations_of_another_shape_are_refused(data, shape):
    """NumPy would broadcast them, to densities of every pair or of one number at all inputs."""
    x, y = data
    gp = gp_regression(NET, x[:20], y[:20], noise_sd=0.1)
    with pytest.raises(ValueError, match=r"log_density: argument `y` got shape .*Pass \(4,\)"):
        gp.log_density(x[20:24], np.ones(shape))


def test_predictions_at_inputs_of_another_kind_are_refused(data):
    gp = gp_regression(NET, *data, noise_sd=0.1)
    with pytest.raises(ValueError, match="like the data"):
        gp.predict(np.zeros((2, 3)))


# ------------------------------------------------------------------------------ the tangent kernel of finite width


def train(net, params, sds, x, y, rate, steps):
    """Gradient descent on standardized parameters."""

    def loss(p):
        return 0.5 * jnp.sum((net.apply(p, x)[:, 0] - y) ** 2)

    def step(p, _):
        slopes = jax.grad(loss)(p)
        return {name: p[name] - rate * sds[name] ** 2 * slopes[name] for name in p}, None

    return jax.lax.scan(step, params, None, steps)[0]


def prior_draw(net, shape, prior, key):
    names = net.param_shapes(shape)
    keys = jax.random.split(key, len(names))
    return {
        name: prior(name, dims).expand(dims).sample(k) for (name, dims), k in zip(names.items(), keys, strict=True)
    }


def standard_deviations(net, shape, prior):
    return {name: jnp.asarray(prior(name, dims).scale) for name, dims in net.param_shapes(shape).items()}


def test_empirical_kernel_is_the_product_of_jacobians(data):
    x = jnp.asarray(data[0][:5], jnp.float32)
    net = nn.Sequential([nn.Dense(4), nn.LayerNorm(), "tanh", nn.Dense(3)])
    params = prior_draw(net, (2,), PRIOR, jax.random.key(0))
    sds = standard_deviations(net, (2,), PRIOR)
    jacobians = jax.jacobian(lambda p: net.apply(p, x))(params)
    full = sum(jnp.einsum("akp,blp->abkl", *2 * (jacobians[name].reshape(5, 3, -1) * sds[name],)) for name in params)
    found = empirical_ntk(net, params, x, prior=PRIOR, full=True, block_size=2)
    np.testing.assert_allclose(found, full, rtol=1e-4, atol=1e-5)
    mean = np.einsum("abkk->ab", full) / 3
    np.testing.assert_allclose(empirical_ntk(net, params, x, prior=PRIOR), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        empirical_ntk(net, params, x, x[:2], prior=PRIOR, block_size=3), mean[:, :2], rtol=1e-4, atol=1e-5
    )


def kernels_before_and_after(width, networks, x, y):
    net = nn.MLP([width, width, 1], "erf")
    sds = standard_deviations(net, (2,), PRIOR)
    trained = jax.jit(lambda p: train(net, p, sds, x, y, 0.01, 100))
    for i in range(networks):
        start = prior_draw(net, (2,), PRIOR, jax.random.key(1000 * width + i))
        yield empirical_ntk(net, start, x, prior=PRIOR), empirical_ntk(net, trained(start), x, prior=PRIOR)


@pytest.mark.slow
def test_finite_kernels_approach_the_limit_and_move_less():
    """The squared distance of a drawn network's kernel is c / width; its change in training falls with the width."""
    x = jnp.array([[1.0, 0.2], [-0.5, 0.8], [0.3, -1.0]])
    y = jnp.array([1.0, -1.0, 0.5])
    limit = np.asarray(ntk(NET, x, prior=PRIOR))
    widths, distance, change = (16, 32, 64, 128), [], []
    for width in widths:
        pairs = [np.stack(pair) for pair in kernels_before_and_after(width, 40, x, y)]
        before, after = np.swapaxes(pairs, 0, 1)
        distance.append(np.mean((before - limit) ** 2) / np.mean(limit**2))
        change.append(np.mean(np.linalg.norm(after - before, axis=(1, 2)) / np.linalg.norm(before, axis=(1, 2))))
    # 40 networks know a mean square to about 0.3 and so the slope to 0.15 at most: the bounds are three of these.
    assert abs(np.polyfit(np.log(widths), np.log(distance), 1)[0] + 1) < 0.45
    assert np.polyfit(np.log(widths), np.log(change), 1)[0] < -0.4
    assert (np.diff(change) < 0).all()


@pytest.mark.parametrize(
    ("net", "change", "message"),
    [
        (nn.MLP([4, 1], "relu", nn.BatchNorm()), {}, "LayerNorm"),
        (nn.MLP([4, 1], "relu"), {"Dense_0.kernel": np.zeros((2, 3))}, "one array for each"),
    ],
)
def test_errors_of_empirical_kernels(net, change, message):
    params = net.init(jax.random.key(0), (2,)) | change
    with pytest.raises(ValueError, match=message):
        empirical_ntk(net, params, np.zeros((3, 2)))


# ------------------------------------------------------------------------------------------ scales from the data


def test_scales_are_found():
    """Targets drawn from the process: the evidence is at least that of the truth, and no direction improves it."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(120, 2))
    truth = {"Dense_0.*": priors.Normal(2.0, bias_scale=0.5), "Dense_1.*": priors.Normal(3.0, bias_scale=0.2)}
    net = nn.MLP([8, 1], "erf")
    with jax.enable_x64(True):
        k = np.asarray(nngp(net, x, prior=truth))
    y = np.linalg.cholesky(k + 0.04 * np.eye(120)) @ rng.normal(size=120)
    found = prior_fit(net, x, y, log_sd=float("inf"))
    true = gp_regression(net, x, y, noise_sd=0.2, prior=truth).log_marginal_likelihood
    assert found.converged
    assert found.start < true < found.log_marginal_likelihood < true + 12  # five parameters: chi^2 / 2, 1e-4
    again = gp_regression(net, x, y, noise_sd=found.noise_sd, prior=found.prior)
    np.testing.assert_allclose(again.log_marginal_likelihood, found.log_marginal_likelihood, atol=1e-6)
    assert abs(found.noise_sd - 0.2) < 6 * 0.2 / 240**0.5
    for factor in (0.8, 1.25):
        moved = gp_regression(net, x, y, noise_sd=factor * found.noise_sd, prior=found.prior)
        assert moved.log_marginal_likelihood < found.log_marginal_likelihood


def test_found_prior_serves_networks(data):
    """By input, with a normalization, and nested names: `random_network` takes what is returned."""
    x, y = data
    block = nn.Residual(nn.Sequential([nn.LayerNorm(), "relu", nn.Dense(6)]))
    net = nn.Sequential([nn.Dense(6), block, nn.Dense(1)])
    found = prior_fit(net, x, y, ard=True, max_steps=3)
    assert found.scales["Dense_0.kernel"].shape == (2,)

    def model():
        return random_network("net", net, (2,), found.prior)(jnp.asarray(x, jnp.float32))

    with handlers.seed(rng_seed=0), handlers.trace() as trace:
        assert np.isfinite(model()).all()
    assert set(trace) == {f"net/{name}" for name in net.param_shapes((2,))}
    sd = np.sqrt(trace["net/Dense_0.kernel"]["fn"].variance)
    np.testing.assert_allclose(sd[:, 0] * 2**0.5, found.scales["Dense_0.kernel"], rtol=1e-5)


def test_scales_that_data_leave_open_stay_near_the_start(data):
    """ReLU layers trade their scales: the weak prior settles them, at next to no cost in evidence."""
    x, y = data
    net = nn.MLP([8, 8, 1], "relu")
    held, free = (prior_fit(net, x, y, log_sd=log_sd) for log_sd in (3.0, float("inf")))
    logs = np.log([held.scales[f"Dense_{i}.kernel"] for i in range(3)])
    assert np.ptp(logs) < 2.0
    assert 0 <= free.log_marginal_likelihood - held.log_marginal_likelihood + 1e-3 < 2.0


def test_a_strong_prior_holds_the_scales_and_leaves_the_noise(data):
    """Scales stay within 0.01 of the start of their logarithms; the noise, begun at 3, is the best given them."""
    x, y = data
    found = prior_fit(NET, x, y, prior=PRIOR, noise_sd=3.0, log_sd=1e-3)
    start = {"Dense_0.kernel": PRIOR.scale, "Dense_1.kernel": PRIOR.scale}
    for name, scale in start.items():
        assert abs(np.log(found.scales[name] / scale)) < 0.01
    for factor in (0.98, 1.02):
        moved = gp_regression(NET, x, y, noise_sd=factor * found.noise_sd, prior=found.prior)
        assert moved.log_marginal_likelihood < found.log_marginal_likelihood


@pytest.mark.parametrize(
    ("net", "options", "message"),
    [
        (nn.MLP([4, 1], "relu"), {"log_sd": 0.0}, "log_sd"),
        (nn.Sequential([nn.LayerNorm(False, False), nn.Dense(4), "relu", nn.Dense(1)]), {"ard": True}, "begins with"),
        (nn.MLP([4, 1], "relu", nn.BatchNorm()), {}, "LayerNorm"),
    ],
)
def test_errors_of_prior_fit(data, net, options, message):
    with pytest.raises(ValueError, match=message):
        prior_fit(net, *data, **options)


# ---------------------------------------------------------------------------------------------------- results


def test_results_for_arviz(data):
    """Six standard errors of 800 draws; the log density of new points is that of the closed form."""
    x, y = data
    gp = gp_regression(NET, x[:20], y[:20], noise_sd=0.3, prior=PRIOR)
    idata = to_inference_data(gp, predictions={"x": x[20:], "y": y[20:]}, num_samples=800)
    names = {"posterior", "posterior_predictive", "predictions", "log_likelihood", "observed_data", "constant_data"}
    assert names | {"predictions_constant_data"} == set(_arviz.group_names(idata))
    mean, covariance = gp.predict(x[20:])
    predicted = _arviz.group(idata, "predictions")
    assert predicted["y_mean"].dims == ("chain", "draw", "data")
    drawn = predicted["y_mean"].to_numpy()[0]
    assert (np.abs(drawn.mean(0) - mean) < 6 * np.sqrt(np.diagonal(covariance) / 800)).all()
    assert (np.abs(predicted["y"].to_numpy()[0].var(0) / (np.diagonal(covariance) + 0.09) - 1) < 6 / 400**0.5).all()
    density = stats.norm(drawn, 0.3).logpdf(y[20:])
    np.testing.assert_allclose(predicted["y_log_likelihood"].to_numpy()[0], density, rtol=1e-6)
    at_data = _arviz.group(idata, "posterior")["f"].to_numpy()[0]
    density = stats.norm(at_data, 0.3).logpdf(y[:20])
    np.testing.assert_allclose(_arviz.group(idata, "log_likelihood")["y"].to_numpy()[0], density, rtol=1e-6)
    attrs = _arviz.attrs(idata)
    assert attrs["algorithm"] == "GPRegression"
    assert attrs["log_marginal_likelihood"] == gp.log_marginal_likelihood
    np.testing.assert_array_equal(_arviz.group(idata, "observed_data")["y"], y[:20])


def test_functions_at_new_rows_and_noise_are_drawn_independently(data):
    """Predicted at the data: f in both groups, and the noise of both, four pairs of 300 x 20 independent numbers.

    Numbers of one draw are divided by their Cholesky factor; failure rate 6e-7 for each pair.
    """
    x, y = (part[:20] for part in data)
    gp = gp_regression(NET, x, y, noise_sd=0.3, prior=PRIOR)
    idata = to_inference_data(gp, predictions={"x": x}, num_samples=300)
    mean, covariance = gp.predict()
    lower = np.linalg.cholesky(covariance + 1e-9 * np.eye(20))
    streams = []
    for name in ("posterior_predictive", "predictions"):
        group = _arviz.group(idata, name)
        f = group["y_mean"].to_numpy()[0]
        streams += [np.linalg.solve(lower, (f - mean).T).T.ravel(), (group["y"].to_numpy()[0] - f).ravel()]
    correlation = np.corrcoef(streams) - np.eye(4)
    assert np.abs(correlation).max() < 5 / 6000**0.5


@pytest.mark.parametrize(
    ("predictions", "message"),
    [
        ({"z": np.zeros((2, 2))}, "'z'"),
        ({"y": np.zeros(2)}, "'x'"),
        ({"x": np.zeros((2, 3))}, "one row per new point"),
    ],
)
def test_wrong_predictions_are_refused(data, predictions, message):
    gp = gp_regression(NET, *data, noise_sd=0.3)
    with pytest.raises(ValueError, match=message):
        to_inference_data(gp, predictions=predictions)


def test_process_beside_a_wide_network(data):
    """Given its hidden layer a network of width 4000 is linear: its exact posterior is near the process."""
    x, y = data
    width, s2, b2 = 4000, 1.5**2, 0.25
    net = nn.MLP([width, 1], "erf")
    mean, covariance = gp_regression(net, x, y, noise_sd=0.3, prior=PRIOR).predict()
    with handlers.seed(rng_seed=0):
        kernel = numpyro.sample("w", PRIOR("Dense_0.kernel", (2, width)).expand([2, width]))
        bias = numpyro.sample("b", PRIOR("Dense_0.bias", (width,)).expand([width]))
    h = np.asarray(jax.scipy.special.erf(x @ kernel + bias), np.float64)
    k = s2 * h @ h.T / width + b2
    a = k + 0.09 * np.eye(25)
    # The kernel has relative errors of a few 1 / sqrt(4000); so has what follows, within the posterior sd.
    sd = np.sqrt(np.diagonal(covariance))
    assert np.abs(k @ np.linalg.solve(a, y) - mean).max() < 0.3 * sd.max()
