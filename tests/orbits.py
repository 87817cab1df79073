"""What tests of symmetries and of moves share: draws moved along orbits, and a kernel
that stays where it is.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax, random
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import constrain_fn, unconstrain_fn

from numpyro_bnn import symmetry


def around(shapes, spread, num_draws, seed=0, num_chains=2):
    """Draws around a random point, as of one mode: site -> (C, S, ...)."""
    rng, many = np.random.default_rng(seed), (num_chains, num_draws)
    return {
        n: rng.normal(size=shape) + spread * rng.normal(size=(*many, *shape))
        for n, shape in shapes.items()
    }


def elements(s, units, many, rng):
    """Random elements of a group: (many, U)."""
    if isinstance(s, symmetry.Permutation):
        return np.stack([rng.permutation(units) for _ in range(many)])
    return (
        rng.choice([-1.0, 1.0], (many, units))
        if isinstance(s, symmetry.SignFlip)
        else rng.normal(size=(many, units))
    )


def scattered(draws, symmetries, seed=0, by_chain=False):
    """Every draw, or every chain, moved by random elements of all groups."""
    num_chains, num_draws = next(iter(draws.values())).shape[:2]
    rng = np.random.default_rng(seed)
    point = {name: v[0, 0] for name, v in draws.items()}
    chosen = [
        elements(
            s, s.units(point), num_chains if by_chain else num_chains * num_draws, rng
        )
        for s in symmetries
    ]
    chosen = [np.repeat(g, num_draws, 0) if by_chain else g for g in chosen]

    @jax.jit
    @jax.vmap
    def moved(point, chosen):
        for s, g in zip(symmetries, chosen, strict=True):
            point = {**point, **s.act(point, g)}
        return point

    flat = moved(
        {name: v.reshape(-1, *v.shape[2:]) for name, v in draws.items()}, chosen
    )
    return {name: np.asarray(v).reshape(draws[name].shape) for name, v in flat.items()}


def outputs_of(net, input_shape, read=lambda y: y):
    """Outputs of a network at fixed inputs, as a function of its parameters."""
    x = np.random.default_rng(1).normal(size=(7, *input_shape))
    apply = jax.jit(jax.vmap(lambda params: read(net.apply(params, x))))
    return lambda draws: np.asarray(
        apply({name: v.reshape(-1, *v.shape[2:]) for name, v in draws.items()})
    )


def assert_close(one, other, tolerance):
    """Equal names and nearly equal values."""
    assert set(one) == set(other)
    for name in one:
        np.testing.assert_allclose(
            one[name], other[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


class StillState(NamedTuple):
    """Unconstrained values, and a key."""

    z: Any
    rng_key: Any


class Still(MCMCKernel):
    """A kernel of a user that stays where it is: around it, a wrapper makes its own
    moves and no others.
    """

    sample_field = "z"

    def __init__(self, model):
        self._model = model

    @property
    def model(self):
        return self._model

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        return StillState(init_params, rng_key)

    def sample(self, state, model_args, model_kwargs):
        return state

    def refresh(self, state, model_args, model_kwargs):
        return state

    def get_constrain_fn(self, model_args, model_kwargs):
        return lambda z: constrain_fn(self.model, model_args, model_kwargs, z)

    def postprocess_fn(self, model_args, model_kwargs):
        return lambda z: constrain_fn(
            self.model, model_args, model_kwargs, z, return_deterministic=True
        )


def after_moves(
    wrap,
    model,
    draws,
    args=(),
    transitions=1,
    num_warmup=0,
    seed=1,
    read=lambda state: (),
):
    """Constrained values after transitions of ``wrap(Still(model))`` from each of many
    draws, each by itself.

    :param draws: site -> (S, ...) constrained values of all latent sites.
    :param read: what to return of the state after each transition: (S, transitions,
        ...).
    """
    kernel = wrap(Still(model))
    free = jax.jit(jax.vmap(lambda values: unconstrain_fn(model, args, {}, values)))(
        draws
    )
    first = jax.tree.map(lambda leaf: leaf[0], free)
    state = kernel.init(random.key(0), num_warmup, first, args, {})

    def chain(key, z):
        def step(state, _):
            state = kernel.sample(state, args, {})
            return state, read(state)

        begin = state._replace(base=state.base._replace(z=z), rng_key=key)
        end, found = lax.scan(step, begin, None, transitions)
        return kernel.get_constrain_fn(args, {})(end.z), found

    keys = random.split(random.key(seed), len(jax.tree.leaves(free)[0]))
    after, found = jax.tree.map(np.asarray, jax.jit(jax.vmap(chain))(keys, free))
    return kernel.describe(state), after, found
