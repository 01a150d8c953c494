"""What is wrong with a text that is no YAML, and what that often means."""

from __future__ import annotations

from ruamel.yaml.error import MarkedYAMLError

_YAML_HINTS = {
    "mapping values are not allowed": "look for uneven indentation or a colon without a space",
    "expected ',' or": "a bracket is not closed",
    "expected <block end>": "keys of one level start in the same column",
    "\\t": "indent with spaces, not tabs",
    "expected a single document": "keep one scenario a file",
    "unexpected end of stream": "a quote is not closed",
}


def why_no_yaml(error: MarkedYAMLError) -> str:
    """What the parser says, on one line, with where the thing began and what it often means."""
    problem = " ".join(f"{error.context or ''} {error.problem or ''}".split())
    began, ended = error.context_mark, error.problem_mark
    since = f" (it began in line {began.line + 1})" if began and ended.line > began.line else ""
    hint = next((f"; {hint}" for words, hint in _YAML_HINTS.items() if words in problem), "")
    return f"{problem}{since}{hint}"
