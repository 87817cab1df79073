"""What a warm-up chooses: step sizes from curvature and noise, preconditioners, the end
of the optimizer.
"""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from helpers import each, walk
from jax.extend.core import jaxprs_in_params
from numpy.testing import assert_allclose as close
from numpyro.distributions import constraints
from numpyro.infer import MCMC
from scipy import linalg, stats

from numpyro_bnn import infer, metrics, models, nn, priors, to_inference_data

N, B = 120, 4
CHAINS = {"num_chains": 3, "chain_method": "vectorized", "progress_bar": False}
NOISY = ["SGLD", "SGHMC", "MCLMC"]


def quadratic(slopes, curvature, batch_size=None):
    """Gradients ``slopes[i]`` and a curvature: noise is the same everywhere."""
    w = numpyro.sample(
        "w", dist.ImproperUniform(constraints.real_vector, (), slopes.shape[1:])
    )
    numpyro.factor("curvature", -0.5 * w @ curvature @ w)
    with numpyro.plate("data", slopes.shape[0], subsample_size=batch_size) as i:
        numpyro.factor("slope", slopes[i] @ w)


def problem(slopes, curvature, batch_size=B):
    return (
        jnp.asarray(slopes, jnp.float32),
        jnp.asarray(curvature, jnp.float32),
        batch_size,
    )


def in_one_direction(noise, curvature):
    """Two directions, the first with all the gradient noise."""
    signs = np.where(np.arange(N) % 2, 1.0, -1.0)
    slopes = np.stack([signs * (noise * B / N**2) ** 0.5, 0 * signs], 1)
    return problem(slopes, curvature * np.eye(2))


# -- step sizes from curvature and noise -----------------------------------------------

TOLERANCE, HEAT, DECAY = 0.01, 2.0, 0.1


def bias_of_sgld(eps, curvature, noise):
    """The stationary variance of its linear recursion."""
    variance = (HEAT * eps + eps**2 * noise / 4) / (1 - (1 - eps * curvature / 2) ** 2)
    return variance * curvature / HEAT - 1


def bias_of_sghmc(eps, curvature, noise):
    """The stationary covariance of BAOAB, from a discrete Lyapunov equation. The
    tolerance is that of the momenta; their refresh, a = 1 - decay, leaves (1 + a)^2 / 4
    of it to the positions.
    """
    h, refresh = eps**0.5, np.diag([1, 1 - DECAY])
    drift, kick = (
        np.array([[1, h / 2], [0, 1]]),
        np.array([[1, 0], [-h * curvature, 1]]),
    )
    whole, source = (
        drift @ refresh @ drift,
        (1 - (1 - DECAY) ** 2) * HEAT * np.diag([0, 1.0]),
    )
    added = drift @ source @ drift.T + whole @ np.diag([0, h**2 * noise]) @ whole.T
    variance = linalg.solve_discrete_lyapunov(whole @ kick, added)[0, 0]
    return (variance * curvature / HEAT - 1) / (1 - DECAY / 2) ** 2


def bias_of_mclmc(eps, curvature, noise):
    """A refresh turns by 2 eps / L = 1/5 in squared angle, noise V by eps^2 V / (P
    T^2).
    """
    squared = eps**2 / (2 * HEAT**2)
    return (squared * noise + 0.2) / (squared * noise / 2 + 0.2) - 1


@each("name", ["SGLD", "SGHMC", "MCLMC"], fast=1)
def test_chosen_steps_have_the_bias_they_state(name):
    """Where one direction has the noise. It is measured from 128 gradients by each of
    256 chains; an estimate of the largest direction that errs does so upwards, so
    biases may come out a fifth smaller, and never 3 % larger.
    """
    theory, options, (curvature, noise) = {
        "SGLD": (bias_of_sgld, {}, (1.0, 40.0)),
        "SGHMC": (bias_of_sghmc, {"momentum_decay": DECAY}, (1.0, 500.0)),
        "MCLMC": (bias_of_mclmc, {}, (1e-6, 500.0)),
    }[name]
    options |= {
        "bias_tolerance": TOLERANCE,
        "temperature": HEAT,
        "preconditioner": "identity",
    }
    kernel = getattr(infer, name)(
        quadratic, steps_per_draw=1, warm_start=0.0, **options
    )
    state, _ = walk(kernel, 1, in_one_direction(noise, curvature), chains=256)
    power = (
        2 if name == "MCLMC" else 1
    )  # inverse powers of the step are linear in the noise
    eps = np.mean(np.asarray(state.step_size, float) ** -power) ** (-1 / power)
    assert 0.8 * TOLERANCE < theory(eps, curvature, noise) < 1.03 * TOLERANCE


def test_steps_are_chosen_by_the_curvature_behind_the_preconditioner():
    """4 * 0.05 over the largest eigenvalue of L' H L."""
    hessian = np.array([[4.0, 1.0, 0.0], [1.0, 3.0, 0.5], [0.0, 0.5, 30.0]])
    metric = np.array([[9.0, 2.0, 0.0], [2.0, 5.0, 0.1], [0.0, 0.1, 0.05]])
    kernel = infer.SGLD(
        quadratic, preconditioner=metric, warm_start=0.0, steps_per_draw=1
    )
    state, _ = walk(kernel, 1, problem(np.zeros((N, 3)), hessian, None))
    root = np.linalg.cholesky(metric)
    assert float(state.step_size) == pytest.approx(
        0.2 / np.linalg.eigvalsh(root.T @ hessian @ root)[-1], rel=1e-3
    )


@pytest.mark.slow
def test_frictions_are_per_unit_of_time():
    """On a flat density paths in units of sqrt(eps) do not depend on it."""

    def flat():
        numpyro.sample("w", dist.ImproperUniform(constraints.real, (), ()))

    def path(eps):
        options = {"momentum_decay": 0.3, "steps_per_draw": 1, "warm_start": 0.0}
        kernel = infer.SGNHT(flat, eps, **options)
        return walk(kernel, 60, start={"w": jnp.zeros(())})[1]["w"] / eps**0.5

    short, long = path(1e-4), path(0.04)
    close(short, long, rtol=1e-3, atol=1e-4)
    assert np.abs(short[-1]) > 0.1


# -- preconditioners -------------------------------------------------------------------


def test_scales_belong_to_the_sites_they_are_given_for():
    """A step moves by G eps / 2, whatever the order of the sites."""

    def slope():
        for name, size in (("b", 2), ("a", 3), ("c", 1)):
            w = numpyro.sample(
                name, dist.ImproperUniform(constraints.real_vector, (), (size,))
            )
            numpyro.factor(f"f_{name}", w.sum())

    scales = {"b": jnp.array([4.0, 9.0]), "a": 25.0}
    kernel = infer.SGLD(
        slope,
        0.2,
        preconditioner=scales,
        temperature=0.0,
        steps_per_draw=1,
        warm_start=0.0,
    )
    start = {"b": jnp.zeros(2), "a": jnp.zeros(3), "c": jnp.zeros(1)}
    _, draws = walk(kernel, 1, start=start)
    for name, moved in {"b": [0.4, 0.9], "a": [2.5] * 3, "c": [0.1]}.items():
        close(draws[name][0], moved, rtol=1e-5)


@each(
    ("family", "batch_size", "held_out"),
    [
        (dist.Laplace, None, 0.2),
        (dist.Normal, None, 0.0),
        (partial(dist.StudentT, 3.0), 9, 0.0),
    ],
    fast=2,
)
def test_the_optimizer_finds_the_mode_of_standardized_weights(
    family, batch_size, held_out
):
    """Centered weights have no other: with a scale near 0 their density is unbounded.
    Chains would start there, and not leave.

    At this mode s maximizes s exp(-s^2 / 2) times the density of u = w / s, whose
    logarithm has the slope (s^2 - 1) / s.
    """
    x = np.random.default_rng(0).normal(size=(10, 20)).astype(np.float32)
    y = x[:, 0]

    def model(x, y, batch_size):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        w = numpyro.sample("w", family(0.0, scale).expand([20]).to_event(1))
        with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y[i])

    warm = infer.WarmStart(0.5, num_steps=3000, held_out=held_out)
    mcmc = MCMC(
        infer.SGLD(model, 1e-6, warm_start=warm, steps_per_draw=1),
        num_warmup=4,
        num_samples=1,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), x, y, batch_size)
    member = to_inference_data(mcmc, members=True)["posterior"]
    scale, w = (np.asarray(member[name]).squeeze() for name in ("scale", "w"))
    slope = jax.grad(lambda s: family(0.0, 1.0).log_prob(w / s).sum())(scale)
    close(scale**2 - 1, scale * slope, atol=0.05 * scale**2)
    assert w @ w > 0.1


@pytest.mark.slow
def test_scales_come_from_the_squared_gradients_of_the_warm_start():
    """An optimizer that stays: G is one over 1e-5 and the root mean square of the
    gradients per row, of mean 1.

    Signs of the rows are random, so their mean gradient says nothing about the squares.
    """
    size = 1e-5
    lengths = np.array([1.0, 3.0, 0.2]) * size
    slopes = np.random.default_rng(0).choice([-1.0, 1.0], (N, 3)) * lengths
    warm = infer.WarmStart(0.5, num_steps=400, optimizer=optax.sgd(0.0))
    options = {
        "preconditioner": "warm_start",
        "warm_start": warm,
        "temperature": 0.0,
        "steps_per_draw": 1,
    }
    kernel = infer.PSGLD(quadratic, 1e-3 / size, **options)
    _, draws = walk(
        kernel,
        2,
        problem(slopes, np.zeros((3, 3)), 1),
        start={"w": jnp.zeros(3)},
        warmup=2,
    )
    np.testing.assert_array_equal(draws["w"][0], 0.0)
    scale = 1 / (1e-5 + lengths)
    close(
        np.abs(draws["w"][1]),
        5e-4 / size * scale / scale.mean() * N * lengths,
        rtol=1e-3,
    )


def test_gradient_noise_is_learned_from_all_rows_and_recent_gradients_weigh_more():
    """Each gradient is 20 in two directions; weights grow by equal steps over the 15
    transitions in which the chain learns, from the middle of its warm start. The number
    of gradients that weighted ones are worth (Kish) says how far the correlation of the
    two, 1, is shrunk.
    """
    rows = np.tile(np.eye(10), 2)
    warm = infer.WarmStart(0.4, num_steps=8, optimizer=optax.sgd(0.0))
    kernel = infer.SGLD(quadratic, steps_per_draw=3, warm_start=warm)
    args = problem(np.concatenate([rows, -rows]), 1e-4 * np.eye(20), 1)
    state, _ = walk(kernel, 20, args, start={"w": jnp.zeros(20)}, warmup=20)
    root = np.asarray(state.engine.adaptation, float)
    moment = np.linalg.inv(root @ root.T)
    squares = np.diag(moment)
    assert squares.min() > 1  # no row is missing
    close(squares.sum(), 2 * 20**2, rtol=0.01)
    weights = np.arange(15.0)
    worth = 3 * weights.sum() ** 2 / (weights**2).sum()
    correlation = moment / np.sqrt(np.outer(squares, squares))
    shrinkage = 1 - np.diag(correlation[:10, 10:])
    close(shrinkage, 0.01 * (20 / worth) ** 3, rtol=0.02)


@pytest.mark.slow
def test_a_thousand_parameters_get_a_diagonal():
    """Of one shape from the start of the warm-up, when it is one, to its end."""

    def many_weights(y, batch_size):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([1001]).to_event(1))
        with numpyro.plate("data", y.shape[0], subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(w[i], 1.0), obs=y[i])

    kernel = infer.MCLMC(many_weights, steps_per_draw=2)
    state, _ = walk(kernel, 5, (jnp.zeros(1001), 7), warmup=4)
    assert state.engine.adaptation.shape == (1001,)
    assert len(np.unique(state.engine.adaptation)) > 500


def uneven_noise():
    """Noise that differs by 10^8 between directions, and so curvatures."""
    mixed = np.array(
        [[1e3, 2e2, 0, 0], [0, 10.0, 1.0, 0], [0, 0, 1.0, 0.05], [0, 0, 0, 0.1]]
    )
    slopes = np.random.default_rng(0).normal(size=(N, 4)) @ mixed
    slopes = slopes - slopes.mean(0)
    return slopes, slopes.T @ slopes


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", NOISY)
def test_chains_move_in_all_directions_of_uneven_noise_within_the_tolerated_bias(name):
    """Variances 1 to 1.05 along each axis; 4 errors over 300 chains."""
    slopes, curvature = uneven_noise()
    kernel = getattr(infer, name)(quadratic, steps_per_draw=60, warm_start=0.0)
    options = {"start": {"w": jnp.zeros((300, 4))}, "chains": 300, "warmup": 40}
    state, draws = walk(kernel, 120, problem(slopes, curvature), **options)
    squares = (
        (np.asarray(draws["w"][80:], float) @ np.linalg.cholesky(curvature)) ** 2
    ).mean(0)
    error = squares.std(0) / 300**0.5
    assert (error < 0.06).all()
    assert (squares.mean(0) > 1 - 4 * error).all()
    assert (squares.mean(0) < 1.05 + 4 * error).all()
    if (
        name == "MCLMC"
        # by noise averaged over 30 gradients, of which one place may show one and a
        # half times as much
    ):
        assert np.median(state.step_size) > 0.5


# -- the warm start --------------------------------------------------------------------


def one_weight_per_row(num_rows, batch_size):
    """The potential falls in direction i by N / B for each row i."""
    w = numpyro.sample(
        "w", dist.ImproperUniform(constraints.real_vector, (), (num_rows,))
    )
    with numpyro.plate("groups", 2, dim=-2):
        a = numpyro.sample("a", dist.ImproperUniform(constraints.real, (), ()))
        with numpyro.plate("data", num_rows, subsample_size=batch_size, dim=-1) as i:
            numpyro.factor("f", 0.5 * (w[i] + a))


def zeros(num_rows):
    return {"w": jnp.zeros(num_rows), "a": jnp.zeros((2, 1))}


@pytest.mark.slow
def test_every_optimizer_step_has_a_minibatch_of_its_own():
    """Gradient descent counts how often it sees each row."""
    warm = infer.WarmStart(0.5, num_steps=60, optimizer=optax.sgd(1 / 30))
    kernel = infer.SGLD(one_weight_per_row, 1e-3, steps_per_draw=1, warm_start=warm)
    _, draws = walk(kernel, 2, (30, 1), start=zeros(30), warmup=4)
    for number, count in zip((30, 60), draws["w"], strict=True):
        close(count, count.round(), atol=1e-3)
        assert count.sum() == pytest.approx(number, rel=1e-4)
    first, both = draws["w"]
    # The share of the most frequent of 30 rows in 30 draws is above a third with
    # probability 1e-7.
    assert first.max() < 10
    assert np.abs(both - 2 * first).max() > 0.5


def learned_of(num_rows, share, batch_size=None):
    """How far gradient descent moves the weight of each row."""
    warm = infer.WarmStart(
        0.5, num_steps=200, optimizer=optax.sgd(1 / 200), held_out=share
    )
    kernel = infer.SGLD(one_weight_per_row, 1e-3, steps_per_draw=1, warm_start=warm)
    return walk(kernel, 1, (num_rows, batch_size), start=zeros(num_rows), warmup=2)[1][
        "w"
    ][0]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 1])
def test_held_out_rows_are_not_learned_and_the_others_weigh_as_much_as_all(batch_size):
    moved = learned_of(20, 0.25, batch_size)
    assert (moved == 0).sum() == 5
    assert moved.sum() == pytest.approx(20, rel=1e-3)
    if batch_size is None:
        close(moved[moved > 0], 20 / 15, rtol=1e-3)
    np.testing.assert_array_equal(
        moved == 0, learned_of(20, 0.25) == 0
    )  # the same rows in each run


def up(steps):
    """An optimizer that moves up by ``steps``, whatever the gradient."""
    return optax.GradientTransformation(
        lambda p: (),
        lambda g, s, p=None: (
            jax.tree.map(lambda leaf: steps * jnp.ones_like(leaf), g),
            s,
        ),
    )


def measured(y, random=False):
    """The mean of rows that half of the masks of a random model hide."""
    with numpyro.plate("groups", 2, dim=-2):
        a = numpyro.sample("a", dist.Normal(0.0, 100.0))
        kept = 2.0 * jax.random.bernoulli(numpyro.prng_key()) if random else 1.0
        with numpyro.plate("data", y.shape[0], dim=-1) as i:
            numpyro.sample("y", dist.Normal(kept * a, 1.0), obs=y[i])


@pytest.mark.parametrize("random", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sampling_starts_where_held_out_rows_were_predicted_best(random):
    """At 3, the mean of the held-out rows, not at that of the others, nor at the last
    step. Masks of a random model are averaged over: with one of them, every second
    chain would see no row at all, and stay at its first step.
    """
    learned = learned_of(8, 0.25) > 0
    y = jnp.where(learned, 5.0, 3.0)
    warm = infer.WarmStart(
        0.6, num_steps=6, optimizer=up(0.5 if random else 1.0), held_out=0.25
    )
    kernel = infer.SGLD(
        partial(measured, random=random), 1e-9, steps_per_draw=1, warm_start=warm
    )
    start = {"a": jnp.zeros((8, 2, 1))}
    _, draws = walk(kernel, 6, (y,), start=start, chains=8, warmup=10)
    path = np.array([1, 2, 3, 4, 5, 3]) * (0.5 if random else 1.0)
    close(
        draws["a"], np.broadcast_to(path[:, None, None, None], (6, 8, 2, 1)), rtol=1e-3
    )


def test_starts_are_spread():
    """Uniformly between -2 and 2 times the spread."""
    keys = jax.random.split(jax.random.key(0), 200)

    def start(spread):
        kernel = infer.SGLD(quadratic, 1e-3, warm_start=infer.WarmStart(spread=spread))
        return kernel.init(keys, 4, None, problem(np.ones((N, 2)), np.eye(2)), {}).z[
            "w"
        ]

    near, far = (np.asarray(start(spread)) for spread in (1.0, 3.0))
    close(start(6.0), 2 * far, rtol=1e-6)
    for spread, values in ((1, near), (3, far)):
        assert stats.kstest(values.ravel() / spread, "uniform", (-2, 4)).pvalue > 1e-3


@pytest.mark.slow
def test_one_huge_gradient_at_the_start_is_forgotten():
    """Of 1e12: the scale of Adam alone would remember it."""

    def beside_a_wall():
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.factor("wall", -1e12 * jnp.maximum(w[0] - 1.98, 0.0))

    def end_of(warm):
        kernel = infer.SGLD(beside_a_wall, 1e-6, warm_start=warm, steps_per_draw=1)
        state, _ = walk(kernel, 10, start={"w": jnp.array([2.0, 1.0])}, warmup=20)
        return np.ravel(kernel.members(state, (), {})["w"])

    close(end_of(infer.WarmStart(0.5, num_steps=1000)), 0.0, atol=0.02)
    plain = end_of(infer.WarmStart(0.5, num_steps=1000, optimizer=optax.adam(0.01)))
    assert plain[0] > 1.8


# -- gradients that measurements use ---------------------------------------------------


# ------------------------------------------------------------------------------------
# chains that move, or say so


@pytest.mark.slow
def test_a_minibatch_kernel_stays_where_a_rescaling_leaves_the_network_as_it_is():
    """The error of a ReLU network with learned scales is below half that of a constant,
    0.86, for each chain.

    Along these directions gradients have no noise. A preconditioner that is its inverse
    takes steps so long that they leave the curved orbits: errors of 1e2 to 1e6 for some
    chain of each kernel with momentum.
    """
    x = jax.random.normal(jax.random.key(0), (1500, 8))
    f = jnp.sin(x[:, 0]) + 0.5 * x[:, 1] * x[:, 2]
    y = f + 0.1 * jax.random.normal(jax.random.key(1), f.shape)
    model = models.regression(nn.MLP([16, 1], "relu"), priors.Hierarchical())
    kernel = infer.SGHMC(model, steps_per_draw=20)
    args, kwargs = (x[:1000], y[:1000]), {"batch_size": 50}
    state, z = walk(kernel, 65, args, kwargs, warmup=60, chains=3)
    weights_of = kernel.postprocess_fn(args, kwargs)

    @jax.jit
    @jax.vmap
    @jax.vmap
    def outputs(z):
        names = ("Dense_0.kernel", "Dense_0.bias", "Dense_1.kernel", "Dense_1.bias")
        first, bias, last, shift = (weights_of(z)[f"net/{site}"] for site in names)
        return (jax.nn.relu(x[1000:] @ first + bias) @ last + shift)[:, 0]

    means = outputs({name: value[60:] for name, value in z.items()}).mean(0)
    errors = jnp.sqrt(jnp.mean((means - f[1000:]) ** 2, axis=1))
    assert jnp.all(errors < 0.4), errors
    assert kernel.describe(state)["frozen_chains"] == "[]"


@pytest.mark.slow
@pytest.mark.optimized
def test_too_few_steps_for_the_gradient_noise_are_reported():
    """One row in 100: a position is forgotten in 101 * 2 / 0.2 steps; five times that
    are 5000, not 1000.

    Inputs of three sizes make gradient noise of 1 : 100 : 10,000.
    """

    def model(x, y, batch_size=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1.0), obs=y[i])

    x = jax.random.normal(jax.random.key(0), (2000, 3)) * np.array([0.1, 1.0, 10.0])
    y = x @ jnp.array([1.0, -1.0, 0.5]) + jax.random.normal(jax.random.key(1), (2000,))
    mcmc = MCMC(
        infer.SGLD(model, steps_per_draw=50), num_warmup=200, num_samples=20, **CHAINS
    )
    mcmc.run(jax.random.key(2), x, y, 20)
    about = mcmc.sampler.describe(mcmc.last_state)
    assert about["steps_kept"] == 1000
    assert about["steps_needed"] == pytest.approx(5000, rel=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", metrics.HealthWarning)
        checks = {
            finding.name: finding
            for finding in metrics.health(to_inference_data(mcmc)).findings
        }
    assert checks["steps"].verdict == "warning"
    assert "5e+03" in checks["steps"].what


def number_of(name, jaxpr):
    """How often a program, with all inside of it, has an equation."""
    number = 0
    for equation in jaxpr.eqns:
        number += equation.primitive.name == name
        for inner in jaxprs_in_params(equation.params):
            number += number_of(name, inner)
    return number


@pytest.mark.parametrize("warm_up", [0, 2])
def test_caches_are_evaluated_before_they_are_used(warm_up):
    """Without a warm-up that samples, too, and where NaN is an error."""

    def model():
        numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    kernel = infer.MCLMC(model, step_size=0.1, warm_start=0.9, steps_per_draw=2)
    mcmc = MCMC(kernel, num_warmup=warm_up, num_samples=2, progress_bar=False)
    with jax.debug_nans(True):
        mcmc.run(jax.random.key(0))
    assert not mcmc.last_state.engine.refused_in_a_row
