"""Which axis of which array of a model comes from which plate or argument: by its program, never by a length."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from numpyro_bnn._axes import Axis, Place, Rows, follow_axes
from numpyro_bnn.program.reading import Reading, Sites


def axes_of_data(
    reading: Reading, parts: Callable[[Sites], Mapping[Any, jax.Array]]
) -> dict[Any, dict[Axis, int | None]]:
    """Where the axes of arguments, and the indices of plates, lie in parts of the trace.

    :return: for each part, axis of an argument or plate -> axis of the part. ``None``: its elements are mixed, one of
        the part depends on several of them.

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> def model(x):
    ...     with numpyro.plate("data", 3) as i:
    ...         numpyro.sample("y", dist.Normal(x.T[i] @ jnp.ones(2), 1.0))
    >>> found = axes_of_data(Reading(model, (jnp.ones((2, 3)),)), lambda sites: {"loc": sites["y"]["fn"].loc})
    >>> {(axis.source, axis.axis): at for axis, at in found["loc"].items()}
    {('_[0]', 0): None, ('_[0]', 1): None, ('data', 0): 0}
    """
    plates = [name for name, site in reading.sites.items() if site["type"] == "plate"]
    given = {"data": reading._arrays, "plates": reading.shapes(plates), "latent": reading.shapes()}

    def program(given: Mapping[str, Any]) -> Mapping[Any, jax.Array]:
        return parts(reading._on(given["data"]).at({**given["latent"], **given["plates"]}))

    closed, outputs = jax.make_jaxpr(program, return_shape=True)(given)
    inputs = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(given)[0]:
        numbered = Rows()
        if path[0].key != "latent":
            for axis, size in enumerate(jax.numpy.shape(leaf)):
                numbered[Axis(path[1].key, axis, size)] = Place(axis, 1)
        inputs.append(numbered)
    keys = [path[0].key for path, _ in jax.tree_util.tree_flatten_with_path(outputs)[0]]
    found: dict[Any, dict[Axis, int | None]] = {key: {} for key in outputs}
    for key, rows in zip(keys, follow_axes(closed.jaxpr, inputs), strict=True):
        for label, place in rows.items():
            whole = place is not None and place.inner == 1 and outputs[key].shape[place.axis] == label.size
            found[key][label] = place.axis if whole else None
    return found
