"""Lists the messages of all errors that the sources raise, each as its text with {} for what is filled in.

python scripts/error_messages.py            # all of them, a line each: file: text
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ("python",)
CPP = ("src", "apps", "include", "python/src")
#: What is raised that users never see, or that comes with the text of another error alone.
INTERNAL = {"AttributeError", "IndexError"}
THROW = re.compile(
    r"\bthrow\s+(?:infinitybatch::)?[A-Z]\w*\s*[({]|\breturn\s+[A-Z]\w*Error\(|"
    r"\brefuse\w*\((?=[^)])|\battr\(\"add_note\"\)\("
)
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, order=True)
class Message:
    file: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.text}"

    def says(self, said: str) -> bool:
        """Whether the text of an error that was raised is this one, filled in."""
        parts = map(re.escape, self.text.split("{}"))
        return re.search(".*".join(parts), said, re.DOTALL) is not None


def joined(parts: list[str]) -> str:
    return re.sub(r"(\{\}\s*)+\{\}", "{}", "".join(parts))


# Python


def of_expression(node: ast.expr) -> list[str]:
    """The texts that an expression can give: two of a conditional one."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            return [
                joined(["{}" if isinstance(v, ast.FormattedValue) else v.value for v in values])
            ]  # type: ignore[attr-defined]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return [joined([a, b]) for a in of_expression(left) for b in of_expression(right)]
        case ast.IfExp(body=body, orelse=other):
            return of_expression(body) + of_expression(other)
        case _:
            return ["{}"]


def is_error(name: str) -> bool:
    return name[:1].isupper() and name not in INTERNAL


def returned(tree: ast.Module, argument: ast.expr) -> list[ast.expr]:
    """What a function of the same file gives as the text, or the argument itself."""
    if not isinstance(argument, ast.Call):
        return [argument]
    called = ast.unparse(argument.func).split(".")[-1]
    return [
        node.value
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name == called
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value is not None
    ]


def of_python(file: Path, name: str) -> Iterator[Message]:
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func).split(".")[-1]
            call = node.value if called in ERRORS else None
        if not isinstance(call, ast.Call) or not call.args:
            continue
        if is_error(ast.unparse(call.func).split(".")[-1]):
            for value in returned(tree, call.args[0]):
                yield from (Message(name, text) for text in of_expression(value))


ERRORS = {
    "InvalidArgument",
    "InvalidType",
    "BatchError",
    "CouplingError",
    "Unsupported",
    "StateError",
    "BudgetExceeded",
    "UsageError",
}

# C++


def argument_end(text: str, begin: int) -> int:
    """Where the bracket closes that is open before `begin`."""
    depth, i = 1, begin
    while depth:
        if text[i] == '"':
            found = LITERAL.match(text, i)
            assert found
            i = found.end()
            continue
        if text[i] == "'":
            i += 4 if text[i + 1] == "\\" else 3
            continue
        depth += (text[i] in "({[") - (text[i] in ")}]")
        i += 1
    return i - 1


def split_at(text: str, mark: str) -> list[str]:
    """The pieces between `mark`s that stand in no bracket and no literal."""
    pieces, depth, begin, i = [], 0, 0, 0
    while i < len(text):
        if text[i] == '"':
            found = LITERAL.match(text, i)
            assert found
            i = found.end()
            continue
        depth += (text[i] in "({[") - (text[i] in ")}]")
        if text[i] == mark and depth == 0:
            pieces.append(text[begin:i])
            begin = i + 1
        i += 1
    return [*pieces, text[begin:]]


def of_sum(text: str, by: str = "+") -> str:
    """A sum of strings: literals as they stand, {} for all else."""
    parts = []
    for operand in split_at(text, by):
        operand = operand.strip()
        wrapped = re.fullmatch(r"std::string\((.*)\)", operand, re.DOTALL)
        operand = wrapped[1].strip() if wrapped else operand
        literals = LITERAL.findall(operand)
        if literals and not LITERAL.sub("", operand).strip():
            parts.append("".join(literals).replace('\\"', '"').replace("\\\\", "\\"))
        else:
            parts.append("{}")
    return joined(parts)


def before(text: str, end: int, name: str) -> str:
    """What a string variable, or a stream, was made of in the lines before its use."""
    lines = text[:end].splitlines()
    begin = max(
        (
            i
            for i, line in enumerate(lines)
            if line and line[0] not in " }/#" and i < len(lines) - 1
        ),
        default=0,
    )
    body = "\n".join(lines[begin:])
    made = []
    for found in re.finditer(rf"\b{name}\s*(?:\+?=|\(|<<)\s*(?![=)])", body):
        closing = body.find(";", found.end())
        while closing > 0 and body[:closing].count('"') % 2:
            closing = body.find(";", closing + 1)
        value = body[found.end() : closing].rstrip(") ").replace("<<", "+")
        made.append(of_sum(value))
    return joined(made) or "{}"


def of_argument(argument: str) -> list[str]:
    """The texts that an argument can be: two of a conditional one."""
    argument = argument.strip()
    if len(split_at(argument, "?")) == 2:
        return [of_sum(text) for text in split_at(split_at(argument, "?")[1], ":")]
    if argument.startswith("c10::str(") and argument.endswith(")"):
        return [of_sum(argument[len("c10::str(") : -1], ",")]
    return [of_sum(argument)]


def of_cpp(file: Path, name: str) -> Iterator[Message]:
    text = re.sub(r"(?m)^\s*//.*$", "", file.read_text())
    for found in THROW.finditer(text):
        inside = text[found.end() : argument_end(text, found.end())]
        arguments = split_at(inside, ",")
        texts = [of_argument(argument) for argument in arguments]
        said = [some for some in texts if any(t.replace("{}", "").strip() for t in some)]
        variable = re.fullmatch(r"(?:std::move\()?(\w+)(?:\.str\(\)|\))?", arguments[-1].strip())
        if not said and variable:
            said = [[before(text, found.start(), variable[1])]]
        yield from (Message(name, each) for each in (said[-1] if said else []))


def messages(root: Path = ROOT) -> list[Message]:
    """Of all errors in the sources, those left out that have no words of their own."""
    found: set[Message] = set()
    for folder in PYTHON:
        for file in (root / folder).rglob("*.py"):
            found |= set(of_python(file, str(file.relative_to(root))))
    for folder in CPP:
        for file in (root / folder).rglob("*.[ch]pp"):
            found |= set(of_cpp(file, str(file.relative_to(root))))
    return sorted(m for m in found if len(re.findall(r"[A-Za-z]{2,}", m.text)) > 1)


if __name__ == "__main__":
    sys.stdout.writelines(f"{message}\n" for message in messages())
