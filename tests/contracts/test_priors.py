"""Every prior serves every parameter, in centered and non-centered form."""

import copy
import pickle
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import traced_sites
from numpyro import handlers
from numpyro.infer.util import log_density
from registry import GIVEN, PRIORS, rows

from numpyro_bnn import priors

pytestmark = pytest.mark.core

DENSE, CONV = ("Dense_0.kernel", (4, 3)), ("Conv2d_0.kernel", (2, 3, 2, 3))


def model_of(prior, *parameters):
    """The sites NumPyro's module functions make, and nothing else."""

    def model():
        for name, shape in parameters:
            fn = prior(name, shape)
            numpyro.sample(
                name, fn.expand(shape[: len(shape) - fn.event_dim]).to_event()
            )

    return model


def sites_of(model):
    """Type and shape of every site, without running anything."""
    return {
        name: (site["type"], jnp.shape(site["value"]))
        for name, site in traced_sites(model).items()
    }


def values_of(model, dtype=np.float32):
    """A positive value of every site: inside every support, without a program."""
    random = np.random.default_rng(0)
    shapes = {
        name: shape
        for name, (kind, shape) in sites_of(model).items()
        if kind == "sample"
    }
    return {
        name: random.uniform(0.6, 1.4, shape).astype(dtype)
        for name, shape in shapes.items()
    }


def is_noncentered(row):
    learned = bool(row.hyper_sites) or isinstance(row.prior, priors.GPFilters)
    return learned and not getattr(row.prior, "centered", False)


@pytest.mark.parametrize("row", rows(PRIORS))
def test_prior_serves_every_parameter_with_its_sites(row):
    """Also a copy of the prior from another process."""
    sites = sites_of(model_of(row.prior, *GIVEN.items()))
    for name, shape in GIVEN.items():
        assert sites[name] == ("sample", shape)
    assert all(site.startswith(tuple(GIVEN)) for site in sites)
    name = DENSE[0]
    hyper = {key: sites[f"{name}_{key}"][1] for key in row.hyper_sites}
    assert hyper == dict(row.hyper_sites)
    assert sum(site.startswith(name) for site in sites) == 1 + len(row.hyper_sites)
    name = CONV[0] if isinstance(row.prior, priors.GPFilters) else name
    noncentered = sites_of(priors.noncenter(model_of(row.prior, *GIVEN.items())))
    kind = "deterministic" if is_noncentered(row) else "sample"
    assert noncentered[name][0] == kind
    assert (f"{name}_base" in noncentered) == is_noncentered(row)
    assert copy.copy(row.prior) == row.prior
    again = pickle.loads(pickle.dumps(row.prior))
    assert sites_of(model_of(again, *GIVEN.items())) == sites


@pytest.mark.parametrize("row", rows(PRIORS, "test_prior_takes_equinox_convolutions"))
def test_prior_takes_equinox_convolutions(row):
    name, shape = "layers[0].weight", (3, 2, 2, 3)
    model = priors.noncenter(model_of(row.prior, (name, shape)))
    assert sites_of(model)[name][1] == shape


@pytest.mark.parametrize(
    "row", [row for row in rows(PRIORS, fast=PRIORS) if is_noncentered(row.values[0])]
)
def test_centered_and_noncentered_forms_agree(row, x64):
    """log p(hyper, z) = log p(hyper, w(z)) + log |dw/dz|, Jacobian by autodiff."""
    name, shape = CONV if isinstance(row.prior, priors.GPFilters) else DENSE
    centered = model_of(row.prior, (name, shape))
    noncentered, base = priors.noncenter(centered), f"{name}_base"

    hyper = values_of(noncentered, np.float64)
    z = hyper.pop(base)

    @jax.jit
    def both(z):
        def weight(z):
            return handlers.trace(
                handlers.substitute(noncentered, {**hyper, base: z})
            ).get_trace()[name]["value"]

        jacobian = jax.jacfwd(weight)(z).reshape(prod(shape), prod(shape))
        return (
            log_density(noncentered, (), {}, {**hyper, base: z})[0],
            log_density(centered, (), {}, {**hyper, name: weight(z)})[0]
            + jnp.linalg.slogdet(jacobian)[1],
        )

    np.testing.assert_allclose(*both(z), rtol=1e-10)


def test_densities_are_differentiable_in_the_precision_of_the_run():
    """Of all priors in one program."""
    models = {
        row: priors.noncenter(model_of(PRIORS[row].prior, DENSE, CONV))
        for row in PRIORS
    }

    def run(values):
        return {
            row: jax.value_and_grad(
                lambda at, model=models[row]: log_density(model, (), {}, at)[0]
            )(given)
            for row, given in values.items()
        }

    low = jax.jit(run)({row: values_of(model) for row, model in models.items()})
    finite = {
        row: all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
        for row, found in low.items()
    }
    assert finite == dict.fromkeys(PRIORS, True)
    assert {leaf.dtype for leaf in jax.tree.leaves(low)} == {np.dtype("float32")}
    with jax.enable_x64(True):
        high = jax.eval_shape(
            run, {row: values_of(model, np.float64) for row, model in models.items()}
        )
    assert {leaf.dtype for leaf in jax.tree.leaves(high)} == {np.dtype("float64")}


# -- names and layouts -----------------------------------------------------------------

FAN_IN = {  # of the kernels of our layers, of Flax, NNX and Equinox
    ("Dense_0.kernel", (3, 8)): 3,
    ("Conv2d_0.kernel", (5, 5, 2, 16)): 50,
    ("Embed_0.embedding", (1000, 16)): 1,
    ("layers[0].weight", (8, 3)): 3,
    ("conv.weight", (16, 2, 5, 5)): 50,
    ("cell.weight_ih", (24, 3)): 3,
    ("net/attention.query.kernel", (6, 4, 3)): 6,
    ("key.kernel", (6, 12)): 6,
    ("attention.out.kernel", (4, 3, 5)): 12,
}
BIASES = [("attention.query.bias", (4, 3)), ("conv.bias", (16, 1, 1))]
GAINS = [("norm.weight", (8,)), ("LayerNorm_0.scale", (8,))]


def test_names_tell_role_and_fan_in():
    prior = priors.Normal(2.0, bias_scale=0.7, gain_scale=0.3)
    for parameter, fan_in in FAN_IN.items():
        fn = prior(*parameter)
        assert (fn.loc, fn.scale) == (0.0, pytest.approx(2 / fan_in**0.5)), parameter
    biases, gains = ([prior(*parameter) for parameter in p] for p in (BIASES, GAINS))
    assert {(fn.loc, fn.scale) for fn in biases} == {(0.0, 0.7)}
    assert {(fn.loc, fn.scale) for fn in gains} == {(1.0, 0.3)}


# of a horseshoe, parameter: shape of the local scales as they multiply the kernel
UNITS = {
    ("output", *DENSE): (1, 3),
    ("input", *CONV): (1, 1, 2, 1),
    ("output", "layers[0].weight", (3, 4)): (3, 1),
    ("input", "conv.weight", (3, 2, 5, 4)): (1, 2, 1, 1),
    ("input", "attention.query.kernel", (6, 4, 3)): (6, 1, 1),
}


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(("unit", "name", "shape"), UNITS, ids=lambda value: str(value))
def test_weights_of_a_unit_share_a_scale(unit, name, shape, centered):
    """Of an ARD prior those of one input, of a horseshoe those of either."""
    shared, fan_in = UNITS[unit, name, shape], priors.Normal()(name, shape).scale ** -2
    local = np.arange(1, max(shared) + 1, dtype=np.float32)
    horseshoe = priors.Horseshoe(unit=unit, centered=centered)
    given = {horseshoe: {"global": 0.5, "local": 2 * local}}
    if unit == "input":
        given[priors.ARD(centered=centered)] = {"scale": local}
    for prior, hyper in given.items():
        values = {
            f"{name}_{site}": value
            for site, value in {**hyper, "base": np.ones(shape, np.float32)}.items()
        }
        model = handlers.substitute(
            priors.noncenter(model_of(prior, (name, shape))), values
        )
        site = handlers.trace(handlers.seed(model, 0)).get_trace()[name]
        sd = site["fn"].variance ** 0.5 if centered else site["value"]
        expected = np.broadcast_to(local.reshape(shared) * fan_in**-0.5, shape)
        np.testing.assert_allclose(sd, expected, rtol=1e-6)


def test_filters_leave_the_rest_to_the_other_prior():
    prior = priors.GPFilters(bias_scale=0.1, gain_scale=0.2, fan_in_scaling=False)
    names = {DENSE: 1.0, ("Dense_0.bias", (3,)): 0.1, ("BatchNorm_0.scale", (3,)): 0.2}
    assert {parameter: prior(*parameter).scale for parameter in names} == names
    prior = priors.GPFilters(other=priors.Normal(3.0, gain_scale=0.7))
    assert prior(*DENSE).scale == 1.5
    assert prior("BatchNorm_0.scale", (3,)).scale == 0.7


def test_first_matching_pattern_wins():
    prior = priors.BySite(
        {
            "Dense_0.*": priors.Laplace(),
            "*.kernel": dist.Cauchy(0.0, 2.0),
            "*": priors.Normal(bias_scale=0.5),
        }
    )
    assert isinstance(prior("Dense_0.kernel", (4, 3)), dist.Laplace)
    assert isinstance(prior("Dense_1.kernel", (4, 3)), dist.Cauchy)
    assert prior("Dense_1.bias", (3,)).scale == 0.5


# -- what fits and what does not -------------------------------------------------------

POSITIVE = {
    "Uniform": lambda: dist.Uniform(0.1, 2.0),
    "Pareto": lambda: dist.Pareto(1.0, 2.0),
}


@pytest.mark.parametrize("name", POSITIVE)
def test_scales_on_part_of_the_half_line_are_welcome(name):
    """Also where the prior is made inside a traced model."""

    def model():
        model_of(priors.Hierarchical(POSITIVE[name]()), DENSE)()

    assert sites_of(model)[DENSE[0]][1] == DENSE[1]


REFUSED = {
    "interval": (lambda: priors.ARD(dist.Uniform(-1.0, 1.0)), "`scale_prior`"),
    "batch of scales": (
        lambda: priors.ARD(dist.HalfNormal(jnp.ones(3))),
        "scalar distribution",
    ),
    "layout": (
        lambda: priors.GPFilters()("layers[0].weight", (3, 2, 2, 2)),
        "It takes Flax kernels (h, w, in, out), not Equinox ones",
    ),
    "class in patterns": (
        lambda: priors.BySite({"*": priors.Normal}),
        "Pass an object such as",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_priors_that_do_not_fit_are_refused(call, message):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    assert message in str(error.value)
