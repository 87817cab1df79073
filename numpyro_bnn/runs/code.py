"""What a value is, as labeled texts: numbers, arrays, objects by their values,
functions by their code.

The texts are the same in every process and differ for different settings. Of a
function, they have a hash of the instructions that Python runs, and what these read:
globals, closures, defaults, and so on through all functions that are reached. Line
numbers, comments, formatting and names of variables do not enter. Libraries enter by
name and version.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import jax
import numpy as np
from jax import Array
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.mcmc import MCMCKernel

from numpyro_bnn._checks import PACKAGE
from numpyro_bnn._types import Attributes, Trees
from numpyro_bnn.program.arguments import is_table
from numpyro_bnn.program.rows import Rows
from numpyro_bnn.runs.folder import digest

# A label, which names a difference but does not make one, and a text.
LabeledText = tuple[str, str]

PACKAGES = (
    "numpyro_bnn",
    "numpyro",
    "jax",
    "jaxlib",
)  # whose versions every run describes
MAX_TEXT_CHARACTERS = 60  # characters of a text
MAX_TEXTS = 40  # of a value inside of another one; more become one
MAX_DEPTH = 50  # levels of values in values
PLAIN = (
    str
    | bytes
    | bool
    | int
    | float
    | complex
    | np.generic
    | np.dtype
    | range
    | None
    | type(...)
)
STANDARD = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))
INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
READS = ("LOAD_GLOBAL", "LOAD_NAME")
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
# Depend on where lines break, and where closures are made in the order of names.
LEFT_OUT = (
    "NOP",
    "CACHE",
    "RESUME",
    "MAKE_CELL",
    "COPY_FREE_VARS",
    "EXTENDED_ARG",
    "NOT_TAKEN",
)


def described_value(value: object) -> Any:
    """A text, or a list of labeled texts if there are several."""
    texts = _Reader().texts(value)
    return texts[0][1] if len(texts) == 1 else [list(labeled) for labeled in texts]


def options_of(method: MCMCKernel | AutoGuide) -> Attributes:
    """What a kernel or a guide was made with, by argument, its model too; the same once
    it was used.
    """
    names: set[str] = set()
    for kind in type(method).__mro__[:-1]:
        names.update(inspect.signature(kind).parameters)
    values = {}
    if isinstance(method, AutoGuide):
        # whose `_name` may be what it has made of an argument
        for name in names - {"blocks"}:
            values[name] = getattr(method, name, getattr(method, f"_{name}", None))
        for name in ("asked", "patterns", "guides"):
            values[name] = getattr(method, f"_{name}", None)
    else:
        for name in names:
            values[name] = getattr(method, f"_{name}", getattr(method, name, None))
    return {name: value for name, value in sorted(values.items()) if value is not None}


class _Reader:
    """Reads values into labeled texts, each object once."""

    def __init__(self) -> None:
        self._known: dict[
            int, tuple[Any, list[LabeledText] | None]
        ] = {}  # with the object, so that its id stays its own
        self._depth = 0

    def texts(self, value: object) -> list[LabeledText]:
        if isinstance(value, PLAIN):
            return [("", _short(repr(value)))]
        if is_table(value) and hasattr(value, "to_numpy"):
            value = value.to_numpy()
        if isinstance(value, np.ndarray) and value.dtype.kind in "OMm":
            # whose bytes are places in memory, or dates
            value = value.tolist()
        if isinstance(value, Array | np.ndarray | Rows):
            return [("", f"{value.dtype}{list(value.shape)} {digest(value)[:16]}")]
        if id(value) in self._known:
            cached = self._known[id(value)][1]
            return [("", "itself")] if cached is None else cached
        if self._depth == MAX_DEPTH:
            return [("", "…")]
        self._known[id(value)] = value, None
        self._depth += 1
        texts = self._read(value)
        self._depth -= 1
        if len(texts) > MAX_TEXTS and self._depth:
            summary = _hash([text for _, text in texts])
            texts = [("", f"{texts[0][1]} and {len(texts) - 1} parts {summary}")]
        self._known[id(value)] = value, texts
        return texts

    def _read(self, value: object) -> list[LabeledText]:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, ModuleType):
            return self._module(value)
        if isinstance(value, functools.partial):
            bound = {"": value.func, " args": value.args}
            bound |= _prefixed(" ", value.keywords)
            return self._joined(f"partial({', '.join(value.keywords)})", bound)
        if inspect.ismethod(value):
            return self._joined("method", {"": value.__func__, ".self": value.__self__})
        if isinstance(value, enum.Enum):
            return [("", _short(f"{type(value).__qualname__}.{value.name}"))]
        if isinstance(value, Mapping):
            keys = ", ".join(map(self._text, value))
            items = {f"[{key!r}]": item for key, item in value.items()}
            return self._joined(f"{_name(type(value))}({keys})", items)
        if isinstance(value, list | tuple):
            items = {f"[{i}]": item for i, item in enumerate(value)}
            return self._joined(_name(type(value)), items)
        if isinstance(value, set | frozenset):
            members = sorted(map(self._text, value))
            return [("", _short(f"set of {members}"))]
        return self._object(value)

    def _text(self, value: object) -> str:
        return " ".join(text for _, text in self.texts(value))

    def _joined(self, head: str, values: Trees) -> list[LabeledText]:
        """The texts of several values by label; ``head`` says what a label would, as
        labels are not compared.
        """
        texts = [("", _short(head))]
        for label, value in values.items():
            texts += [(label + inner, text) for inner, text in self.texts(value)]
        return texts

    def _object(self, value: object) -> list[LabeledText]:
        kind = type(value)
        head = _name(kind)
        values = _state(value)
        if not _of_library(kind.__module__):
            values = {"class": kind, **values}
        elif not values and hasattr(value, "__qualname__"):
            # a function of a library that is not written in Python
            head = f"{getattr(value, '__module__', '')}.{value.__qualname__}"
        elif not values and "0x" not in repr(value):  # a date, a fraction
            head = repr(value)
        return self._joined(
            f"{head}({', '.join(values)})",
            {f".{name}".rstrip("."): content for name, content in values.items()},
        )

    def _class(self, kind: type) -> list[LabeledText]:
        if _of_library(kind.__module__):
            return [("", _name(kind))]
        members = {}
        for name, member in vars(kind).items():
            special = name.startswith("__") and not isinstance(member, FunctionType)
            if not special and name != "_abc_impl":
                member = getattr(member, "__func__", getattr(member, "fget", member))
                members[f".{name}"] = member
        bases = _prefixed(" base ", dict(enumerate(kind.__bases__)))
        return self._joined(f"class({', '.join(members)})", members | bases)

    def _module(self, module: ModuleType) -> list[LabeledText]:
        if _of_library(module.__name__):
            return [("", f"{module.__name__} {_version(module.__name__)}".strip())]
        members = {}
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) == module.__name__:
                members[name] = value
        return self._joined(f"module({', '.join(members)})", _prefixed(".", members))

    def _function(self, function: FunctionType) -> list[LabeledText]:
        by_position = dict(enumerate(function.__defaults__ or ()))
        defaults = _prefixed(" default ", by_position)
        defaults |= _prefixed(" default ", function.__kwdefaults__ or {})
        if _in_library(function.__code__.co_filename):
            cells = _prefixed(", ", _cells(function))
            module = str(function.__globals__.get("__name__", ""))
            head = f"{module}.{function.__code__.co_qualname} {_version(module)}"
            return self._joined(head.strip(), cells | defaults)
        code = _Code(function)
        reads = {f", {'.'.join(names)}": value for names, value in code.reads.items()}
        return self._joined(f"code {_hash(code.words)}", reads | defaults)


class _Code:
    """The instructions of a function as words, and what they read from outside, by its
    name.

    In the words, variables are numbers, in the order in which their names occur.
    """

    def __init__(self, function: FunctionType) -> None:
        self._globals, self._cells = function.__globals__, _cells(function)
        self.reads: dict[tuple[str, ...], Any] = {}
        self._variables: dict[str, int] = {}
        self.words: list[str] = self._walk(function.__code__, frozenset())

    def _number(self, name: str) -> int:
        return self._variables.setdefault(name, len(self._variables))

    def _walk(self, code: CodeType, outer: frozenset[str]) -> list[str]:
        """The words of a piece of code.

        :param outer: variables of the code around it, inside of the function.
        """
        steps: list[dis.Instruction] = []
        places: dict[int, int] = {}
        for step in dis.get_instructions(code):
            places[step.offset] = len(steps)
            if step.opname not in LEFT_OUT:
                steps.append(step)
        packed = [inspect.CO_VARARGS, inspect.CO_VARKEYWORDS]
        count = sum(bool(code.co_flags & flag) for flag in packed)
        count += code.co_argcount + code.co_kwonlyargcount
        for name in code.co_varnames[:count]:
            self._number(name)
        words = [
            (
                f"{code.co_argcount} {code.co_posonlyargcount} "
                f"{code.co_kwonlyargcount} {code.co_flags & 0x2AC}"
            )
        ]
        position = 0
        while position < len(steps):
            step = steps[position]
            position += 1
            kind = re.sub("_BORROW|_CHECK", "", step.opname)
            of_cell = (
                step.opcode in dis.hasfree
                and step.argval in code.co_freevars
                and step.argval not in outer
            )
            if kind == "LOAD_CLOSURE":
                words.append(kind)
            elif of_cell or kind in READS:
                names_read = self._read(steps[position - 1 :], of_cell)
                position += len(names_read) - 1
                words.append(f"{kind} {list(self.reads).index(names_read)}")
            elif step.opcode in dis.hasconst:
                if isinstance(step.argval, CodeType):
                    num_cells = len(step.argval.co_freevars)
                    if num_cells and words[-1] == f"BUILD_TUPLE {num_cells}":
                        # of its closure, in the order of names
                        del words[-num_cells - 1 :]
                    words += self._walk(step.argval, outer.union(code.co_cellvars))
                else:
                    words.append(f"{kind} {_constant(step.argval)}")
            elif step.opcode in dis.haslocal or step.opcode in dis.hasfree:
                words += self._variables_in(code, kind, step.argval)
            elif step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
                words.append(f"{kind} {places[step.argval]}")
            elif step.opcode in dis.hasname:
                words.append(f"{kind} {step.argval}")
                module = sys.modules.get(step.argval)
                if kind == "IMPORT_NAME" and isinstance(module, ModuleType):
                    self.reads.setdefault((step.argval,), module)
            else:
                words.append(f"{kind} {step.arg}")
        return words

    def _variables_in(self, code: CodeType, kind: str, names: object) -> list[str]:
        """The words of an instruction that reads or writes one variable, or two."""
        kinds = [kind]
        if isinstance(names, tuple):
            kinds = re.findall("(?:LOAD|STORE)_FAST", kind)
        else:
            names = (names,)
        cells = code.co_freevars + code.co_cellvars
        words = []
        for instruction, name in zip(kinds, names, strict=True):
            if instruction == "LOAD_FAST" and name in cells:
                words.append("LOAD_CLOSURE")
            else:
                words.append(f"{instruction} {self._number(name)}")
        return words

    def _read(self, steps: list[dis.Instruction], of_cell: bool) -> tuple[str, ...]:
        """Note what the first step reads, and the attributes that the next ones read of
        it; return the names.
        """
        value, exists = self._outside(steps[0].argval, of_cell)
        chain = [steps[0].argval]
        for step in steps[1:] if exists else ():
            if step.opname not in ATTRIBUTES or not _holds(value, step.argval):
                break
            chain.append(step.argval)
            value = getattr(value, step.argval)
        self.reads.setdefault(tuple(chain), value)
        return tuple(chain)

    def _outside(self, name: str, of_cell: bool) -> tuple[Any, bool]:
        """The value of a name outside of the function, and whether there is one."""
        builtins = self._globals.get("__builtins__", {})
        scope = self._cells if of_cell else self._globals
        if name in scope:
            return scope[name], True
        names = builtins if isinstance(builtins, dict) else vars(builtins)
        return f"built in: {name in names} {name}", False


def _constant(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, frozenset):
        return f"set of {sorted(map(_constant, value))}"
    return f"{type(value).__name__} {value!r}"


def _cells(function: FunctionType) -> dict[str, object]:
    """What a function has from the functions around it, by name."""
    values = {}
    for name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            values[name] = None
    return values


def _holds(value: object, name: str) -> bool:
    """Whether an attribute is read without running code: of a module, a class, or what
    holds settings.
    """
    if isinstance(value, ModuleType):
        return hasattr(value, name)
    return name in getattr(value, "__dict__", {}) and not isinstance(
        value, FunctionType
    )


def _state(value: object) -> dict[str, object]:
    """The values that make an object what it is, by name; not what it has computed from
    them.
    """
    if isinstance(value, MCMCKernel | AutoGuide):
        return options_of(value)
    if dataclasses.is_dataclass(value):
        return {
            field.name: getattr(value, field.name, None)
            for field in dataclasses.fields(value)
        }
    kind = type(value)
    if _of_library(kind.__module__) and hasattr(value, "__wrapped__"):
        # `jax.jit`, `jax.custom_jvp`
        rules = {
            name: getattr(value, name)
            for name in ("jvp", "fwd", "bwd")
            if hasattr(value, name)
        }
        return {"": value.__wrapped__, **rules}
    if any(base.__module__.startswith("flax.nnx") for base in kind.__mro__):
        leaves, _ = jax.tree_util.tree_flatten_with_path(value)
        return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    values = {}
    for base in kind.__mro__:
        for name in np.atleast_1d(getattr(base, "__slots__", ())):
            if hasattr(value, name):
                values[str(name)] = getattr(value, name)
    values |= getattr(value, "__dict__", {})
    state = {}
    for name, content in values.items():
        descriptor = type(inspect.getattr_static(kind, name, None)).__name__
        computed = descriptor in ("cached_property", "lazy_property")
        if not computed and not name.startswith("__"):
            state[name] = content
    return state


def _name(kind: type) -> str:
    """A class of a library by its name, one of the user only by its code."""
    of_library = _of_library(kind.__module__)
    return (
        f"{kind.__qualname__} {_version(kind.__module__)}".strip()
        if of_library
        else "object"
    )


def _of_library(module: str | None) -> bool:
    if module == "__main__" or module not in sys.modules:
        return False
    file = getattr(sys.modules[module], "__file__", None)
    return file is None or _in_library(file)


def _in_library(file: str) -> bool:
    """Whether code belongs to Python, to an installed package or to this one, and not
    to the user.
    """
    return (
        file.startswith((PACKAGE, "<frozen", *STANDARD))
        or INSTALLED.search(file) is not None
    )


def _version(module: str | None) -> str:
    """The version of the package of a module, unless a description has it anyway."""
    package = (module or "").partition(".")[0]
    return (
        ""
        if package in PACKAGES
        else str(getattr(sys.modules.get(package), "__version__", ""))
    )


def _prefixed(prefix: str, values: Mapping[Any, Any]) -> dict[str, object]:
    return {f"{prefix}{name}": value for name, value in values.items()}


def _hash(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _short(text: str) -> str:
    return (
        text
        if len(text) <= MAX_TEXT_CHARACTERS
        else f"{text[: MAX_TEXT_CHARACTERS - 18]}… {_hash([text])}"
    )
