"""What a model is for some arguments, read from one abstract run of it, of which
nothing is computed.

A reader asks a :class:`Reading` instead of running the model itself:

- ``sites``, ``latent``, ``observed``, ``learned``, ``plates``: kinds, families,
  supports, shapes, plates;
- ``stochastic``, ``redrawn``: whether the model asks for random numbers, which plates
  redraw their indices;
- ``idle_states``: which of its state nothing uses;
- ``at(values, rng_key, only)``: the trace at values of some sites, the others drawn,
  without running the model: it evaluates the equations that were read, of which those
  of some sites need few. It can stand in for the model in any function that JAX
  transforms;
- ``depends(quantities)``, ``sources(quantities)``: from which latent sites, or indices
  of plates, and from which data, quantities of that trace are computed;
- ``run(fn, *given)``, ``draw(seeds)``: numbers, by one compiled program whose inputs
  are the data of the model.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from copy import copy
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import Distribution
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.transforms import Transform
from numpyro.infer.initialization import init_to_sample
from numpyro.infer.util import initialize_model
from numpyro.primitives import Messenger
from numpyro.util import is_prng_key

from numpyro_bnn._checks import TRACED, argument_error
from numpyro_bnn._jaxprs import dependence, named_inputs
from numpyro_bnn._options import Model, checked
from numpyro_bnn.program.arguments import Arguments, naming_arguments
from numpyro_bnn.program.codes import check_codes, looks_up_data
from numpyro_bnn.program.compiled import NEEDS_VALUES, TRACING, evaluate, shared
from numpyro_bnn.program.plates import (
    Plate,
    check_observations,
    full_plates,
    random_indices,
    sites_of_type,
    subsampled_plates,
)

__all__ = ["CONDITIONED", "Plate", "Reading", "arrays_in", "initial_values"]

Site = dict[str, Any]
Sites = dict[str, Site]

# Names of the values of sites in a program.
MARK = "numpyro_bnn site "
# Keyword through which NumPyro's Gibbs passes the values of other blocks to a model.
CONDITIONED = "_gibbs_sites"


class _marked(Messenger):
    """Name the values of all sites in the program of a model, so that others can take
    their places.
    """

    asks_keys = loops = starts = False

    def __init__(self) -> None:
        # parameters, and whether they are to be learned and no handler gives them
        self.learned: dict[str, bool] = {}
        # leaves of `numpyro.mutable` sites
        self.states: dict[str, jax.ShapeDtypeStruct] = {}
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

            def marked(path: Any, leaf: Any) -> Any:
                if not isinstance(leaf, jax.Array | np.ndarray):
                    return leaf
                name = msg["name"] + jax.tree_util.keystr(path)
                self.states[name] = jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype)
                return checkpoint_name(leaf, MARK + name)

            msg["value"] = jax.tree_util.tree_map_with_path(marked, msg["value"])
            # before the model changes it
            msg["args"] = (jax.tree.map(lambda leaf: leaf, msg["value"]),)
        array = isinstance(msg["value"], jax.Array | np.ndarray)
        if msg["type"] == "sample" or (
            msg["type"] in ("deterministic", "plate") and array
        ):
            msg["value"] = checkpoint_name(
                jnp.asarray(msg["value"]), MARK + msg["name"]
            )


class Reading:
    """What a model is for some arguments.

    :param model: the NumPyro model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :param full: whether subsampled plates are read on all their indices; otherwise on
        random ones, whose places others can take in ``at``.

    >>> import numpyro, numpyro.distributions as dist
    >>> def model(y):
    ...     s = numpyro.sample("s", dist.HalfNormal(1.0))
    ...     w = numpyro.sample("w", dist.Normal(0.0, s))
    ...     numpyro.sample("y", dist.Normal(2.0 * w, 1.0), obs=y)
    >>> reading = Reading(model, (3.0,))
    >>> reading.latent, reading.observed
    (('s', 'w'), ('y',))
    >>> reading.depends(
    ...     lambda sites: {name: site["fn"] for name, site in sites.items()}
    ... )
    {'s': set(), 'w': {'s'}, 'y': {'w'}}
    >>> float(reading.at({"w": 0.5})["y"]["fn"].loc)
    1.0
    """

    @checked("program.Reading")
    def __init__(
        self,
        model: Model,
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        full: bool = True,
    ) -> None:
        self._model = (full_plates if full else random_indices)(model)
        #: Values that other blocks of a ``Gibbs`` hold; for the model they are
        # observed.
        self.held = dict((kwargs or {}).get(CONDITIONED, {}))
        self._programs: dict[Any, Callable] = {}
        arguments = Arguments.of(args, kwargs or {})
        fixed, arrays = arguments.split()
        with TRACING, naming_arguments(model, args, kwargs):
            self._trace_on(arguments, fixed, arrays)
        if not looks_up_data(self):
            return
        on_all_rows = copy(self)
        if self.plates:
            on_all_rows._model = full_plates(model)
            try:
                with TRACING:
                    on_all_rows._trace_on(arguments, fixed, arrays)
            # a model that runs on minibatches only is refused where they are checked
            except Exception:
                return
        with suppress(TypeError):
            # names are known by the signature, unless others have changed the call
            arguments = Arguments.of(args, kwargs or {}, model)
        check_codes(on_all_rows, arguments.leaves)

    def _trace_on(
        self, arguments: Arguments, fixed: Arguments, arrays: dict[str, Any]
    ) -> None:
        try:
            self._trace(fixed, arrays)
        except NEEDS_VALUES:  # data that shape the model are a part of it
            inputs = {}
            for place, array in arrays.items():
                with suppress(*NEEDS_VALUES):
                    self._trace(arguments, {place: array})
                    inputs[place] = array
            self._trace(arguments, inputs)

    def _trace(self, arguments: Arguments, arrays: dict[str, Any]) -> None:
        def read(key: jax.Array, values: dict[str, Any]) -> list:
            originals = {id(values[place]): array for place, array in arrays.items()}
            token = TRACED.set(originals)
            try:
                return self._read(key, *arguments.call(values))
            finally:
                TRACED.reset(token)

        trace = jax.make_jaxpr(read, return_shape=True)
        self._closed, self._outputs = trace(jax.eval_shape(random.key, 0), arrays)
        self._arrays = arrays

    def on(self, args: tuple, kwargs: Mapping[str, Any]) -> "Reading":
        """The same model on other data of these shapes, without running it.

        :raises ValueError: if the model computes shapes or branches from the data.
        """
        _, arrays = Arguments.of(args, kwargs).split()
        if arrays.keys() != self._arrays.keys():
            came = "data from which the model computes shapes or branches"
            instead = "Write `jnp.where`, or fix such values inside the model."
            raise argument_error("program.Reading", "args", came, instead)
        return self._on(arrays)

    def _on(self, arrays: dict[str, Any]) -> "Reading":
        """The same model on other arrays of these shapes."""
        reading = copy(self)
        reading._arrays = arrays
        return reading

    def _read(self, rng_key: jax.Array, args: tuple, kwargs: Mapping[str, Any]) -> list:
        #: Sites, also parameters, whose values are given inside the model.
        self.fixed: set[str] = set()

        def value(site: Site) -> Any:
            if site["value"] is None:
                return init_to_sample(site)
            return self.fixed.add(site["name"])

        marks, seeded = _marked(), handlers.seed(self._model, rng_key)
        drawn = handlers.substitute(seeded, substitute_fn=value)
        with marks:
            trace = handlers.trace(drawn).get_trace(*args, **kwargs)
            if marks.loops:  # values must reach the inside of loops
                latent = {
                    name: trace[name]["value"] for name in _names(trace, observed=False)
                }
                seeded = handlers.seed(self._model, rng_key)
                placed = handlers.substitute(seeded, latent)
                trace = handlers.trace(placed).get_trace(*args, **kwargs)
        for site in trace.values():
            _check_name(site)
        check_observations(trace)
        for site in trace.values():
            _check_real(site)
        #: The trace: arrays that the model computes have a shape and a dtype, and no
        # values.
        self.sites: Sites = trace
        self._asks_keys = marks.asks_keys
        #: Parameters of ``priors.Learned`` that no handler gives a value.
        self.learned = tuple(name for name, waits in marks.learned.items() if waits)
        self._states = marks.states
        return list(map(_arrays_of, trace.values()))

    # -- what there is -----------------------------------------------------------------

    @property
    def latent(self) -> tuple[str, ...]:
        """Names of the sample sites that are not observed."""
        return _names(self.sites, observed=False)

    @property
    def observed(self) -> tuple[str, ...]:
        """Names of the observed sample sites."""
        return _names(self.sites, observed=True)

    @property
    def plates(self) -> dict[str, Plate]:
        """The plates that see a subset of their indices."""
        return subsampled_plates(self.sites)

    @property
    def stochastic(self) -> bool:
        """Whether the model computes with random numbers of its own
        (``numpyro.prng_key``: dropout).

        A module of Linen asks for them too, to start parameters that may all have
        priors.
        """
        if not self._asks_keys:
            return False
        shapes = self.shapes([*self.latent, *self.plates])

        def computed(values: Mapping[str, Any]) -> dict[str, Any]:
            sites = self.at(values, values[""])
            sites = sites_of_type(sites, "sample", "deterministic", "mutable")
            return {name: _arrays_of(site) for name, site in sites.items()}

        random_key = jax.eval_shape(random.key, 0)
        used = dependence(computed, {**shapes, "": random_key})
        return "" in set().union(*used.values())

    @property
    def redrawn(self) -> frozenset[str]:
        """Plates whose random indices follow the seed from outside; none if the model
        is already seeded.
        """

        def indices(inputs: Mapping[str, jax.Array]) -> dict[str, Any]:
            sites = self.at({}, inputs["key"])
            return {name: sites[name]["value"] for name in self.plates}

        used = dependence(indices, {"key": jax.eval_shape(random.key, 0)})
        return frozenset(name for name in used if used[name])

    def shapes(
        self, names: Collection[str] | None = None
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the values of sites, by default of the latent ones."""
        shapes = {}
        for name in self.latent if names is None else names:
            value = self.sites[name]["value"]
            shape, dtype = jnp.shape(value), jnp.result_type(value)
            shapes[name] = jax.ShapeDtypeStruct(shape, dtype)
        return shapes

    def zeros(self) -> dict[str, jax.Array]:
        """Zeros in the place of the values of latent sites."""
        shapes = self.shapes()
        return {name: jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()}

    # -- the program -------------------------------------------------------------------

    def at(
        self,
        values: Mapping[str, Any] | None = None,
        rng_key: Any = 0,
        only: Iterable[str] | None = None,
    ) -> Sites:
        """The trace of the model at values of some sites; all others are drawn, or
        computed from these.

        :param values: constrained values of sample or deterministic sites, and indices
            of plates; names of other sites are ignored.
        :param rng_key: a key or seed for the sites that are drawn.
        :param only: names of the sites that are wanted, by default all.
        """
        replaceable = self.sites.keys() | self._states.keys()
        inputs = {
            name: value for name, value in (values or {}).items() if name in replaceable
        }
        outputs = tuple(self.sites if only is None else only)
        key = frozenset(inputs), outputs
        if key not in self._programs:
            self._programs[key] = self._program(*key)
        if not is_prng_key(rng_key):
            rng_key = random.key(rng_key)
        if not jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
            rng_key = random.wrap_key_data(rng_key)
        numbers = iter(
            self._programs[key](inputs, rng_key, *jax.tree.leaves(self._arrays))
        )
        sites = {}
        for name in outputs:
            site = dict(self.sites[name])
            for field in _fields(site):
                site[field] = _exchange(site.get(field), lambda _: next(numbers))
            sites[name] = site
        return sites

    def _program(self, inputs: Collection[str], names: Collection[str]) -> Callable:
        """The program from values of some sites to the arrays of others."""
        variables, outputs = iter(self._closed.jaxpr.outvars), {}
        for name, leaves in zip(self.sites, self._outputs, strict=True):
            outputs[name] = list(islice(variables, len(leaves)))
        outvars: list[Any] = []
        for name in names:
            outvars += outputs[name]
        jaxpr = self._closed.jaxpr.replace(outvars=outvars)
        return named_inputs(
            self._closed.replace(jaxpr=jaxpr), {MARK + name: name for name in inputs}
        )

    def depends(
        self,
        quantities: Callable[[Sites], Mapping[Any, Any]],
        on: Iterable[str] | None = None,
    ) -> dict[Any, set[str]]:
        """For each part of a trace, the sites from whose values it is computed; nothing
        is evaluated.

        :param on: names of sites and plates, by default of all latent sites.
        """
        on = set(self.latent if on is None else on)
        sites_used = dependence(
            lambda values: quantities(self.at(values)),
            self.shapes(on.union(self.latent)),
        )
        return {quantity: used & on for quantity, used in sites_used.items()}

    def sources(
        self, quantities: Callable[[Sites], Mapping[Any, Any]]
    ) -> dict[Any, set[str]]:
        """For each part of a trace at given latent sites, the places of the arguments
        from which it is computed.
        """

        def program(inputs: Mapping[str, Any]) -> Mapping[Any, Any]:
            return quantities(
                self._on({place: inputs[place] for place in self._arrays}).at(
                    inputs[""]
                )
            )

        inputs_used = dependence(program, {**self._arrays, "": self.shapes()})
        return {quantity: used - {""} for quantity, used in inputs_used.items()}

    def idle_states(self) -> set[str]:
        """The places in ``numpyro.mutable`` state that no site is computed from, and
        that follow from state alone.

        Such is a counter of random keys that nobody uses, and not a running mean.
        """

        def quantities(inputs: Mapping[str, Any]) -> dict[str, Any]:
            states = {place: inputs[place] for place in self._states}
            sites = self._on(inputs["data"]).at({**states, **inputs["values"]})
            arrays: dict[str, Any] = {"used": []}
            for name, site in sites.items():
                if site["type"] != "mutable":
                    arrays["used"] += _arrays_of(site)
                    continue
                for path, leaf in jax.tree_util.tree_leaves_with_path(site["value"]):
                    arrays[name + jax.tree_util.keystr(path)] = arrays_in(leaf)
            return arrays

        sources = dependence(
            quantities, {"data": self._arrays, "values": self.shapes(), **self._states}
        )
        outside = sources.pop("used") | {"data", "values"}
        idle = set()
        for place, used in sources.items():
            if outside.isdisjoint({place, *used}):
                idle.add(place)
        return idle

    def run(self, fn: Callable, *values: Any, once: bool = True) -> Any:
        """``fn(reading, *given)`` by a compiled program, which equal ones share, also
        with other data.

        :param once: whether it runs so rarely that compiling it quickly matters more
            than its speed.
        """
        return self.prepare(fn, once)(*values)

    def prepare(self, fn: Callable, once: bool = True) -> Callable:
        """:meth:`run` as a function of ``values``, traced once for all values of one
        shape.
        """

        def on_arrays(arrays: dict, *values: Any) -> Any:
            return fn(self._on(arrays), *values)

        program = shared(on_arrays, once)
        return lambda *values: program(self._arrays, *values)

    def draw(
        self, seeds: Iterable[int], kinds: Collection[str] = ("sample",)
    ) -> list[dict[str, Any]]:
        """For each seed, values of the sites of some kinds that are not observed, drawn
        from the prior.
        """

        def values(reading: "Reading", seed: jax.Array) -> dict[str, Any]:
            sites = reading.at({}, random.key(seed))
            values = {}
            for name, site in sites_of_type(sites, *kinds).items():
                if not site.get("is_observed", False):
                    values[name] = jax.tree.map(jnp.asarray, site["value"])
            return values

        program = self.prepare(values)
        return [program(jnp.uint32(seed)) for seed in seeds]


def initial_values(
    rng_key: jax.Array,
    model: Callable,
    init_strategy: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    with_trace: bool = False,
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Search for values at which density and gradient are finite.

    :return: unconstrained values, and if asked for, the trace of the model that the
        search began with.
    """

    def search(
        rng_key: jax.Array, args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[dict, Any, dict]:
        options = {
            "init_strategy": init_strategy,
            "model_args": args,
            "model_kwargs": kwargs,
        }
        start, _, _, trace = initialize_model(rng_key, model, **options)
        check_observations(trace)
        valid = jnp.all(
            jnp.isfinite(ravel_pytree((start.potential_energy, start.z_grad))[0])
        )
        return start.z, valid, trace if with_trace else {}

    # NumPyro draws twice with one key
    with jax.debug_key_reuse(False), naming_arguments(model, args, kwargs):
        z, valid, trace = evaluate(search, rng_key, args, kwargs, once=True)
        if not isinstance(valid, jax.core.Tracer) and not valid:
            # raises, and warns of values outside of supports
            z, _, trace = search(rng_key, args, kwargs)
    return z, trace


def _names(sites: Sites, observed: bool) -> tuple[str, ...]:
    samples = sites_of_type(sites, "sample")
    return tuple(n for n in samples if samples[n]["is_observed"] == observed)


def _check_name(site: Site) -> None:
    """Refuse names of which no file, and no variable of an export, can be named."""
    name, kind = site["name"], site["type"]
    needs_name = kind in ("sample", "deterministic", "param", "plate")
    if needs_name and not (
        isinstance(name, str) and name.strip("./ ") and name.isprintable()
    ):
        instead = 'Give it a name with a letter or a number, e.g. `"w"`.'
        raise argument_error(f"numpyro.{kind}", "name", repr(name), instead)


def _check_real(site: Site) -> None:
    """Refuse distributions of complex numbers, which have no density to sample."""
    if site["type"] != "sample":
        return
    if any(map(np.iscomplexobj, arrays_in(site["fn"]))):
        got = f"complex numbers for the site {site['name']!r}"
        instead = "Pass real data, or take `x.real` or `jnp.abs(x)` in the model."
        raise argument_error("numpyro.sample", "fn", got, instead)


def _exchange(value: Any, new: Callable[[jax.Array], Any]) -> Any:
    """A copy of a value, also of a distribution, with other arrays in the place of
    those that are computed.
    """
    objects = Distribution | Transform | Constraint
    if isinstance(value, objects):
        exchanged = copy(value)
        for name, entry in vars(value).items():
            exchanged.__dict__[name] = _exchange(entry, new)
        return exchanged

    def leaf(entry: Any) -> Any:
        if isinstance(entry, objects):
            return _exchange(entry, new)
        return new(entry) if isinstance(entry, jax.core.Tracer) else entry

    return jax.tree.map(leaf, value, is_leaf=lambda entry: isinstance(entry, objects))


def arrays_in(value: Any) -> list[jax.Array]:
    """The arrays in a value, also in a distribution, that a trace computes."""
    arrays: list[jax.Array] = []

    def note(leaf: jax.Array) -> jax.Array:
        arrays.append(leaf)
        return leaf

    _exchange(value, note)
    return arrays


def _arrays_of(site: Site) -> list[jax.Array]:
    return arrays_in([site.get(field) for field in _fields(site)])


def _fields(site: Site) -> tuple[str, ...]:
    """What a site holds besides its description."""
    return {"sample": ("fn", "value", "scale"), "mutable": ("args", "value")}.get(
        site["type"], ("value",)
    )
