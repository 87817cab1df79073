"""The walk over the equations of a program (a jaxpr) that passes marked values to a
table of rules.

Equations whose inputs are all plain are evaluated as usual, those with a marked input
by the rule of their primitive. Calls (``jit``, ``custom_jvp``, ``custom_vjp``,
``remat``, ...) are entered, and equations that the outputs do not need are skipped.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from numpyro_bnn._checks import PACKAGE, argument_error
from numpyro_bnn._types import Atom, Operand, Trees

# Primitives that call an inner program once.
CALLS = frozenset(
    {
        *("jit", "closed_call", "checkpoint", "remat2"),
        *("custom_jvp_call", "custom_vjp_call"),
    }
)
_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
# Rooms that interpret programs; the line that a user looks for is in none of them.
_HIDDEN = (_JAX, *(f"{PACKAGE}{room}{os.sep}" for room in ("_jaxprs", "moments")))


def inner_jaxpr(equation: JaxprEqn) -> tuple[Jaxpr, Sequence]:
    """The program that a call or a loop holds, and its constants."""
    params = equation.params
    program = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def scan_starts(equation: Any) -> tuple[int, int]:
    """Where the operands that a ``scan`` carries begin, and those that it slices."""
    params = equation.params
    if "ft_in" in params:  # of newer JAX
        constants, carried, _ = params["ft_in"].unpack()
        return len(constants), len(constants) + len(carried)
    return params["num_consts"], params["num_consts"] + params["num_carry"]


def variables_of(atoms: Iterable[Atom]) -> set:
    """The variables among the operands of an equation, of which some are literals."""
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def needed_equations(
    jaxpr: Jaxpr, outputs: Iterable[Atom], constants: Collection[Atom] = frozenset()
) -> list[tuple[JaxprEqn, list[bool]]]:
    """The equations that compute the variables ``outputs`` of a jaxpr, in order, and
    which of their outputs are used.

    Variables in ``constants`` have known values, and so do literals.
    """
    needed = variables_of(outputs).difference(constants)
    equations = []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            equations.append((equation, [var in needed for var in equation.outvars]))
            needed |= variables_of(equation.invars).difference(constants)
    return equations[::-1]


@dataclass(frozen=True)
class Equation:
    """One equation of a program, as rules see it.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: x.sum(0))(jax.numpy.ones((2, 3))).jaxpr
    >>> equation = Equation(
    ...     jaxpr.eqns[0], Interpreter({}, lambda value: False, "example")
    ... )
    >>> equation.name, equation.params["axes"], equation.outputs[0].shape
    ('reduce_sum', (0,), (3,))
    >>> equation.bind(jax.numpy.ones((2, 3))).tolist()
    [2.0, 2.0, 2.0]
    """

    jaxpr_equation: Any
    interpreter: "Interpreter"
    needed: Sequence[bool] | None = None
    caller: "Equation | None" = None

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return self.jaxpr_equation.primitive.name

    @property
    def params(self) -> Trees:
        """Parameters of the primitive."""
        return self.jaxpr_equation.params

    @property
    def outputs(self) -> list[Operand]:
        """Abstract values (``shape``, ``dtype``) of the outputs."""
        return [var.aval for var in self.jaxpr_equation.outvars]

    @property
    def several(self) -> bool:
        """Whether the primitive returns a list."""
        return self.jaxpr_equation.primitive.multiple_results

    def bind(self, *operands: Operand) -> Operand:
        """Apply the primitive itself to plain arrays: an array, or a list of them for
        several outputs.
        """
        primitive = self.jaxpr_equation.primitive
        return primitive.bind(*operands, **primitive.get_bind_params(self.params))

    def descend(self, *operands: Operand) -> list[Operand]:
        """Evaluate the program inside a call, under the same rules."""
        jaxpr, consts = inner_jaxpr(self.jaxpr_equation)
        return self.interpreter.run(jaxpr, consts, operands, self.needed, self)

    def refuse(self, why: str, instead: str) -> Exception:
        """The error (the caller raises it) that names the primitive and the user's
        line; ``why`` follows "which".
        """
        return argument_error(
            self.interpreter.call,
            "fn",
            f"`{self.name}` at {self.where()}, which {why}",
            instead,
        )

    def where(self) -> str:
        """The innermost line outside JAX, and the user's line that led to it if that is
        a different one.
        """
        frames = self._frames()
        shown = frames[:1]
        for frame in frames:
            path = frame.file_name
            if not (path.startswith(PACKAGE) or "site-packages" in path):
                shown += [frame] if frame is not frames[0] else []
                break
        if not shown:
            return (
                f"a line inside `{self.caller.params.get('name')}`"
                if self.caller
                else "an unknown line"
            )
        return ", called from ".join(
            f"{f.file_name}:{f.line_num} ({f.function_name})" for f in shown
        )

    def _frames(self) -> list[Operand]:
        """Frames outside JAX and the interpreters, innermost first.

        A jitted function keeps the traceback of its first use, so for an equation
        inside a call only the frames of the called function itself can be trusted;
        beyond it the frames of the call apply.
        """
        traceback = self.jaxpr_equation.source_info.traceback
        frames = []
        for frame in traceback.frames if traceback else ():
            if not frame.file_name.startswith(_HIDDEN):
                frames.append(frame)
        if self.caller is None:
            return frames
        name = str(self.caller.params.get("name", ""))
        length = 0
        for i, frame in enumerate(frames):
            if name and frame.function_name.split(".")[-1] == name:
                length = i + 1
                break
        return frames[:length] + self.caller._frames()


Rule = Callable[..., Any]


@dataclass
class Interpreter:
    """Evaluate jaxprs under a table of rules.

    :param rules: from the name of a primitive to ``rule(equation, *operands)``, which
        returns the output (a list if the primitive has several). A rule of a call is
        used instead of entering it.
    :param marked: whether rules must handle a value; all others are plain.
    :param call: public name for error messages.
    :param default: the rule of every other primitive with a marked operand; ``None``
        refuses it.

    >>> import jax, jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda a, b: jnp.tanh(a + 2.0) * b)(1.0, 2.0)
    >>> tag, names = object(), []
    >>> def note(equation, *operands):
    ...     names.append(equation.name)
    ...     return operands[0]
    >>> walk = Interpreter({}, lambda value: value is tag, "example", default=note)
    >>> walk.run(jaxpr.jaxpr, jaxpr.consts, [tag, 2.0])[0] is tag, names
    (True, ['add', 'tanh', 'mul'])
    """

    rules: Mapping[str, Rule]
    marked: Callable[[Operand], bool]
    call: str
    default: Rule | None = None

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Operand],
        args: Sequence[Operand],
        needed: Sequence[bool] | None = None,
        caller: Equation | None = None,
    ) -> list[Operand]:
        """Outputs of a jaxpr for inputs ``args``, plain or marked, and values
        ``consts`` of its constants.

        Outputs that are not ``needed`` come out as ``None``; ``caller`` is the equation
        whose program this is.
        """
        needed = [True] * len(jaxpr.outvars) if needed is None else needed
        values: dict[Atom, Operand] = dict(
            zip(jaxpr.constvars, map(self.constant, consts), strict=True)
        )
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Atom) -> Operand:
            is_literal = isinstance(atom, Literal)
            return self.constant(atom.val) if is_literal else values[atom]

        outvars = list(compress(jaxpr.outvars, needed))
        for equation, outputs_needed in self.equations(jaxpr, outvars):
            outputs = self._evaluate(
                Equation(equation, self, outputs_needed, caller),
                list(map(read, equation.invars)),
            )
            values.update(zip(equation.outvars, outputs, strict=True))
        return [
            read(var) if want else None
            for var, want in zip(jaxpr.outvars, needed, strict=True)
        ]

    def equations(
        self, jaxpr: Jaxpr, outputs: Sequence[Atom]
    ) -> Iterable[tuple[JaxprEqn, Sequence[bool] | None]]:
        """The equations to visit, and which of their outputs are used (``None``:
        all).
        """
        return needed_equations(jaxpr, outputs)

    def constant(self, value: Operand) -> Operand:
        """How a number that the program itself holds is represented."""
        return value

    def plain(self, equation: Equation, *operands: Operand) -> Operand:
        """The rule of equations without a marked operand."""
        if all(map(_is_number, operands)) and all(
            out.size == 1 for out in equation.outputs
        ):
            # Known numbers stay known under jit, so that rules can inspect them (is
            # this constant 0?).
            with jax.ensure_compile_time_eval():
                return equation.bind(*operands)
        return equation.bind(*operands)

    def _evaluate(self, equation: Equation, operands: list[Operand]) -> list[Operand]:
        rule = self.rules.get(equation.name, self.default)
        if not any(map(self.marked, operands)):
            rule = self.plain
        elif equation.name in CALLS and equation.name not in self.rules:
            rule = Equation.descend
        elif rule is None:
            raise equation.refuse(
                "has no rule for a random operand",
                (
                    "Rewrite that line with supported operations, or give the "
                    "primitive a rule."
                ),
            )
        output = rule(equation, *operands)
        return list(output) if equation.several else [output]


def _is_number(value: Operand) -> bool:
    if isinstance(value, jax.core.Tracer) or np.size(value) != 1:
        return False
    return not jax.dtypes.issubdtype(
        getattr(value, "dtype", np.float32), jax.dtypes.prng_key
    )


class Follower(Interpreter):
    """Follow what is said of arrays through all equations of a program, without
    computing any.

    :param visit: from an equation of whose operands something is said, and what is said
        of each, to what is said of all of its outputs.
    :param nothing: what is said of other arrays.
    :param rules: of primitives that hold programs and are no calls.

    >>> import jax
    >>> program = jax.make_jaxpr(jax.jit(lambda x, y, z: (x + y, 2 * z)))(1.0, 2.0, 3.0)
    >>> walk = Follower(lambda equation, *names: "".join(names), "")
    >>> walk.follow(program.jaxpr, ["x", "y", ""])
    ['xy', '']
    """

    def __init__(
        self,
        visit: Rule,
        nothing: Operand,
        rules: Mapping[str, Rule] | None = None,
        marked: Callable[[Operand], bool] = bool,
    ) -> None:
        super().__init__(rules or {}, marked, "", self._visited)
        self.visit, self.nothing = visit, nothing

    def follow(self, jaxpr: Jaxpr, inputs: Sequence[Operand]) -> list[Operand]:
        """What is said of the outputs."""
        return self.run(jaxpr, jaxpr.constvars, inputs)

    def equations(
        self, jaxpr: Jaxpr, outputs: Sequence[Atom]
    ) -> Iterable[tuple[JaxprEqn, Sequence[bool] | None]]:
        return [(equation, None) for equation in jaxpr.eqns]

    def constant(self, value: Operand) -> Operand:
        return self.nothing

    def plain(self, equation: Equation, *operands: Operand) -> Operand:
        return self._outputs(equation, self.nothing)

    def _visited(self, equation: Equation, *operands: Operand) -> Operand:
        return self._outputs(equation, self.visit(equation, *operands))

    def _outputs(self, equation: Equation, value: Operand) -> Operand:
        count = len(equation.jaxpr_equation.outvars)
        return [value] * count if equation.several else value


class SiteImage(NamedTuple):
    """An elementwise affine image of a site: its value, and its slope in the site."""

    site: str
    value: Operand
    slope: Operand

    def after(
        self, equation: Equation, operands: Sequence[Operand], operand: int
    ) -> "SiteImage":
        """The image after an operation that is affine in one of its operands."""

        def image(value: Operand) -> Operand:
            return equation.bind(*operands[:operand], value, *operands[operand + 1 :])

        return SiteImage(self.site, *jax.jvp(image, (self.value,), (self.slope,)))
