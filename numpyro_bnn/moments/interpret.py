"""An interpreter of JAX programs (jaxprs) that passes marked values to a table of
rules; it knows nothing of moments.

Equations whose inputs are all plain are evaluated as usual, those with a marked input
by the rule of their primitive. Calls (``jit``, ``custom_jvp``, ``custom_vjp``,
``remat``, ...) are entered, and equations that the outputs do not need are skipped.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from numpyro_bnn._checks import argument_error
from numpyro_bnn._jaxprs import needed_equations

# Primitives that call an inner program, and the names under which versions of JAX store
# it.
CALLS = {
    *(
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "core_closed_call",
        "checkpoint",
        "remat",
        "remat2",
    ),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}
_PROGRAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OURS = os.path.dirname(os.path.dirname(_HERE)) + os.sep
_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep


def inner_jaxpr(equation: Any) -> tuple[Any, Sequence[Any]]:
    """The program that a call holds, and its constants."""
    program = next(
        equation.params[name] for name in _PROGRAMS if name in equation.params
    )
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


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
    def params(self) -> Mapping[str, Any]:
        """Parameters of the primitive."""
        return self.jaxpr_equation.params

    @property
    def outputs(self) -> list[Any]:
        """Abstract values (``shape``, ``dtype``) of the outputs."""
        return [var.aval for var in self.jaxpr_equation.outvars]

    def bind(self, *operands: Any) -> Any:
        """Apply the primitive itself to plain arrays: an array, or a list of them for
        several outputs.
        """
        primitive = self.jaxpr_equation.primitive
        return primitive.bind(*operands, **primitive.get_bind_params(self.params))

    def descend(self, *operands: Any) -> list[Any]:
        """Interpret the program inside a call."""
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
            if not (path.startswith(_OURS) or "site-packages" in path):
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

    def _frames(self) -> list[Any]:
        """Frames outside JAX and this folder, innermost first.

        A jitted function keeps the traceback of its first use, so for an equation
        inside a call only the frames of the called function itself can be trusted;
        beyond it the frames of the call apply.
        """
        traceback = getattr(
            getattr(self.jaxpr_equation, "source_info", None), "traceback", None
        )
        frames = [
            f
            for f in getattr(traceback, "frames", ())
            if not f.file_name.startswith((_JAX, _HERE))
        ]
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


@dataclass(frozen=True)
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
    marked: Callable[[Any], bool]
    call: str
    default: Rule | None = None

    def run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Any],
        needed: Sequence[bool] | None = None,
        caller: Equation | None = None,
    ) -> list[Any]:
        """Outputs of a jaxpr for inputs ``args``, plain or marked, and values
        ``consts`` of its constants.

        Outputs that are not ``needed`` come out as ``None``; ``caller`` is the equation
        whose program this is.
        """
        needed = [True] * len(jaxpr.outvars) if needed is None else needed
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))
        outvars = list(compress(jaxpr.outvars, needed))
        for equation, outputs_needed in needed_equations(jaxpr, outvars):
            operands = [_read(values, var) for var in equation.invars]
            outputs = self._evaluate(
                Equation(equation, self, outputs_needed, caller), operands
            )
            values.update(zip(equation.outvars, outputs, strict=True))
        return [
            _read(values, var) if want else None
            for var, want in zip(jaxpr.outvars, needed, strict=True)
        ]

    def _evaluate(self, equation: Equation, operands: list[Any]) -> list[Any]:
        rule = self.rules.get(equation.name, self.default)
        if not any(map(self.marked, operands)):
            rule = _plain
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
        return (
            list(output)
            if equation.jaxpr_equation.primitive.multiple_results
            else [output]
        )


def _plain(equation: Equation, *operands: Any) -> Any:
    if all(map(_is_number, operands)) and all(
        out.size == 1 for out in equation.outputs
    ):
        # Known numbers stay known under jit, so that rules can inspect them (is this
        # constant 0?).
        with jax.ensure_compile_time_eval():
            return equation.bind(*operands)
    return equation.bind(*operands)


def _is_number(value: Any) -> bool:
    if isinstance(value, jax.core.Tracer) or np.size(value) != 1:
        return False
    return not jax.dtypes.issubdtype(
        getattr(value, "dtype", np.float32), jax.dtypes.prng_key
    )


def _read(values: Mapping[Any, Any], var: Any) -> Any:
    return var.val if isinstance(var, Literal) else values[var]
