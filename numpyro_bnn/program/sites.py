"""Sites of a model in its program: marks by which others can give their values, and the
arrays that a site holds.
"""

from collections.abc import Callable
from copy import copy

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from numpyro.distributions import Distribution
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.transforms import Transform
from numpyro.primitives import Messenger

from numpyro_bnn._checks import argument_error
from numpyro_bnn._types import PyTree, Site, Sites
from numpyro_bnn.program.plates import sites_of_type

# Names of the values of sites in a program.
MARK = "numpyro_bnn site "
# Name of a random key of the model's own, which no site can have.
OWN_KEY = "\x00key {}"


class marked(Messenger):
    """Name the values of all sites in the program of a model, so that others can take
    their places.
    """

    asks_keys = loops = starts = False

    def __init__(self) -> None:
        # parameters, and whether they are to be learned and no handler gives them
        self.learned: dict[str, bool] = {}
        # leaves of `numpyro.mutable` sites
        self.states: dict[str, jax.ShapeDtypeStruct] = {}
        # sites that take a random key, and keys of the model's own, in order
        self.seeded: list[str] = []
        super().__init__(None)

    def process_message(self, msg: Site) -> None:
        if msg["type"] == "param":
            self.learned[msg["name"]] = (
                msg["kwargs"].get("learned", False) and msg["value"] is None
            )
            self.starts = True
        # The start of a parameter may be random: it is given a value before anything
        # depends on it.
        self.asks_keys |= msg["type"] == "prng_key" and not self.starts
        self.loops |= msg["type"] == "control_flow"

    def postprocess_message(self, msg: Site) -> None:
        self.starts &= msg["type"] != "param"
        if msg["type"] == "mutable":

            def marked(path: tuple, leaf: PyTree) -> PyTree:
                if not isinstance(leaf, Array | np.ndarray):
                    return leaf
                name = msg["name"] + jax.tree_util.keystr(path)
                self.states[name] = jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype)
                return checkpoint_name(leaf, MARK + name)

            msg["value"] = jax.tree_util.tree_map_with_path(marked, msg["value"])
            # before the model changes it
            msg["args"] = (jax.tree.map(lambda leaf: leaf, msg["value"]),)
        if msg["type"] == "prng_key":
            if msg["value"] is not None:
                self.seeded.append(OWN_KEY.format(len(self.seeded)))
                msg["value"] = checkpoint_name(msg["value"], MARK + self.seeded[-1])
            return
        if msg["type"] in ("sample", "plate"):
            self.seeded.append(msg["name"])
        array = isinstance(msg["value"], Array | np.ndarray)
        if msg["type"] == "sample" or (
            msg["type"] in ("deterministic", "plate") and array
        ):
            msg["value"] = checkpoint_name(
                jnp.asarray(msg["value"]), MARK + msg["name"]
            )


def names_of(sites: Sites, observed: bool) -> tuple[str, ...]:
    """Names of the sample sites that are observed, or that are not."""
    samples = sites_of_type(sites, "sample")
    return tuple(n for n in samples if samples[n]["is_observed"] == observed)


def check_name(site: Site) -> None:
    """Refuse names of which no file, and no variable of an export, can be named."""
    name, kind = site["name"], site["type"]
    needs_name = kind in ("sample", "deterministic", "param", "plate")
    if needs_name and not (
        isinstance(name, str) and name.strip("./ ") and name.isprintable()
    ):
        instead = 'Give it a name with a letter or a number, e.g. `"w"`.'
        raise argument_error(f"numpyro.{kind}", "name", repr(name), instead)


def safe(name: str) -> str:
    """The name of a site in a file or a DataTree: ``/`` becomes a dot.

    >>> safe("net/Dense_0.kernel")
    'net.Dense_0.kernel'
    """
    return name.replace("/", ".")


def check_real(site: Site) -> None:
    """Refuse distributions of complex numbers, which have no density to sample."""
    if site["type"] != "sample":
        return
    if any(map(np.iscomplexobj, arrays_in(site["fn"]))):
        got = f"complex numbers for the site {site['name']!r}"
        instead = "Pass real data, or take `x.real` or `jnp.abs(x)` in the model."
        raise argument_error("numpyro.sample", "fn", got, instead)


def exchange(value: PyTree, new: Callable[[Array], PyTree]) -> PyTree:
    """A copy of a value, also of a distribution, with other arrays in the place of
    those that are computed.
    """
    objects = Distribution | Transform | Constraint
    if isinstance(value, objects):
        exchanged = copy(value)
        for name, entry in vars(value).items():
            exchanged.__dict__[name] = exchange(entry, new)
        return exchanged

    def leaf(entry: PyTree) -> PyTree:
        if isinstance(entry, objects):
            return exchange(entry, new)
        return new(entry) if isinstance(entry, jax.core.Tracer) else entry

    return jax.tree.map(leaf, value, is_leaf=lambda entry: isinstance(entry, objects))


def arrays_in(value: PyTree) -> list[Array]:
    """The arrays in a value, also in a distribution, that a trace computes."""
    arrays: list[Array] = []

    def note(leaf: Array) -> Array:
        arrays.append(leaf)
        return leaf

    exchange(value, note)
    return arrays


def arrays_of(site: Site) -> list[Array]:
    return arrays_in([site.get(field) for field in fields(site)])


def fields(site: Site) -> tuple[str, ...]:
    """What a site holds besides its description."""
    return {"sample": ("fn", "value", "scale"), "mutable": ("args", "value")}.get(
        site["type"], ("value",)
    )
