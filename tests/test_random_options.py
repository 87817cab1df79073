"""Random options of kernels, guides and priors: a call works with finite results, or is refused before compiling."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.initialization import init_to_median
from registry import IMAGE

from numpyro_bnn import guides, infer, nn, priors, random_network, sgmcmc

X = jnp.linspace(-1, 1, 12).reshape(6, 2)
Y = X[:, 0]
NET = nn.MLP([3, 1], "tanh")
ODD = [-1, 0, True, None, "0.1", "no", np.nan, np.inf, -np.inf, [1.0], (), {}, np.ones(3), dist.Normal, object, 10**6]


def number(low, high):
    return st.floats(low, high)


RATE, POSITIVE, COUNT, FLAG = number(0.001, 0.9), number(0.01, 3.0), st.integers(1, 4), st.booleans()
SCALE = st.sampled_from([dist.HalfNormal(1.0), dist.HalfCauchy(0.5), dist.Gamma(2.0, 2.0)])
# Right values by the name of the option.
VALID = {
    **dict.fromkeys(["scale", "bias_scale", "gain_scale", "wide_scale", "narrow_scale", "df"], POSITIVE),
    **dict.fromkeys(["global_scale", "slab_scale", "slab_df", "amplitude", "length_scale", "init_scale"], POSITIVE),
    **dict.fromkeys(["weight", "explore", "bias_tolerance", "momentum_decay", "jitter", "share", "spread"], RATE),
    **dict.fromkeys(["centered", "marginal", "fan_in_scaling", "include_scales", "condition_on_scales"], FLAG),
    **dict.fromkeys(["steps_per_draw", "num_steps", "num_flows", "num_moves", "rank", "num_particles"], COUNT),
    **dict.fromkeys(["cycle_length", "draws_per_cycle"], st.integers(2, 4)),
    "step_size": st.floats(1e-6, 1e-3) | st.just(sgmcmc.schedules.constant(1e-4)) | st.none(),
    "alpha": number(0.3, 3.0),  # precisions of a smaller shape underflow
    "temperature": st.floats(0.5, 2.0),
    "gradient": st.sampled_from(["minibatch", "control_variates"]),
    "minibatches": st.sampled_from(["with_replacement", "epochs"]),
    "preconditioner": st.none() | POSITIVE,
    "warm_start": st.sampled_from([0, 0.25, 0.5]),
    "optimizer": st.just(optax.adam(0.01)),
    "init_strategy": st.just(init_to_median),
    "decoherence_length": st.none() | POSITIVE,
    "energy_variance": st.floats(1e-4, 1e-2),
    "scale_prior": SCALE,
    "unit": st.sampled_from(["weight", "input", "output"]),
    "covariance": st.sampled_from(["rbf", "matern12", "matern32", "matern52"]),
    "other": st.just(priors.Laplace()),
    "hidden": st.lists(COUNT, min_size=1, max_size=2),
    "mask": st.sampled_from(["alternating", "random"]),
    "bound": POSITIVE,
    "seed": st.integers(0, 5),
    "family": st.sampled_from([guides.FullRank(), guides.LowRank(1), guides.Diagonal()]),
}
COMMON = set(inspect.signature(infer.SGMCMCKernel).parameters) - {"model"}
LEFT_OUT = {"model", "options", "settings", "blocks", "init_loc_fn", "prefix", "create_plates", "integrator"} | {
    "vectorize_particles"
}
KERNELS = [infer.SGLD, infer.PSGLD, infer.SGHMC, infer.SGNHT, infer.CyclicalSGLD, infer.MALA, infer.GHMC, infer.MCLMC]
PRIORS = [priors.Normal, priors.Laplace, priors.StudentT, priors.ScaleMixture, priors.Hierarchical, priors.ARD]
PRIORS += [priors.GammaPrecision, priors.Horseshoe, priors.RegularizedHorseshoe, priors.GPFilters]
GUIDES = [guides.AutoMeanField, guides.AutoStructured, guides.AutoCoupling, guides.AutoBlocks]
ELBOS = [guides.TraceLocalReparam_ELBO, guides.TraceFlipout_ELBO]
FAMILIES = [guides.LowRank, guides.Coupling]


def names_of(kind):
    """The options of a class that this test knows; a new option must get a row above."""
    names = set(inspect.signature(kind).parameters)
    names |= COMMON if "options" in names and issubclass(kind, infer.SGMCMCKernel) else set()
    names |= {"init_scale", "condition_on_scales"} if "settings" in names else set()
    assert names - LEFT_OUT <= set(VALID), f"say in VALID what {sorted(names - LEFT_OUT - set(VALID))} may be"
    return sorted(names - LEFT_OUT)


def options(kind, odd):
    """A few options with right values, or with any of the odd ones too."""

    def values(names):
        return st.fixed_dictionaries(
            {name: VALID[name] | st.sampled_from(ODD) if odd else VALID[name] for name in names}
        )

    return st.lists(st.sampled_from(names_of(kind)), unique=True, max_size=3).flatmap(values)


def made(kind, *args, **chosen):
    """The object, or ``None`` if it is refused by an error of ours."""
    try:
        return kind(*args, **{**REQUIRED.get(kind, {}), **chosen})
    except (ValueError, TypeError) as error:
        message = str(error)
        # Options are passed on to a part that checks them, such as a warm start or a schedule.
        assert message.split(":")[0].split(".")[0] in {"infer", "guides", "priors", "sgmcmc", "schedules"}, message
        assert ": argument `" in message, message
        return None


def model(x, y=None, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.5 + s), obs=None if y is None else y[i])


def network(x, y=None):
    net = random_network("net", NET, (2,))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(net(x)[..., 0], 0.5), obs=y)


def quick(examples):
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


NEEDS_MODEL = KERNELS + GUIDES
REQUIRED = {infer.CyclicalSGLD: {"step_size": 1e-4}}


@pytest.mark.parametrize("kind", [*NEEDS_MODEL, *PRIORS, *ELBOS, *FAMILIES], ids=lambda kind: kind.__name__)
def test_wrong_options_are_refused_before_any_program_is_compiled(kind, compiled):
    first = (model,) if kind in NEEDS_MODEL else ()

    @quick(60)
    @given(options(kind, odd=True))
    def check(chosen):
        before = len(compiled)
        if made(kind, *first, **chosen) is None:
            assert len(compiled) == before

    check()


@pytest.mark.parametrize("kind", PRIORS, ids=lambda kind: kind.__name__)
def test_priors_with_right_options_give_finite_weights(kind):
    shape, net = (IMAGE, nn.CNN([2], [2], window=3)) if kind is priors.GPFilters else ((2,), NET)

    @quick(10)
    @given(options(kind, odd=False))
    def check(chosen):
        prior = made(kind, **chosen)
        if prior is None:
            return
        with handlers.trace() as sites, handlers.seed(rng_seed=0):
            random_network("net", net, shape, prior)
        for site in sites.values():
            assert np.isfinite(site["value"]).all(), (chosen, site["name"])

    check()


@pytest.mark.parametrize("kind", KERNELS, ids=lambda kind: kind.__name__)
def test_kernels_with_right_options_give_finite_draws(kind):
    exact = kind in (infer.MALA, infer.GHMC)

    @quick(2)
    @given(options(kind, odd=False))
    def check(chosen):
        kernel = made(kind, model, **{"steps_per_draw": 2, **chosen})
        if kernel is None:
            return
        call = (X, Y), {} if exact else {"batch_size": 3}
        try:
            state = kernel.init(jax.random.key(0), 2, None, *call)
        except ValueError as error:
            assert str(error).startswith("infer."), error  # noqa: PT017
            return
        for _ in range(3):
            state = jax.jit(lambda state: kernel.sample(state, *call))(state)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.z)) or state.diverging, chosen

    check()


@pytest.mark.parametrize("kind", [*GUIDES, *ELBOS], ids=lambda kind: kind.__name__)
def test_guides_with_right_options_give_finite_losses(kind):
    @quick(2)
    @given(options(kind, odd=False))
    def check(chosen):
        guide = guides.AutoMeanField(network) if kind in ELBOS else made(kind, network, **chosen)
        loss = made(kind, **chosen) if kind in ELBOS else Trace_ELBO()
        if guide is not None and loss is not None:
            svi = SVI(network, guide, numpyro.optim.Adam(1e-3), loss)
            result = guides.fit(svi, jax.random.key(0), 2, X, Y, progress_bar=False)
            assert np.isfinite(result.losses).all(), chosen

    check()
