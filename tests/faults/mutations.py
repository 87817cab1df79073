"""Faults as transformations of the syntax tree: what programmers get wrong, at every place where it can go wrong.

No list quotes source text: a fault is a function, a transformation and a number, so it survives that code moves.
"""

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "numpyro_bnn"


class Fault(NamedTuple):
    """One changed expression.

    :param room: folder or file of the package, e.g. ``"infer"``.
    :param function: full name, e.g. ``"infer.sgld.SGLD.parts"``.
    :param kind: name of the transformation, a key of ``KINDS``.
    :param number: among the places of this kind in this function, from 0.
    :param line: of the file.
    :param before: source of the expression; for people only.
    :param after: what stands there instead.
    """

    room: str
    function: str
    kind: str
    number: int
    file: Path
    line: int
    before: str
    after: str
    source: str

    @property
    def key(self) -> tuple[str, str, int]:
        """What names this fault in lists."""
        return self.function, self.kind, self.number


# -- transformations: each gives what stands in a node's place, or None where it does not apply ------------


def is_text(node: ast.AST) -> bool:
    """Whether an operand is text, which + joins."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def is_sum(node: ast.AST) -> bool:
    """Whether a node adds or subtracts numbers or arrays, as far as one can see."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub):
        return False
    sides = (node.left, node.right)
    return not any(is_text(side) or isinstance(side, ast.List | ast.Tuple | ast.ListComp) for side in sides)


def other_sign(node: ast.AST) -> ast.AST | None:
    """a + b for a - b and the other way round; x for -x."""
    if is_sum(node):
        return ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        return node.operand
    return None


def dropped_term(node: ast.AST) -> ast.AST | None:
    """a for a + b and a - b."""
    return node.left if is_sum(node) else None


def lost_factor(node: ast.AST) -> ast.AST | None:
    """a for a * b."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return None
    return None if isinstance(node.left, ast.List | ast.Tuple) or is_text(node.left) else node.left


def other_factor(node: ast.AST) -> ast.AST | None:
    """Twice a number that is not an integer, which is a factor rather than an index, a size or a guard."""
    number = isinstance(node, ast.Constant) and isinstance(node.value, float)
    return ast.Constant(2 * node.value) if number and 1e-4 < abs(node.value) < 1e4 else None


def inverted_ratio(node: ast.AST) -> ast.AST | None:
    """b / a for a / b: N / B inverted."""
    division = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    return ast.BinOp(node.right, ast.Div(), node.left) if division and not is_text(node.right) else None


TURNED = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


def turned_comparison(node: ast.AST) -> ast.AST | None:
    """a >= b for a < b, a != b for a == b, and so on."""
    if not isinstance(node, ast.Compare) or type(node.ops[0]) not in TURNED:
        return None
    return ast.Compare(node.left, [TURNED[type(node.ops[0])](), *node.ops[1:]], node.comparators)


def swapped_arguments(node: ast.AST) -> ast.AST | None:
    """f(b, a) for f(a, b), where both are plain values."""
    if not isinstance(node, ast.Call) or len(node.args) != 2 or node.keywords:
        return None
    first, second = node.args
    plain = (ast.Name, ast.Attribute, ast.Subscript, ast.BinOp)
    # The order means nothing for these, or both orders raise an error at once.
    name = ast.unparse(node.func).split(".")[-1]
    commutative = name in ("maximum", "minimum", "max", "min", "add", "multiply", "isinstance", "logaddexp", "equal")
    if commutative or not isinstance(first, plain) or not isinstance(second, plain):
        return None
    return ast.Call(node.func, [second, first], [])


def called(node: ast.AST) -> str:
    """Last name of the function that a node calls with positional arguments, or an empty text."""
    plain = isinstance(node, ast.Call) and node.args and not any(isinstance(a, ast.Starred) for a in node.args)
    return ast.unparse(node.func).split(".")[-1] if plain else ""


def same_key_again(node: ast.AST) -> ast.AST | None:
    """The key itself for one folded in or split from it: the same randomness twice."""
    if called(node) == "fold_in":
        return node.args[0]
    if isinstance(node, ast.Assign) and called(node.value) == "split" and isinstance(node.targets[0], ast.Tuple):
        names = node.targets[0].elts
        if "key" in ast.unparse(node.value.args[0]) and not any(isinstance(name, ast.Starred) for name in names):
            return ast.Assign(node.targets, ast.Tuple([node.value.args[0]] * len(names)), lineno=node.lineno)
    return None


def other_axis(node: ast.AST) -> ast.AST | None:
    """The first axis for the last and the other way round, in ``axis=``."""
    if not isinstance(node, ast.Call):
        return None
    for place, keyword in enumerate(node.keywords):
        value = keyword.value
        negative = isinstance(value, ast.UnaryOp) and isinstance(value.operand, ast.Constant)
        number = -value.operand.value if negative else getattr(value, "value", None)
        if keyword.arg == "axis" and isinstance(number, int) and not isinstance(number, bool):
            changed = ast.keyword("axis", ast.Constant(-1 if number == 0 else 0))
            return ast.Call(node.func, node.args, [*node.keywords[:place], changed, *node.keywords[place + 1 :]])
    return None


def off_by_one(node: ast.AST) -> ast.AST | None:
    """n for n + 1 and n - 1."""
    one = is_sum(node) and isinstance(node.right, ast.Constant) and node.right.value == 1
    return node.left if one else None


def other_branch(node: ast.AST) -> ast.AST | None:
    """b if c else a for a if c else b."""
    return ast.IfExp(node.test, node.orelse, node.body) if isinstance(node, ast.IfExp) else None


KINDS: dict[str, Callable[[ast.AST], ast.AST | None]] = {
    "sign": other_sign,
    "dropped term": dropped_term,
    "lost factor": lost_factor,
    "factor": other_factor,
    "inverted ratio": inverted_ratio,
    "comparison": turned_comparison,
    "swapped arguments": swapped_arguments,
    "key used twice": same_key_again,
    "axis": other_axis,
    "off by one": off_by_one,
    "branch": other_branch,
}
INPUT = "input returned"  # `return x` for `return f(x)`: not a change of one expression


# -- places --------------------------------------------------------------------------------------------


def is_message(node: ast.AST) -> bool:
    """Whether a node only says something to people: errors, texts, warnings."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
        return True
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return name.endswith(("argument_error", "unknown_name", "refuse", "warn", "shown"))


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's body in order, without functions inside it, annotations and messages."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
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
    """The source with other text in the place of a node; its other lines stay where they are."""
    lines = source.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    filler = "\n" * (node.end_lineno - node.lineno)
    whole = source.encode()
    return (whole[:start] + text.encode() + filler.encode() + whole[end:]).decode()


def input_of(function: ast.FunctionDef, node: ast.AST) -> ast.AST | None:
    """The first parameter for what a function returns, unless it returns it anyway."""
    names = [argument.arg for argument in function.args.posonlyargs + function.args.args]
    names = [name for name in names if name not in ("self", "cls")]
    if not isinstance(node, ast.Return) or not names or node.value is None or isinstance(node.value, ast.Constant):
        return None
    return None if ast.unparse(node.value) == names[0] else ast.Return(ast.Name(names[0]))


def faults_of(path: Path, root: Path = PACKAGE) -> Iterator[Fault]:
    """Every fault that can be planted in a file."""
    source = path.read_text()
    parts = path.relative_to(root).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    for name, function in functions(ast.parse(source), module):
        if function.name in ("__repr__", "__str__"):
            continue
        counts: dict[str, int] = {}
        for node in walk(function):
            changes = [(kind, change(node)) for kind, change in KINDS.items()]
            for kind, other in [*changes, (INPUT, input_of(function, node))]:
                if other is None:
                    continue
                text = ast.unparse(ast.fix_missing_locations(other))
                text = text if isinstance(other, ast.stmt) else f"({text})"
                number = counts[kind] = counts.get(kind, -1) + 1
                changed = spliced(source, node, text)
                yield Fault(parts[0], name, kind, number, path, node.lineno, ast.unparse(node), text, changed)


def all_faults(rooms: Sequence[str] = (), root: Path = PACKAGE) -> list[Fault]:
    """Every fault of these rooms (all by default), by file and line."""
    paths = sorted(root.rglob("*.py"))
    chosen = [p for p in paths if not rooms or p.relative_to(root).with_suffix("").parts[0] in rooms]
    return [fault for path in chosen for fault in faults_of(path, root)]


def drawn(faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """So many faults: a kind first, then a place of that kind, so that rare kinds are seen too."""
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
