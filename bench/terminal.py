"""Tables in a terminal, and as wide as they need where output goes to a file."""

from __future__ import annotations

import sys

Table = tuple[list[str], list[list[str]]]
"""Headings, and lines of cells; a cell between ** is bold."""
WIDE = 300


def print_table(table: Table, title: str | None = None) -> None:
    from rich.console import Console
    from rich.table import Table as Drawn

    headings, lines = table
    drawn = Drawn(title=title, title_justify="left")
    for heading in headings:
        drawn.add_column(heading, overflow="fold")
    for line in lines:
        drawn.add_row(*(f"[bold]{cell[2:-2]}[/bold]" if cell.startswith("**") else cell for cell in line))
    Console(width=None if sys.stdout.isatty() else WIDE).print(drawn)
