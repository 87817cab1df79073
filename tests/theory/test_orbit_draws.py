"""Moves along symmetries: exact densities on the orbit, priors that stay, walks that
adapt.

Where the likelihood ignores all sites the posterior is the prior; moves run around a
kernel that stays where it is.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import refused
from jax import random
from numpyro import handlers
from orbits import Still, after_moves
from scipy import stats

from numpyro_bnn import infer, symmetry
from numpyro_bnn.symmetry import (
    JointRescale,
    JointScale,
    Rescale,
    Scale,
    Shift,
    SignFlip,
)

RATE = 1e-6  # failure rate of a comparison


def ignored(y=None):
    """Data that no other site has an effect on."""
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


def moves(symmetries, **options):
    return lambda kernel: infer.OrbitMoves(kernel, symmetries, **options)


def methods(described):
    """How a kernel moves along each symmetry, as the attributes of its results tell."""
    return [entry.rpartition(": ")[2] for entry in described["orbit_moves"].split("; ")]


def prior_draws(model, size=4000, args=()):
    def draw(key):
        trace = handlers.trace(handlers.seed(model, key)).get_trace(*args)
        return {name: site["value"] for name, site in trace.items() if name != "y"}

    return jax.tree.map(
        np.asarray, jax.jit(jax.vmap(draw))(random.split(random.key(0), size))
    )


# -- from one point: the density on the orbit ------------------------------------------

LOC, SD = np.array([[0.4, -1.0], [2.0, 0.3]]), np.array([[0.5, 2.0], [1.5, 0.8]])
W, V = np.array([[0.3, -1.2], [0.7, 1.9]]), np.array([[1.1], [-0.6]])
CHAINS = 4000


def log_normal(value, loc, sd):
    return -0.5 * ((value - loc) / sd) ** 2


# Symmetry, method, and the log density of the group element g of unit u with respect to
# the Haar measure.
EXACT_DRAWS = {
    "radius": (
        Scale([("radius w", 1)]),
        "gig",
        lambda g, u: 2 * g + log_normal(np.exp(g) * W[:, [u]], 0.0, SD[:, [u]]).sum(0),
    ),
    "factor": (
        Rescale([("factor w", 1)], [("factor v", 0)]),
        "gig",
        lambda g, u: (
            (2 - 1) * g
            + log_normal(np.exp(g) * W[:, [u]], 0.0, SD[:, [u]]).sum(0)
            + log_normal(np.exp(-g) * V[u], 0.0, 0.7)
        ),
    ),
    "shift": (
        Shift([("shift w", 1)]),
        "normal",
        lambda g, u: log_normal(g + W[:, [u]], LOC[:, [u]], SD[:, [u]]).sum(0),
    ),
    "shift of one element": (
        Shift([("one v", 0)]),
        "prior",
        lambda g, u: log_normal(g + V[u], 0.0, 0.7),
    ),
}
REDRAWN, SIGNS = JointScale("weights", "precision", -2.0), SignFlip([("radius w", 1)])


def independent(y=None):
    unit = dist.Normal(jnp.zeros((2, 2)), 1.0).to_event(2)
    affine = dist.transforms.AffineTransform(0.0, jnp.asarray(SD))
    numpyro.sample("radius w", dist.TransformedDistribution(unit, affine))
    for name, loc in (("factor", 0 * LOC), ("shift", LOC)):
        numpyro.sample(
            f"{name} w", dist.Normal(jnp.asarray(loc), jnp.asarray(SD)).to_event(2)
        )
    for name in ("factor", "one"):
        numpyro.sample(f"{name} v", dist.Normal(jnp.zeros((2, 1)), 0.7).to_event(2))
    precision = numpyro.sample("precision", dist.Gamma(2.0, 2.0))
    numpyro.sample("weights", dist.Normal(0.0, precision**-0.5).expand([3]).to_event(1))
    ignored(y)


START = {
    **{f"{name} w": W for name in ("radius", "factor", "shift")},
    **{f"{name} v": V for name in ("factor", "one")},
    "precision": np.array(3.0),
    "weights": np.array([0.5, -1.0, 2.0]),
}


def from_one_point(symmetries, **options):
    draws = {
        name: jnp.broadcast_to(jnp.float32(value), (CHAINS, *value.shape))
        for name, value in START.items()
    }
    return after_moves(
        moves(symmetries, **options.pop("moves", {})),
        independent,
        draws,
        (0.3,),
        **options,
    )


@cache
def one_transition():
    return from_one_point([*(s for s, _, _ in EXACT_DRAWS.values()), REDRAWN, SIGNS])


def elements_of(name, after):
    """Group elements (S, U) of a move of sites that started at W and V."""
    site = EXACT_DRAWS[name][0].sites[0]
    now = after[site][:, 0] if site.endswith("w") else after[site][..., 0]
    before = W[0] if site.endswith("w") else V[:, 0]
    return (
        np.log(np.abs(now / before)) if name in ("radius", "factor") else now - before
    )


def assert_density_on_the_orbit(name, after):
    """Kolmogorov-Smirnov against quadrature, and units draw independently."""
    drawn, grid = elements_of(name, after), np.linspace(-12.0, 12.0, 40_001)
    for unit in range(2):
        log_density = EXACT_DRAWS[name][2](grid, unit)
        density = np.exp(log_density - log_density.max())
        cdf = np.cumsum(density) / density.sum()
        assert (
            stats.kstest(
                drawn[:, unit], lambda x, cdf=cdf: np.interp(x, grid, cdf)
            ).pvalue
            > RATE
        )
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 5 / np.sqrt(CHAINS)


@pytest.mark.parametrize("name", EXACT_DRAWS)
def test_exact_draws_have_the_density_on_the_orbit(name):
    described, after, _ = one_transition()
    assert methods(described)[list(EXACT_DRAWS).index(name)] == EXACT_DRAWS[name][1]
    assert_density_on_the_orbit(name, after)


def test_a_redrawn_precision_keeps_the_standardized_weights():
    described, after, _ = one_transition()
    assert methods(described)[-2:] == ["scale prior", "flip"]
    assert (
        stats.kstest(after["precision"], stats.gamma(2.0, scale=0.5).cdf).pvalue > RATE
    )
    standard = after["weights"] * np.sqrt(after["precision"] / 3.0)[:, None]
    np.testing.assert_allclose(
        standard, np.broadcast_to(START["weights"], standard.shape), rtol=1e-5
    )


def test_moves_of_one_transition_are_independent_and_follow_one_another():
    """Signs move after radii of a site; elements of symmetries are uncorrelated."""
    _, after, _ = one_transition()
    signs = np.sign(after["radius w"][:, 0] / W[0])
    np.testing.assert_array_equal(signs, np.sign(after["radius w"][:, 1] / W[1]))
    for column in signs.T:
        assert stats.binomtest(int((column > 0).sum()), CHAINS).pvalue > RATE
    assert (after["factor w"] / W > 0).all()
    elements = np.column_stack(
        [*(elements_of(name, after) for name in EXACT_DRAWS), signs, after["precision"]]
    )
    correlations = np.corrcoef(elements.T) - np.eye(elements.shape[1])
    # 55 pairs of at most standard correlation errors each: five of them, 6e-7 each.
    assert np.abs(correlations).max() < 5.5 / np.sqrt(CHAINS)


def test_walks_have_the_density_of_exact_draws():
    """Where the likelihood enters the ratio moves are walks; it ignores these sites."""
    described, after, _ = from_one_point(
        [EXACT_DRAWS["factor"][0]], moves={"exact": False}, transitions=60
    )
    assert methods(described) == ["walk"]
    assert_density_on_the_orbit("factor", after)


def heavy(y=None):
    """Two units whose prior is not normal, so that each walks on its orbit."""
    numpyro.sample("heavy", dist.Laplace(0.0, jnp.asarray(SD)).to_event(2))
    ignored(y)


def test_units_that_walk_together_are_accepted_one_by_one():
    """A common random number would accept both or none."""
    start = jnp.broadcast_to(jnp.float32(W[:, :1] * SD), (CHAINS, 2, 2))
    described, after, _ = after_moves(
        moves([Scale([("heavy", 1)])]), heavy, {"heavy": start}, (0.3,)
    )
    assert methods(described) == ["walk"]
    stayed = np.isclose(after["heavy"][:, 0], W[0, 0] * SD[0], rtol=1e-5)
    assert (stayed.mean(0) > 0.1).all()
    assert abs(np.corrcoef(stayed.T)[0, 1]) < 5 / np.sqrt(CHAINS)


# -- from draws of the prior: it stays the prior ---------------------------------------


def test_units_whose_prior_depends_on_other_units_keep_it():
    """Both sites move; one enters the prior of the other. Rate 4e-6."""

    def model(y=None):
        w = numpyro.sample("w", dist.Normal(0.4, 1.0).expand([3, 2]).to_event(2))
        v = dist.Normal(0.2 * w.sum(), 0.7).expand([2, 2]).to_event(2)
        numpyro.sample("v", v)
        ignored(y)

    before = prior_draws(model)
    symmetries = [SignFlip([("w", 1), ("v", 0)]), Rescale([("w", 1)], [("v", 0)])]
    described, after, _ = after_moves(
        moves(symmetries), model, before, (0.3,), transitions=3
    )
    assert methods(described) == ["flip", "walk"]
    w, v = after["w"], after["v"]
    residuals = (v - 0.2 * w.sum((1, 2), keepdims=True)) / 0.7
    for name, standard in (("w", w - 0.4), ("v", residuals)):
        assert (np.abs(after[name] - before[name]) > 1e-4).mean() > 0.5
        # elements of one unit, and the mean of all
        for x in (standard[:, 0, 0], standard.mean((1, 2)) * standard[0].size ** 0.5):
            assert stats.kstest(x, "norm").pvalue > RATE


COUPLED = np.array([[1.0, 0.8, 0.5], [0.8, 1.0, 0.7], [0.5, 0.7, 1.0]])
RING = np.eye(4) + 0.4 * (np.roll(np.eye(4), 1, 0) + np.roll(np.eye(4), -1, 0))
# Orders are accepted only if all are equally likely: neither one exchange of units nor
# a rotation shows it.
UNITS = {
    "flip": (symmetry.SignFlip, "flip", np.zeros(3), COUPLED),
    "ring": (symmetry.Permutation, "shuffle", np.zeros(4), RING),
    "two of three": (symmetry.Permutation, "shuffle", np.array([0, 0, 6.0]), np.eye(3)),
}


@pytest.mark.slow
def test_dependent_units_and_units_with_means_of_their_own_keep_their_prior():
    """Moments within 5 errors (6e-7 each); Var(x y) = 1 + r^2 of standard normals."""

    def model(y=None):
        for name, (_, _, loc, covariance) in UNITS.items():
            fn = dist.MultivariateNormal(jnp.asarray(loc), jnp.asarray(covariance))
            if name == "two of three":
                fn = dist.Normal(jnp.asarray(loc), 1.0).to_event(1)
            numpyro.sample(name, fn)
        ignored(y)

    before, number = prior_draws(model, 10_000), 10_000
    symmetries = [group([(name, 0)]) for name, (group, *_) in UNITS.items()]
    described, after, _ = after_moves(
        moves(symmetries), model, before, (0.3,), transitions=4
    )
    assert methods(described) == [method for _, method, *_ in UNITS.values()]
    for name, (_, _, loc, covariance) in UNITS.items():
        centered, error = after[name] - loc, np.sqrt((1 + covariance**2) / number)
        assert (np.abs(centered.mean(0)) < 5 / np.sqrt(number)).all()
        off = np.abs(centered.T @ centered / number - covariance)
        assert (off < 5 * error).all()
        changed = (np.abs(after[name] - before[name]) > 1e-5).mean(0)
        assert (changed[:2] > 0.2).all()
        # it is 6 sd apart, and keeps its place
        assert name != "two of three" or changed[2] < 0.01


@pytest.mark.slow
def test_moves_are_corrected_for_densities_and_supports_of_sites_that_stay():
    """Scales redrawn above a density and a support; orders that supports tell apart."""
    high = np.array([1.0, 1.2])

    def model(y=None):
        s = numpyro.sample("s", dist.Gamma(3.0, 2.0))
        numpyro.sample("w", dist.Normal(0.0, s).expand([2]).to_event(1))
        numpyro.sample("t", dist.HalfNormal(s))
        r = numpyro.sample("r", dist.Uniform(0.5, 2.0))
        numpyro.sample("u", dist.Uniform(0.0, r))
        numpyro.sample("v", dist.Normal(0.0, r).expand([2]).to_event(1))
        numpyro.sample("bounded", dist.Uniform(0.0, jnp.asarray(high)).to_event(1))
        ignored(y)

    before, units = prior_draws(model, 10_000), [("bounded", 0)]
    symmetries = [
        JointScale("w", "s"),
        JointScale("v", "r"),
        symmetry.Permutation(units),
    ]
    with jax.debug_key_reuse(True):  # no move uses a key twice
        described, after, _ = after_moves(
            moves(symmetries), model, before, (0.3,), transitions=4
        )
    assert methods(described) == ["hyperprior", "hyperprior", "shuffle"]
    for name in ("t", "u"):
        np.testing.assert_allclose(after[name], before[name], rtol=1e-4, atol=1e-6)
    for name in ("s", "r"):
        assert (np.abs(after[name] / before[name] - 1) > 1e-4).mean() > 0.5
    expected = {
        "s": (after["s"], stats.gamma(3.0, scale=0.5)),
        "w": ((after["w"] / after["s"][:, None]).ravel(), stats.norm),
        "t": (after["t"] / after["s"], stats.halfnorm),
        "r": (after["r"], stats.uniform(0.5, 1.5)),
        "u": (after["u"] / after["r"], stats.uniform),
    }
    for values, exact in expected.values():
        assert stats.kstest(values, exact.cdf).pvalue > RATE
    assert (after["bounded"] < high).all()
    assert (np.abs(after["bounded"] - before["bounded"]) > 1e-4).any()


def test_scales_of_single_units_move_with_the_units():
    """So an order of the units is always accepted, and each weight keeps its scale."""

    def model(y=None):
        a, b, _ = (
            numpyro.sample(name, dist.HalfCauchy(1.0).expand([3]).to_event(1))
            for name in ("a", "b", "other")
        )
        numpyro.sample("in", dist.Normal(0.0, a).expand([2, 3]).to_event(2))
        numpyro.sample("out", dist.Normal(0.0, b[:, None]).expand([3, 4]).to_event(2))
        ignored(y)

    before = prior_draws(model, 50)
    order = [symmetry.Permutation([("in", 1), ("out", 0)])]
    described, after, accepted = after_moves(
        moves(order), model, before, (0.3,), read=lambda state: state.orbit_accept_prob
    )
    assert methods(described) == ["order"]
    assert (accepted == 1.0).all()
    for n in range(50):
        # A unit is known by its first scale.
        where = np.argsort(before["a"][n])[np.argsort(np.argsort(after["a"][n]))]
        for name, axis in (("a", 0), ("b", 0), ("in", 1), ("out", 0)):
            moved = before[name][n].take(where, axis)
            np.testing.assert_allclose(after[name][n], moved, rtol=1e-4)
    assert (np.abs(after["a"] - before["a"]) > 1e-6).any()
    np.testing.assert_allclose(after["other"], before["other"], rtol=1e-4)


# Moves of scales, and of weights given them.
OF_SCALES = {
    "scale prior": JointScale("w", "w scale"),
    "prior": Shift([("b", 0)]),
    "walk": JointRescale("u", "w", [("u scale", 1), ("b scale", 1), ("w scale", -1)]),
    "gig": Scale([("w", 0)]),
}
MEANS = {"u": 1.5, "w": 0.0, "b": 0.0}


def test_learned_scales_and_their_weights_keep_their_prior():
    def model(y=None):
        for name in "uwb":
            scale = numpyro.sample(f"{name} scale", dist.LogNormal(1.0, 0.5))
            fn = dist.Normal(MEANS[name], scale).expand([2]).to_event(1)
            numpyro.sample(name, fn)
        ignored(y)

    before = prior_draws(model)
    described, after, _ = after_moves(
        moves(list(OF_SCALES.values())), model, before, (0.3,), transitions=3
    )
    assert methods(described) == list(OF_SCALES)
    for name in "uwb":
        scale = after[f"{name} scale"]
        assert (np.abs(scale / before[f"{name} scale"] - 1) > 1e-4).mean() > 0.5
        assert stats.kstest((np.log(scale) - 1.0) / 0.5, "norm").pvalue > RATE, name
        standard = (after[name] - MEANS[name]) / scale[:, None]
        assert stats.kstest(standard.ravel(), "norm").pvalue > RATE, name


@pytest.mark.slow
def test_each_walk_finds_its_width_in_warm_up_and_keeps_it():
    """To an acceptance of 0.44; exact draws are always accepted."""

    def model(y=None):
        numpyro.sample("narrow", dist.Normal(2.0, 0.1).expand([2]).to_event(1))
        numpyro.sample("wide", dist.StudentT(2.0, 0.0, 3.0))
        numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        ignored(y)

    start = {
        "narrow": jnp.full((40, 2), 2.0),
        "wide": jnp.ones(40),
        "w": jnp.ones((40, 2)),
    }
    described, _, (accepted, widths) = after_moves(
        moves([Scale("narrow"), Scale("wide"), Scale("w")]),
        model,
        start,
        (0.3,),
        transitions=400,
        num_warmup=200,
        read=lambda state: (state.orbit_accept_prob, state.orbit_width),
    )
    assert methods(described) == ["walk", "walk", "gig"]
    # Independent chains: their mean has a standard error near 0.003.
    np.testing.assert_allclose(accepted[:, 200:, :2].mean((0, 1)), 0.44, atol=0.03)
    assert (accepted[..., 2] == 1.0).all()
    assert (widths[:, 1:200, :2] != widths[:, :199, :2]).all()
    assert (widths[:, 200:] == widths[:, 199:200]).all()
    assert (widths[:, -1, 1] > 10 * widths[:, -1, 0]).all()


# -- refusals --------------------------------------------------------------------------


def two_units(x, y):
    w, v = (
        numpyro.sample(name, dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        for name in "wv"
    )
    numpyro.sample(
        "y", dist.Normal(jnp.tanh(x[:, None] * w) @ v, 0.5).to_event(1), obs=y
    )


@pytest.mark.parametrize(
    ("make", "argument", "fragment"),
    [
        (lambda: infer.OrbitMoves(lambda: None, []), "kernel", "has `refresh`"),
        (lambda: started(["w"]), "symmetries", "symmetry.find"),
        (lambda: started([Scale([("w", 5)])]), "unit_axes", "Count the axes"),
        (
            lambda: jax.jit(lambda y: started([SignFlip("w")], y))(jnp.ones(6)),
            "model_args",
            "outside",
        ),
    ],
    ids=["no kernel", "no symmetry", "axis", "traced data"],
)
def test_what_moves_cannot_use_is_refused(make, argument, fragment):
    with refused(argument, fragment):
        make()


def started(symmetries, y=None):
    y = jnp.ones(6) if y is None else y
    return infer.OrbitMoves(Still(two_units), symmetries).init(
        random.key(0), 0, {}, (jnp.ones(6), y), {}
    )


def test_a_symmetry_that_nearly_holds_is_refused_with_the_way_out():
    def with_epsilon(x, y):
        f = x @ numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        f = (f - f.mean()) / jnp.sqrt(f.var() + 0.3)
        numpyro.sample("y", dist.Normal(f, 0.3).to_event(1), obs=y)

    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    with pytest.raises(ValueError, match=r"changes by \d.*exact=False"):
        symmetry.check(with_epsilon, [Scale("w")], (x, x[:, 0]))
