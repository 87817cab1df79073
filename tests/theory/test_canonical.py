"""Canonical representatives: the best labels, fixed gauges, R-hat of weights that means
something, refusals.

That they depend on nothing but the orbit is tested for every network by
contracts/test_symmetries.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from helpers import refused
from numpy.testing import assert_allclose as close
from numpy.testing import assert_array_equal as equal
from orbits import around, assert_close

from numpyro_bnn import nn, symmetry
from numpyro_bnn.symmetry import (
    JointScale,
    Permutation,
    Rescale,
    Scale,
    Shift,
    SignFlip,
    canonical,
)

UNITS = [("w", 1), ("v", 0)]


def of_network(net, input_shape, spread=0.1, num_draws=100):
    """Its symmetries, and draws of its parameters."""
    shapes = {
        f"net/{name}": shape for name, shape in net.param_shapes(input_shape).items()
    }
    return symmetry.from_network(net, input_shape), around(shapes, spread, num_draws)


def test_signs_and_order_are_decided_together():
    """No other of 3! 2^3 elements has a larger product with the reference."""
    rng = np.random.default_rng(0)
    draws = {"w": rng.normal(size=(1, 20, 2, 3)), "v": rng.normal(size=(1, 20, 3, 1))}
    reference = {"w": rng.normal(size=(2, 3)), "v": rng.normal(size=(3, 1))}
    placed = canonical(draws, [SignFlip(UNITS), Permutation(UNITS)], reference)

    def fit(point):
        return sum(float(np.sum(point[site] * reference[site])) for site in reference)

    orders = np.array([(i, j, 3 - i - j) for i in range(3) for j in range(3) if i != j])
    signs = 1.0 - 2.0 * np.indices((2, 2, 2)).reshape(3, 8).T
    for n in range(20):
        w, v = draws["w"][0, n], draws["v"][0, n]
        fits = [
            fit({"w": w[:, o] * sign, "v": v[o] * sign[:, None]})
            for o in orders
            for sign in signs
        ]
        assert fit({site: placed[site][0, n] for site in placed}) == pytest.approx(
            max(fits)
        )


def test_draws_agree_with_their_mean():
    """No flip or order of a single draw is closer to the mean of all."""
    rng = np.random.default_rng(3)
    center = {"w": rng.normal(size=(2, 3)), "v": rng.normal(size=(3, 2))}
    draws = {
        site: value + 1.5 * rng.normal(size=(1, 60, *value.shape))
        for site, value in center.items()
    }
    placed = canonical(draws, [SignFlip(UNITS), Permutation(UNITS)], sweeps=100)
    mean = {site: value.mean((0, 1)) for site, value in placed.items()}
    assert_close(
        canonical(placed, [SignFlip(UNITS), Permutation(UNITS)], mean), placed, 1e-12
    )


def test_the_first_reference_is_a_typical_draw_with_its_units_in_order():
    """Norms fall, sums of cubes are positive; an outlier decides nothing."""
    w = np.diag([1.0, 2.0, 3.0])
    draws = np.stack([[w, w, w, np.diag([1000.0, 100.0, 1.0])]])
    placed = canonical({"w": draws[..., [1, 0, 2]]}, [Permutation([("w", 1)])])
    equal(placed["w"], draws[..., ::-1])
    equal(canonical({"w": -draws}, [SignFlip([("w", 1)])])["w"], draws)


def test_canonical_draws_have_norms_and_means_of_their_gauges():
    """Norms sqrt(d), means 0; zero weights, hyper-parameters and others stay."""
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 5), "b": (5,), "v": (5, 2)}
    draws = {site: rng.normal(size=(2, 3, *shape)) for site, shape in shapes.items()}
    draws |= {"s": np.exp(rng.normal(size=(2, 3))), "sigma": np.ones((2, 3))}
    draws["w"][0, 0, :, 1] = draws["b"][0, 0, 1] = 0.0
    placed = canonical(
        draws,
        [
            Rescale([("w", 1), ("b", 0)], [("v", 0)]),
            Shift([("v", 0)]),
            JointScale("w", "s"),
        ],
    )
    squares = (placed["w"] ** 2).sum(2) + placed["b"] ** 2
    close(np.delete(squares.ravel(), 1), 5.0)
    assert squares.ravel()[1] == 0.0
    close(placed["v"].mean(-1), 0.0, atol=1e-12)
    for site in ("s", "sigma"):
        equal(placed[site], draws[site])
    close((canonical(draws, Scale("v"))["v"] ** 2).sum((2, 3)), 10.0)


def test_scales_are_fixed_in_the_order_of_the_layers():
    """What a layer reads is scaled by an earlier one, whichever is named first."""
    symmetries, draws = of_network(
        nn.MLP([4, 3, 1], "relu", nn.BatchNorm()), (2,), num_draws=5
    )
    for listed in (symmetries, symmetries[::-1]):
        placed = canonical(draws, [s for s in listed if s.continuous])
        for layer in (0, 1):
            kernel = placed[f"net/Dense_{layer}.kernel"]
            close((kernel**2).sum(2), kernel.shape[2])


def test_draws_of_mcmc_and_of_a_file_keep_their_form():
    """Non-centered, in single precision; from arrays and by ArviZ names."""
    symmetries, draws = of_network(nn.MLP([3, 1], "tanh"), (2,), num_draws=20)
    draws = {site: jnp.asarray(v, jnp.float32) for site, v in draws.items()}
    draws |= {
        f"{site}_base": v / 2 for site, v in draws.items() if "kernel" in site
    } | {"sigma": jnp.ones((2, 20))}
    placed = canonical(draws, symmetries)
    assert {n: (v.shape, v.dtype) for n, v in placed.items()} == {
        n: (v.shape, v.dtype) for n, v in draws.items()
    }
    for site in ("net/Dense_0.kernel_base", "sigma"):
        equal(placed[site], draws[site])
    arrays = {
        site.replace("/", "."): (
            ("chain", "draw", *(f"{site}_{i}" for i in range(v.ndim - 2))),
            np.asarray(v),
        )
        for site, v in draws.items()
    }
    stored = xr.Dataset(arrays)
    from_file = canonical(stored, symmetries)
    for site, value in placed.items():
        equal(from_file[site.replace("/", ".")], value)
    assert list(symmetry.invariants(stored, symmetries)) == [
        "Permutation(net.Dense_0.kernel)"
    ]


# -- summaries -------------------------------------------------------------------------


def test_invariants_of_one_hidden_layer():
    """Effective scales are products of norms; equal weights count all."""
    rng = np.random.default_rng(0)
    draws = {"w": rng.normal(size=(1, 4, 3, 2)), "v": rng.normal(size=(1, 4, 2, 1))}
    rescale = Rescale([("w", 1)], [("v", 0)])
    product = np.linalg.norm(draws["w"], axis=2) * np.abs(draws["v"][..., 0])
    close(symmetry.invariants(draws, rescale)["Rescale(w)"], product)
    both = symmetry.invariants(draws, [rescale, Permutation(UNITS)])
    close(both["Rescale(w)"], -np.sort(-product))
    draws["v"], draws["u"] = rng.normal(size=(1, 4, 2, 2)), rng.normal(size=(1, 4, 2))
    chain = [Rescale([("w", 1)], [("v", 0)]), Rescale([("v", 1)], [("u", 0)])]
    assert list(symmetry.invariants(draws, chain)) == ["Rescale(w)", "Rescale(v)"]
    # of a single unit the next ones have all: |w| |v| |u|
    single = {"w": draws["w"][..., :1], "v": draws["v"][..., :1, :], "u": draws["u"]}
    (scales,) = symmetry.invariants(single, chain).values()
    product = np.linalg.norm(single["w"], axis=2) * np.abs(single["v"][..., 0, :])
    expected = product * np.abs(single["u"])
    close(scales, expected / 3**0.5, rtol=1e-6)
    weights = {"w": np.array([[[[1.0, 2.0], [0.0, -2.0], [0.0, 2.0]]]])}
    close(symmetry.invariants(weights, Scale([("w", 1)]))["Scale(w)"], [[[1.0, 3.0]]])


def test_orbit_coordinates_move_by_the_group_element(x64):
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 3), "v": (3, 2), "b": (3,), "s": (), "t": ()}
    draws = {site: rng.normal(size=(2, 3, *shape)) for site, shape in shapes.items()}
    draws |= {site: np.exp(draws[site]) for site in "st"}
    factors = {
        Scale([("w", 1)]): 1.0,
        Scale("w"): 1.0,
        Rescale([("w", 1), ("b", 0)], [("v", 0)]): 2.0,
        JointScale("w", "s"): 1.0,
        JointScale("w", "s", -2.0): 1.0,
        symmetry.JointRescale("w", "v", [("s", 1), ("t", -1)]): 1.0,
        Shift([("b", 0)]): 1.0,
        Shift([("w", 0)]): 1.0,
    }
    point = {site: v[0, 0] for site, v in draws.items()}
    elements = [s.random(jax.random.key(0), s.units(point)) for s in factors]
    act = jax.vmap(
        jax.vmap(
            lambda values: [
                s.act(values, g) for s, g in zip(factors, elements, strict=True)
            ]
        )
    )
    for (s, factor), g, moved in zip(
        factors.items(), elements, jax.jit(act)(draws), strict=True
    ):
        before, after = (
            symmetry.orbit_coordinates(d, [s])[s.name] for d in (draws, draws | moved)
        )
        close(after - before, np.broadcast_to(factor * g, before.shape), atol=1e-10)
    assert (
        symmetry.orbit_coordinates(
            draws, [SignFlip([("w", 1)]), Permutation([("w", 1)])]
        )
        == {}
    )
    alike = [Rescale([("w", 1)], [("v", 0)]), Rescale([("w", 1)], [("b", 0)])]
    assert list(symmetry.orbit_coordinates(draws, alike)) == [
        "Rescale(w)",
        "Rescale(w, b)",
    ]


# -- refusals --------------------------------------------------------------------------

GOOD = {"net/w": np.ones((2, 3, 4)), "b": np.ones((2, 3, 4))}


@pytest.mark.parametrize(
    "call", [canonical, symmetry.invariants, symmetry.orbit_coordinates]
)
@pytest.mark.parametrize(
    ("draws", "s", "argument", "fragment"),
    [
        (GOOD, ["net/w"], "symmetries", "got net/w. Pass symmetries"),
        (GOOD, [Scale("net/v")], "symmetries", "got 'net/v'. Did you mean 'net/w'?"),
        (
            GOOD,
            [Scale([("net/w", 1)])],
            "unit_axes",
            "axis 1 of site 'net/w' of shape (4,)",
        ),
        ({"w": np.ones(3)}, [Scale("w")], "draws", "group_by_chain=True"),
        (
            {"w": np.ones((2, 3)), "v": np.ones((3, 2))},
            [Scale(["w", "v"])],
            "draws",
            "{'w': (2, 3), 'v': (3, 2)}",
        ),
        ({"w": np.array([[1.0, np.nan]])}, [Scale("w")], "draws", "got 1 NaN"),
    ],
)
def test_draws_that_do_not_fit_are_refused(call, draws, s, argument, fragment):
    with refused(argument, fragment):
        call(draws, s)


def test_references_that_do_not_fit_are_refused():
    s = [SignFlip([("net/w", 0)])]
    with refused("reference", "got site 'net/w' of shape (3, 4). The draws are"):
        canonical(GOOD, s, {"net/w": np.ones((3, 4))})
    with refused("symmetries", "got 'net/w'"):
        canonical(GOOD, s, {"b": np.ones(4)})


def test_without_symmetries_draws_stay():
    assert_close(canonical(GOOD, []), GOOD, 0.0)
    assert symmetry.invariants(GOOD, []) == {}
