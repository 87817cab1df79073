"""ParallelTempering: exchanges, the ladder, targets of all replicas, crossing between
modes, inner kernels.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import refused, walk
from numpy.testing import assert_allclose as close
from numpy.testing import assert_array_equal as equal
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import HMC, MCMC
from numpyro.infer.gibbs import GIBBS_SITES_KWARG, conditioned
from numpyro.infer.util import compute_log_probs, constrain_fn
from scipy import stats
from zoo import BATCH, ZOO

from numpyro_bnn import infer


def run(kernel, args=(), warmup=300, draws=1000, chains=1, method="vectorized"):
    options = {
        "num_warmup": warmup,
        "num_samples": draws,
        "num_chains": chains,
        "chain_method": method,
    }
    mcmc = MCMC(kernel, progress_bar=False, **options)
    mcmc.run(jax.random.key(0), *args)
    return mcmc


def hmc(model, length=1.5):
    return HMC(model, trajectory_length=length)


def still(model):
    """A kernel that stays where it is: what moves are exchanges."""
    fixed = {"adapt_step_size": False, "adapt_mass_matrix": False}
    return HMC(model, step_size=1e-9, trajectory_length=1e-9, **fixed)


# -- exchanges and the ladder ----------------------------------------------------------


def bordered():
    """Conjugate, but without a density beyond 3."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(jnp.where(w < 3, w, jnp.nan), 0.5), obs=1.0)


def log_ratios(betas, log_density):
    return (betas[..., :-1] - betas[..., 1:]) * (
        log_density[..., 1:] - log_density[..., :-1]
    )


def test_neighbors_exchange_by_turns_with_the_right_probability_on_a_set_ladder():
    """Replicas that stay where they are, in 64 chains; a half of these has a replica
    without a density.

    The ladder is spaced after 2, 4, 8 and 16 transitions by the rejections since the
    last time, and never afterwards.
    """
    kernel = infer.ParallelTempering(still(bordered), 4)
    chains = 64
    warmup = 20
    size = 4
    places = np.tile(np.array([1.6, 0.7, 0.3, -0.4], np.float32), (chains, 1))
    places[: chains // 2, 2] = 3.5

    def at(state):
        base = state.base._replace(z={"w": jnp.asarray(places)})
        return kernel.refresh(
            state._replace(base=base, z={"w": base.z["w"][:, 0]}), (), {}
        )

    def keep(state):
        return state.base.z["w"], state._replace(base=(), rng_key=())

    end, (w, seen) = walk(kernel, 150, warmup=warmup, chains=chains, edit=at, keep=keep)
    before = np.concatenate([places[None], w[:-1]]).astype(float)
    first = np.broadcast_to(0.01 ** (np.arange(size) / 3), (1, chains, size))
    betas = np.concatenate([first, seen.inverse_temperatures]).astype(float)
    log_density = np.where(before < 3, -0.5 * ((before - 1) / 0.5) ** 2, np.nan)
    ratios = log_ratios(betas[:-1], log_density)
    accepted = np.where(np.isnan(ratios), 0, np.exp(np.minimum(ratios, 0)))
    close(seen.swap_accept_prob, accepted, rtol=1e-3, atol=1e-5)
    equal(seen.z["w"], w[..., 0])

    swapped = (w[..., 1:] == before[..., :-1]) & (w[..., :-1] == before[..., 1:])
    turn = np.arange(150)[:, None] % 2 == np.arange(size - 1) % 2
    assert not swapped[~turn[:, None].repeat(chains, 1)].any()
    due = turn[:, None].repeat(chains, 1)
    error = np.sqrt((accepted * (1 - accepted))[due].sum())
    # failure rate 6e-7
    assert abs(swapped[due].sum() - accepted[due].sum()) < 5 * error
    # nothing but exchanges
    equal(np.sort(w, -1), np.sort(before, -1))
    assert swapped[due & (accepted > 0.9999)].all()
    assert not swapped[accepted == 0].any()

    moved = np.flatnonzero(np.abs(np.diff(betas, axis=0)).max((1, 2)) > 1e-5) + 1
    equal(moved, [2, 4, 8, 16])
    total = np.zeros((chains, size - 1))
    for i, (accept_prob, rejections) in enumerate(
        zip(accepted, seen.rejections, strict=True), 1
    ):
        total = np.zeros_like(total) if i in moved else total + 1 - accept_prob
        close(rejections, total, rtol=1e-3, atol=1e-4)

    # A state that was at the last temperature and comes back to the first has made a
    # round trip.
    been, trips = np.zeros((chains, size), bool), np.zeros(chains, int)
    for i in range(150):
        source = np.argmax(before[i][:, None] == w[i][:, :, None], -1)
        been = np.take_along_axis(been, source, 1)
        trips = trips + been[:, 0] if i >= warmup else trips
        been[:, 0], been[:, -1] = False, True
    equal(end.round_trips, trips)
    assert trips[chains // 2 :].min() > 0
    assert trips[: chains // 2].max() == 0

    # What the replicas cache belongs to their values and temperatures, also where other
    # kernels move the first.
    fresh = kernel.refresh(end, (), {})
    close(end.base.potential_energy, fresh.base.potential_energy, rtol=1e-5)
    there = kernel.refresh(end._replace(z={"w": jnp.full(chains, 0.7)}), (), {})
    close(there.base.z["w"], np.c_[np.full(chains, 0.7), end.base.z["w"][:, 1:]])
    potential = (
        0.5 * 0.7**2 + 0.5 * ((0.7 - 1) / 0.5) ** 2 + np.log(2 * np.pi) + np.log(0.5)
    )
    close(there.base.potential_energy[:, 0], potential, rtol=1e-5)


def test_no_replica_leaves_the_bounds_of_one_of_several_observations():
    """Outside of its support the density of a uniform distribution is finite."""

    def model():
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        fn = dist.Uniform(0.0, w, validate_args=False)
        numpyro.sample("y", fn, obs=jnp.array(0.5))
        numpyro.sample("v", dist.Normal(0.0, jnp.exp(w)), obs=0.0)

    fixed = {"adapt_step_size": False, "adapt_mass_matrix": False}
    hmc = HMC(model, step_size=0.3, trajectory_length=0.6, **fixed)
    start = {"w": jnp.ones(())}
    _, z = walk(infer.ParallelTempering(hmc, 2), 40, start=start)
    assert (z["w"] > 0.5).all()
    assert np.ptp(z["w"]) > 0.1


@pytest.mark.slow
def test_sites_that_other_blocks_hold_are_not_tempered():
    """As a block of ``Gibbs``, exchanges and replicas agree."""

    def model():
        u = numpyro.sample("u", dist.Normal(0.0, 1.0))
        w = numpyro.sample("w", dist.Normal(u, 0.5))
        numpyro.sample("y", dist.Normal(w + u, 1.0), obs=1.0)

    kernel = infer.ParallelTempering(still(model).wrap_model(conditioned), 3)
    keep = {
        "keep": lambda state: (
            state.base.z["u"],
            state.inverse_temperatures,
            state.swap_accept_prob,
        )
    }
    _, (u, betas, accepted) = walk(
        kernel, 10, kwargs={GIBBS_SITES_KWARG: {"w": jnp.array(2.0)}}, **keep
    )
    ratios = log_ratios(betas[:-1], stats.norm.logpdf(1.0, 2.0 + u[:-1]))
    assert np.abs(ratios).max() > 0.01
    close(accepted[1:], np.exp(np.minimum(ratios, 0)), rtol=1e-3)


# -- what it targets -------------------------------------------------------------------


def positive_scale():
    s = numpyro.sample("s", dist.Gamma(0.5, 1.0))
    with numpyro.plate("data", 2):
        numpyro.sample("y", dist.Normal(0.0, s), obs=jnp.array([1.5, -2.5]))


@pytest.mark.slow
@pytest.mark.optimized
def test_warm_up_makes_a_ladder_of_equal_rates():
    mcmc = run(infer.ParallelTempering(hmc(positive_scale), 4, lowest=0.05), draws=3000)
    betas = np.asarray(mcmc.last_state.inverse_temperatures)
    assert betas[0] == 1
    assert (np.diff(betas) < 0).all()
    assert (
        np.ptp(np.asarray(mcmc.get_extra_fields()["swap_accept_prob"]).mean(0)) < 0.25
    )


def scanned():
    def step(total, x):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(total, s), obs=x)
        return total + s, s

    scan(step, 0.0, jnp.array([0.3, 1.0, -0.4]))


def scoped():
    handlers.scope(
        handlers.scope(positive_scale, prefix="a", divider="."), prefix="b"
    )()


@pytest.mark.slow
@pytest.mark.parametrize("model", [scanned, scoped], ids=["scanned", "scoped"])
def test_potentials_of_replicas_hold_tempered_densities_and_whole_jacobians(model):
    """Whatever the loops and names; `tests/truth` has supports and handlers."""
    kernel = infer.ParallelTempering(hmc(model), 3, lowest=0.1)
    state = kernel.init(jax.random.key(1), 0)
    same = {name: value[:1].repeat(3, 0) for name, value in state.base.z.items()}
    there = kernel.refresh(state._replace(base=state.base._replace(z=same)), (), {})
    place = {name: value[0] for name, value in same.items()}
    values = constrain_fn(model, (), {}, place)
    densities, sites = compute_log_probs(model, (), {}, values)
    tempered = sum(densities[name] for name in densities if sites[name]["is_observed"])
    assert abs(tempered) > 0.01
    transforms = {name: dist.biject_to(sites[name]["fn"].support) for name in place}
    jacobian = sum(
        jnp.sum(transforms[name].log_abs_det_jacobian(value, values[name]))
        for name, value in place.items()
    )
    whole = (
        sum(densities.values()) + (there.inverse_temperatures - 1) * tempered + jacobian
    )
    close(there.base.potential_energy, -whole, rtol=1e-4, atol=1e-5)


# -- inner kernels, refusals -----------------------------------------------------------


def test_kernels_that_cannot_be_tempered_are_refused():
    entry = ZOO["line"]
    with refused("kernel", "NUTS(model)"):
        infer.ParallelTempering(HMC(potential_fn=lambda z: jnp.sum(z**2)))
    with refused("kernel", "SGLD with temperature 0.5"):
        infer.ParallelTempering(infer.SGLD(entry.model, temperature=0.5))
    kernel = infer.ParallelTempering(infer.SGLD(entry.model, 1e-3))
    with refused("kernel", "subsamples plate 'data'"):
        kernel.init(jax.random.key(0), 0, None, entry.args, {"batch_size": BATCH})
