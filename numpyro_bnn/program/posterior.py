"""What a model is for some arguments, read from one abstract run of it, of which
nothing is computed.

Whoever wants to know something of a model asks a :class:`Posterior` instead of running
the model itself:

- ``sites``, ``latent``, ``observed``, ``local``, ``held``, ``learned``, ``plates``:
  roles, families, supports, shapes, plates;
- ``initial``, ``constrain``, ``unconstrain``: values of the latent sites;
- ``potential``, and its parts ``log_prior``, ``log_jacobian``, ``log_likelihood``,
  ``scale``, ``outputs``, on all rows or a minibatch;
- ``at(values, rng_key, only)``: the trace at values of some sites, the others drawn,
  without running the model: it evaluates the equations that were read, of which those
  of some sites need few. It can stand in for the model in any function that JAX
  transforms;
- ``scaled``: the normal sites whose scale is random;
- ``depends(quantities)``, ``sources(quantities)``: from which latent sites, or indices
  of plates, and from which data, quantities of that trace are computed;
- ``stochastic``, ``redrawn``, ``idle_states``: whether the model asks for random
  numbers, which plates redraw their indices, which of its state nothing uses;
- ``with_arguments(args, kwargs)``, ``with_all_rows()``, ``with_sizes(sizes)``: the
  same for other arguments, read anew only where shapes, or values that shape the model,
  are others; on all rows; on so many rows of some plates;
- ``run(fn, *values)``, ``draw(seeds)``: numbers, by one compiled program whose inputs
  are the data of the model.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpyro
from jax import Array, random
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import Distribution, biject_to
from numpyro.distributions.constraints import Constraint, real
from numpyro.distributions.util import is_identically_one, sum_rightmost
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.initialization import init_to_sample, init_to_uniform
from numpyro.infer.util import initialize_model
from numpyro.primitives import CondIndepStackFrame, apply_stack
from numpyro.util import is_prng_key

from numpyro_bnn._checks import TRACED, argument_error, unknown_name
from numpyro_bnn._distributions import affine_normal, in_support, log_scale
from numpyro_bnn._jaxprs.slices import dependence, named_inputs
from numpyro_bnn._options import Model, checked
from numpyro_bnn._types import Arrays, Atom, Kwargs, PyTree, Scalar, Trees
from numpyro_bnn.program.arguments import Arguments, as_arrays, naming_arguments
from numpyro_bnn.program.codes import check_codes, looks_up_data
from numpyro_bnn.program.compiled import NEEDS_VALUES, TRACING, evaluate, shared
from numpyro_bnn.program.plates import (
    Plate,
    check_observations,
    draw_indices,
    full_plates,
    random_indices,
    sites_of_type,
    subsampled_plates,
)
from numpyro_bnn.program.sites import (
    MARK,
    Site,
    Sites,
    arrays_in,
    arrays_of,
    check_name,
    check_real,
    exchange,
    fields,
    marked,
    names_of,
)

__all__ = ["Posterior"]

Rows: TypeAlias = Mapping[str, Array]  # indices by plate
Values: TypeAlias = Mapping[str, ArrayLike]  # of sites
Key: TypeAlias = Array | int  # or a seed

# Where no start between -2 and 2 has a finite density, they lie within these of 0.
NEARER = (0.25, 0.03)


class Posterior:
    """A model with its data, as one object: its sites, its plates, its log density.

    :param model: the NumPyro model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :param full: whether subsampled plates are read on all their indices; otherwise on
        random ones, whose places others can take.

    >>> import numpyro, numpyro.distributions as dist
    >>> def model(y):
    ...     s = numpyro.sample("s", dist.HalfNormal(1.0))
    ...     w = numpyro.sample("w", dist.Normal(0.0, s))
    ...     numpyro.sample("y", dist.Normal(2.0 * w, 1.0), obs=y)
    >>> posterior = Posterior(model, (3.0,))
    >>> posterior.latent, posterior.observed
    (('s', 'w'), ('y',))
    >>> posterior.depends(
    ...     lambda sites: {name: site["fn"] for name, site in sites.items()}
    ... )
    {'s': set(), 'w': {'s'}, 'y': {'w'}}
    >>> float(posterior.at({"w": 0.5})["y"]["fn"].loc)
    1.0
    >>> z = {"s": 0.0, "w": 0.5}  # unconstrained: s = exp(0)
    >>> round(float(posterior.potential(z)), 2)
    4.69
    """

    @checked("program.Posterior")
    def __init__(
        self,
        model: Model,
        args: tuple = (),
        kwargs: Kwargs | None = None,
        *,
        full: bool = True,
    ) -> None:
        self.model = model
        self._full = full
        #: Values that other blocks of a ``Gibbs`` hold; for the model they are
        # observed.
        self.held = dict((kwargs or {}).get(GIBBS_SITES_KWARG, {}))
        # the same model with other numbers of rows
        self._resized: dict[Any, Posterior] = {}
        arguments = Arguments.of(args, kwargs or {})
        self._template, arrays = arguments.split()
        with TRACING, naming_arguments(model, args, kwargs):
            self._trace_on((full_plates if full else random_indices)(model), arrays)
        if not looks_up_data(self):
            return
        try:
            on_all_rows = self.with_sizes({})
        # a model that runs on minibatches only is refused where they are checked
        except Exception:
            return
        with suppress(TypeError):
            # names are known by the signature, unless others have changed the call
            arguments = Arguments.of(args, kwargs or {}, model)
        check_codes(on_all_rows, arguments.leaves)

    def with_arguments(self, args: tuple, kwargs: Kwargs | None) -> "Posterior":
        """The same model on other arguments; it is read anew where an array has another
        shape, or one that shapes the model is another.
        """
        template, arrays = Arguments.of(args, kwargs or {}).split()
        same = template == self._template and _types(arrays) == self._array_types
        if not same or any(
            arrays[place] is not constant for place, constant in self.constants.items()
        ):
            return Posterior(self.model, args, kwargs, full=self._full)
        posterior = self.with_data({place: arrays[place] for place in self.data})
        posterior.held = dict((kwargs or {}).get(GIBBS_SITES_KWARG, {}))
        return posterior

    def with_all_rows(self) -> "Posterior":
        """The same model with all indices of its plates."""
        posterior = copy(self.with_sizes({}))
        posterior._full = True
        return posterior

    def without_data(self) -> "Posterior":
        """The model without its data, for :meth:`with_arguments`: it keeps no arrays,
        nor tracers, alive.
        """
        posterior = self.with_data(dict.fromkeys(self.data))
        posterior.held = dict.fromkeys(self.held)
        return posterior

    def with_data(self, data: Trees) -> "Posterior":
        """The same model on other arrays of these shapes."""
        posterior = copy(self)
        posterior.data = data
        return posterior

    def with_sizes(self, sizes: Mapping[str, int]) -> "Posterior":
        """The same model with so many rows in some plates; others are full."""
        if sizes == self._sizes:
            return self
        arrays = {**self.constants, **self.data}
        key = frozenset(sizes.items())
        known = self._resized.get(key)
        # data that shape it are a part of it
        if known is None or any(
            arrays[place] is not array for place, array in known.constants.items()
        ):
            resized = copy(self)
            with TRACING:
                resized._trace_on(full_plates(self.model, sizes), arrays)
            self._resized[key] = resized.without_data()
        resized = self._resized[key]
        resized = resized.with_data({place: arrays[place] for place in resized.data})
        resized.held = self.held
        return resized

    def _trace_on(self, model: Callable, arrays: Trees) -> None:
        self._programs: dict[Hashable, Callable] = {}
        self._array_types = _types(arrays)
        try:
            self._trace(model, arrays, {})
        except NEEDS_VALUES:  # data that shape the model are a part of it
            inputs = {}
            for place, array in arrays.items():
                constants = {name: arrays[name] for name in arrays if name != place}
                with suppress(*NEEDS_VALUES):
                    self._trace(model, {place: array}, constants)
                    inputs[place] = array
            constants = {name: arrays[name] for name in arrays if name not in inputs}
            self._trace(model, inputs, constants)
        self._sizes = {name: plate.batch_size for name, plate in self.plates.items()}

    def _trace(self, model: Callable, arrays: Trees, constants: Trees) -> None:
        def read(key: Array, values: Trees) -> list:
            originals = {id(values[place]): array for place, array in arrays.items()}
            token = TRACED.set(originals)
            try:
                return self._read(model, key, *self._template.call({**known, **values}))
            finally:
                TRACED.reset(token)

        known = as_arrays((), constants, "model")[1]
        trace = jax.make_jaxpr(read, return_shape=True)
        self._closed, self._outputs = trace(jax.eval_shape(random.key, 0), arrays)
        #: The arrays among the arguments, by place: the inputs of the program, and
        # those that shape it.
        self.data, self.constants = arrays, constants

    def _read(
        self,
        model: Callable,
        rng_key: Array,
        args: tuple,
        kwargs: Kwargs,
    ) -> list:
        #: Sites, also parameters, whose values are given inside the model.
        self.fixed: set[str] = set()

        def value(site: Site) -> PyTree:
            if site["value"] is None:
                return init_to_sample(site)
            return self.fixed.add(site["name"])

        marks, seeded = marked(), handlers.seed(model, rng_key)
        drawn = handlers.substitute(seeded, substitute_fn=value)
        with marks:
            trace = handlers.trace(drawn).get_trace(*args, **kwargs)
            if marks.loops:  # values must reach the inside of loops
                latent = {
                    name: trace[name]["value"]
                    for name in names_of(trace, observed=False)
                }
                marks.seeded.clear()
                seeded = handlers.seed(model, rng_key)
                placed = handlers.substitute(seeded, latent)
                trace = handlers.trace(placed).get_trace(*args, **kwargs)
        for site in trace.values():
            check_name(site)
        check_observations(trace)
        for site in trace.values():
            check_real(site)
        #: The trace: arrays that the model computes have a shape and a dtype, and no
        # values.
        self.sites: Sites = trace
        self._asks_keys, self._loops = marks.asks_keys, marks.loops
        self._seeded = tuple(marks.seeded)
        #: Parameters of ``priors.Learned`` that no handler gives a value.
        self.learned = tuple(name for name, waits in marks.learned.items() if waits)
        self._states = marks.states
        return list(map(arrays_of, trace.values()))

    # -- what there is -----------------------------------------------------------------

    @property
    def latent(self) -> tuple[str, ...]:
        """Names of the sample sites that are not observed."""
        return names_of(self.sites, observed=False)

    @property
    def observed(self) -> tuple[str, ...]:
        """Names of the observed sample sites."""
        return names_of(self.sites, observed=True)

    @property
    def plates(self) -> dict[str, Plate]:
        """The plates that see a subset of their indices."""
        return subsampled_plates(self.sites)

    @property
    def local(self) -> tuple[str, ...]:
        """Names of latent sites with a value for each row, of which a minibatch has a
        part.
        """
        return tuple(name for name in self.latent if self.frames(name))

    def frames(
        self, name: str, plates: Collection[str] | None = None
    ) -> list[CondIndepStackFrame]:
        """Plates of which a site has the rows of a minibatch, or those of them in
        ``plates``.
        """
        plates = self._sizes if plates is None else plates
        frames = self.sites[name].get("cond_indep_stack", ())
        return [frame for frame in frames if frame.name in plates]

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

        def computed(values: Arrays) -> Trees:
            sites = self.at(values, values[""])
            sites = sites_of_type(sites, "sample", "deterministic", "mutable")
            return {name: arrays_of(site) for name, site in sites.items()}

        random_key = jax.eval_shape(random.key, 0)
        used = dependence(computed, {**shapes, "": random_key})
        return "" in set().union(*used.values())

    @property
    def redrawn(self) -> frozenset[str]:
        """Plates whose random indices change with the seed; none if the model sets its
        own seed.
        """

        def indices(inputs: Arrays) -> Trees:
            sites = self.at({}, inputs["key"])
            return {name: sites[name]["value"] for name in self.plates}

        used = dependence(indices, {"key": jax.eval_shape(random.key, 0)})
        return frozenset(name for name in used if used[name])

    def row_axes(
        self, name: str, plates: Collection[str] | None = None
    ) -> dict[str, int]:
        """The axes of the value of a sample site that have the rows of a minibatch, or
        of ``plates``, by plate.
        """
        event_dim, frames = self.sites[name]["fn"].event_dim, self.frames(name, plates)
        return {frame.name: frame.dim - event_dim for frame in frames}

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

    def zeros(self) -> dict[str, Array]:
        """Zeros shaped like the latent sites, local ones with all their rows."""
        zeros = {}
        for name, value in self.shapes().items():
            shape = list(value.shape)
            for plate, axis in self.row_axes(name).items():
                shape[axis] = self.plates[plate].size
            zeros[name] = jnp.zeros(shape, value.dtype)
        return zeros

    # -- values of the latent sites ----------------------------------------------------

    def initial(
        self,
        rng_key: Array,
        init_strategy: Callable = init_to_uniform,
        search: bool = True,
    ) -> dict[str, Array]:
        """Search for values at which density and gradient are finite, for one chain or
        for each of a batch of keys.

        :param init_strategy: as for NumPyro's kernels.
        :param search: whether uniform values, which are cheap, must be such.
        :return: unconstrained values.
        :raises RuntimeError: if there are none in a hundred tries, of uniform values
            also none nearer to 0.

        >>> import numpyro, numpyro.distributions as dist
        >>> posterior = Posterior(lambda: numpyro.sample("w", dist.Normal()))
        >>> bool(abs(posterior.initial(random.key(0))["w"]) < 2)
        True
        """
        posterior = self.with_sizes({}) if self.local else self
        if search or self._loops or init_strategy is not init_to_uniform:
            return posterior._search(rng_key, init_strategy)[0]

        def uniform(posterior: Posterior, rng_key: Array) -> dict[str, Array]:
            zeros = jax.eval_shape(posterior.unconstrain, posterior.zeros())
            flat, unravel = ravel_pytree(jax.tree.map(jnp.zeros_like, zeros))
            return unravel(random.uniform(rng_key, flat.shape, flat.dtype, -2, 2))

        single = is_prng_key(rng_key)
        return posterior.run(
            uniform if single else jax.vmap(uniform, (None, 0)), rng_key
        )

    def prototype(
        self, rng_key: Array, init_strategy: Callable
    ) -> tuple[dict[str, Array], Sites]:
        """Initial values, of local sites those of a minibatch, and the trace with which
        the search for them began.
        """
        z, trace = self._search(rng_key, init_strategy, with_trace=True)
        return z, {name: trace[name] for name in self.sites}  # JAX sorts names

    def _search(
        self, rng_key: Array, init_strategy: Callable, with_trace: bool = False
    ) -> tuple[dict[str, Array], Sites]:
        def search(
            strategy: Callable, rng_key: Array, args: tuple, kwargs: Kwargs
        ) -> tuple[dict, PyTree, Sites]:
            posterior = self.with_data(*args)
            start, _, _, drawn = initialize_model(
                rng_key, posterior._replay, init_strategy=strategy
            )
            valid = jnp.all(
                jnp.isfinite(ravel_pytree((start.potential_energy, start.z_grad))[0])
            )
            trace = posterior._trace_of(rng_key, drawn) if with_trace else {}
            return start.z, valid, trace

        call = self._template.call({**self.constants, **self.data})
        # NumPyro draws twice with one key
        with naming_arguments(self.model, *call), jax.debug_key_reuse(False):
            strategies = [init_strategy]
            if init_strategy is init_to_uniform:  # an exponential is finite near 0
                strategies += [partial(init_to_uniform, radius=r) for r in NEARER]
            for strategy in strategies:
                using = partial(search, strategy)
                z, valid, trace = evaluate(
                    using, rng_key, (self.data,), {}, runs_rarely=True
                )
                if isinstance(valid, jax.core.Tracer) or valid:
                    break
            else:  # raises, and warns of values outside of supports
                z, _, trace = search(init_strategy, rng_key, (self.data,), {})
        return z, trace

    def _trace_of(self, rng_key: Array, drawn: Sites) -> Sites:
        """The trace of the model at the values that :meth:`_replay` drew by a key."""
        values: dict[str, PyTree] = {}
        key = _typed_key(rng_key)
        for name in self._seeded:
            if name in self.plates or name in self.latent:
                key, _ = random.split(key)
                values[name] = drawn[name]["value"]
            elif name not in self.sites:  # a key of the model's own
                key, values[name] = random.split(key)
        sites = self.at(values)
        for site in sites.values():
            for field in site.keys() - set(fields(site)):
                # nothing that only the reading knew
                site[field] = exchange(site[field], lambda _: None)
        return sites

    def _replay(self) -> None:
        """A NumPyro model of the latent and observed sites: it evaluates what was read.

        Sites take their random keys in the order of the model.
        """
        values: dict[str, PyTree] = {}
        for name in self._seeded:
            if name not in self.sites:  # a key of the model's own
                numpyro.prng_key()
                continue
            site = self.sites[name]
            if name in self.plates:
                new = {
                    "fn": draw_indices,
                    "value": None,
                    "kwargs": {"rng_key": None},
                    "stop": False,  # a reading may be hidden from outer handlers
                }
                values[name] = apply_stack({**site, **new})["value"]
            elif name in self.latent:
                site = self.at(values, only=[name])[name]
                if self._loops:
                    # its distribution may follow from its own values: counted below
                    site["fn"] = site["fn"].mask(False)
                values[name] = _sample(site, None)
        sites = self.at(values, only=sites_of_type(self.sites, "sample"))
        numpyro.factor("_support of all sites", self._log_support(sites))
        for name, site in sites.items():
            if site["is_observed"]:
                _sample(site, site["value"])
            elif self._loops:
                numpyro.factor(f"_density of {name}", log_density(site))

    def _support(self, name: str, values: Values) -> Constraint:
        """The support of a latent site at values of those before it."""
        support = self.sites[name]["fn"].support
        if not arrays_in(support):
            return support
        if (
            self._loops
            and self.depends(
                lambda sites: {name: arrays_in(sites[name]["fn"].support)}, [name]
            )[name]
        ):
            got = f"the site {name!r} in a loop, whose bounds follow from its own steps"
            instead = "Sample it without bounds, and transform it in the model."
            raise argument_error("program.Posterior", "model", got, instead)
        posterior = self
        if name in self.local:
            posterior = self.with_sizes({})
        else:
            values = {key: values[key] for key in values if key not in self.local}
        return posterior.at(values, only=[name])[name]["fn"].support

    def constrain(self, z: Values, some: bool = False) -> dict[str, Array]:
        """Values of the latent sites at unconstrained values.

        :param some: whether sites may be left out that no bounds depend on.
        """
        return self._constrained(z, some)[0]

    def _constrained(
        self, z: Values, some: bool = False
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Values, and log determinants of the Jacobians of constrained sites."""
        values: dict[str, Array] = {}
        log_determinants = {}
        missing = set(self.latent).difference(z)
        if missing and some:
            bounds = self.depends(
                lambda sites: {n: arrays_in(sites[n]["fn"].support) for n in z}, missing
            )
            missing = set().union(*bounds.values())
        if missing:
            names = ", ".join(map(repr, sorted(missing)))
            instead = "Pass unconstrained values of all latent sites."
            raise argument_error("program.Posterior", "z", f"no {names}", instead)
        for name in self.latent:
            if name not in z:
                continue
            support = self._support(name, values)
            transform = biject_to(support)
            values[name] = transform(z[name])
            if getattr(support, "base_constraint", support) is real:
                continue
            log_determinant = transform.log_abs_det_jacobian(z[name], values[name])
            event_dim = len(self.sites[name]["fn"].event_shape)
            extra = jnp.ndim(log_determinant) - jnp.ndim(values[name]) + event_dim
            log_determinants[name] = sum_rightmost(log_determinant, extra)
        return values, log_determinants

    def unconstrain(self, values: Values) -> dict[str, Array]:
        """Unconstrained values of the latent sites at their values."""
        unconstrained = {}
        for name in self.latent:
            transform = biject_to(self._support(name, values))
            unconstrained[name] = transform.inv(values[name])
        return unconstrained

    # -- densities ---------------------------------------------------------------------

    def at_rows(
        self,
        values: Values,
        rows: Rows | None = None,
        rng_key: Key = 0,
        only: Iterable[str] | None = None,
    ) -> Sites:
        """The trace at values of all latent sites, on some rows of the plates.

        Sites with one value per row are given, and returned, with all of them.

        :param rows: indices by plate; other plates are full.
        :param rng_key: a key or seed for the model's own random numbers.
        :param only: names of the sites that are wanted, by default all.
        """
        rows = dict(rows or {})
        sizes = {}
        for name, indices in rows.items():
            plates = sites_of_type(self.sites, "plate")
            if name not in plates:
                raise unknown_name("program.Posterior", "rows", name, plates)
            if len(indices) != plates[name]["args"][0]:
                sizes[name] = len(indices)
        posterior = self.with_sizes(sizes)
        inputs = {**posterior.row_values(values, rows), **self._own_keys(rng_key)}
        sites = posterior.at(inputs, only=only)
        # also those of plates whose rows are all there, in another order
        latent = sites.keys() & set(self.latent)
        if local := [name for name in latent if self.frames(name, rows)]:
            return {**sites, **self.with_sizes({}).at(values, only=local)}
        return sites

    def row_values(self, values: Values, rows: Rows) -> Trees:
        """Take the wanted rows of sites that have all rows of these plates: what ``at``
        takes.
        """
        inputs = {**values, **rows}
        for name in inputs.keys() & set(self.latent):
            for plate, axis in self.row_axes(name, rows).items():
                inputs[name] = jnp.take(inputs[name], rows[plate], axis)
        return inputs

    def _own_keys(self, rng_key: Key) -> Arrays:
        """One key after the other for what the model draws by itself."""
        keys = {}
        rng_key = _typed_key(rng_key)
        for name in self._seeded:
            if name not in self.sites:
                rng_key, keys[name] = random.split(rng_key)
        return keys

    @property
    def _not_held(self) -> tuple[str, ...]:
        """Observed sites that no other block of a ``Gibbs`` holds."""
        return tuple(name for name in self.observed if name not in self.held)

    def log_prior(self, z: Values) -> dict[str, Array]:
        """Log density of each latent site at unconstrained values, without Jacobians;
        also of those that other blocks of a ``Gibbs`` hold.

        >>> import numpyro, numpyro.distributions as dist
        >>> posterior = Posterior(lambda: numpyro.sample("w", dist.Normal()))
        >>> round(float(posterior.log_prior({"w": 0.0})["w"]), 3)
        -0.919
        """
        samples = sites_of_type(self.sites, "sample")
        names = [name for name in samples if name not in self._not_held]
        sites = self.at_rows(self.constrain(z), only=names)
        return {name: log_density(site) for name, site in sites.items()}

    def log_jacobian(self, z: Values) -> dict[str, Array]:
        """Log determinant of the Jacobian of each constrained latent site."""
        log_determinants = self._constrained(z)[1]
        return {name: jnp.sum(entry) for name, entry in log_determinants.items()}

    def log_likelihood(
        self, z: Values, rows: Rows | None = None, rng_key: Key = 0
    ) -> dict[str, Array]:
        """Log density of each observed site, by row: neither scaled to N rows nor by
        ``handlers.scale``; masked rows count 0.

        :param z: unconstrained values of the latent sites.
        :param rows: indices by plate, by default all.
        :param rng_key: a key or seed for the model's own random numbers.

        >>> import numpyro, numpyro.distributions as dist
        >>> def model(y):
        ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("data", 3) as i:
        ...         numpyro.sample("y", dist.Normal(w, 1.0), obs=y[i])
        >>> posterior = Posterior(model, (jnp.array([0.0, 1.0, 2.0]),))
        >>> log_p = posterior.log_likelihood({"w": 0.0}, {"data": jnp.array([2])})["y"]
        >>> log_p.shape, round(float(log_p[0]), 2)
        ((1,), -2.92)
        """
        sites = self.at_rows(self.constrain(z), rows, rng_key, self._not_held)
        return {n: site["fn"].log_prob(site["value"]) for n, site in sites.items()}

    def outputs(
        self, z: Values, rows: Rows | None = None, rng_key: Key = 0
    ) -> dict[str, Distribution]:
        """The distribution of each observed site; its parameters are the outputs."""
        sites = self.at_rows(self.constrain(z), rows, rng_key, self._not_held)
        return {name: site["fn"] for name, site in sites.items()}

    def scale(self, rows: Rows | None = None) -> Trees:
        """The factor of each log density on some rows: N / B of a plate, times that of
        ``handlers.scale``.
        """
        sites = self.at_rows({}, rows, only=self._not_held)
        scales = {}
        for name, site in sites.items():
            scales[name] = 1.0 if site["scale"] is None else site["scale"]
        return scales

    def potential(
        self,
        z: Values,
        rows: Rows | None = None,
        rng_key: Key = 0,
        jacobian_weight: float = 1.0,
        standardized: bool = False,
    ) -> Array:
        """Minus the log density of the unconstrained values, up to a constant; on some
        rows an unbiased estimate of it.

        It is not finite where a distribution leaves its bounds, or data their support.

        :param z: unconstrained values of the latent sites.
        :param rows: indices by plate, by default all.
        :param rng_key: a key or seed for the model's own random numbers.
        :param jacobian_weight: factor of the log determinants.
        :param standardized: the density is that of u = (w - loc) / scale instead, as a
            function of w, for all w of a location-scale family (normal, Student's t,
            Laplace, jointly normal, and functions of these). That of w itself has no
            mode if the scale is random: it grows without bound where w nears loc and
            the scale nears 0.

        >>> import numpyro, numpyro.distributions as dist
        >>> def model(y, batch_size=None):
        ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("data", 3, subsample_size=batch_size) as i:
        ...         numpyro.sample("y", dist.Normal(w, 1.0), obs=y[i])
        >>> posterior = Posterior(model, (jnp.array([0.0, 1.0, 2.0]),))
        >>> round(float(posterior.potential({"w": 0.0})), 3)
        6.176
        >>> by_row = [
        ...     posterior.potential({"w": 0.0}, {"data": jnp.array([i])})
        ...     for i in range(3)
        ... ]
        >>> round(float(sum(by_row) / 3), 3)
        6.176
        """
        values, log_determinants = self._constrained(z)
        sites = self.at_rows(values, rows, rng_key, sites_of_type(self.sites, "sample"))
        total: Any = 0.0
        for name in self.latent if standardized else ():
            site = sites[name]
            total += jnp.sum(_scaled(site["scale"], log_scale(site["fn"])))
        for name, site in sites.items():
            if name in log_determinants:
                total += jnp.sum(_scaled(jacobian_weight, log_determinants[name]))
            total += log_density(site)
        return -(total + self._log_support(sites))

    def _log_support(self, sites: Sites) -> Scalar:
        """0 where the distributions of all sites, and the data, are within their
        bounds, and minus infinity elsewhere.

        Their own log densities are often finite there, and gradients take a chain
        across the border.
        """
        inside: Any = True
        for site in sites.values():
            data = site["value"] if site["is_observed"] else None
            inside &= jnp.all(in_support(site["fn"], data))
        return jnp.where(inside, 0.0, -jnp.inf)

    # -- the program -------------------------------------------------------------------

    def at(
        self,
        values: Values | None = None,
        rng_key: Key = 0,
        only: Iterable[str] | None = None,
    ) -> Sites:
        """The trace of the model at values of some sites; all others are drawn, or
        computed from these.

        :param values: constrained values of sample or deterministic sites, and indices
            of plates; names of other sites are ignored.
        :param rng_key: a key or seed for the sites that are drawn.
        :param only: names of the sites that are wanted, by default all.
        """
        replaceable = self.sites.keys() | self._states.keys() | set(self._seeded)
        inputs = {
            name: value for name, value in (values or {}).items() if name in replaceable
        }
        outputs = tuple(self.sites if only is None else only)
        key = frozenset(inputs), outputs
        if key not in self._programs:
            self._programs[key] = self._program(*key)
        numbers = iter(
            self._programs[key](
                inputs, _typed_key(rng_key), *jax.tree.leaves(self.data)
            )
        )
        sites = {}
        for name in outputs:
            site = dict(self.sites[name])
            for field in fields(site):
                site[field] = exchange(site.get(field), lambda _: next(numbers))
            sites[name] = site
        return sites

    def _program(self, inputs: Collection[str], names: Collection[str]) -> Callable:
        """The program from values of some sites to the arrays of others."""
        variables, outputs = iter(self._closed.jaxpr.outvars), {}
        for name, leaves in zip(self.sites, self._outputs, strict=True):
            outputs[name] = list(islice(variables, len(leaves)))
        outvars: list[Atom] = []
        for name in names:
            outvars += outputs[name]
        jaxpr = self._closed.jaxpr.replace(outvars=outvars)
        return named_inputs(
            self._closed.replace(jaxpr=jaxpr), {MARK + name: name for name in inputs}
        )

    def depends(
        self,
        quantities: Callable[[Sites], Mapping],
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

    def sources(self, quantities: Callable[[Sites], Mapping]) -> dict[Any, set[str]]:
        """For each part of a trace at given latent sites, the places of the arguments
        from which it is computed.
        """

        def program(inputs: Trees) -> Mapping:
            posterior = self.with_data({place: inputs[place] for place in self.data})
            return quantities(posterior.at(inputs[""]))

        inputs_used = dependence(program, {**self.data, "": self.shapes()})
        return {quantity: used - {""} for quantity, used in inputs_used.items()}

    @property
    def scaled(self) -> dict[str, frozenset[str]]:
        """The normal sites whose scale depends on other latent sites, with all those
        that their prior depends on.
        """

        def moments(sites: Sites) -> dict[tuple[str, str], Array]:
            arrays = {}
            for name in self.latent:
                if pair := affine_normal(sites[name]["fn"], masked=True):
                    arrays[name, "loc"], arrays[name, "scale"] = pair
            return arrays

        parents, scaled = self.depends(moments), {}
        for name, field in parents:
            if field == "scale" and parents[name, field]:
                both = parents[name, "loc"] | parents[name, "scale"]
                scaled[name] = frozenset(both)
        return scaled

    def idle_states(self) -> set[str]:
        """The places in ``numpyro.mutable`` state that no site is computed from, and
        that follow from state alone.

        Such is a counter of random keys that nobody uses, and not a running mean.
        """

        def quantities(inputs: Trees) -> Trees:
            states = {place: inputs[place] for place in self._states}
            sites = self.with_data(inputs["data"]).at({**states, **inputs["values"]})
            arrays: dict[str, PyTree] = {"used": []}
            for name, site in sites.items():
                if site["type"] != "mutable":
                    arrays["used"] += arrays_of(site)
                    continue
                for path, leaf in jax.tree_util.tree_leaves_with_path(site["value"]):
                    arrays[name + jax.tree_util.keystr(path)] = arrays_in(leaf)
            return arrays

        sources = dependence(
            quantities, {"data": self.data, "values": self.shapes(), **self._states}
        )
        outside = sources.pop("used") | {"data", "values"}
        idle = set()
        for place, used in sources.items():
            if outside.isdisjoint({place, *used}):
                idle.add(place)
        return idle

    def run(self, fn: Callable, *values: PyTree, runs_rarely: bool = True) -> PyTree:
        """``fn(posterior, *values)`` by a compiled program, which equal ones share,
        also with other data.

        :param runs_rarely: so rarely that compiling it quickly matters more than its
            speed.
        """
        return self.prepare(fn, runs_rarely)(*values)

    def prepare(self, fn: Callable, runs_rarely: bool = True) -> Callable:
        """:meth:`run` of ``fn`` as a function of ``values`` alone, traced once for all
        values of one shape.
        """

        def on_arrays(arrays: dict, *values: PyTree) -> PyTree:
            return fn(self.with_data(arrays), *values)

        program = shared(on_arrays, runs_rarely)
        return lambda *values: program(self.data, *values)

    def draw(
        self, seeds: Iterable[int], kinds: Collection[str] = ("sample",)
    ) -> list[dict[str, Any]]:
        """For each seed, values of the sites of some kinds that are not observed, drawn
        from the prior.
        """

        def values(reading: "Posterior", seed: Array) -> Trees:
            sites = reading.at({}, random.key(seed))
            values = {}
            for name, site in sites_of_type(sites, *kinds).items():
                if not site.get("is_observed", False):
                    values[name] = jax.tree.map(jnp.asarray, site["value"])
            return values

        program = self.prepare(values)
        return [program(jnp.uint32(seed)) for seed in seeds]


def log_density(site: Site, within: bool = False) -> Array:
    """The log density of a site as it enters the potential: masked, scaled, summed.

    :param within: whether it is minus infinity where a parameter, or the value, leaves
        bounds, with values behind a mask inside of all.
    """
    fn, value = site["fn"], site["value"]
    total = jnp.sum(_scaled(site["scale"], fn.log_prob(value)))
    if not within:
        return total
    return jnp.where(jnp.all(in_support(fn, value)), total, -jnp.inf)


def _scaled(scale: Scalar, log_prob: Array) -> Array:
    if scale is None or is_identically_one(scale):
        return log_prob
    return scale * log_prob


def _sample(site: Site, value: PyTree) -> PyTree:
    """The value of a sample site that is declared once more."""
    new = {
        "value": value,
        "kwargs": {**site["kwargs"], "rng_key": None},
        "intermediates": [],
        "infer": {},
        "stop": False,
        "_control_flow_done": False,
    }
    return apply_stack({**site, **new})["value"]


def _typed_key(rng_key: Key) -> Array:
    """A key, or the key of a seed, in the form that programs take."""
    key = jnp.asarray(rng_key) if is_prng_key(rng_key) else random.key(rng_key)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = random.wrap_key_data(key)
    return key


def _types(arrays: Trees) -> dict:
    """Shape and dtype of each array, and the precision in which a model computes."""
    types: dict = {"": jnp.result_type(float)}
    for place, array in arrays.items():
        aval = jax.typeof(array)
        types[place] = aval.shape, aval.dtype
    return types
