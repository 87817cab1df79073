"""Random keys of one chain, or of several at once."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import random
from numpyro.util import is_prng_key

__all__ = ["split"]


def split(rng_key: jax.Array, num: int = 2) -> jax.Array:
    """``num`` keys, along the first axis: each of them one key, or a batch of keys where ``rng_key`` is a batch.

    >>> split(random.key(0), 3).shape, split(random.split(random.key(0), 5), 3).shape
    ((3,), (3, 5))
    """
    if is_prng_key(rng_key):
        return random.split(rng_key, num)
    return jnp.swapaxes(jax.vmap(partial(random.split, num=num))(rng_key), 0, 1)
