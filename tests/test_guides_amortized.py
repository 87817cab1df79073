"""AutoAmortized: the exact posterior of factor analysis, unbiased minibatches, new data, the contract of a guide."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Predictive, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoGuideList
from scipy import stats

from numpyro_bnn import nn
from numpyro_bnn.guides import AutoAmortized, AutoMeanField
from numpyro_bnn.guides.inference_network import Posterior

N, K, L = 60, 5, 2
NOISE = 0.7
_DRAWS = np.random.default_rng(0)
LOADINGS = _DRAWS.normal(size=(L, K))
# Loadings with orthogonal rows: the posterior of z has independent components.
ORTHOGONAL = np.linalg.qr(LOADINGS.T)[0].T * np.array([[2.0], [1.0]])


def make_data(loadings, num=N, seed=1):
    draws = np.random.default_rng(seed)
    return draws.normal(size=(num, L)) @ loadings + NOISE * draws.normal(size=(num, K))


def factor_analysis(loadings):
    """y_n = z_n W + e_n with known W."""

    def model(y, batch_size=None):
        with numpyro.plate("data", y.shape[0], subsample_size=batch_size) as n:
            z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([L]).to_event(1))
            numpyro.sample("y", dist.Normal(z @ jnp.asarray(loadings), NOISE).to_event(1), obs=y[n])

    return model


def exact(loadings):
    """Matrix A and covariance S of the posterior N(y A, S) of z."""
    covariance = np.linalg.inv(np.eye(L) + loadings @ loadings.T / NOISE**2)
    return loadings.T @ covariance / NOISE**2, covariance


def log_evidence(loadings, y):
    return stats.multivariate_normal(np.zeros(K), loadings.T @ loadings + NOISE**2 * np.eye(K)).logpdf(y)


def as_it_is(rows):
    return rows


def exact_params(loadings):
    """Parameters at which a guide without hidden layer is the exact posterior."""
    matrix, covariance = exact(loadings)
    factor = np.linalg.cholesky(covariance)
    sd = np.diag(factor)
    below = (factor / sd[:, None])[np.tril_indices(L, -1)]
    flat = {"kernel": np.zeros((K, L)), "bias": np.log(np.expm1(sd))}
    params = {
        "z_auto_loc.kernel": matrix,
        "z_auto_loc.bias": np.zeros(L),
        **{f"z_auto_scale.{part}": value for part, value in flat.items()},
        "auto_data_tril.kernel": np.zeros((K, len(below))),
        "auto_data_tril.bias": below,
    }
    return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


@pytest.mark.parametrize(("loadings", "full_rank"), [(LOADINGS, True), (ORTHOGONAL, False)])
def test_at_the_exact_posterior_every_draw_gives_the_evidence(loadings, full_rank):
    """log p(y, z) - log q(z | y) = log p(y) whatever z is: no Monte Carlo error."""
    y = jnp.asarray(make_data(loadings), jnp.float32)
    model = factor_analysis(loadings)
    guide = AutoAmortized(model, "y", as_it_is, full_rank=full_rank)
    SVI(model, guide, optax.adam(0.1), Trace_ELBO()).init(jax.random.key(0), y)
    params = exact_params(loadings)
    loss = jax.jit(lambda key: Trace_ELBO().loss(key, params, model, guide, y))
    for seed in range(3):
        np.testing.assert_allclose(-loss(jax.random.key(seed)), log_evidence(loadings, y).sum(), rtol=2e-5)
    draws = guide.sample_posterior(jax.random.key(9), params, y[:3], sample_shape=(20_000,))["z"]
    matrix, covariance = exact(loadings)
    # 6 numbers of mean, 9 of covariance: 5 standard errors, a failure rate of 1e-5.
    error = np.sqrt(np.diag(covariance) / len(draws))
    assert np.all(np.abs(draws.mean(0) - y[:3] @ matrix) < 5 * error)
    np.testing.assert_allclose(np.cov(draws[:, 1].T), covariance, atol=5 * 2**0.5 * 0.3 / len(draws) ** 0.5)


def gaussian_kl(mean, covariance, other_mean, other):
    """KL of N(mean, covariance) from N(other_mean, other), row by row."""
    precision = np.linalg.inv(other)
    shift = np.einsum("ni,ij,nj->n", mean - other_mean, precision, mean - other_mean)
    log_dets = np.linalg.slogdet(other)[1] - np.linalg.slogdet(covariance)[1]
    return 0.5 * (np.trace(precision @ covariance) + shift - len(other) + log_dets)


@pytest.fixture(scope="module")
def learned():
    """A network with a hidden layer, trained on minibatches."""
    y = jnp.asarray(make_data(LOADINGS, 1000), jnp.float32)
    model = factor_analysis(LOADINGS)
    guide = AutoAmortized(model, "y", nn.Sequential([nn.Dense(16), "tanh"]), full_rank=True)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, 3000))
    svi = SVI(model, guide, optimizer, Trace_ELBO())
    return model, guide, svi.run(jax.random.key(0), 3000, y, batch_size=100, progress_bar=False).params, y


@pytest.mark.slow
@pytest.mark.parametrize("new", [False, True])
def test_learns_the_exact_posterior(learned, new):
    """The mean is linear in y, the covariance the same for all rows; on rows never seen as well.

    Tolerance: the evidence of a row has an sd of 1.6 nats over rows; 0.03 nats are 2 % of that.
    """
    _, guide, params, y = learned
    y = jnp.asarray(make_data(LOADINGS, 400, seed=5), jnp.float32) if new else y
    _, _, posterior = guide._read(params, (y,), {})
    matrix, covariance = exact(LOADINGS)
    factor = np.asarray(posterior.scale, float)
    loc, y = np.asarray(posterior.loc, float), np.asarray(y, float)
    kl = [
        gaussian_kl(loc[n : n + 1], factor[n] @ factor[n].T, y[n : n + 1] @ matrix, covariance) for n in range(len(y))
    ]
    assert 0 <= np.mean(kl) < 0.03
    medians = guide.median(params, y)["z"]
    np.testing.assert_allclose(medians, posterior.loc)
    low, high = guide.quantiles(params, [0.05, 0.95], y)["z"]
    np.testing.assert_allclose((high - low) / 2 / 1.6449, posterior.sd, rtol=1e-3)


@pytest.mark.slow
def test_elbo_is_below_the_evidence_by_the_kl(learned):
    model, guide, params, y = learned
    losses = jax.jit(
        jax.vmap(lambda key: Trace_ELBO().loss(key, params, model, guide, y)),
    )(jax.random.split(jax.random.key(3), 50))
    evidence = log_evidence(LOADINGS, y).sum()
    error = np.std(losses) / 50**0.5
    assert -5 * error < evidence + np.mean(losses) < 0.03 * len(y) + 5 * error


# ------------------------------------------------------------------------------------------------ minibatches


def hierarchy(y, total=None, batch_size=None):
    """Global sites before and after, two local sites, one of them positive, and a deterministic one."""
    total = y.shape[0] if total is None else total
    loadings = numpyro.sample("loadings", dist.Normal(0.0, 1.0).expand([L, K]).to_event(2))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("data", total, subsample_size=batch_size) as n:
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([L]).to_event(1))
        gain = numpyro.sample("gain", dist.Gamma(3.0, 3.0))
        mean = numpyro.deterministic("mean", gain[:, None] * (z @ loadings))
        rows = y if y.shape[0] == batch_size else y[n]
        numpyro.sample("y", dist.Normal(mean, noise).to_event(1), obs=rows)


@pytest.fixture(scope="module")
def rows():
    return jnp.asarray(make_data(LOADINGS, 12), jnp.float32)


_NETWORK = nn.Sequential([nn.Dense(4), "tanh"])


def started(rows, full_rank, **options):
    """A guide and parameters away from the start, so that rows differ."""
    guide = AutoAmortized(hierarchy, "y", _NETWORK, full_rank=full_rank, **options)
    svi = SVI(hierarchy, guide, optax.adam(0.05), Trace_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), rows, batch_size=6))
    draws = np.random.default_rng(0)
    moved = {name: value + 0.2 * draws.normal(size=value.shape) for name, value in params.items()}
    kept = {name: value for name, value in params.items() if name.endswith("_scale")}  # positive
    return guide, {name: jnp.asarray(value, jnp.float32) for name, value in {**moved, **kept}.items()}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="independent"),
        pytest.param(True, id="full rank", marks=pytest.mark.slow),
    ],
)
def fitted(request, rows):
    return started(rows, request.param)


@pytest.mark.slow
def test_minibatches_are_unbiased(fitted, rows):
    """Mean over 4000 minibatches and draws against all rows: 5 standard errors."""
    guide, params = fitted

    def losses(keys, **options):
        loss = Trace_ELBO().loss
        return jax.jit(jax.vmap(lambda key: loss(key, params, hierarchy, guide, rows, **options)))(keys)

    first, second = jax.random.split(jax.random.key(2))
    whole = losses(jax.random.split(first, 4000))
    parts = losses(jax.random.split(second, 4000), batch_size=3)
    error = np.sqrt((np.var(whole) + np.var(parts)) / 4000)
    assert abs(np.mean(whole) - np.mean(parts)) < 5 * error
    # A minibatch that lost its factor N / B = 4 would be found.
    assert abs(0.5 * np.mean(parts)) > 5 * error


def test_model_sees_the_rows_of_the_guide(fitted, rows):
    guide, params = fitted
    seeded = handlers.seed(handlers.substitute(guide, data=params), 3)
    of_guide = handlers.trace(seeded).get_trace(rows, batch_size=5)
    of_model = handlers.trace(handlers.replay(handlers.seed(hierarchy, 4), of_guide)).get_trace(rows, batch_size=5)
    index = of_guide["data"]["value"]
    assert len(set(index.tolist())) == 5
    np.testing.assert_array_equal(of_model["y"]["value"], rows[index])
    for name in ("z", "gain"):
        assert of_guide[name]["scale"] == of_model[name]["scale"] == 12 / 5
        assert of_guide[name]["fn"].event_dim == of_model[name]["fn"].event_dim
    medians = guide.median(params, rows)
    if not guide.full_rank:
        np.testing.assert_allclose(of_guide["z"]["fn"].mean, medians["z"][index], rtol=1e-5, atol=1e-6)


def test_minibatch_given_as_an_argument(fitted, rows):
    """``plate("data", N, len(y))``: as many rows as the plate draws are taken as they are."""
    guide, params = fitted
    seeded = handlers.seed(handlers.substitute(guide, data=params), 3)
    trace = handlers.trace(seeded).get_trace(rows[:4], 1000, 4)
    assert trace["z"]["scale"] == 250
    assert trace["z"]["value"].shape == (4, L)
    draws = guide.sample_posterior(jax.random.key(0), params, rows[:4], 1000, 4)
    assert draws["mean"].shape == (4, K)


def test_density_of_both_forms_agrees(rows):
    """With a zero triangle the joint statement and its change of variables are the independent statements."""
    densities, values, common = [], {}, {}
    for full_rank in (False, True):
        guide, params = started(rows, full_rank)
        if not full_rank:
            common = params
        params = {name: common.get(name, value) for name, value in params.items()}
        params = {name: 0 * value if "tril" in name else value for name, value in params.items()}
        seeded = handlers.seed(handlers.substitute(guide, data=params), 0)
        if full_rank:
            flat = jnp.concatenate([values["z"], jnp.log(values["gain"])[:, None]], -1)
            seeded = handlers.substitute(seeded, data={"_auto_data_latent": flat})
        trace = handlers.trace(seeded).get_trace(rows)
        values = {name: trace[name]["value"] for name in ("z", "gain")}
        sites = [trace[n] for n in ("z", "gain", "_auto_data_latent") if n in trace]
        densities.append(sum(site["fn"].log_prob(site["value"]) for site in sites))
        assert densities[-1].shape == (12,)
    np.testing.assert_allclose(*densities, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("full_rank", [False, True])
def test_local_sites_start_at_their_prior(full_rank):
    """Normal and log-normal; the spread of the latter, from 1000 draws, has a relative error of 4 %."""

    def model(y):
        with numpyro.plate("data", len(y)):
            z = numpyro.sample("z", dist.Normal(0.7, 2.0))
            gain = numpyro.sample("gain", dist.LogNormal(0.2, 0.5))
            numpyro.sample("y", dist.Normal(gain * z, 1.0), obs=y[:, 0])

    guide = AutoAmortized(model, "y", as_it_is, full_rank=full_rank)
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace(jnp.ones((4, 1)))
    params = {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
    low, high = (guide.quantiles(params, stats.norm.cdf([-1.0, 1.0]), jnp.ones((4, 1)))[n] for n in ("z", "gain"))
    np.testing.assert_allclose(low, np.array([-1.3, 2.7])[:, None] * np.ones(4), rtol=1e-4)
    np.testing.assert_allclose(np.log(high), np.array([-0.3, 0.7])[:, None] * np.ones(4), atol=0.1)


# --------------------------------------------------------------------------------------------------- contract


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(jax.random.key(4), id="typed"),
        pytest.param(jax.random.PRNGKey(4), id="legacy", marks=pytest.mark.slow),
    ],
)
def test_posterior_of_old_and_new_rows(fitted, rows, key):
    guide, params = fitted
    again = pickle.loads(pickle.dumps(guide))
    for given, length in (((rows,), 12), ((rows[:3],), 3), ((), 12)):
        draws = again.sample_posterior(key, params, *given, sample_shape=(2, 5))
        shapes = {name: value.shape[2:] for name, value in draws.items()}
        assert shapes == {
            "loadings": (L, K), "noise": (), "z": (length, L), "gain": (length,), "mean": (length, K),
        }  # fmt: skip
        assert bool((draws["gain"] > 0).all())
        expected = draws["gain"][..., None] * jnp.einsum("...nl,...lk->...nk", draws["z"], draws["loadings"])
        np.testing.assert_allclose(draws["mean"], expected, rtol=1e-4, atol=1e-5)
        low, middle, high = again.quantiles(params, [0.1, 0.5, 0.9], *given)["gain"]
        np.testing.assert_allclose(middle, again.median(params, *given)["gain"], rtol=1e-5)
        assert bool((low < high).all())
    np.testing.assert_allclose(again.median(params, rows[:3])["z"], again.median(params, rows)["z"][:3], rtol=1e-5)


def test_joint_posterior_of_a_row_has_the_covariance_of_its_factor():
    """L = [[1, 0], [2, 0.5]]: L L' = [[1, 2], [2, 4.25]], by 20,000 draws to 5 standard errors."""
    factor = np.array([[1.0, 0.0], [2.0, 0.5]])
    posterior = Posterior(jnp.array([[0.3, -1.0]]), jnp.asarray(factor)[None])
    np.testing.assert_allclose(posterior.sd, [[1.0, 4.25**0.5]], rtol=1e-6)
    draws = np.asarray(posterior.draw(jax.random.key(0), (20_000,)), np.float64)[:, 0]
    covariance = factor @ factor.T
    variance = np.diagonal(covariance)
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / 20_000)
    assert (np.abs(np.cov(draws.T) - covariance) < 5 * error).all()
    assert (np.abs(draws.mean(0) - [0.3, -1.0]) < 5 * np.sqrt(variance / 20_000)).all()


def test_draws_have_the_stated_quantiles(fitted, rows):
    """Share of 20,000 draws below the 0.2 quantile: 5 standard errors for each of 12 rows x 3 sites."""
    guide, params = fitted
    below = guide.quantiles(params, [0.2], rows)
    draws = guide.sample_posterior(jax.random.key(0), params, rows, sample_shape=(20_000,))
    for name in ("z", "gain"):
        share = np.mean(draws[name] < below[name], axis=0)
        np.testing.assert_allclose(share, 0.2, atol=5 * (0.16 / 20_000) ** 0.5)


@pytest.mark.parametrize(
    "loss",
    [
        Trace_ELBO(),
        pytest.param(TraceMeanField_ELBO(), marks=pytest.mark.slow),
        pytest.param(RenyiELBO(num_particles=2), marks=pytest.mark.slow),
    ],
    ids=lambda e: type(e).__name__,
)
def test_losses(fitted, rows, loss):
    guide, params = fitted
    if guide.full_rank and isinstance(loss, TraceMeanField_ELBO):
        loss = TraceMeanField_ELBO(num_particles=3)
    step = jax.jit(jax.value_and_grad(lambda p: loss.loss(jax.random.key(0), p, hierarchy, guide, rows)))
    value, slope = step(params)
    assert np.isfinite(value)
    assert all(bool(jnp.isfinite(part).all()) for part in jax.tree.leaves(slope))


def test_predictive(fitted, rows):
    guide, params = fitted
    found = Predictive(hierarchy, guide=guide, params=params, num_samples=3)(jax.random.key(0), rows)
    assert found["mean"].shape == (3, 12, K)
    draws = Predictive(guide, params=params, num_samples=3)(jax.random.key(0), rows)
    assert draws["gain"].shape == (3, 12)


@pytest.mark.slow
def test_other_guides_for_the_rest(rows):
    """Point estimates of the other sites; or a part of a list, with another guide beside it."""
    guide, params = started(rows, False, rest=AutoDelta)
    assert params["noise_auto_loc"].shape == ()
    assert guide.median(params, rows)["noise"] == params["noise_auto_loc"]

    together = AutoGuideList(hierarchy)
    together.append(
        AutoAmortized(
            handlers.block(handlers.seed(hierarchy, 0), hide=["loadings", "noise", "mean"]),
            "y",
            _NETWORK,
            prefix="local",
        )
    )
    together.append(AutoMeanField(handlers.block(handlers.seed(hierarchy, 0), hide=["z", "gain", "mean"])))
    fit = SVI(hierarchy, together, optax.adam(0.01), Trace_ELBO()).run(jax.random.key(0), 3, rows, progress_bar=False)
    assert np.isfinite(fit.losses).all()
    draws = together.sample_posterior(jax.random.key(0), fit.params, rows, sample_shape=(2,))
    assert {name: value.shape for name, value in draws.items()} == {
        "z": (2, 12, L), "gain": (2, 12), "loadings": (2, L, K), "noise": (2,),
    }  # fmt: skip


def test_plates_inside_the_rows():
    """Several latents per row along another plate; a chosen plate among two."""

    def model(y, batch_size=None):
        neurons = numpyro.plate("neurons", K, dim=-1)
        with neurons:
            offset = numpyro.sample("offset", dist.Normal(1.0, 0.1))
        with numpyro.plate("data", y.shape[0], subsample_size=batch_size, dim=-2) as n, neurons:
            z = numpyro.sample("z", dist.Normal(0.5, 2.0))
            numpyro.sample("y", dist.Normal(z + offset, 1.0), obs=y[n])

    y = jnp.asarray(make_data(LOADINGS, 12), jnp.float32)
    guide = AutoAmortized(model, "y", _NETWORK, plate="data")
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    state = svi.init(jax.random.key(0), y, batch_size=4)
    params = svi.get_params(state)
    # It starts at the prior, for every row.
    np.testing.assert_allclose(guide.median(params, y)["z"], 0.5 * np.ones((12, K)), rtol=1e-5)
    np.testing.assert_allclose(guide._read(params, (y,), {})[2].sd, 2 * np.ones((12, K)), rtol=1e-5)
    assert params["offset_auto_loc"].shape == (K,)
    state, loss = svi.update(state, y, batch_size=4)
    assert np.isfinite(loss)
    draws = guide.sample_posterior(jax.random.key(0), svi.get_params(state), y[:2], sample_shape=(3,))
    assert draws["z"].shape == (3, 2, K)


def test_own_inputs_and_plates(rows):
    """Inputs from a function of the arguments; plates from the user."""

    def plates(y, total=None, batch_size=None):
        return numpyro.plate("data", y.shape[0], subsample_size=2)

    guide = AutoAmortized(hierarchy, lambda y, *_, **__: y[:, :2] ** 2, _NETWORK, create_plates=plates)

    def values(key):
        trace = handlers.trace(handlers.seed(guide, key)).get_trace(rows, batch_size=2)
        return {name: site["value"] for name, site in trace.items()}

    found = jax.eval_shape(values, jax.random.key(0))
    assert found["auto_network/Dense_0.kernel"].shape == (2, 4)
    assert found["z"].shape == (2, L)


# ----------------------------------------------------------------------------------------------------- errors


def no_plate(y):
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(z, 1.0).expand([len(y), K]).to_event(2), obs=y)


def two_plates(y):
    with numpyro.plate("neurons", K):
        numpyro.sample("offset", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("z", dist.Normal(0.0, 1.0))


def two_subsampled(y):
    with numpyro.plate("data", len(y), dim=-1), numpyro.plate("other", 5, subsample_size=2, dim=-2):
        numpyro.sample("z", dist.Normal(0.0, 1.0))


def imputed(y):
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y[:, 0], obs_mask=y[:, 0] > 0)


_PLAIN = factor_analysis(LOADINGS)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: AutoAmortized(_PLAIN, 3), "argument `inputs` got 3"),
        (lambda: AutoAmortized(_PLAIN, "y", 3), "argument `network` got 3"),
        (lambda: AutoAmortized(_PLAIN, "z"), "Arguments of the model: y, batch_size"),
        (lambda: AutoAmortized(_PLAIN, "batch_size"), "posterior of local latents needs their data"),
        (lambda: AutoAmortized(_PLAIN, lambda y: y[0]), r"Give \(N, D\)"),
        (lambda: AutoAmortized(_PLAIN, lambda y: y[:5]), "5 rows, and plate 'data' has 12, of which it draws 12"),
        (lambda: AutoAmortized(_PLAIN, "y", nn.MLP([4, 2], norm=nn.BatchNorm())), "nn.LayerNorm"),
        (lambda: AutoAmortized(_PLAIN, "y", lambda rows: rows[:2]), "one row of features per row"),
        (lambda: AutoAmortized(no_plate, "y"), "lie in no plate"),
        (lambda: AutoAmortized(two_plates, "y"), 'Say which holds the data points, e.g. `plate="neurons"`'),
        (lambda: AutoAmortized(two_plates, "y", plate="x"), "Plates with latent sites: 'neurons', 'data'"),
        (lambda: AutoAmortized(two_subsampled, "y", plate="data"), "Only the plate 'data' may be subsampled"),
        (lambda: AutoAmortized(imputed, "y"), "'y_unobserved' of `obs_mask`"),
    ],
)  # fmt: skip
def test_errors(make, fault, rows):
    with pytest.raises((ValueError, TypeError), match=fault), handlers.seed(rng_seed=0):
        make()(rows)
