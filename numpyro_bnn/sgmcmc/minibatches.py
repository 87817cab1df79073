"""Streams of minibatch indices: each block is a pure function of (words, step) at O(B) cost, whatever N is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_bnn._checks import argument_error
from numpyro_bnn.sgmcmc.noise import integers, multiply_high, threefry, typed_key

__all__ = ["Stream", "FullData", "WithReplacement", "Epochs", "Keys", "Rows", "ProductStream", "permute"]

# Each round spends one bit per element: 2^64 paths lead to fewer than 2^31 places.
_ROUNDS = 64


class Stream(Protocol):
    """A source of minibatches.

    ``independent`` tells whether the blocks of different steps are independent of each other; the exact samplers
    with minibatches need that.

    >>> WithReplacement(100, 5).independent, Epochs(100, 5).independent
    (True, False)
    """

    @property
    def independent(self) -> bool: ...

    def draw(self, words: jax.Array, step: jax.Array) -> Any:
        """Return the minibatch of ``step`` (uint32 scalar) under the seed ``words`` (uint32, (2,))."""


def _check_sizes(call: str, num_data: Any, batch_size: Any) -> None:
    for name, value in (("num_data", num_data), ("batch_size", batch_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise argument_error(call, name, value, "Pass a positive integer.")
    if batch_size > num_data:
        raise argument_error(call, "batch_size", batch_size, f"Pass at most num_data = {num_data}.")
    if num_data >= 2**31:
        raise argument_error(call, "num_data", num_data, "Pass fewer than 2^31 rows: indices are int32.")


@dataclass(frozen=True)
class FullData:
    """The stream of a full-data gradient: no indices.

    >>> FullData().draw(None, None)
    ()
    """

    @property
    def independent(self) -> bool:
        return True

    def draw(self, words: jax.Array, step: jax.Array) -> tuple[()]:
        return ()


@dataclass(frozen=True)
class WithReplacement:
    """B independent uniform indices per step.

    :param num_data: N.
    :param batch_size: B.
    :raises ValueError: unless 1 <= B <= N < 2^31.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_bnn.sgmcmc.noise import seeds
    >>> WithReplacement(10**6, 4).draw(seeds(jax.random.key(0), 1)[0], jnp.uint32(0)).shape
    (4,)
    """

    num_data: int
    batch_size: int

    def __post_init__(self) -> None:
        _check_sizes("sgmcmc.WithReplacement", self.num_data, self.batch_size)

    @property
    def independent(self) -> bool:
        return True

    def draw(self, words: jax.Array, step: jax.Array) -> jax.Array:
        bits = threefry(words, lax.iota(jnp.uint32, self.batch_size), step.astype(jnp.uint32))
        return integers(*bits, self.num_data)


@dataclass(frozen=True)
class Epochs:
    """Without replacement: each epoch visits every index once, in a new pseudo-random order.

    Nothing of size N is stored or shuffled: the B needed positions of the epoch's permutation are computed by
    :func:`permute`. Where B does not divide N the epochs follow each other without a gap: a block then holds the end
    of one epoch and the start of the next, so no index is left out, repeated within its epoch, or reweighted, and
    ``lcm(N, B) / B`` successive blocks cover the data ``lcm(N, B) / N`` times exactly.

    :param num_data: N.
    :param batch_size: B.
    :raises ValueError: unless 1 <= B <= N < 2^31 and lcm(N, B) < 2^32.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_bnn.sgmcmc.noise import seeds
    >>> stream, words = Epochs(6, 3), seeds(jax.random.key(0), 1)[0]
    >>> sorted(int(i) for step in range(2) for i in stream.draw(words, jnp.uint32(step)))
    [0, 1, 2, 3, 4, 5]
    """

    num_data: int
    batch_size: int

    def __post_init__(self) -> None:
        call = "sgmcmc.Epochs"
        _check_sizes(call, self.num_data, self.batch_size)
        if math.lcm(self.num_data, self.batch_size) >= 2**32:
            raise argument_error(
                call,
                "batch_size",
                self.batch_size,
                f"For num_data = {self.num_data} pass a divisor of it, or sample with replacement.",
            )

    @property
    def independent(self) -> bool:
        return False

    def draw(self, words: jax.Array, step: jax.Array) -> jax.Array:
        # After `period` blocks the epochs start at a block's edge again; counting from there avoids overflow.
        covered = math.lcm(self.num_data, self.batch_size)
        period, epochs = covered // self.batch_size, covered // self.num_data
        step, size = step.astype(jnp.uint32), jnp.uint32(self.num_data)
        start = (step % jnp.uint32(period)) * jnp.uint32(self.batch_size)
        epoch = (step // jnp.uint32(period)) * jnp.uint32(epochs) + start // size
        place = start % size + lax.iota(jnp.uint32, self.batch_size)
        if epochs == 1:
            return permute(words, epoch, place, self.num_data)
        both = jax.vmap(permute, in_axes=(None, 0, None, None))(
            words, jnp.stack([epoch, epoch + jnp.uint32(1)]), place % size, self.num_data
        )
        return jnp.where(place < size, both[0], both[1])


def permute(words: jax.Array, epoch: jax.Array, place: jax.Array, size: int) -> jax.Array:
    """Evaluate a keyed pseudo-random permutation of 0..size-1 at the given places, at a cost flat in ``size``.

    The swap-or-not shuffle: round i pairs x with K_i - x mod size and moves x to its partner if a hash bit, which
    depends only on the unordered pair, is set. Both members of a pair see the same bit, so every round is a bijection
    (its own inverse) for every size, and so is their composition; no walking back into the range is needed.

    :param words: uint32 seed (2,).
    :param epoch: uint32 scalar; each value names another permutation.
    :param place: uint32 array (B,), values in [0, size).
    :param size: N.
    :return: int32 array (B,).

    Reference: Hoang, Morris and Rogaway (2012), "An enciphering scheme based on a card shuffle", figure 1.

    >>> import jax.numpy as jnp
    >>> sorted(permute(jnp.uint32([1, 2]), jnp.uint32(0), jnp.arange(5, dtype=jnp.uint32), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    bound = jnp.uint32(size)
    mirror_bits, salts = threefry(words, lax.iota(jnp.uint32, _ROUNDS), epoch)

    def swap_or_not(x, round_):
        mirror, salt = round_
        partner = jnp.where(mirror >= x, mirror - x, mirror + (bound - x))
        move = _hash_bit(jnp.maximum(x, partner), salt) == 1
        return jnp.where(move, partner, x), None

    mirrors = multiply_high(mirror_bits, bound)
    return lax.scan(swap_or_not, place, (mirrors, salts))[0].astype(jnp.int32)


def _hash_bit(x: jax.Array, salt: jax.Array) -> jax.Array:
    """Return one well mixed bit of (x, salt): the top bit after two multiplications."""
    x = (x ^ salt) * jnp.uint32(0x85EBCA6B)
    return ((x ^ (x >> jnp.uint32(15))) * jnp.uint32(0xC2B2AE35)) >> jnp.uint32(31)


@dataclass(frozen=True)
class Keys:
    """A fresh typed key per step, for potentials with randomness of their own.

    >>> import jax, jax.numpy as jnp
    >>> Keys().draw(jnp.uint32([1, 2]), jnp.uint32(0)).shape
    ()
    """

    @property
    def independent(self) -> bool:
        return True

    def draw(self, words: jax.Array, step: jax.Array) -> jax.Array:
        return typed_key(words, step)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of the data themselves instead of their indices, gathered ahead for a block of steps.

    On CPU a gather from a large array inside the step loop costs more than a small network's gradient, whatever the
    number of rows taken; gathered ahead, the time per step no longer depends on N.

    :param stream: source of indices (B,).
    :param data: array, or any pytree of arrays, with leading axis N.

    >>> import jax.numpy as jnp
    >>> x, y = Rows(Epochs(3, 3), (jnp.ones((3, 2)), jnp.ones(3))).draw(jnp.uint32([1, 2]), jnp.uint32(0))
    >>> x.shape, y.shape
    ((3, 2), (3,))
    """

    stream: Any
    data: Any

    @property
    def independent(self) -> bool:
        return self.stream.independent

    def draw(self, words: jax.Array, step: jax.Array) -> Any:
        index = self.stream.draw(words, step)
        return jax.tree.map(lambda array: array[index], self.data)


@dataclass(frozen=True)
class ProductStream:
    """Several streams side by side, one per name (nested or parallel plates), with independent seeds.

    :param streams: name -> stream.

    >>> import jax, jax.numpy as jnp
    >>> both = ProductStream({"rows": WithReplacement(100, 4), "columns": Epochs(10, 5)})
    >>> {name: block.shape for name, block in both.draw(jnp.uint32([1, 2]), jnp.uint32(0)).items()}
    {'rows': (4,), 'columns': (5,)}
    """

    streams: Mapping[str, Any]

    @property
    def independent(self) -> bool:
        return all(stream.independent for stream in self.streams.values())

    def draw(self, words: jax.Array, step: jax.Array) -> dict[str, Any]:
        return {
            name: stream.draw(_child(words, number), step)
            for number, (name, stream) in enumerate(self.streams.items())
        }


def _child(words: jax.Array, number: int) -> jax.Array:
    # The last counter is never reached by steps, so a child's seed is not among the words of any stream.
    return jnp.stack(threefry(words, jnp.uint32(number), jnp.uint32(2**32 - 1)))
