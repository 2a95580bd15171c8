"""The tool: a calculator. Every decorated function of this file is a tool; more are added in the same way.

Name, description and types of the arguments come from the signature and the docstring. What the function returns is
appended to the conversation; an exception is returned to the model as text. `ToolError` is for mistakes of the model:
other exceptions are also logged.
"""

from __future__ import annotations

import ast
import operator

from verl.tools.base_tool import ToolError
from verl.tools.function_tool import function_tool

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@function_tool
def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses, such as (17 - 5) * 2.
    """

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("use numbers, + - * / and parentheses")

    try:
        return f"{value(ast.parse(expression.strip(), mode='eval').body):.10g}"
    except (ValueError, SyntaxError, ArithmeticError, RecursionError) as error:
        raise ToolError(f"cannot evaluate {expression!r}: {error}") from error
