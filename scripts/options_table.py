"""Write the table of options into README.md, between its markers, from the metadata of ``TokenTimingConfig``."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from pathlib import Path
from types import UnionType

from vllm_tokentiming.config import TokenTimingConfig

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- options: written by `make docs` -->"
END = "<!-- end of options -->"
JSON_NAMES = {str: "string", bool: "true, false", int: "integer", float: "number", type(None): "null"}


def type_name(annotation: object) -> str:
    """What a user writes in JSON for a field of this type."""
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if isinstance(annotation, UnionType):
        return " or ".join(type_name(a) for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is tuple:
        return "list of [string, string]"
    return JSON_NAMES[typing.cast("type", annotation)]


def table() -> str:
    """The table in Markdown."""
    hints = typing.get_type_hints(TokenTimingConfig)
    lines = ["| key | value | default | what it does |", "|---|---|---|---|"]
    for f in dataclasses.fields(TokenTimingConfig):
        # In --speculative-config the draft is called "model", as for vLLM's other methods.
        key = "`model`" if f.name == "draft_model" else f"`{f.name}`"
        if f.default is dataclasses.MISSING:
            default = "required"
        elif f.default is None:
            default = ""
        else:
            default = f"`{json.dumps(f.default)}`"
        cells = (key, type_name(hints[f.name]), default, f.metadata["help"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def rewritten(text: str) -> str:
    """``text`` with the current table between the markers.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README.md must have {BEGIN} and then {END}, once each")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Rewrite the file; with ``--check`` only say whether it is current."""
    text = README.read_text(encoding="utf-8")
    new = rewritten(text)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if new == text else "README.md's table of options is not current: run 'make docs'")
    README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
