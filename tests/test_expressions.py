"""Filters and label rules against plain Python, row by row."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adumbra.expressions import parse

NAN = math.nan
NUMBERS = {"a": [0.0, 1.0, 2.0, -1.5, NAN, 7.0], "b": [1.0, 1.0, NAN, 0.0, NAN, 2.0]}
TEXTS = {"site": ["x", "y", "", "x", "größe", "xx"]}


def evaluate(source):
    expression = parse(source)
    return np.broadcast_to(
        expression.evaluate(lambda name: np.array(NUMBERS[name]), lambda name, text: np.array(TEXTS[name]) == text), 6
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a", NUMBERS["a"]),
        ("a + b * 2", [2, 3, NAN, -1.5, NAN, 11]),
        ("-a", [0, -1, -2, 1.5, NAN, -7]),
        ("a / b", [0, 1, NAN, -math.inf, NAN, 3.5]),
        ("a == 1", [0, 1, 0, 0, 0, 0]),
        ("a != 1", [1, 0, 1, 1, 0, 1]),
        ("a >= b", [0, 1, 0, 0, 0, 1]),
        ("not a", [1, 0, 0, 0, 1, 0]),
        ("not a == 1", [1, 0, 1, 1, 1, 1]),
        ("a and b", [0, 1, 0, 0, 0, 1]),
        ("a or b", [1, 1, 1, 1, 0, 1]),
        ("site == 'x'", [1, 0, 0, 1, 0, 0]),
        ("site != 'größe'", [1, 1, 1, 1, 0, 1]),
        ("site == ''", [0, 0, 1, 0, 0, 0]),
        ("(site == 'x') + (site != 'y')", [2, 0, 1, 2, 1, 1]),
        ("-(site == 'x')", [-1, 0, 0, -1, 0, 0]),
        ("(a and b) - (a or b)", [-1, 0, -1, -1, 0, 0]),
        ("1 - (a == 1) * (b == 1)", [1, 0, 1, 1, 1, 1]),
        ("3", [3] * 6),
        ("1 == 1", [1] * 6),
        ("True and 0", [0] * 6),
        ("1 / 0", [math.inf] * 6),
    ],
)
def test_values(source, expected):
    np.testing.assert_array_equal(evaluate(source), expected)


@pytest.mark.parametrize(
    "source",
    [
        *["", "a b", "a ** 2", "a == 1 == 1", "a < b < 3", "f(a)", "a[0]", "a.b", "lambda: 1", "'x'", "site < 'x'"],
        *["'x' == site", "a if b else 1", "[a]", "a & b", "1j", "None", "a := 1", "a\nb", "__import__('os')", "\0"],
        *["1e999", "9" * 400, "9" * 5000, "(" * 300 + "a" + ")" * 300, "+".join("a" * 480), "-" * 5000 + "a"],
    ],
)
def test_what_is_not_understood(source):
    with pytest.raises(ValueError, match=r"is not|nested") as caught:
        parse(source)
    assert len(str(caught.value)) < 6000


def test_which_columns_it_reads_and_how():
    expression = parse("a * (site == 'x') + (b > 2)")
    assert (expression.numbers, expression.texts) == ({"a", "b"}, {"site"})


TREES = st.recursive(
    st.sampled_from(["a", "b", "0", "1", "2.5", "True", "(site == 'x')", "(site != '')"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([*"+-*/<>", "==", "!=", "<=", ">="]), inner).map(lambda t: f"({' '.join(t)})"),
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({' '.join(t)})"),
        st.tuples(st.sampled_from(["-", "not "]), inner).map(lambda t: f"({''.join(t)})"),
    ),
    max_leaves=12,
)


class Number(float):
    """A float64 of one row, with the language's three departures from Python: division by zero, and NaN."""

    def __truediv__(self, other):
        with np.errstate(all="ignore"):
            return float(np.float64(self) / np.float64(other))


def by_hand(source, row):
    import ast

    def value(node):
        match node:
            case ast.Name():
                return NUMBERS[node.id][row]
            case ast.Constant():
                return float(node.value)
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.UnaryOp():
                return float(not true(value(node.operand)))
            case ast.BoolOp():
                every = isinstance(node.op, ast.And)
                return float((all if every else any)(true(value(inner)) for inner in node.values))
            case ast.Compare(comparators=[ast.Constant(value=str() as text)]):
                return float((TEXTS[node.left.id][row] == text) == isinstance(node.ops[0], ast.Eq))
            case ast.Compare():
                left, right = value(node.left), value(node.comparators[0])
                if math.isnan(left) or math.isnan(right):
                    return 0.0
                sign = (left > right) - (left < right)
                holds = {"Eq": sign == 0, "NotEq": sign != 0, "Lt": sign < 0, "LtE": sign <= 0}
                holds |= {"Gt": sign > 0, "GtE": sign >= 0}
                return float(holds[type(node.ops[0]).__name__])
        left, right = value(node.left), value(node.right)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
        return Number(left) / Number(right)

    def true(number):
        return number != 0 and not math.isnan(number)

    return value(ast.parse(source, mode="eval").body)


@given(TREES)
def test_any_expression_is_what_python_makes_of_it(source):
    np.testing.assert_array_equal(evaluate(source), [by_hand(source, row) for row in range(6)])
