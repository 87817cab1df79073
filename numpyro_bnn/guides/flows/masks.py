"""Which half of a vector each coupling layer keeps, and which it changes."""

from typing import NamedTuple

import numpy as np

from numpyro_bnn._checks import argument_error, unknown_name

__all__ = ["Half", "MASKS", "halves"]

MASKS = ("alternating", "random")


class Half(NamedTuple):
    """One layer's split: the leading ``split`` coordinates and the rest; ``swap`` changes the leading ones.

    ``then`` is a permutation that follows the layer, or ``None``. Orders are static, so that the compiled program
    holds slices; only between random orders does it hold one gather.
    """

    split: int
    swap: bool
    then: np.ndarray | None = None

    def sizes(self, dim: int) -> tuple[int, int]:
        """Numbers of coordinates kept and changed."""
        return (dim - self.split, self.split) if self.swap else (self.split, dim - self.split)


def halves(call: str, dim: int, num_flows: int, mask: str = "alternating", seed: int = 0) -> list[Half]:
    """Split D coordinates for each of ``num_flows`` layers; consecutive layers change complementary halves.

    :param call: the public name the user wrote, for errors.
    :param mask: ``"alternating"``: first and second half of the block; ``"random"``: every two layers halve the
        coordinates anew, by a fixed seed.
    :param seed: of the random halves.
    :return: one :class:`Half` per layer. The coordinates leave the last layer in their own order. They enter the
        first in any order, which independent standard normals do not feel.
    :raises ValueError: for an unknown mask or no layer.

    >>> halves("guides.Coupling", 5, 2)
    [Half(split=2, swap=False, then=None), Half(split=2, swap=True, then=None)]
    """
    if mask not in MASKS:
        raise unknown_name(call, "mask", mask, MASKS)
    if num_flows < 1:
        raise argument_error(call, "num_flows", num_flows, "Pass at least 1 layer.")
    split = dim // 2
    layers = [Half(split, swap=bool(i % 2)) for i in range(num_flows)]
    if mask == "random":
        draws = np.random.default_rng((seed, dim))
        orders = [draws.permutation(dim) for _ in range(0, num_flows, 2)]
        for i, order in enumerate(orders):
            # Coordinate j of an ordered vector is coordinate order[j] of the block.
            following = orders[i + 1] if i + 1 < len(orders) else np.arange(dim)
            last = min(2 * i + 1, num_flows - 1)
            layers[last] = layers[last]._replace(then=np.argsort(order)[following])
    return layers
