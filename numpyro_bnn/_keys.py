"""Random keys: split for one chain or several at once, or derived from the values of a
draw.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from numpyro.util import is_prng_key

from numpyro_bnn._types import Arrays


def split(rng_key: Array, num: int = 2) -> Array:
    """Split one key into ``num``; split a batch of C keys into (num, C), so that
    ``keys[0]`` is a batch again.

    >>> split(random.key(0), 3).shape, split(random.split(random.key(0), 5), 3).shape
    ((3,), (3, 5))
    """
    if is_prng_key(rng_key):
        return random.split(rng_key, num)
    return jnp.swapaxes(jax.vmap(partial(random.split, num=num))(rng_key), 0, 1)


def key_numbers(value: Any) -> Any:
    """The numbers of a random key; anything else as it is."""
    typed = hasattr(value, "dtype") and jax.dtypes.issubdtype(
        value.dtype, jax.dtypes.prng_key
    )
    return random.key_data(value) if typed else value


def key_from(values: Arrays) -> Array:
    """Make a key from the bits of all values, by two sums with random odd weights (each
    a universal hash).

    >>> one, other = ({"w": jnp.array([1.0, w])} for w in (2.0, 2.0000002))
    >>> (
    ...     bool(key_from(one) == key_from(other)),
    ...     bool(key_from(one) == key_from(dict(one))),
    ... )
    (False, True)
    """
    words = []
    for name in sorted(values):
        value = values[name]
        if jnp.issubdtype(value.dtype, jnp.floating):
            words.append(lax.bitcast_convert_type(value, jnp.uint32).ravel())
        else:
            words.append(value.astype(jnp.uint32).ravel())
    joined = jnp.concatenate(words)
    weights = random.bits(random.key(2026), (2, joined.size), jnp.uint32) | jnp.uint32(
        1
    )
    first, second = jnp.sum(weights * joined, axis=1, dtype=jnp.uint32)
    return random.fold_in(random.fold_in(random.key(0), first), second)
