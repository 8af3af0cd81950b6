"""The small language of filters and label rules: arithmetic and comparisons over the columns of one log.

    click == 1
    attribution * (click_pos == click_nb - 1) * (conversion_timestamp - timestamp <= 30 * 86400)
    country == 'fr' and device != 'tablet'

Numbers are float64 and a missing value is NaN. A comparison with NaN is false, and so is NaN itself to `and`, `or` and
`not`. A column compared with text is compared as text, exactly as it stands in the log.
"""

import ast
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_DEEPEST = 100
"""How deep an expression may be nested: far beyond any rule, far below what Python's stack holds."""


@dataclass(frozen=True)
class Expression:
    """A checked expression. `numbers` and `texts` are the columns that it reads as numbers and as text."""

    source: str
    tree: ast.expr
    numbers: frozenset[str]
    texts: frozenset[str]

    @property
    def columns(self) -> frozenset[str]:
        return self.numbers | self.texts

    def evaluate(self, number: Callable[[str], np.ndarray], equals: Callable[[str, str], np.ndarray]) -> np.ndarray:
        """Its value for each row: `number(column)` gives float64, `equals(column, text)` booleans."""
        with np.errstate(all="ignore"):
            return np.asarray(_evaluate(self.tree, number, equals), dtype=np.float64)


def parse(source: str) -> Expression:
    """Checks an expression; ValueError says what is not understood."""
    try:
        tree = ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"'{_short(source)}' is not an expression") from None
    if _depth(tree) > _DEEPEST:
        raise ValueError(f"'{_short(source)}' is nested too deeply")
    numbers: set[str] = set()
    texts: set[str] = set()
    _check(tree, numbers, texts)
    return Expression(source, tree, frozenset(numbers), frozenset(texts))


def _short(source: str) -> str:
    return source if len(source) <= 200 else source[:197] + "..."


def _depth(tree: ast.expr) -> int:
    depth, level = 0, [tree]
    while level:
        depth, level = depth + 1, [inner for node in level for inner in ast.iter_child_nodes(node)]
    return depth


def _check(node: ast.expr, numbers: set[str], texts: set[str]) -> None:
    match node:
        case ast.Name():
            numbers.add(node.id)
        case ast.Constant(value=bool() | int() | float() as value) if abs(value) <= sys.float_info.max:
            pass
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=inner):
            _check(inner, numbers, texts)
        case ast.BinOp(op=op) if isinstance(op, _ARITHMETIC):
            _check(node.left, numbers, texts)
            _check(node.right, numbers, texts)
        case ast.BoolOp():
            for inner in node.values:
                _check(inner, numbers, texts)
        case ast.Compare(ops=[ast.Eq() | ast.NotEq()], left=ast.Name(id=name), comparators=[ast.Constant(value=str())]):
            texts.add(name)
        case ast.Compare(ops=[op]) if isinstance(op, _COMPARISONS):
            _check(node.left, numbers, texts)
            _check(node.comparators[0], numbers, texts)
        case _:
            raise ValueError(
                f"'{ast.unparse(node)}' is not understood: columns, numbers, + - * /, one comparison at a time,"
                " column == 'text', and, or, not"
            )


def _evaluate(node: ast.expr, number: Callable[[str], Any], equals: Callable[[str, str], Any]) -> Any:
    def value(inner: ast.expr) -> Any:
        return _evaluate(inner, number, equals)

    match node:
        case ast.Name():
            return number(node.id)
        case ast.Constant():
            return float(node.value)  # pyright: ignore[reportArgumentType]
        case ast.UnaryOp(op=ast.USub()):
            return -value(node.operand)
        case ast.UnaryOp():
            return 1.0 - _true(value(node.operand))
        case ast.BoolOp(op=ast.And()):
            return np.all(np.broadcast_arrays(*(_true(value(v)) for v in node.values)), axis=0) * 1.0
        case ast.BoolOp():
            return np.any(np.broadcast_arrays(*(_true(value(v)) for v in node.values)), axis=0) * 1.0
        case ast.Compare(comparators=[ast.Constant(value=str() as text)], left=ast.Name(id=name)):
            same = equals(name, text)
            return (same if isinstance(node.ops[0], ast.Eq) else ~same) * 1.0
        case ast.Compare():
            return _COMPARE[type(node.ops[0])](value(node.left), value(node.comparators[0])) * 1.0
        case ast.BinOp():
            return _OPERATE[type(node.op)](value(node.left), value(node.right))
    raise AssertionError(node)


def _true(value: Any) -> Any:
    """What `and`, `or` and `not` take for true: neither zero nor missing."""
    return (value < 0) | (value > 0)


_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    # a missing value differs from nothing: NaN != x is false here
    ast.NotEq: lambda a, b: (a < b) | (a > b),
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_OPERATE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
}
