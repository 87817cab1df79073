"""Counter-based random numbers: every draw is a pure function of (words, step).

So the draws of many steps can be made ahead in one block. The bits are Threefry-2x32 with 20 rounds, bit for bit
those of JAX's own generator, written as one expression that the compiler fuses with the transform to normals.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_bnn._checks import argument_error

__all__ = ["seeds", "threefry", "normal", "box_muller", "uniform", "integers", "multiply_high", "typed_key"]

Pair = tuple[jax.Array, jax.Array]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
# Chebyshev interpolants on [0, 1] of sin(pi a / 4) / a and cos(pi a / 4) in a^2; largest errors 3e-9 and 5e-11.
_SINE = (0.7853981609766183, -0.08074543470810158, 0.0024900068014925836, -3.5954290725115357e-05)
_COSINE = (
    0.9999999999524891,
    -0.30842513515828135,
    0.01585432522840392,
    -0.0003259385858800123,
    3.529797104073023e-06,
)


def seeds(rng_key: jax.Array, count: int) -> jax.Array:
    """Turn a user's key into ``count`` independent generator seeds.

    :param rng_key: a typed key (``jax.random.key``, any implementation) or a legacy one (``jax.random.PRNGKey``).
    :param count: the number of streams.
    :return: uint32 array (count, 2).
    :raises TypeError: if ``rng_key`` is not one PRNG key.

    >>> import jax
    >>> seeds(jax.random.key(0), 3).shape
    (3, 2)
    """
    typed = hasattr(rng_key, "dtype") and jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    legacy = not typed and getattr(rng_key, "dtype", None) == jnp.uint32
    if not (typed and rng_key.ndim == 0) and not (legacy and rng_key.ndim == 1):
        raise argument_error(
            "sgmcmc.seeds",
            "rng_key",
            f"{type(rng_key).__name__} of shape {getattr(rng_key, 'shape', ())}",
            "Pass one key, e.g. `jax.random.key(0)`; for several chains use `jax.vmap`.",
            TypeError,
        )
    return jax.random.bits(rng_key, (count, 2), jnp.uint32)


def threefry(words: jax.Array, first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Hash the counter (first, second) under the key ``words``: Threefry-2x32-20.

    :param words: uint32 array (2,).
    :param first: uint32 array, first counter word.
    :param second: uint32 array that broadcasts with ``first``.
    :return: two uint32 arrays of independent uniform bits, of the broadcast shape.

    Reference: Salmon, Moraes, Dror and Shaw (2011), "Parallel random numbers: as easy as 1, 2, 3".

    >>> import jax.numpy as jnp
    >>> zero = jnp.uint32(0)
    >>> [hex(int(word)) for word in threefry(jnp.zeros(2, jnp.uint32), zero, zero)]
    ['0x6b200159', '0x99ba4efe']
    """
    schedule = (words[0], words[1], words[0] ^ words[1] ^ jnp.uint32(_PARITY))
    left, right = jnp.broadcast_arrays(first + schedule[0], second + schedule[1])
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            left = left + right
            right = (right << jnp.uint32(rotation)) | (right >> jnp.uint32(32 - rotation))
            right = right ^ left
        left = left + schedule[(group + 1) % 3]
        right = right + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return left, right


def typed_key(words: jax.Array, step: jax.Array) -> jax.Array:
    """Return the typed JAX key of one step."""
    pair = jnp.stack(threefry(words, jnp.uint32(0), step.astype(jnp.uint32)))
    return jax.random.wrap_key_data(pair, impl="threefry2x32")


def uniform(words: jax.Array, step: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Draw one uniform number in (0, 1] for a step; never 0, so that its logarithm is finite."""
    bits, _ = threefry(words, jnp.uint32(0), step.astype(jnp.uint32))
    return (bits.astype(dtype) + jnp.asarray(0.5, dtype)) * jnp.asarray(2.0**-32, dtype)


def normal(words: jax.Array, step: jax.Array, size: int, dtype: jnp.dtype) -> jax.Array:
    r"""Draw ``size`` standard normals for a step.

    Box and Muller (1958): :math:`(r\cos\phi, r\sin\phi)`, :math:`r = \sqrt{-2 \log u}`. In 32 bits ``u`` lies on the
    grid :math:`(k + 1/2) 2^{-32}`, which leaves relative precision in the tail: values reach 6.76 standard
    deviations and the two-sided tail probability at 6 is right to 2 %. Half-precision types are rounded from float32;
    float64 takes ``u`` from 64 bits and reaches 9.4.

    :param words: uint32 seed (2,), see :func:`seeds`.
    :param step: integer scalar; distinct steps give independent draws.
    :param size: number of normals.
    :param dtype: floating type of the result.
    :return: array (size,).

    >>> import jax, jax.numpy as jnp
    >>> normal(seeds(jax.random.key(0), 1)[0], jnp.uint32(7), 5, jnp.float32).shape
    (5,)
    """
    half = (size + 1) // 2
    index = lax.iota(jnp.uint32, half)
    step = step.astype(jnp.uint32)
    if dtype == jnp.float64:
        # Even and odd counters: two independent pairs of words per pair of normals.
        radius_bits = threefry(words, 2 * index, step)
        angle_bits = threefry(words, 2 * index + 1, step)
        pair = _box_muller_64(radius_bits, angle_bits)
    else:
        # Without the barrier the compiler hashes once for each of the two normals of a pair.
        pair = box_muller(*lax.optimization_barrier(threefry(words, index, step)))
    return jnp.concatenate(pair)[:size].astype(dtype)


def box_muller(radius_bits: jax.Array, angle_bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Map two arrays of uniform uint32 words to two arrays of independent float32 standard normals."""
    grid = radius_bits.astype(jnp.float32) + jnp.float32(0.5)
    radius = jnp.sqrt(jnp.float32(-2.0) * jnp.log(grid * jnp.float32(2.0**-32)))
    # Two bits choose the quadrant, thirty the angle in [-pi/4, pi/4): short polynomials, no range reduction.
    angle = (angle_bits << jnp.uint32(2)).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-31)
    square = angle * angle
    sine, cosine = angle * _polynomial(_SINE, square), _polynomial(_COSINE, square)
    quadrant = angle_bits >> jnp.uint32(30)
    swapped = (quadrant & jnp.uint32(1)) == 1
    radius = jnp.where(quadrant >= 2, -radius, radius)
    return radius * jnp.where(swapped, -sine, cosine), radius * jnp.where(swapped, cosine, sine)


def _box_muller_64(radius_bits: Pair, angle_bits: Pair) -> Pair:
    open_unit = _unit_64(*radius_bits)
    radius = jnp.sqrt(-2.0 * jnp.log(open_unit))
    angle = (2.0 * math.pi) * _unit_64(*angle_bits)
    return radius * jnp.cos(angle), radius * jnp.sin(angle)


def _unit_64(high: jax.Array, low: jax.Array) -> jax.Array:
    grid = high.astype(jnp.float64) * 2.0**32 + low.astype(jnp.float64) + 0.5
    return grid * 2.0**-64


def _polynomial(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    value = jnp.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x + jnp.float32(coefficient)
    return value


def integers(high: jax.Array, low: jax.Array, bound: int) -> jax.Array:
    """Map pairs of uniform uint32 words to uniform integers in [0, bound): floor(bound * (high 2^32 + low) / 2^64).

    The probabilities differ from 1 / bound by at most 2^-64.

    :param high: uint32 array.
    :param low: uint32 array of the same shape.
    :param bound: 1 <= bound < 2^32.
    :return: int32 array.

    >>> import jax.numpy as jnp
    >>> int(integers(jnp.uint32(2**31), jnp.uint32(0), 10))
    5
    """
    factor = jnp.uint32(bound)
    middle = high * factor
    total = middle + multiply_high(low, factor)
    carry = (total < middle).astype(jnp.uint32)
    return (multiply_high(high, factor) + carry).astype(jnp.int32)


def multiply_high(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the upper 32 bits of a 32 by 32 bit product, by schoolbook multiplication of 16-bit halves."""
    mask, shift = jnp.uint32(0xFFFF), jnp.uint32(16)
    a_low, a_high, b_low, b_high = a & mask, a >> shift, b & mask, b >> shift
    cross = a_high * b_low + (a_low * b_low >> shift)
    other = a_low * b_high + (cross & mask)
    return a_high * b_high + (cross >> shift) + (other >> shift)
