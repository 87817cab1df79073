"""Which axis of which array of a model comes from which plate or argument: by its
program, never by a length.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_bnn._jaxprs.axes import Axis, AxisFollower, LabelPlaces, follow_axes
from numpyro_bnn._jaxprs.primitives import (
    ADDRESSING,
    SUMMED,
    Place,
    gathered,
    names_of,
    place_after,
    stacked_columns,
)
from numpyro_bnn._jaxprs.walk import Equation, scan_starts
from numpyro_bnn._types import Operand, PyTree, Site, Trees
from numpyro_bnn.program.plates import sites_of_type
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.sites import Sites

# Operations that sum over whole axes, and those along an axis whose elements stay as
# many.
SUMS = names_of("reduction") | {"dot_general"}
ALIGNED = names_of("along") | {"rev"}


def axes_of_data(
    reading: Posterior, quantities: Callable[[Sites], Mapping[Any, Array]]
) -> dict[Any, dict[Axis, int | None]]:
    """Where the axes of arguments, and the indices of plates, lie in parts of the
    trace.

    :return: for each part, axis of an argument or plate -> axis of the part. ``None``:
        its elements are mixed, one of the part depends on several of them.

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> def model(x):
    ...     with numpyro.plate("data", 3) as i:
    ...         numpyro.sample("y", dist.Normal(x.T[i] @ jnp.ones(2), 1.0))
    >>> found = axes_of_data(
    ...     Posterior(model, (jnp.ones((2, 3)),)),
    ...     lambda sites: {"loc": sites["y"]["fn"].loc},
    ... )
    >>> {(axis.source, axis.axis): at for axis, at in found["loc"].items()}
    {('_[0]', 0): None, ('_[0]', 1): None, ('data', 0): 0}
    """
    jaxpr, outputs, arguments = _program(reading, quantities)
    inputs = []
    for path, leaf in arguments:
        labels = LabelPlaces()
        if path[0].key != "latent":
            for axis, size in enumerate(jnp.shape(leaf)):
                labels[Axis(path[1].key, axis, size)] = Place(axis, 1)
        inputs.append(labels)
    axes: dict[Any, dict[Axis, int | None]] = {key: {} for key in outputs}
    # JAX sorts the keys
    for key, rows in zip(sorted(outputs), follow_axes(jaxpr, inputs), strict=True):
        for label, place in rows.items():
            is_axis = (
                place is not None
                and place.inner == 1
                and outputs[key].shape[place.axis] == label.size
            )
            axes[key][label] = place.axis if is_axis else None
    return axes


def _program(
    reading: Posterior, quantities: Callable[[Sites], Any]
) -> tuple[Any, Any, list[tuple[Any, Any]]]:
    """The program of some quantities of the trace, their shapes, and its inputs with
    their paths: data, indices of plates, latent values.
    """
    arguments = {
        "data": reading.data,
        "plates": reading.shapes(sites_of_type(reading.sites, "plate")),
        "latent": reading.shapes(),
    }

    def program(arguments: Trees) -> PyTree:
        values = {**arguments["latent"], **arguments["plates"]}
        return quantities(reading.with_data(arguments["data"]).at(values))

    closed, outputs = jax.make_jaxpr(program, return_shape=True)(arguments)
    inputs, _ = jax.tree_util.tree_flatten_with_path(arguments)
    return closed.jaxpr, outputs, inputs


class Counted(NamedTuple):
    """Which axes of arguments, named by place and axis, and which plates count the same
    things.

    :param kinds: axis or plate -> the same label for all that count the same.
    :param unclear: axes that pass an operation whose axes are not followed, that no
        site is computed from, or that are summed by themselves, as in a mean of data.
    """

    kinds: Mapping[Any, Any] = {}
    unclear: frozenset[Any] = frozenset()

    def alike(self, first: Operand, second: Operand) -> bool | None:
        """Whether two of them count the same, ``None`` if the program does not tell."""
        if first not in self.kinds or second not in self.kinds:
            return None
        if self.kinds[first] == self.kinds[second]:
            return True
        return None if {first, second} & self.unclear else False


def counted(reading: Posterior) -> Counted:
    """Which axes of the arguments of a model count the rows of which plate, or each
    other's elements.

    Two axes count the same where their elements meet one by one: in arithmetic, in a
    sum over both, where a plate's index looks up elements, or in a site within the
    plate. A table that other data look up counts its own levels.

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> def model(x, table, group):
    ...     with numpyro.plate("data", 3) as i:
    ...         mean = x.T[i] @ jnp.ones(2) + table[group[i]]
    ...         numpyro.sample("y", dist.Normal(mean, 1.0), obs=jnp.ones(3))
    >>> found = counted(
    ...     Posterior(
    ...         model,
    ...         (),
    ...         dict(x=jnp.ones((2, 3)), table=jnp.ones(3), group=jnp.arange(3)),
    ...     )
    ... )
    >>> [
    ...     found.alike(axis, "data")
    ...     for axis in [("x", 0), ("x", 1), ("table", 0), ("group", 0)]
    ... ]
    [False, True, False, True]
    """
    samples = sites_of_type(reading.sites, "sample")
    jaxpr, densities, arguments = _program(
        reading, lambda sites: [_log_prob(sites[name]) for name in samples]
    )
    inputs, followed = [], _Meetings()
    labels: set[_Label] = set()
    latent: set[_Label] = set()
    for path, leaf in arguments:
        kind, name = path[0].key, path[1].key
        places = set()
        for axis, size in enumerate(jnp.shape(leaf)):
            key = {"data": (name, axis), "plates": name}.get(kind, (kind, name, axis))
            if size > 1:  # one element may be meant for any number of others
                places.add((_Label(key, size), Place(axis, 1)))
        inputs.append(_LabeledValue(frozenset(places), kind == "plates"))
        labels |= _labels(places)
        if kind == "latent":
            latent |= _labels(places)
    arrived, rows = set(), set()
    for (name, site), density, value in zip(
        samples.items(), densities, followed.follow(jaxpr, inputs), strict=True
    ):
        label_places: set[tuple[_Label, Place | None]] = set(value.places)
        shape = density.shape
        for frame in site["cond_indep_stack"]:
            if len(shape) >= -frame.dim and shape[frame.dim] == frame.size > 1:
                label = _Label(frame.name, frame.size)
                label_places.add((label, Place(len(shape) + frame.dim, 1)))
                if name in reading.observed:
                    rows.add(label)
        followed.meet(label_places)
        arrived |= _labels(label_places)
    labels |= arrived
    kinds = {label: followed.first(label) for label in labels}
    kinds_of_rows = set(map(followed.first, rows))
    kinds_of_latent = {kinds[label] for label in latent}
    unclear = followed.lost | (labels - arrived)
    for label, neighbors in followed.beside.items():
        beside_rows = not kinds_of_rows.isdisjoint(map(followed.first, neighbors))
        # elements of a weight are summed by themselves in its density
        if not beside_rows and kinds[label] not in kinds_of_latent:
            unclear.add(label)
    return Counted(
        {label.key: kinds[label] for label in labels},
        frozenset(label.key for label in unclear),
    )


def _log_prob(site: Site) -> Array:
    value = site["value"]
    if site["fn"].support.is_discrete:
        value = value.astype(int)  # classes that are written as 1.0
    return site["fn"].log_prob(value)


class _Label(NamedTuple):
    """The name of a plate, or place and axis of an argument; and its size."""

    key: Array
    size: int


Places: TypeAlias = frozenset[tuple[_Label, Place | None]]


class _LabeledValue(NamedTuple):
    """Where labels lie in a value, each maybe at several places.

    :param is_index: whether it is the index of a plate.
    :param columns: values that it stacks along its last axis, as ``x[i, j]`` does.
    """

    places: Places = frozenset()
    is_index: bool = False
    columns: tuple["_LabeledValue", ...] = ()


class _Meetings(AxisFollower):
    """Follows labels through a program by all paths, and joins those whose elements
    meet.
    """

    def __init__(self) -> None:
        super().__init__(self._moved, _LabeledValue(), lambda value: bool(value.places))
        self._before: dict[_Label, _Label] = {}
        #: Labels that pass an operation whose axes are not followed.
        self.lost: set[_Label] = set()
        #: Labels that are summed or looked up, and the labels of the axes that are
        # left.
        self.beside: dict[_Label, set[_Label]] = {}

    def first(self, label: _Label) -> _Label:
        """The label that stands for all that count the same."""
        while label in self._before:
            label = self._before[label]
        return label

    def meet(self, places: Iterable[tuple[_Label, Place | None]]) -> None:
        """Join the labels that lie at the same place."""
        by_place: dict[Hashable, _Label] = {}
        for label, place in places:
            if place is not SUMMED:
                root = self.first(label)
                shared_root = self.first(
                    by_place.setdefault((place, label.size), label)
                )
                if root != shared_root:
                    self._before[root] = shared_root

    def joined(self, first: _LabeledValue, second: _LabeledValue) -> _LabeledValue:
        places = first.places | second.places
        self.meet(places)
        return _LabeledValue(places)

    def replaced(
        self, value: _LabeledValue, place: Callable[[Place], Place | None]
    ) -> _LabeledValue:
        places = set()
        for label, old in value.places:
            places.add((label, SUMMED if old is SUMMED else place(old)))
        return _LabeledValue(frozenset(places))

    def scan(self, equation: Equation, *operands: _LabeledValue) -> list[_LabeledValue]:
        """What is scanned together has the same steps, also in what comes out."""
        carry_start, slice_start = scan_starts(equation)
        num_carry, sliced = slice_start - carry_start, operands[slice_start:]
        steps = set()
        for operand in sliced:
            for label, place in operand.places:
                if place is not SUMMED and place.axis == 0:
                    steps.add((label, place))
        self.meet(steps)
        for operand in sliced:
            self._sum(_labels(steps), self._shifted(operand, -1).places)
        outputs = super().scan(equation, *operands)
        for i in range(num_carry, len(outputs)):
            outputs[i] = self.joined(outputs[i], _LabeledValue(frozenset(steps)))
        return outputs

    def _moved(self, equation: Equation, *operands: _LabeledValue) -> _LabeledValue:
        jaxpr_equation = equation.jaxpr_equation
        moved_places, contracted, summed = set(), set(), set()
        for number, operand in enumerate(operands):
            for label, place in operand.places:
                output_place = None
                if place is not SUMMED:
                    output_place = self._move(equation, operands, number, label, place)
                    if output_place is SUMMED:
                        summed.add(label)
                        if equation.name == "dot_general":
                            axes = equation.params["dimension_numbers"][0][number]
                            position = tuple(axes).index(place.axis)
                            contracted.add((label, Place(position, place.inner)))
                moved_places.add((label, output_place))
        self.meet(contracted)
        self._sum(summed, moved_places)
        self.meet(moved_places)
        is_index = equation.name in ADDRESSING and any(
            operand.is_index for operand in operands
        )
        columns = tuple(stacked_columns(jaxpr_equation, operands))
        if columns != operands:  # one of them holds several
            columns = ()
        return _LabeledValue(frozenset(moved_places), is_index, columns)

    def _move(
        self,
        equation: Equation,
        operands: tuple[_LabeledValue, ...],
        number: int,
        label: _Label,
        place: Place,
    ) -> Place | None:
        """The place of a label after an operation; what no rule says is lost."""
        if equation.name in ALIGNED:
            return place
        output_place = place_after(equation.jaxpr_equation, number, place, label.size)
        if output_place is not SUMMED or equation.name in SUMS:
            return output_place
        if equation.name == "gather" and number == 0:
            return self._looked_up(equation, label, place, operands[1])
        self.lost.add(label)
        return SUMMED

    def _looked_up(
        self, equation: Equation, label: _Label, place: Place, index: _LabeledValue
    ) -> Place | None:
        """The place of elements that are looked up: that of the plate whose index does
        it.
        """
        axes = list(equation.params["dimension_numbers"].start_index_map)
        columns = index.columns if len(axes) > 1 else (index,)
        column = _LabeledValue()
        if place.axis in axes and columns:
            column = columns[axes.index(place.axis)]
        by_data = set()
        for index_label, index_place in column.places:
            is_plate = isinstance(index_label.key, str)
            if column.is_index and index_place is not SUMMED and is_plate:
                return gathered(equation.jaxpr_equation, 1, index_place, {})
            if not is_plate:
                by_data.add(index_label)
        if not by_data or by_data & self.lost:
            self.lost.add(label)
        return SUMMED

    def _sum(
        self, labels: Iterable[_Label], places: Iterable[tuple[_Label, Place | None]]
    ) -> None:
        left = {label for label, place in places if place is not SUMMED}
        for label in labels:
            self.beside.setdefault(label, set()).update(left)


def _labels(places: Iterable[tuple[_Label, Place | None]]) -> set[_Label]:
    return {label for label, _ in places}
