"""TOML in, a typed tree out; whatever is wrong with it becomes one line that says where and how to mend it."""

import difflib
import json
import tomllib
import types
import typing
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from adumbra.errors import InputError


class Tree(BaseModel):
    """A frozen node of configuration that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


T = typing.TypeVar("T", bound=Tree)


def read(path: Path) -> dict[str, object]:
    """The raw TOML of a file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InputError(f"{path}: not readable as TOML: {reason}") from None


def parse(raw: dict[str, object], tree: type[T], where: str) -> T:
    """The typed tree of a raw TOML; `where` names the file in messages."""
    try:
        return tree.model_validate(raw)
    except ValidationError as error:
        raise InputError(f"{where}: {_first_line(error, tree, raw)}") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply") from None


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """` (did you mean …?)`, or the known words where nothing is near."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else f" (known: {', '.join(known)})"


def _first_line(error: ValidationError, tree: type[Tree], raw: object) -> str:
    first = min(error.errors(), key=_says_little)
    place = _place(first["loc"], raw)
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        return f"unknown key '{place}'{nearest(key, _fields_at(tree, first['loc'][:-1]))}"
    if first["type"] == "missing":
        return f"'{place}' is missing"
    if first["type"] == "value_error":
        text = first["msg"].removeprefix("Value error, ")
        return f"{place}: {text}" if place else text
    message = first["msg"].replace("Input should be", "should be")
    return f"{place}: {message[0].lower()}{message[1:]}, got {_short(first['input'])}"


def _says_little(error: typing.Any) -> int:
    """Of the errors in a union's branches, the one that says most comes first."""
    if error["type"] == "literal_error":
        return 1 if isinstance(error["input"], str) else 3
    return 0 if error["type"] == "extra_forbidden" else 2


def _place(parts: tuple[int | str, ...], raw: typing.Any) -> str:
    """Where in the file: an entry of a list goes by its name, if it has one."""
    names: list[str] = []
    for part in parts:
        if isinstance(raw, list) if isinstance(part, int) else isinstance(raw, dict) and part in raw:
            raw = raw[part]
        elif not isinstance(raw, dict) or part != parts[-1]:
            continue  # pydantic's word for a branch of a union
        name = raw.get("name") if isinstance(part, int) and isinstance(raw, dict) else None
        names.append(f"'{name}'" if isinstance(name, str) else str(part))
    return ".".join(names)


def _short(value: object) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else text[:57] + "..."


def _fields_at(tree: type[Tree], place: tuple[int | str, ...]) -> list[str]:
    for part in place:
        if isinstance(part, str) and part in tree.model_fields:
            inner = _tree_in(tree.model_fields[part].annotation)
            if inner is None:
                break
            tree = inner
    return list(tree.model_fields)


def _tree_in(annotation: object) -> type[Tree] | None:
    if isinstance(annotation, type) and issubclass(annotation, Tree):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        for argument in typing.get_args(annotation):
            if (found := _tree_in(argument)) is not None:
                return found
    return None


def change(raw: dict[str, object], text: str) -> None:
    """Applies one `section.key=value` to a raw TOML; a value that is no TOML is taken as text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {text}: expected section.key=value")
    try:
        parsed: object = tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        parsed = value
    *sections, last = key.strip().split(".")
    node: object = raw
    for section in sections:
        assert isinstance(node, dict)
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise InputError(f"--set {text}: '{section}' is no section")
    assert isinstance(node, dict)
    node[last] = parsed


def dump(tree: dict[str, typing.Any], section: str = "") -> str:
    """TOML of nested tables of plain values, such as a configuration is."""
    plain = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    lines = [f"[{section}]"] if section and plain else []
    lines += [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += ["", dump(value, f"{section}.{key}" if section else key).rstrip()]
    return "\n".join(lines).lstrip("\n") + "\n"
