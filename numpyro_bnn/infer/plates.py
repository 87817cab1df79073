"""Subsampled plates: which indices they see, and keys for models with randomness of their own."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from numpyro.primitives import Messenger

from numpyro_bnn._checks import argument_error
from numpyro_bnn._plates import draw_indices, full_plates

__all__ = ["KEY", "Plate", "Rows", "first_batch", "give_indices", "on_batch", "only_rows"]

KEY = "prng_key"  # entry of a batch that seeds the model's own randomness


class Plate(NamedTuple):
    """A subsampled plate: N data points, B of them per minibatch."""

    size: int
    batch_size: int


class Rows(NamedTuple):
    """In the place of a minibatch: the rows of plates that a model shall see, by plate."""

    indices: Mapping[str, jax.Array]


class only_rows(Messenger):
    """Show some plates a fixed part of their rows, weighted as if they were all; others are full.

    :param rows: indices by plate.

    >>> import numpyro
    >>> def model():
    ...     with numpyro.plate("data", 4) as index:
    ...         return index
    >>> only_rows(model, {"data": jnp.array([1, 3])})().tolist()
    [1, 3]
    """

    def __init__(self, fn: Callable, rows: Mapping[str, jax.Array]) -> None:
        self.rows = rows
        super().__init__(full_plates(fn))

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["name"] in self.rows:
            indices = self.rows[msg["name"]]
            msg["args"], msg["value"] = (msg["args"][0], indices.shape[0]), indices


class give_indices(Messenger):
    """Give subsampled plates their indices: O(B), where NumPyro's own draw costs O(N); and a model its keys.

    Keys are set as values: NumPyro's potential would put a constant in the place of what a ``seed`` handler offers.

    :param batch: indices by plate; ``None`` for random ones.
    :param plates: the plates that ``batch`` was made for.
    """

    def __init__(
        self, fn: Callable, batch: Mapping[str, jax.Array] | None, plates: Mapping[str, Plate] | None = None
    ) -> None:
        self.batch = batch
        self.plates = plates or {}
        self.key = None if batch is None else batch.get(KEY)
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "prng_key" and self.key is not None and msg["value"] is None:
            self.key, msg["value"] = random.split(self.key)
        if msg["type"] != "plate" or msg["value"] is not None:
            return
        if self.batch is None:
            msg["fn"] = draw_indices
            return
        name, now, then = msg["name"], tuple(msg["args"]), self.plates.get(msg["name"])
        if then is None or now != tuple(then):
            raise argument_error(
                "MCMC.run",
                "model arguments",
                f"data with which plate {name!r} has size and subsample size {now}",
                f"The run was started with {then and tuple(then)}: start a new one for other sizes.",
            )
        msg["value"] = self.batch[name]


def on_batch(model: Callable, plates: Mapping[str, Plate]) -> Callable:
    """The model with a keyword ``_batch`` more: indices by plate, ``None`` for random ones, "full", or ``Rows``."""

    def wrapped(*args: Any, _batch: Any = None, **kwargs: Any) -> Any:
        if isinstance(_batch, Rows):
            return only_rows(model, _batch.indices)(*args, **kwargs)
        if isinstance(_batch, str):
            return full_plates(model)(*args, **kwargs)
        return give_indices(model, _batch, plates)(*args, **kwargs)

    return wrapped


def first_batch(plates: Mapping[str, Plate]) -> dict[str, jax.Array]:
    """The first B indices of every plate."""
    return {name: jnp.arange(plate.batch_size) for name, plate in plates.items()}
