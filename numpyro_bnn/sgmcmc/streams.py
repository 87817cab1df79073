"""Counter-based randomness: noise and minibatches, each a pure function of (words,
step).

So the draws of many steps can be made ahead in one block, and a minibatch costs O(B)
for any number of data. The bits are Threefry-2x32 with 20 rounds, identical to those of
JAX's own generator, written as one expression that the compiler fuses with the
transform to normals.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import PositiveInt, check_fields
from numpyro_bnn._types import PyTree

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
# Chebyshev interpolants on [0, 1] of sin(pi a / 4) / a and cos(pi a / 4) in a^2;
# largest errors 3e-9 and 5e-11.
_SINE = (
    0.7853981609766183,
    -0.08074543470810158,
    0.0024900068014925836,
    -3.5954290725115357e-05,
)
_COSINE: tuple[float, ...] = (
    0.9999999999524891,
    -0.30842513515828135,
    0.01585432522840392,
)
_COSINE += (-0.0003259385858800123, 3.529797104073023e-06)


def seeds(rng_key: Array, count: int) -> Array:
    """Turn one PRNG key, typed or legacy, into ``count`` independent generator seeds:
    uint32 (count, 2).
    """
    typed = hasattr(rng_key, "dtype") and jnp.issubdtype(
        rng_key.dtype, jax.dtypes.prng_key
    )
    legacy = not typed and getattr(rng_key, "dtype", None) == jnp.uint32
    if not (typed and rng_key.ndim == 0) and not (legacy and rng_key.ndim == 1):
        came = f"{type(rng_key).__name__} of shape {getattr(rng_key, 'shape', ())}"
        instead = (
            "Pass one key, e.g. `jax.random.key(0)`; for several chains use `jax.vmap`."
        )
        raise argument_error("sgmcmc.seeds", "rng_key", came, instead, TypeError)
    return jax.random.bits(rng_key, (count, 2), jnp.uint32)


def threefry(words: Array, first: Array, second: Array) -> tuple[Array, Array]:
    """Hash the counter (first, second) under the key ``words`` (2,) to two independent
    words: Threefry-2x32-20.

    Reference: Salmon, Moraes, Dror and Shaw (2011), "Parallel random numbers: as easy
    as 1, 2, 3".
    """
    schedule = (words[0], words[1], words[0] ^ words[1] ^ jnp.uint32(_PARITY))
    left, right = jnp.broadcast_arrays(first + schedule[0], second + schedule[1])
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            left = left + right
            right = (right << jnp.uint32(rotation)) | (
                right >> jnp.uint32(32 - rotation)
            )
            right = right ^ left
        left = left + schedule[(group + 1) % 3]
        right = right + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return left, right


def uniform(words: Array, step: Array, dtype: jnp.dtype) -> Array:
    """Draw one uniform number in (0, 1] for a step; never 0, so that its logarithm is
    finite.
    """
    bits, _ = threefry(words, jnp.uint32(0), step.astype(jnp.uint32))
    return (bits.astype(dtype) + jnp.asarray(0.5, dtype)) * jnp.asarray(2.0**-32, dtype)


def normal(words: Array, step: Array, size: int, dtype: jnp.dtype) -> Array:
    r"""Draw ``size`` standard normals for a step, (size,); distinct steps give
    independent draws.

    Box and Muller (1958): :math:`(r\cos\phi, r\sin\phi)`, :math:`r = \sqrt{-2 \log u}`.
    In 32 bits ``u`` lies on the grid :math:`(k + 1/2) 2^{-32}`, which keeps relative
    precision in the tail: values reach 6.76 standard deviations and the two-sided tail
    probability at 6 is correct to 2 %. Half-precision types are rounded from float32;
    float64 takes ``u`` from 64 bits and reaches 9.4.
    """
    half = (size + 1) // 2
    index = lax.iota(jnp.uint32, half)
    step = step.astype(jnp.uint32)
    if dtype == jnp.float64:
        # Even and odd counters: two independent pairs of words per pair of normals.
        radius = jnp.sqrt(-2.0 * jnp.log(_unit_64(*threefry(words, 2 * index, step))))
        angle = (2.0 * math.pi) * _unit_64(*threefry(words, 2 * index + 1, step))
        pair = radius * jnp.cos(angle), radius * jnp.sin(angle)
    else:
        # Without the barrier the compiler would hash once for each of the two normals
        # of a pair.
        pair = box_muller(*lax.optimization_barrier(threefry(words, index, step)))
    return jnp.concatenate(pair)[:size].astype(dtype)


def box_muller(radius_bits: Array, angle_bits: Array) -> tuple[Array, Array]:
    """Map two arrays of uniform uint32 words to two arrays of independent float32
    standard normals.
    """
    grid = radius_bits.astype(jnp.float32) + jnp.float32(0.5)
    radius = jnp.sqrt(jnp.float32(-2.0) * jnp.log(grid * jnp.float32(2.0**-32)))
    # Two bits choose the quadrant, thirty the angle in [-pi/4, pi/4): short
    # polynomials, no range reduction.
    angle = (angle_bits << jnp.uint32(2)).astype(jnp.int32).astype(
        jnp.float32
    ) * jnp.float32(2.0**-31)
    square = angle * angle
    sine, cosine = angle * _polynomial(_SINE, square), _polynomial(_COSINE, square)
    quadrant = angle_bits >> jnp.uint32(30)
    swapped = (quadrant & jnp.uint32(1)) == 1
    radius = jnp.where(quadrant >= 2, -radius, radius)
    return radius * jnp.where(swapped, -sine, cosine), radius * jnp.where(
        swapped, cosine, sine
    )


def _unit_64(high: Array, low: Array) -> Array:
    grid = high.astype(jnp.float64) * 2.0**32 + low.astype(jnp.float64) + 0.5
    return grid * 2.0**-64


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    value = jnp.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x + jnp.float32(coefficient)
    return value


def integers(high: Array, low: Array, bound: int) -> Array:
    """Map pairs of uniform uint32 words to uniform int32 in [0, bound), with
    probabilities correct to 2^-64.
    """
    factor = jnp.uint32(bound)
    middle = high * factor
    total = middle + multiply_high(low, factor)
    carry = (total < middle).astype(jnp.uint32)
    return (multiply_high(high, factor) + carry).astype(jnp.int32)


def multiply_high(a: Array, b: Array) -> Array:
    """Return the upper 32 bits of a 32 by 32 bit product, by schoolbook multiplication
    of 16-bit halves.
    """
    mask, shift = jnp.uint32(0xFFFF), jnp.uint32(16)
    a_low, a_high, b_low, b_high = a & mask, a >> shift, b & mask, b >> shift
    cross = a_high * b_low + (a_low * b_low >> shift)
    other = a_low * b_high + (cross & mask)
    return a_high * b_high + (cross >> shift) + (other >> shift)


# Each round spends one bit per element: 2^64 paths lead to fewer than 2^31 places.
_ROUNDS = 64


class Stream(Protocol):
    """A source of minibatches."""

    def draw(self, words: Array, step: Array) -> PyTree:
        """Return the minibatch of ``step`` (uint32 scalar) under the seed ``words``
        (uint32, (2,)).
        """


@dataclass(frozen=True)
class FullData:
    """The stream of a full-data gradient: no indices."""

    def draw(self, words: Array, step: Array) -> tuple[()]:
        return ()


@dataclass(frozen=True)
class _Minibatches:
    num_data: PositiveInt
    batch_size: PositiveInt

    @property
    def _call(self) -> str:
        return f"sgmcmc.{type(self).__name__}"

    def __post_init__(self) -> None:
        check_fields(self._call, self)
        size = self.num_data
        if self.batch_size > size:
            instead = f"Pass at most num_data = {size}."
            raise argument_error(self._call, "batch_size", self.batch_size, instead)
        if size >= 2**31:
            instead = "Pass fewer than 2^31 rows: indices are int32."
            raise argument_error(self._call, "num_data", size, instead)


@dataclass(frozen=True)
class WithReplacement(_Minibatches):
    """Minibatches with replacement: B independent uniform indices per step.

    :param num_data: N.
    :param batch_size: B.
    :raises ValueError: unless 1 <= B <= N < 2^31.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_bnn.sgmcmc.streams import seeds
    >>> WithReplacement(10**6, 4).draw(
    ...     seeds(jax.random.key(0), 1)[0], jnp.uint32(0)
    ... ).shape
    (4,)
    """

    def draw(self, words: Array, step: Array) -> Array:
        bits = threefry(
            words, lax.iota(jnp.uint32, self.batch_size), step.astype(jnp.uint32)
        )
        return integers(*bits, self.num_data)


@dataclass(frozen=True)
class Epochs(_Minibatches):
    """Minibatches without replacement: each epoch visits every index once, in a new
    pseudo-random order.

    Nothing of size N is stored or shuffled: only the B positions of the epoch's
    permutation that a step needs are computed. If B does not divide N, a minibatch may
    hold the end of one epoch and the start of the next: no index is left out, repeated
    within its epoch, or reweighted, and ``lcm(N, B) / B`` successive minibatches cover
    the data exactly ``lcm(N, B) / N`` times.

    :param num_data: N.
    :param batch_size: B.
    :raises ValueError: unless 1 <= B <= N < 2^31 and lcm(N, B) < 2^32.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_bnn.sgmcmc.streams import seeds
    >>> stream, words = Epochs(6, 3), seeds(jax.random.key(0), 1)[0]
    >>> sorted(
    ...     int(i) for step in range(2) for i in stream.draw(words, jnp.uint32(step))
    ... )
    [0, 1, 2, 3, 4, 5]
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if math.lcm(self.num_data, self.batch_size) >= 2**32:
            instead = (
                f"For num_data = {self.num_data} pass a divisor of it, or sample with "
                f"replacement."
            )
            raise argument_error(self._call, "batch_size", self.batch_size, instead)

    def draw(self, words: Array, step: Array) -> Array:
        # After `period` blocks the epochs again start at the edge of a block; counting
        # from there avoids overflow.
        covered = math.lcm(self.num_data, self.batch_size)
        period, epochs = covered // self.batch_size, covered // self.num_data
        step, size = step.astype(jnp.uint32), jnp.uint32(self.num_data)
        start = (step % jnp.uint32(period)) * jnp.uint32(self.batch_size)
        epoch = (step // jnp.uint32(period)) * jnp.uint32(epochs) + start // size
        place = start % size + lax.iota(jnp.uint32, self.batch_size)
        if epochs == 1:
            return permute(words, epoch, place, self.num_data)
        both = jax.vmap(permute, in_axes=(None, 0, None, None))(
            words,
            jnp.stack([epoch, epoch + jnp.uint32(1)]),
            place % size,
            self.num_data,
        )
        return jnp.where(place < size, both[0], both[1])


def permute(words: Array, epoch: Array, place: Array, size: int) -> Array:
    """Evaluate a keyed pseudo-random permutation of 0..size-1 at places (B,), at a cost
    independent of ``size``.

    Each value of ``epoch`` gives another permutation. The swap-or-not shuffle: round i
    pairs x with K_i - x mod size and moves x to its partner if a hash bit of the
    unordered pair is set. Both members of a pair see the same bit, so every round is a
    bijection (its own inverse) for every size, and so is their composition.

    Reference: Hoang, Morris and Rogaway (2012), "An enciphering scheme based on a card
    shuffle", figure 1.
    """
    bound = jnp.uint32(size)
    mirror_bits, salts = threefry(words, lax.iota(jnp.uint32, _ROUNDS), epoch)

    def swap_or_not(x, round_):
        mirror, salt = round_
        partner = jnp.where(mirror >= x, mirror - x, mirror + (bound - x))
        return jnp.where(
            _hash_bit(jnp.maximum(x, partner), salt) == 1, partner, x
        ), None

    return lax.scan(swap_or_not, place, (multiply_high(mirror_bits, bound), salts))[
        0
    ].astype(jnp.int32)


def _hash_bit(x: Array, salt: Array) -> Array:
    """Return one well-mixed bit of (x, salt): the top bit after two multiplications."""
    x = (x ^ salt) * jnp.uint32(0x85EBCA6B)
    return ((x ^ (x >> jnp.uint32(15))) * jnp.uint32(0xC2B2AE35)) >> jnp.uint32(31)


@dataclass(frozen=True)
class Keys:
    """A fresh typed key per step, for potentials that are themselves random."""

    def draw(self, words: Array, step: Array) -> Array:
        pair = jnp.stack(threefry(words, jnp.uint32(0), step.astype(jnp.uint32)))
        return jax.random.wrap_key_data(pair, impl="threefry2x32")


@dataclass(frozen=True)
class ProductStream:
    """Several streams side by side, one per name (nested or parallel plates), with
    independent seeds.
    """

    streams: Mapping[str, Stream]

    def draw(self, words: Array, step: Array) -> dict[str, PyTree]:
        # Steps never reach the last counter, so the words of a part are not among those
        # of any stream.
        parts = [
            jnp.stack(threefry(words, jnp.uint32(n), jnp.uint32(2**32 - 1)))
            for n in range(len(self.streams))
        ]
        return {
            n: stream.draw(part, step)
            for part, (n, stream) in zip(parts, self.streams.items(), strict=True)
        }
