"""Canonical representatives: constant on orbits, the same function, R-hat of weights that means something."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from numpyro.infer import Predictive
from registry import SYMMETRIC_NETS, rows

from numpyro_bnn import _arviz, models, nn, priors, symmetry
from numpyro_bnn.symmetry import JointScale, Permutation, Rescale, Scale, Shift, SignFlip, canonical

CHAINS, DRAWS = 2, 5


def around(net, input_shape, spread, seed=0, draws=DRAWS):
    """Draws around a random point, as of one mode of a posterior: site -> (C, S, ...)."""
    rng = np.random.default_rng(seed)
    shapes = net.param_shapes(input_shape)
    return {
        f"net/{name}": rng.normal(size=shape) + spread * rng.normal(size=(CHAINS, draws, *shape))
        for name, shape in shapes.items()
    }


def scattered(draws, symmetries, seed=0):
    """Every draw moved by random elements of all groups."""
    count = CHAINS * np.shape(next(iter(draws.values())))[1]
    flat = {site: jnp.asarray(v).reshape((count, *v.shape[2:])) for site, v in draws.items()}
    for i, s in enumerate(symmetries):
        units = s.units({site: v[0] for site, v in flat.items()})
        keys = jax.random.split(jax.random.key(1000 * seed + i), count)
        g = jnp.stack([s.random(key, units) for key in keys])
        flat = {**flat, **jax.vmap(s.act)({site: flat[site] for site in s.sites}, g)}
    return {site: np.asarray(v).reshape(draws[site].shape) for site, v in flat.items()}


def outputs(net, draws, x):
    flat = {site.removeprefix("net/"): v.reshape((-1, *v.shape[2:])) for site, v in draws.items()}
    return np.asarray(jax.jit(jax.vmap(lambda params: net.apply(params, x)))(flat))


def assert_close(one, other, tolerance=1e-7):
    assert set(one) == set(other)
    for site in one:
        np.testing.assert_allclose(one[site], other[site], rtol=tolerance, atol=tolerance, err_msg=site)


# One of each way in which layers share sites, units, signs and scales.
DISTINCT = (
    "linear",
    "MLP tanh",
    "MLP identity",
    "one hidden unit",
    "BatchNorm tanh",
    "BatchNorm relu",
    "LayerNorm tanh, no gain",
    "LayerNorm relu",
    "BatchNorm, then LayerNorm",
    "CNN average tanh",
    "norms behind Flatten",
    "ResNet BatchNorm",
    "ResNet BatchNorm tanh, no gain",
    "pre-activation BatchNorm",
    "pre-activation LayerNorm tanh, no gain",
    "block that ends with BatchNorm",
    "residual of a dense layer",
    "residual of BatchNorm",
    "residual with projection",
)


SLOW_NETS = {
    "MLP identity",
    "BatchNorm tanh",
    "LayerNorm relu",
    "CNN average tanh",
    "ResNet BatchNorm",
    "ResNet BatchNorm tanh, no gain",
    "pre-activation BatchNorm",
    "residual of BatchNorm",
    "residual with projection",
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "row", rows({name: SYMMETRIC_NETS[name] for name in DISTINCT}, "test_canonical_is_constant_on_orbits", SLOW_NETS)
)
def test_canonical_is_constant_on_orbits(row):
    """It is idempotent too, and the network computes what it did."""
    symmetries = symmetry.from_network(row.net, row.input_shape)
    draws = around(row.net, row.input_shape, spread=0.1)
    here = canonical(draws, symmetries)
    elsewhere = scattered(draws, symmetries)
    assert_close(here, canonical(elsewhere, symmetries))
    assert_close(here, canonical(here, symmetries))
    x = np.random.default_rng(1).normal(size=(7, *row.input_shape))
    expected = outputs(row.net, draws, x)
    np.testing.assert_allclose(outputs(row.net, here, x), expected, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(outputs(row.net, elsewhere, x), expected, rtol=1e-8, atol=1e-8)
    swapped = {site: value[::-1] for site, value in draws.items()}
    assert_close({site: value[::-1] for site, value in canonical(swapped, symmetries).items()}, here)


# -- what it is for ---------------------------------------------------------------------------------


def by_chain(draws, symmetries, seed=0):
    """Every chain moved by one random element of each group: modes that are copies of one another."""
    moved = [
        scattered_alike({site: value[c] for site, value in draws.items()}, symmetries, 10 * seed + c)
        for c in range(CHAINS)
    ]
    return {site: np.stack([chain[site] for chain in moved]) for site in draws}


def scattered_alike(chain, symmetries, seed):
    flat = {site: jnp.asarray(v) for site, v in chain.items()}
    for i, s in enumerate(symmetries):
        units = s.units({site: v[0] for site, v in flat.items()})
        g = s.random(jax.random.key(1000 * seed + i), units)
        move = jax.vmap(lambda values, s=s, g=g: s.act(values, g))
        flat = {**flat, **move({site: flat[site] for site in s.sites})}
    return {site: np.asarray(v) for site, v in flat.items()}


def r_hats(draws):
    """Of all weights that vary."""
    found = [np.ravel(_arviz.rhat(v)) for v in draws.values() if np.ptp(v) > 1e-6]
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("activation", "norm"),
    [
        ("tanh", None),
        ("relu", nn.BatchNorm()),
        ("tanh", nn.LayerNorm()),
        pytest.param("relu", None, marks=pytest.mark.slow),
        pytest.param("tanh", nn.BatchNorm(), marks=pytest.mark.slow),
        pytest.param("relu", nn.LayerNorm(), marks=pytest.mark.slow),
    ],
)
def test_r_hat_of_weights_after_canonical(activation, norm):
    """Independent draws: with 4 half chains of 100 draws R-hat^2 - 1 is about (chi^2_3 / 3 - 1) / 100.

    At most 200 weights, two R-hats of each: a right answer exceeds 1.05 with probability below 1e-3.
    """
    net, input_shape = nn.MLP([6, 5, 2], activation, norm), (3,)
    symmetries = symmetry.from_network(net, input_shape)
    draws = by_chain(around(net, input_shape, spread=0.1, draws=200), symmetries)
    assert np.median(r_hats(draws)) > 1.5
    assert r_hats(canonical(draws, symmetries)).max() < 1.05
    # Norms and effective scales need no labels, and agree before.
    for name, summary in symmetry.invariants(draws, symmetries).items():
        assert r_hats({name: summary}).max() < 1.05


def test_units_that_swap_within_a_chain_are_brought_back():
    """Draws hop between all labelings: after canonical they scatter around one point as much as they did before."""
    net, input_shape = nn.MLP([6, 2], "tanh"), (3,)
    symmetries = symmetry.from_network(net, input_shape)
    draws = around(net, input_shape, spread=0.1, draws=100)
    hopping = scattered(draws, symmetries)
    settled = canonical(hopping, symmetries)
    for site in draws:
        assert settled[site].std((0, 1)).max() < 0.15
    assert hopping["net/Dense_0.kernel"].std((0, 1)).min() > 0.3


def test_signs_and_order_are_decided_together():
    """Against all 3! 2^3 elements of the group: no other has a larger inner product with the reference."""
    rng = np.random.default_rng(0)
    s = [SignFlip([("w", 1), ("v", 0)]), Permutation([("w", 1), ("v", 0)])]
    draws = {"w": rng.normal(size=(1, 20, 2, 3)), "v": rng.normal(size=(1, 20, 3, 1))}
    reference = {"w": rng.normal(size=(2, 3)), "v": rng.normal(size=(3, 1))}
    placed = canonical(draws, s, reference)

    def fit(point):
        return sum(float(np.sum(point[site] * reference[site])) for site in reference)

    orders = np.array([(i, j, 3 - i - j) for i in range(3) for j in range(3) if i != j])
    signs = 1.0 - 2.0 * np.indices((2, 2, 2)).reshape(3, 8).T
    for n in range(20):
        w, v = draws["w"][0, n], draws["v"][0, n]
        best = max(
            fit({"w": w[:, order] * sign, "v": v[order] * sign[:, None]}) for order in orders for sign in signs
        )
        assert fit({site: placed[site][0, n] for site in placed}) == pytest.approx(best)


def test_draws_agree_with_their_mean():
    """No flip or order of a single draw is closer to the mean of the canonical draws, however wide they scatter."""
    rng = np.random.default_rng(3)
    axes = [("w", 1), ("v", 0)]
    center = {"w": rng.normal(size=(2, 3)), "v": rng.normal(size=(3, 2))}
    draws = {site: value + 1.5 * rng.normal(size=(1, 60, *value.shape)) for site, value in center.items()}
    placed = canonical(draws, [SignFlip(axes), Permutation(axes)], sweeps=100)
    mean = {site: value.mean((0, 1)) for site, value in placed.items()}
    again = canonical(placed, [SignFlip(axes), Permutation(axes)], mean)
    assert_close(again, placed, 1e-12)


def test_the_first_reference_is_a_typical_draw_with_its_units_in_order():
    """Norms of its units fall and sums of cubes are positive; an outlier with another order decides nothing."""
    w = np.diag([1.0, 2.0, 3.0])
    draws = np.stack([[w, w, w, np.diag([1000.0, 100.0, 1.0])]])
    placed = canonical({"w": draws[..., [1, 0, 2]]}, [Permutation([("w", 1)])])
    np.testing.assert_array_equal(placed["w"], draws[..., ::-1])
    placed = canonical({"w": -draws}, [SignFlip([("w", 1)])])
    np.testing.assert_array_equal(placed["w"], draws)


def test_a_reference_is_met():
    """Two runs are brought to one labeling by the mean of the first."""
    net, input_shape = nn.MLP([5, 4, 1], "relu"), (2,)
    symmetries = symmetry.from_network(net, input_shape)
    draws = around(net, input_shape, spread=0.05)
    first = canonical(draws, symmetries)
    mean = {site: value.mean((0, 1)) for site, value in first.items()}
    assert_close(canonical(by_chain(draws, symmetries), symmetries, mean), first, 1e-4)


def test_gauges():
    """Norms of the square root of d, means of 0; zero weights stay; hyper-parameters and other sites stay."""
    rng = np.random.default_rng(0)
    draws = {
        "w": rng.normal(size=(2, 3, 4, 5)),
        "b": rng.normal(size=(2, 3, 5)),
        "v": rng.normal(size=(2, 3, 5, 2)),
        "s": np.exp(rng.normal(size=(2, 3))),
        "sigma": np.ones((2, 3)),
    }
    draws["w"][0, 0, :, 1] = draws["b"][0, 0, 1] = 0.0
    placed = canonical(draws, [Rescale([("w", 1), ("b", 0)], [("v", 0)]), Shift([("v", 0)]), JointScale("w", "s")])
    squares = (placed["w"] ** 2).sum(2) + placed["b"] ** 2
    np.testing.assert_allclose(np.delete(squares.ravel(), 1), 5.0)
    assert squares.ravel()[1] == 0.0
    np.testing.assert_allclose(placed["v"].mean(-1), 0.0, atol=1e-12)
    for site in ("s", "sigma"):
        np.testing.assert_array_equal(placed[site], draws[site])
    np.testing.assert_allclose((canonical(draws, Scale("v"))["v"] ** 2).sum((2, 3)), 10.0)


def test_scales_are_fixed_in_the_order_of_the_layers():
    """What a layer reads is scaled by an earlier one, whichever is named first."""
    net = nn.MLP([4, 3, 1], "relu", nn.BatchNorm())
    symmetries = symmetry.from_network(net, (2,))
    draws = around(net, (2,), spread=0.1)
    for listed in (symmetries, symmetries[::-1]):
        placed = canonical(draws, [s for s in listed if s.continuous])
        for layer in (0, 1):
            kernel = placed[f"net/Dense_{layer}.kernel"]
            np.testing.assert_allclose((kernel**2).sum(2), kernel.shape[2])


# -- draws of NumPyro and ArviZ ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampled():
    """A non-centered network, and draws with the names, shapes and deterministic sites that MCMC gives."""
    net = nn.MLP([3, 1], "tanh")
    prior = Predictive(models.regression(net, priors.Hierarchical()), num_samples=CHAINS * 20)
    draws = prior(jax.random.key(0), jnp.linspace(-1.0, 1.0, 12).reshape(6, 2))
    return net, {site: v.reshape((CHAINS, 20, *v.shape[1:])) for site, v in draws.items()}


def test_draws_of_mcmc(sampled):
    net, draws = sampled
    symmetries = symmetry.from_network(net, (2,))
    placed = canonical(draws, symmetries)
    assert {site: (v.shape, v.dtype) for site, v in placed.items()} == {
        site: (v.shape, v.dtype) for site, v in draws.items()
    }
    for site in ("net/Dense_0.kernel_base", "net/Dense_0.kernel_scale"):
        np.testing.assert_array_equal(placed[site], draws[site])
    x = np.linspace(-1.0, 1.0, 8).reshape(4, 2)
    weights = {f"net/{name}" for name in net.param_shapes((2,))}
    before, after = (outputs(net, {s: np.asarray(d[s]) for s in weights}, x) for d in (draws, placed))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)


def test_draws_of_a_file(sampled):
    """ArviZ names and arrays give the same."""
    net, draws = sampled
    symmetries = symmetry.from_network(net, (2,))
    stored = xr.Dataset(
        {
            site.replace("/", "."): (("chain", "draw", *(f"{site}_{i}" for i in range(v.ndim - 2))), np.asarray(v))
            for site, v in draws.items()
        }
    )
    placed, expected = canonical(stored, symmetries), canonical(draws, symmetries)
    for site, value in expected.items():
        np.testing.assert_array_equal(placed[site.replace("/", ".")], value)
    summaries = symmetry.invariants(stored, symmetries)
    assert list(summaries) == ["Permutation(net.Dense_0.kernel)"]


# -- summaries -----------------------------------------------------------------------------------------

NETS = ("MLP relu", "BatchNorm relu", "LayerNorm tanh", "CNN max", "ResNet BatchNorm", "BatchNorm, then LayerNorm")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "name", [name if number < 3 else pytest.param(name, marks=pytest.mark.slow) for number, name in enumerate(NETS)]
)
def test_invariants_do_not_change_along_orbits(name):
    row = SYMMETRIC_NETS[name]
    symmetries = symmetry.from_network(row.net, row.input_shape)
    draws = around(row.net, row.input_shape, spread=0.5)
    here = symmetry.invariants(draws, symmetries)
    assert len(here) == sum(isinstance(s, Scale | Rescale | Permutation) for s in symmetries)
    for summary in here.values():
        assert summary.shape[:2] == (CHAINS, DRAWS)
        assert (summary > 0.0).all()
        assert np.ptp(summary, axis=(0, 1)).min() > 1e-3
    assert_close(symmetry.invariants(scattered(draws, symmetries), symmetries), here)


def test_invariants_of_one_hidden_layer():
    """Effective scales are products of norms; one weight counts as one, equal weights count all."""
    rng = np.random.default_rng(0)
    draws = {"w": rng.normal(size=(1, 4, 3, 2)), "v": rng.normal(size=(1, 4, 2, 1))}
    rescale = Rescale([("w", 1)], [("v", 0)])
    product = np.linalg.norm(draws["w"], axis=2) * np.abs(draws["v"][..., 0])
    np.testing.assert_allclose(symmetry.invariants(draws, rescale)["Rescale(w)"], product)
    both = symmetry.invariants(draws, [rescale, Permutation([("w", 1), ("v", 0)])])
    np.testing.assert_allclose(both["Rescale(w)"], -np.sort(-product))
    weights = {"w": np.array([[[[1.0, 2.0], [0.0, -2.0], [0.0, 2.0]]]])}
    np.testing.assert_allclose(symmetry.invariants(weights, Scale([("w", 1)]))["Scale(w)"], [[[1.0, 3.0]]])


@pytest.mark.usefixtures("x64")
def test_orbit_coordinates_move_by_the_group_element():
    rng = np.random.default_rng(0)
    draws = {
        "w": rng.normal(size=(CHAINS, DRAWS, 4, 3)),
        "v": rng.normal(size=(CHAINS, DRAWS, 3, 2)),
        "b": rng.normal(size=(CHAINS, DRAWS, 3)),
        "s": np.exp(rng.normal(size=(CHAINS, DRAWS))),
        "t": np.exp(rng.normal(size=(CHAINS, DRAWS))),
    }
    cases = {
        Scale([("w", 1)]): 1.0,
        Scale("w"): 1.0,
        Rescale([("w", 1), ("b", 0)], [("v", 0)]): 2.0,
        JointScale("w", "s"): 1.0,
        JointScale("w", "s", -2.0): 1.0,
        symmetry.JointRescale("w", "v", [("s", 1), ("t", -1)]): 1.0,
        Shift([("b", 0)]): 1.0,
        Shift([("w", 0)]): 1.0,
    }
    for s, factor in cases.items():
        moved = {}
        g = np.asarray(s.random(jax.random.key(0), s.units({site: v[0, 0] for site, v in draws.items()})))
        act = jax.vmap(jax.vmap(lambda values, s=s, g=g: s.act(values, g)))
        moved = {**draws, **act({site: draws[site] for site in s.sites})}
        before, after = (symmetry.orbit_coordinates(d, [s])[s.name] for d in (draws, moved))
        np.testing.assert_allclose(after - before, np.broadcast_to(factor * g, before.shape), atol=1e-10)
    finite = [SignFlip([("w", 1)]), Permutation([("w", 1)])]
    assert symmetry.orbit_coordinates(draws, finite) == {}


def test_symmetries_of_one_name_are_kept_apart():
    draws = {"w": np.ones((1, 2, 3, 2)), "v": np.ones((1, 2, 2, 1)), "u": np.ones((1, 2, 2, 1))}
    pair = [Rescale([("w", 1)], [("v", 0)]), Rescale([("w", 1)], [("u", 0)])]
    assert list(symmetry.orbit_coordinates(draws, pair)) == ["Rescale(w)", "Rescale(w, u)"]


# -- errors --------------------------------------------------------------------------------------------

GOOD = {"net/w": np.ones((2, 3, 4)), "b": np.ones((2, 3, 4))}


@pytest.mark.parametrize("call", [canonical, symmetry.invariants, symmetry.orbit_coordinates])
@pytest.mark.parametrize(
    ("draws", "s", "kind", "message"),
    [
        (GOOD, ["net/w"], TypeError, r"argument `symmetries` got net/w\. Pass symmetries"),
        (GOOD, [Scale("net/v")], ValueError, r"argument `symmetries` got 'net/v'\. Did you mean 'net/w'\?"),
        (GOOD, [Scale([("net/w", 1)])], ValueError, r"axis 1 of site 'net/w' of shape \(4,\)"),
        ({"w": np.ones(3)}, [Scale("w")], ValueError, r"argument `draws` got leading axes .*group_by_chain=True"),
        (
            {"w": np.ones((2, 3)), "v": np.ones((3, 2))},
            [Scale(["w", "v"])],
            ValueError,
            r"argument `draws` got leading axes \{'w': \(2, 3\), 'v': \(3, 2\)\}",
        ),
        ({"w": np.array([[1.0, np.nan]])}, [Scale("w")], ValueError, r"argument `draws` got 1 NaN"),
    ],
)
def test_draws_that_do_not_fit_are_refused(call, draws, s, kind, message):
    with pytest.raises(kind, match=message):
        call(draws, s)


def test_references_that_do_not_fit_are_refused():
    s = [SignFlip([("net/w", 0)])]
    with pytest.raises(ValueError, match=r"argument `reference` got site 'net/w' of shape \(3, 4\)\. The draws are"):
        canonical(GOOD, s, {"net/w": np.ones((3, 4))})
    with pytest.raises(ValueError, match=r"argument `symmetries` got 'net/w'"):
        canonical(GOOD, s, {"b": np.ones(4)})
    with pytest.raises(ValueError, match=r"argument `sweeps` got 0"):
        canonical(GOOD, s, sweeps=0)


def test_without_symmetries_draws_stay():
    placed = canonical(GOOD, [])
    assert_close(placed, GOOD)
    assert symmetry.invariants(GOOD, []) == {}
