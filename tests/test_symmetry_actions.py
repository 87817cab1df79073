"""Symmetries as group actions with Jacobians, and those derived from networks: the function must not change."""

from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to
from registry import NET_VARIANTS, SYMMETRIC_NETS, SYMMETRIES, SYMMETRY_VARIANTS, rows

from numpyro_bnn import nn, symmetry
from numpyro_bnn.nn.wiring import Wire, Wiring
from numpyro_bnn.symmetry import JointScale, Permutation, Rescale, Scale, Shift, SignFlip
from numpyro_bnn.symmetry.base import UnitAxis

pytestmark = pytest.mark.usefixtures("x64")

# -- the groups -------------------------------------------------------------------------------------

POSITIVE = biject_to(dist.constraints.positive)


def identity(s, units):
    if isinstance(s, Permutation):
        return jnp.arange(units)
    return jnp.ones(units) if isinstance(s, SignFlip) else jnp.zeros(units)


def inverse(s, g):
    if isinstance(s, Permutation):
        return jnp.argsort(g)
    return g if isinstance(s, SignFlip) else -g


def composed(s, g, then):
    """First g, then the other."""
    if isinstance(s, Permutation):
        return g[then]
    return g * then if isinstance(s, SignFlip) else g + then


def values_of(row, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(row.shapes))
    drawn = {site: jax.random.normal(k, shape) for k, (site, shape) in zip(keys, row.shapes.items(), strict=True)}
    return {site: jnp.exp(value) if site in row.positive else value for site, value in drawn.items()}


def assert_same(moved, values):
    for site, value in moved.items():
        np.testing.assert_allclose(value, values[site], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("row", rows(SYMMETRIES, "test_group_axioms", SYMMETRY_VARIANTS))
def test_group_axioms(row):
    s, values = row.symmetry, values_of(row)
    units = s.units(values)
    g, h = (s.random(jax.random.key(seed), units) for seed in (1, 2))
    moved = {**values, **s.act(values, g)}
    assert g.shape == (units,)
    assert set(s.act(values, g)) == set(s.sites)
    assert {site: value.shape for site, value in moved.items()} == dict(row.shapes)
    assert_same(s.act(values, identity(s, units)), values)
    assert_same(s.act(moved, inverse(s, g)), values)
    assert_same(s.act(moved, h), s.act(values, composed(s, g, h)))


@pytest.mark.parametrize("row", rows(SYMMETRIES, "test_elements_move_the_point", SYMMETRY_VARIANTS))
def test_elements_move_the_point(row):
    """Random elements of every unit are far from the identity; a finite group has an element that moves."""
    s, values = row.symmetry, values_of(row)
    moves = [s.act(values, s.random(jax.random.key(seed), s.units(values))) for seed in range(8)]
    change = [max(float(jnp.max(jnp.abs(m[site] - values[site]))) for site in m) for m in moves]
    assert max(change) > 0.1
    if s.continuous:
        assert min(change) > 1e-3


def log_det_by_autodiff(s, values, g, positive=()):
    """Of the map in the coordinates of the sampler: log of the positive sites, the others as they are."""
    touched = {site: values[site] for site in s.sites}
    free = {site: POSITIVE.inv(value) if site in positive else value for site, value in touched.items()}
    flat, unravel = ravel_pytree(free)

    def move(flat):
        at = {site: POSITIVE(z) if site in positive else z for site, z in unravel(flat).items()}
        moved = s.act({**values, **at}, g)
        return ravel_pytree({site: POSITIVE.inv(moved[site]) if site in positive else moved[site] for site in at})[0]

    return jnp.linalg.slogdet(jax.jacfwd(move)(flat))[1]


def log_volume(row, values):
    """log|d theta / d z| of the positive sites."""
    logs = [POSITIVE.log_abs_det_jacobian(POSITIVE.inv(values[s]), values[s]) for s in row.positive]
    return sum((jnp.sum(log) for log in logs), jnp.zeros(()))


def jacobian_error(row, seed=3):
    s, values = row.symmetry, values_of(row)
    g = s.random(jax.random.key(seed), s.units(values))
    return float(jnp.abs(jnp.sum(s.log_det(values, g)) - log_det_by_autodiff(s, values, g)))


@pytest.mark.parametrize("row", rows(SYMMETRIES, "test_log_det_is_that_of_the_map", SYMMETRY_VARIANTS))
def test_log_det_is_that_of_the_map(row):
    assert row.symmetry.log_det(values_of(row), identity(row.symmetry, 4)).shape == (4,)
    assert jacobian_error(row) < 1e-10


@pytest.mark.parametrize("row", rows(SYMMETRIES, "test_log_det_in_unconstrained_coordinates", SYMMETRY_VARIANTS))
def test_log_det_in_unconstrained_coordinates(row):
    """log|dz' / dz| = log|d theta' / d theta| + log|d theta / dz| - log|d theta' / dz'|."""
    s, values = row.symmetry, values_of(row)
    g = s.random(jax.random.key(4), s.units(values))
    moved = {**values, **s.act(values, g)}
    expected = jnp.sum(s.log_det(values, g)) + log_volume(row, values) - log_volume(row, moved)
    assert log_det_by_autodiff(s, values, g, row.positive) == pytest.approx(float(expected), abs=1e-10)


def test_a_wrong_jacobian_is_caught():
    class OneShort(Scale):
        def log_det(self, values, g):
            return super().log_det(values, g) - g

    class Unsigned(Rescale):
        def log_det(self, values, g):
            return sum(part.per_unit(values[part.site].shape) for part in self.unit_axes) * g

    row = SYMMETRIES["Scale of units"]
    assert jacobian_error(row._replace(symmetry=OneShort(row.symmetry.weights))) > 0.1
    row = SYMMETRIES["Rescale"]
    assert jacobian_error(row._replace(symmetry=Unsigned(row.symmetry.incoming, row.symmetry.outgoing))) > 0.1


def test_random_elements_reach_the_group():
    flips = np.stack([SignFlip([("w", 0)]).random(jax.random.key(i), 3) for i in range(64)])
    # A missing pattern of 8 has probability below 8 (7 / 8)^64 = 2e-3 for random seeds; these are fixed.
    assert len({tuple(f) for f in flips}) == 8
    assert set(np.unique(flips)) == {-1.0, 1.0}
    orders = {tuple(np.asarray(Permutation([("w", 0)]).random(jax.random.key(i), 3))) for i in range(64)}
    assert len(orders) == 6


def test_rename_and_names():
    s = Rescale([("w", 1), ("b", 0)], [("v", 0)]).rename({"w": "w_base"})
    assert s.sites == ("w_base", "b", "v")
    assert s.name == "Rescale(w_base)"
    assert JointScale("w", "s").rename({"s": "t"}).name == "JointScale(t)"
    assert Scale("w") == Scale([("w", None)]) == Scale([UnitAxis("w")])
    assert len({Scale("w"), Scale(["w"])}) == 1


def test_variants_name_rows():
    assert set(SYMMETRIES) > SYMMETRY_VARIANTS
    assert set(SYMMETRIC_NETS) > NET_VARIANTS


# -- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Scale(3), r"symmetry.Scale: argument `weights` got None\. Pass a site, or a pair"),
        (lambda: Scale([3]), r"symmetry.Scale: argument `weights` got 3\. Pass a site, or a pair"),
        (lambda: Scale([]), r"symmetry.Scale: argument `weights` got nothing\. Name at least one site"),
        (lambda: Shift([(1, "w")]), r"symmetry.Shift: argument `elements` got \(1, 'w'\)"),
        (lambda: Rescale([("w", 1)], []), r"symmetry.Rescale: argument `outgoing` got nothing"),
        (lambda: SignFlip([("w", 1, 2, 3)]), r"symmetry.SignFlip: argument `elements` got"),
        (lambda: JointScale([("w", 1)], "s"), r"symmetry.JointScale: argument `weights` got .*without axes"),
        (lambda: JointScale("w", ["s", "t"]), r"symmetry.JointScale: argument `scale` got .*Name one site"),
        (lambda: JointScale("w", "s", 0), r"symmetry.JointScale: argument `power` got 0"),
    ],
)
def test_wrong_parts_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("s", "message"),
    [
        (Scale([("w", 2)]), r"axis 2 of site 'w' of shape \(3, 4\)\. Count the axes"),
        (Scale([("b", -2)]), r"axis -2 of site 'b' of shape \(4,\)"),
        (Scale([("w", 0, 2)]), r"of shape \(3, 4\)\. Repeats must divide"),
        (Rescale([("w", 0)], [("v", 0)]), r"units by site \{'w': 3, 'v': 4\}\. All sites must have the same number"),
        (SignFlip([("w", 1), "b"]), r"units by site \{'w': 4, 'b': 1\}"),
    ],
)
def test_units_that_disagree_are_refused(s, message):
    values = values_of(SYMMETRIES["Rescale"])
    with pytest.raises(ValueError, match=rf"symmetry.{type(s).__name__}: argument `unit_axes` got .*{message}"):
        s.units(values)


# -- of networks --------------------------------------------------------------------------------------

BATCH, SEEDS = 7, (0, 1, 2)


def point(net, input_shape, seed):
    shapes = net.param_shapes(input_shape)
    *keys, x_key = jax.random.split(jax.random.key(seed), len(shapes) + 1)
    params = {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
    return params, jax.random.normal(x_key, (BATCH, *input_shape))


def element(s, seed, units):
    """Random, and once the flip of all units, which a single factor needs."""
    if isinstance(s, SignFlip) and seed == 0:
        return -jnp.ones(units)
    return s.random(jax.random.key(100 + seed), units)


def changes(net, input_shape, symmetries, read=lambda y: y):
    """Largest change of the outputs under each symmetry, over the seeds."""
    apply = jax.jit(jax.vmap(lambda params, x: read(net.apply(params, x)), (0, None)))
    largest = np.zeros(len(symmetries))
    for seed in SEEDS:
        params, x = point(net, input_shape, seed)
        points = [params]
        for s in symmetries:
            moved = s.act(params, element(s, seed, s.units(params)))
            assert any(not np.allclose(moved[site], params[site]) for site in s.sites) or not s.continuous
            points.append({**params, **moved})
        outputs = np.asarray(apply({name: jnp.stack([p[name] for p in points]) for name in params}, x))
        error = np.abs(outputs[1:] - outputs[0]) / (1.0 + np.abs(outputs[0]))
        largest = np.maximum(largest, error.reshape(len(symmetries), -1).max(1, initial=0.0))
    return largest


def derived(net, input_shape, logits=False):
    """Symmetries in terms of the names of the parameters."""
    found = symmetry.from_network(net, input_shape, "net", logits)
    return [s.rename({site: site.removeprefix("net/") for site in s.sites}) for s in found]


@pytest.mark.parametrize("row", rows(SYMMETRIC_NETS, "test_derived_symmetries_hold_and_are_complete", NET_VARIANTS))
def test_derived_symmetries_hold_and_are_complete(row):
    """Float64: gains and norms near 0 lose some digits, 1e-9 is far below any change that a mistake makes."""
    found = derived(row.net, row.input_shape)
    assert Counter(type(s).__name__ for s in found) == row.kinds
    if found:
        largest = changes(row.net, row.input_shape, found)
        assert largest.max() < 1e-9, {s.name: e for s, e in zip(found, largest, strict=True) if e >= 1e-9}


@pytest.mark.parametrize(
    ("net", "input_shape", "shifts"),
    [
        (nn.MLP([4, 3]), (3,), 2),
        (nn.MLP([3], "relu"), (3,), 2),
        (nn.Sequential([nn.Dense(4), "tanh", nn.Dense(3, use_bias=False)]), (3,), 1),
        # The outputs of the block are the stream itself, which the block reads.
        (nn.Sequential([nn.Dense(3), nn.Residual(nn.MLP([4, 3]))]), (3,), 0),
        (nn.Sequential([nn.Dense(5), "relu", nn.Residual(nn.MLP([4, 3]), nn.Dense(3))]), (3,), 4),
        # Means of pixels keep what an input adds, a maximum and separate pixels do not.
        (nn.Sequential([nn.Conv2d(3, 3), nn.AvgPool(None), nn.Flatten()]), (6, 5, 2), 2),
        (nn.Sequential([nn.Conv2d(3, 3), nn.MaxPool(None), nn.Flatten()]), (6, 5, 2), 1),
        (nn.Sequential([nn.Conv2d(3, 3), nn.Flatten()]), (6, 5, 2), 1),
        (nn.Sequential([nn.Dense(3), "relu"]), (3,), 0),
        # The gain of a normalization is no shift, its shift is one; the bias before it goes by unit.
        (nn.Sequential([nn.Dense(3), nn.BatchNorm()]), (3,), 2),
    ],
)
def test_shifts_of_logits(net, input_shape, shifts):
    found = derived(net, input_shape, logits=True)
    assert sum(isinstance(s, Shift) for s in found) == shifts
    if found:
        assert changes(net, input_shape, found, jax.nn.log_softmax).max() < 1e-9


def test_without_logits_the_outputs_do_not_shift():
    assert not any(isinstance(s, Shift) for s in derived(nn.MLP([4, 3]), (3,)))


def test_what_is_no_symmetry_is_seen():
    """The comparison has power: the same kinds on a network without them change the outputs."""
    net = nn.MLP([4, 2], "softplus")
    tanh, relu = (derived(nn.MLP([4, 2], name), (3,)) for name in ("tanh", "relu"))
    assert changes(net, (3,), [tanh[0], relu[0]]).min() > 1e-3
    forgotten = [
        Permutation([("Dense_0.kernel", 1), ("Dense_1.kernel", 0)]),  # the bias stays behind
        Permutation([("Dense_0.bias", 0)]),
    ]
    assert changes(net, (3,), forgotten).min() > 1e-3
    transposed = Rescale([("Conv2d_0.kernel", 3), ("Conv2d_0.bias", 0)], [UnitAxis("Dense_0.kernel", 0, 1)])
    with pytest.raises(ValueError, match="All sites must have the same number of units"):
        changes(nn.CNN([3], [2], 3), (6, 5, 2), [transposed])


@dataclass(frozen=True)
class Mixing(nn.Layer):
    """A layer of the user that does not tell its wiring."""

    def shapes(self, input_shape, path=""):
        return {"mix": (input_shape[-1],)}, input_shape

    def forward(self, run, x):
        return jnp.cumsum(x, -1) + run["mix"]


@dataclass(frozen=True)
class Scaled(nn.Layer):
    """A layer of the user that does: a gain by feature, without a bias."""

    def shapes(self, input_shape, path=""):
        return {"gain": (input_shape[-1],)}, input_shape

    def connect(self, wiring, path, x, shape):
        wiring.read(x, f"{path}.gain", 0)
        return wiring.begin(shape[-1], Wire(f"{path}.gain", 0)), shape

    def forward(self, run, x):
        return x * run["gain"]


def test_an_unknown_layer_lets_nothing_through():
    blocked = nn.Sequential([nn.Dense(4), "tanh", Mixing(), "tanh", nn.Dense(4), "tanh", nn.Dense(2)])
    found = derived(blocked, (3,))
    assert {site for s in found for site in s.sites} == {"Dense_1.kernel", "Dense_1.bias", "Dense_2.kernel"}
    assert Counter(type(s).__name__ for s in found) == {"SignFlip": 1, "Permutation": 1}
    assert changes(blocked, (3,), found).max() < 1e-12
    open_ = nn.Sequential([nn.Dense(4), "relu", Scaled(), "relu", nn.Dense(2)])
    rescales = [s for s in derived(open_, (3,)) if isinstance(s, Rescale)]
    assert [s.sites[-1] for s in rescales] == ["Scaled_0.gain", "Dense_1.kernel"]
    assert changes(open_, (3,), rescales).max() < 1e-12


def test_of_refuses_what_is_no_network():
    with pytest.raises(TypeError, match=r"symmetry.from_network: argument `net` got 'net'\. Pass a specification"):
        symmetry.from_network("net", (3,))
    with pytest.raises(ValueError, match=r"nn\.Dense at 'Dense_0'"):
        symmetry.from_network(nn.MLP([4, 1]), (3, 3, 2))


def test_find_says_what_it_looked_for_if_it_finds_nothing():
    def linear(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    message = r"symmetry\.find: found none as it has no `random_network`\. Declare your own"
    with pytest.warns(UserWarning, match=message):
        assert symmetry.find(linear, jnp.arange(8.0).reshape(4, 2), jnp.ones(4)) == []


# -- the record of the wiring ------------------------------------------------------------------------


def test_wiring_of_a_residual_block():
    net = nn.Sequential([nn.Dense(4), nn.Residual(nn.MLP([5, 4], "tanh")), nn.Flatten(1), nn.Dense(2)])
    wiring = net.wiring((3,))
    inputs, stream, hidden, output = (wiring.segments[i] for i in wiring.kept())
    assert inputs.fixed
    assert inputs.bound
    assert output.fixed
    assert wiring[wiring.output] is output
    assert [wire.param for wire in stream.writers if wire.axis] == [
        "Dense_0.kernel",
        "Residual_0.body.Dense_1.kernel",
    ]
    assert [wire.param for wire in stream.readers] == ["Residual_0.body.Dense_0.kernel", "Dense_1.kernel"]
    assert stream.linear
    assert not hidden.linear
    assert (hidden.odd, hidden.homogeneous) == (True, False)


def test_wiring_of_flatten_counts_pixels():
    net = nn.Sequential([nn.Conv2d(3, 3), nn.Flatten(), nn.Dense(2)])
    wiring = net.wiring((6, 5, 2))
    assert wiring.segments[1].readers == [Wire("Dense_0.kernel", 0, 30)]
    # Without a pixel axis there is nothing to count.
    assert nn.Sequential([nn.Dense(3), nn.Flatten(1), nn.Dense(2)]).wiring((3,)).segments[1].readers == [
        Wire("Dense_1.kernel", 0, 1)
    ]


def test_sums_join_once_and_refuse_units_that_do_not_fit():
    wiring = Wiring()
    a, b, c = wiring.begin(3), wiring.begin(3), wiring.begin(4)
    assert wiring.add(a, a) == a
    assert wiring.find(wiring.add(a, b).segment) == wiring.find(b.segment) == a.segment
    assert wiring.kept() == [0, 2]
    assert wiring.add(b, a) == b
    assert not wiring[a].fixed
    wiring.add(b, c)
    assert wiring[a].fixed
    repeated = wiring.begin(3)
    plain = wiring.begin(3)
    wiring.add(repeated._replace(repeats=2), plain)
    assert wiring[plain].fixed


def test_a_single_number_has_a_wiring():
    """A layer whose output has no axes."""

    @dataclass(frozen=True)
    class Total(nn.Layer):
        def shapes(self, input_shape, path=""):
            return {}, ()

        def forward(self, run, x):
            return x.sum(-1)

    wiring = nn.Sequential([nn.Dense(3), "relu", Total()]).wiring((2,))
    assert wiring.segments[1].fixed
    assert wiring[wiring.output].units == 1
    assert symmetry.from_network(nn.Sequential([nn.Dense(3), "relu", Total()]), (2,)) == []


@pytest.mark.parametrize(
    ("false", "place"),
    [
        (symmetry.SignFlip(["w"]), 0),
        (symmetry.SignFlip(["w"]), 10),
        (symmetry.SignFlip(["w"]), 2),
        (symmetry.Permutation([("v", 0)]), 0),
        (symmetry.Permutation([("v", 0)]), 34),
    ],
)
def test_a_false_symmetry_of_one_flip_or_two_orders_is_refused_wherever_it_stands(false, place):
    """Random elements of such a group are all the identity at one place of the list in eight, here at 10 and 34.

    At 2 they are all the flip, and their opposite is the identity.
    """

    def model():
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(w[0] + v[0] + jnp.sum(u) ** 2, 1.0), obs=0.3)

    listed = [symmetry.SignFlip(["u"])] * place + [false]
    with pytest.raises(ValueError, match="under which the log likelihood changes"):
        symmetry.check(model, listed)


@pytest.mark.parametrize("call", [symmetry.check, symmetry.quotient])
def test_a_model_without_observations_is_refused(call):
    """Nothing would be measured: the shift is no symmetry."""

    def model(y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(w.sum(), 1.0), obs=y)

    with pytest.raises(ValueError, match=r"symmetry.check: argument `args` got no observations.*Pass the data"):
        call(model, [symmetry.Shift("w")])
