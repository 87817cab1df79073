"""Latent sites inside subsampled plates: the posterior of the model that declares them outside, at its cost."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.reparam import LocScaleReparam
from scipy import stats

from numpyro_bnn import infer, nn, priors, random_network, to_inference_data
from numpyro_bnn.infer.target import bind

G, B, N = 7, 3, 4  # groups, those of a minibatch, rows of a group
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(G, N)), jnp.float32)
Y = jnp.asarray(0.5 * X + RNG.normal(size=(G, 1)) + 0.3 * RNG.normal(size=(G, N)), jnp.float32)


def observe(y, i, mean):
    numpyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=y[i])


def effects(inside):
    """One effect per group."""

    def model(x, y, batch_size=B):
        tau = numpyro.sample("tau", dist.LogNormal(-0.5, 0.5))
        with numpyro.plate("all", G):
            b = None if inside else numpyro.sample("b", dist.Normal(0.3, tau))
        with numpyro.plate("groups", G, subsample_size=batch_size) as i:
            rows = numpyro.sample("b", dist.Normal(0.3, tau)) if inside else b[i]
            observe(y, i, rows[:, None] * x[i])

    return model


def constrained(inside):
    """Positive effects, of which one prior depends on the data of the group, and one on another effect."""

    def model(x, y, batch_size=B):
        def draw(x):
            s = numpyro.sample("s", dist.LogNormal(x[:, 0], 0.5))
            return s, numpyro.sample("t", dist.Gamma(2.0, s))

        with numpyro.plate("all", G):
            s, t = (None, None) if inside else draw(x)
        with numpyro.plate("groups", G, subsample_size=batch_size) as i:
            s, t = draw(x[i]) if inside else (s[i], t[i])
            observe(y, i, s[:, None] * x[i] + t[:, None])

    return model


def vectors(inside):
    """Effects of intercept and slope."""

    def model(x, y, batch_size=B):
        prior = dist.MultivariateNormal(jnp.zeros(2), jnp.array([[1.0, 0.3], [0.3, 0.5]]))
        with numpyro.plate("all", G):
            b = None if inside else numpyro.sample("b", prior)
        with numpyro.plate("groups", G, subsample_size=batch_size) as i:
            rows = numpyro.sample("b", prior) if inside else b[i]
            observe(y, i, rows[:, :1] + rows[:, 1:] * x[i])

    return model


def crossed(inside):
    """Two subsampled plates, nested, with effects of the first and of both."""

    def model(x, y, batch_size=B):
        rows = numpyro.plate("groups", G, subsample_size=batch_size, dim=-2)
        columns = numpyro.plate("columns", N, subsample_size=2, dim=-1)
        if not inside:
            with numpyro.plate("all", G, dim=-2):
                b = numpyro.sample("b", dist.Normal(0.0, 1.0))
                with numpyro.plate("every", N, dim=-1):
                    c = numpyro.sample("c", dist.LogNormal(0.0, 1.0))
        with rows as i:
            own = numpyro.sample("b", dist.Normal(0.0, 1.0)) if inside else b[i]
            with columns as j:
                cell = numpyro.sample("c", dist.LogNormal(0.0, 1.0)) if inside else c[i[:, None], j]
                numpyro.sample("y", dist.Normal(own + cell, 1.0), obs=y[i[:, None], j])

    return model


def missing(inside):
    """Observations that are missing are latent sites, which NumPyro makes."""

    def model(x, y, batch_size=B):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.plate("all", G):
            if not inside:
                missed = numpyro.sample("y_unobserved", dist.Normal(mu * x[:, 1], 1.0).mask(x[:, 0] <= 0))
        with numpyro.plate("groups", G, subsample_size=batch_size) as i:
            seen, fn = x[i, 0] > 0, dist.Normal(mu * x[i, 1], 1.0)
            if inside:
                values = numpyro.sample("y", fn, obs=y[i, 0], obs_mask=seen)
            else:
                numpyro.sample("y_observed", fn.mask(seen), obs=y[i, 0])
                values = jnp.where(seen, y[i, 0], missed[i])
            numpyro.sample("v", dist.Normal(values, 1.0), obs=y[i, 1])

    return model


def not_centered(inside):
    return handlers.reparam(effects(inside), {"b": LocScaleReparam(0.0)})


def scoped(inside):
    return handlers.scope(effects(inside), prefix="a")


def scaled(inside):
    return handlers.scale(effects(inside), 0.5)


def masked(inside):
    """The prior of some groups' effects does not count."""

    def model(x, y, batch_size=B):
        def draw(x):
            with handlers.mask(mask=x[:, 0] > 0):
                return numpyro.sample("b", dist.Normal(0.3, 0.7))

        with numpyro.plate("all", G):
            b = None if inside else draw(x)
        with numpyro.plate("groups", G, subsample_size=batch_size) as i:
            rows = draw(x[i]) if inside else b[i]
            observe(y, i, rows[:, None] * x[i])

    return model


MODELS = [effects, constrained, vectors, crossed, missing, not_centered, scoped, scaled, masked]


def target_of(model, temperature=1.0):
    return bind("call", model, jax.random.key(0), init_to_uniform, (X, Y), {}, temperature)


def batch_of(target):
    """Some indices of each plate, in no order."""
    orders = {name: np.random.default_rng(1).permutation(plate.size) for name, plate in target.plates.items()}
    return {name: jnp.asarray(orders[name][: plate.batch_size]) for name, plate in target.plates.items()}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_potential_and_gradient_are_those_of_the_model_with_locals_outside(make, temperature):
    inside, z = target_of(make(True), temperature)
    outside, other = target_of(make(False), temperature)
    assert {name: value.shape for name, value in z.items()} == {name: value.shape for name, value in other.items()}
    assert inside.plates == outside.plates
    for batch in (batch_of(inside), "full"):
        found, expected = (jax.value_and_grad(t.potential((X, Y), {}, batch))(z) for t in (inside, outside))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), found, expected)


def test_potential_is_the_prior_of_all_groups_and_the_scaled_likelihood_of_some():
    target, _ = target_of(effects(True))
    tau, b, groups = 0.7, RNG.normal(size=G), [5, 0, 2]
    prior = stats.lognorm(0.5, scale=np.exp(-0.5)).logpdf(tau) + np.log(tau) + stats.norm(0.3, tau).logpdf(b).sum()
    likelihood = stats.norm(b[:, None] * X, 0.5).logpdf(Y)[groups].sum()
    z = {"tau": jnp.log(tau), "b": jnp.asarray(b, jnp.float32)}
    found = target.potential((X, Y), {}, {"groups": jnp.array(groups)})(z)
    assert float(found) == pytest.approx(-(prior + G / B * likelihood), rel=1e-5)


def test_gradients_of_all_minibatches_average_to_that_of_the_data():
    target, z = target_of(constrained(True))
    batches = jnp.array(list(combinations(range(G), B)))
    gradients = jax.vmap(lambda i: jax.grad(target.potential((X, Y), {}, {"groups": i}))(z))(batches)
    full = jax.grad(target.potential((X, Y), {}, "full"))(z)
    for name, value in gradients.items():
        np.testing.assert_allclose(value.mean(0), full[name], rtol=1e-4, atol=1e-3)
        assert value.std(0).max() > 0.1


KERNELS = {
    "SGLD": infer.SGLD,
    "SGNHT, control variates": lambda model, **options: infer.SGNHT(model, gradient="control_variates", **options),
    "MCLMC": infer.MCLMC,
    "GGMC": infer.GGMC,
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_draws_are_exported_by_group(kernel):
    """Each draw of the group's effects, and the log likelihood of all groups at it."""
    made = KERNELS[kernel](effects(True), steps_per_draw=3)
    mcmc = MCMC(made, num_warmup=8, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    draws = mcmc.get_samples()
    assert {name: value.shape for name, value in draws.items()} == {"b": (5, G), "tau": (5,)}
    assert np.isfinite(draws["b"]).all()
    found = to_inference_data(mcmc)
    assert found["posterior"]["b"].dims == ("chain", "draw", "groups")
    np.testing.assert_array_equal(found["posterior"]["b"][0], draws["b"])
    density = stats.norm(draws["b"][..., None] * X, 0.5).logpdf(Y).sum(-1)
    np.testing.assert_allclose(found["log_likelihood"]["y"][0], density, rtol=1e-4)


def test_all_groups_move_in_a_step():
    """The prior's gradient and the noise move also the groups that are not in the minibatch."""
    kernel = infer.SGLD(effects(True), 1e-3, steps_per_draw=1)
    state = kernel.init(jax.random.key(0), 0, None, (X, Y), {})
    after = kernel.sample(state, (X, Y), {})
    assert (np.abs(after.z["b"] - state.z["b"]) > 1e-6).all()


def test_groups_may_be_held_out_of_the_warm_start():
    start = infer.WarmStart(0.5, held_out=0.3)
    kernel = infer.SGLD(effects(True), warm_start=start, steps_per_draw=3)
    mcmc = MCMC(kernel, num_warmup=8, num_samples=2, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    assert np.isfinite(mcmc.get_samples()["b"]).all()


def with_network(inside):
    def model(x, y):
        net = random_network("net", nn.MLP([30, 1], "tanh"), (1,), priors.Normal())
        with numpyro.plate("all", len(x)):
            b = None if inside else numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("groups", len(x), subsample_size=2) as i:
            rows = numpyro.sample("b", dist.Normal(0.0, 1.0)) if inside else b[i]
            observe(y, i, net(x[i][..., None])[..., 0] + rows[:, None])

    return model


def test_the_network_runs_on_the_minibatch_alone():
    """Counted by the compiler: the run on all rows, which draws the locals, costs no network."""
    x = jnp.zeros((500, N))

    def flops(model):
        target, z = bind("call", model, jax.random.key(0), init_to_uniform, (x, x), {})
        gradient = jax.jit(jax.grad(lambda z, i: target.potential((x, x), {}, {"groups": i})(z)))
        return gradient.lower(z, jnp.arange(2)).compile().cost_analysis()["flops"]

    assert flops(with_network(True)) < 1.05 * flops(with_network(False))


# -- what is refused --------------------------------------------------------------------------------


def test_other_sizes_on_resume_are_refused():
    kernel = infer.SGLD(effects(True), 1e-4)
    state = kernel.init(jax.random.key(0), 0, None, (X, Y), {})
    with pytest.raises(ValueError, match=r"plate 'groups' has size and subsample size \(7, 2\).*\(7, 3\)"):
        kernel.sample(state, (X, Y, 2), {})


def outside(x, y):
    with numpyro.plate("groups", G, subsample_size=B) as i:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        observe(y, i, b[:, None] * x[i])
    numpyro.factor("penalty", -jnp.sum(b**2))


def fixed_rows(x, y):
    with numpyro.plate("groups", G, subsample_size=B):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(b, 1.0), obs=y[:B, 0])


def short(x, y):
    with numpyro.plate("groups", 2 * G, subsample_size=B) as i:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        observe(y, i, b[:, None] * x[i])


def discrete(x, y):
    with numpyro.plate("groups", G, subsample_size=B) as i:
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        observe(y, i, k[:, None] * x[i])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (outside, "site 'penalty' outside of plate 'groups', whose indices"),
        (fixed_rows, "site 'y' in plate 'groups', whose value is not one row"),
        (short, "plate 'groups' of size 14 that indexes an array with 7 rows"),
        (discrete, "discrete latent site 'k'"),
        (handlers.seed(effects(True), 0), "already seeded"),
    ],
    ids=["outside", "fixed rows", "short", "discrete", "seeded"],
)
def test_likelihoods_that_would_be_wrong_are_refused_with_locals_too(model, message):
    with pytest.raises(ValueError, match=rf"infer\.SGLD: argument `model` got .*{message}"):
        infer.SGLD(model, 1e-4).init(jax.random.key(0), 0, None, (X, Y), {})
