"""-k of the verbs: one expression over ids, the same in all of them; and the refusal where nothing is selected."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import typer

from shared.checks import ArgumentError

Keyword = Annotated[
    str, typer.Option("-k", help="parts of ids with and, or, not, parentheses: 'mixtral and not (bf16 or pallas)'")
]
_NODES = (ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.Name, ast.Load)
_WORD = re.compile(r"[\w:+\-.\[\]\\/]+")
"""What pytest takes for a word of its -k."""
SHOWN = 3


def matcher(keyword: str) -> Callable[[str], bool]:
    """Whether an id is selected, as pytest's -k does it: a word holds where the id contains it, in upper or lower case.

    The empty keyword selects everything. Raises ArgumentError for what is no expression.
    """
    words: list[str] = []
    terms: list[str] = []
    for term in re.findall(r"[()]|[^\s()]+", keyword):
        if term in ("and", "or", "not", "(", ")"):
            terms.append(term)
            continue
        if not _WORD.fullmatch(term):
            raise _no_expression(keyword)
        terms.append(f"word{len(words)}")
        words.append(term.lower())
    if not terms:
        return lambda name: True
    try:
        tree = ast.parse(" ".join(terms), mode="eval")
    except SyntaxError as error:
        raise _no_expression(keyword) from error
    if not all(isinstance(node, _NODES) for node in ast.walk(tree)):  # "a (b)" is a call in Python
        raise _no_expression(keyword)
    code = compile(tree, "-k", "eval")

    def matches(name: str) -> bool:
        holds = {f"word{i}": word in name.lower() for i, word in enumerate(words)}
        return bool(eval(code, {"__builtins__": {}}, holds))

    return matches


def select[T](items: Iterable[T], keyword: str, key: Callable[[T], str]) -> list[T]:
    """The items whose id, `key(item)`, -k selects. Raises ArgumentError where there is none."""
    matches, every = matcher(keyword), list(items)
    chosen = [item for item in every if matches(key(item))]
    if not chosen:
        raise nothing("-k", keyword, [key(item) for item in every])
    return chosen


def nothing(option: str, given: object, ids: Sequence[str]) -> ArgumentError:
    """The error where `given` to `option` selects none of `ids`: a run that measures nothing must not pass for done."""
    shown = ids[:: max(1, -(-len(ids) // SHOWN))]  # from all over them, as neighbours are alike
    told = f"which selects none of {len(ids)}; ids are such as {', '.join(shown)}" if ids else "but there is nothing"
    return ArgumentError(f"{option}: got {given!r}, {told}")


def _no_expression(keyword: str) -> ArgumentError:
    return ArgumentError(f"-k: got {keyword!r}; allowed: words with and, or, not and parentheses")
