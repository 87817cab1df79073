"""Faults as transformations of the syntax tree: what programmers get wrong, at every
place where it can go wrong.

No list quotes source text: a fault is a function, a transformation and a number, so it
survives that code moves.
"""

import ast
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "numpyro_bnn"
# what stands in a node's place, or None where it does not apply
Change = Callable[[ast.AST], ast.AST | None]


class Fault(NamedTuple):
    """One changed expression: before and after, the file, and its whole new source.

    :param function: full name, e.g. ``"infer.sgld.SGLD.parts"``.
    :param kind: name of the transformation, a key of ``KINDS``.
    :param number: among the places of this kind in this function, from 0.
    """

    function: str
    kind: str
    number: int
    file: Path
    line: int
    before: str
    after: str
    source: str

    @property
    def room(self) -> str:
        """Folder or file of the package."""
        return self.function.split(".")[0] or "__init__"

    @property
    def key(self) -> tuple[str, str, int]:
        """What names this fault in lists."""
        return self.function, self.kind, self.number


# -- transformations -------------------------------------------------------------------


def is_text(node: ast.AST) -> bool:
    """Whether an operand is text, which + joins."""
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def binary(node: ast.AST, *operators: type[ast.operator]) -> bool:
    """Whether a node computes with numbers or arrays, as far as one can see."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, operators):
        return False
    no_number = ast.List | ast.Tuple | ast.ListComp
    return not any(
        is_text(side) or isinstance(side, no_number) for side in (node.left, node.right)
    )


def other_sign(node: ast.AST) -> ast.AST | None:
    """a + b for a - b and the other way round; x for -x."""
    if binary(node, ast.Add, ast.Sub):
        return ast.BinOp(
            node.left,
            ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(),
            node.right,
        )
    negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    return (
        node.operand
        if negative and not isinstance(node.operand, ast.Constant)
        else None
    )


def other_factor(node: ast.AST) -> ast.AST | None:
    """Twice a number that is not an integer, which is a factor rather than an index, a
    size or a guard.
    """
    number = isinstance(node, ast.Constant) and isinstance(node.value, float)
    return (
        ast.Constant(2 * node.value)
        if number and 1e-4 < abs(node.value) < 1e4
        else None
    )


TURNED = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
# The order of their arguments means nothing, or another one raises an error at once.
COMMUTATIVE = {
    "maximum",
    "minimum",
    "max",
    "min",
    "add",
    "multiply",
    "isinstance",
    "logaddexp",
    "equal",
}


def turned_comparison(node: ast.AST) -> ast.AST | None:
    """a >= b for a < b, a != b for a == b, and so on."""
    if not isinstance(node, ast.Compare) or type(node.ops[0]) not in TURNED:
        return None
    return ast.Compare(
        node.left, [TURNED[type(node.ops[0])](), *node.ops[1:]], node.comparators
    )


def called(node: ast.AST) -> str:
    """Last name of the function that a node calls by position, or an empty text."""
    plain = (
        isinstance(node, ast.Call)
        and node.args
        and not any(isinstance(a, ast.Starred) for a in node.args)
    )
    return ast.unparse(node.func).split(".")[-1] if plain else ""


def swapped_arguments(node: ast.AST) -> ast.AST | None:
    """f(b, a) for f(a, b), where both are plain values."""
    if called(node) in {"", *COMMUTATIVE} or len(node.args) != 2 or node.keywords:
        return None
    plain = all(
        isinstance(a, ast.Name | ast.Attribute | ast.Subscript | ast.BinOp)
        for a in node.args
    )
    return ast.Call(node.func, node.args[::-1], []) if plain else None


def same_key_again(node: ast.AST) -> ast.AST | None:
    """The key itself for one folded in or split from it: the same randomness twice."""
    if called(node) == "fold_in":
        return node.args[0]
    if (
        isinstance(node, ast.Assign)
        and called(node.value) == "split"
        and isinstance(node.targets[0], ast.Tuple)
    ):
        names, key = node.targets[0].elts, node.value.args[0]
        if "key" in ast.unparse(key) and not any(
            isinstance(name, ast.Starred) for name in names
        ):
            return ast.Assign(
                node.targets, ast.Tuple([key] * len(names)), lineno=node.lineno
            )
    return None


def other_axis(node: ast.AST) -> ast.AST | None:
    """The first axis for the last and the other way round, in ``axis=``."""
    for place, keyword in enumerate(
        node.keywords if isinstance(node, ast.Call) else []
    ):
        axis = ast.unparse(keyword.value)
        if keyword.arg == "axis" and axis.lstrip("-").isdigit():
            changed = ast.keyword("axis", ast.Constant(-1 if axis == "0" else 0))
            return ast.Call(
                node.func,
                node.args,
                [*node.keywords[:place], changed, *node.keywords[place + 1 :]],
            )
    return None


def off_by_one(node: ast.AST) -> ast.AST | None:
    """n for n + 1 and n - 1."""
    one = (
        binary(node, ast.Add, ast.Sub)
        and isinstance(node.right, ast.Constant)
        and node.right.value == 1
    )
    return node.left if one else None


KINDS: dict[str, Change] = {
    "sign": other_sign,
    "dropped term": lambda node: node.left if binary(node, ast.Add, ast.Sub) else None,
    "lost factor": lambda node: node.left if binary(node, ast.Mult) else None,
    "factor": other_factor,
    "inverted ratio": lambda node: (
        ast.BinOp(node.right, ast.Div(), node.left) if binary(node, ast.Div) else None
    ),
    "comparison": turned_comparison,
    "swapped arguments": swapped_arguments,
    "key used twice": same_key_again,
    "axis": other_axis,
    "off by one": off_by_one,
    "branch": lambda n: (
        ast.IfExp(n.test, n.orelse, n.body) if isinstance(n, ast.IfExp) else None
    ),
}
INPUT = "input returned"  # `return x` for `return f(x)`: not a change of one expression


def input_of(function: ast.FunctionDef) -> Change:
    """The first parameter for what a function returns, unless it returns it anyway."""
    names = [
        argument.arg for argument in function.args.posonlyargs + function.args.args
    ]
    names = [name for name in names if name not in ("self", "cls")]

    def change(node: ast.AST) -> ast.AST | None:
        value = node.value if isinstance(node, ast.Return) else None
        if (
            not names
            or value is None
            or isinstance(value, ast.Constant)
            or ast.unparse(value) == names[0]
        ):
            return None
        return ast.Return(ast.Name(names[0]))

    return change


# -- places ----------------------------------------------------------------------------


def is_message(node: ast.AST) -> bool:
    """Whether a node only says something to people: errors, texts, warnings."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
        return True
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return name.endswith(("argument_error", "unknown_name", "refuse", "warn", "shown"))


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's body, without inner functions and messages."""
    for name, value in ast.iter_fields(node):
        if name in (
            "annotation",
            "returns",
            "decorator_list",
            "type_comment",
            "type_params",
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            inner = isinstance(
                child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            )
            if isinstance(child, ast.AST) and not inner and not is_message(child):
                yield child
                yield from walk(child)


def functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function of a file with its full name."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{prefix}.{child.name}"
            if isinstance(child, ast.FunctionDef):
                yield name, child
            yield from functions(child, name)
        elif isinstance(child, ast.stmt):
            yield from functions(child, prefix)


def spliced(source: str, node: ast.AST, text: str) -> str:
    """The source with other text in the place of a node; other lines stay."""
    whole = source.encode()
    lines = whole.splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    return (
        whole[:start]
        + text.encode()
        + b"\n" * (node.end_lineno - node.lineno)
        + whole[end:]
    ).decode()


def faults_of(path: Path, root: Path = PACKAGE) -> Iterator[Fault]:
    """Every fault that can be planted in a file."""
    source = path.read_text()
    parts = path.relative_to(root).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    for name, function in functions(ast.parse(source), module):
        numbers = Counter[str]()
        for node in (
            walk(function) if function.name not in ("__repr__", "__str__") else ()
        ):
            for kind, change in (*KINDS.items(), (INPUT, input_of(function))):
                if other := change(node):
                    after = ast.unparse(ast.fix_missing_locations(other))
                    after = after if isinstance(other, ast.stmt) else f"({after})"
                    changed = spliced(source, node, after)
                    yield Fault(
                        name,
                        kind,
                        numbers[kind],
                        path,
                        node.lineno,
                        ast.unparse(node),
                        after,
                        changed,
                    )
                    numbers[kind] += 1


def all_faults(rooms: Sequence[str] = (), root: Path = PACKAGE) -> list[Fault]:
    """Every fault of these rooms (all by default), by file and line."""
    return [
        fault
        for path in sorted(root.rglob("*.py"))
        if not rooms or path.relative_to(root).with_suffix("").parts[0] in rooms
        for fault in faults_of(path, root)
    ]


def drawn(faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """So many faults: a kind first, then a place of it, so that rare kinds are seen."""
    generator = random.Random(seed)
    by_kind: dict[str, list[Fault]] = {}
    for fault in faults:
        by_kind.setdefault(fault.kind, []).append(fault)
    for places in by_kind.values():
        generator.shuffle(places)
    chosen: list[Fault] = []
    while len(chosen) < count and by_kind:
        kind = generator.choice(sorted(by_kind))
        chosen.append(by_kind[kind].pop())
        if not by_kind[kind]:
            del by_kind[kind]
    return chosen
