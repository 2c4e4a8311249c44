"""What a check has found: a line for each question, as a table or as JSON."""

import json
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

__all__ = ["Finding", "Report", "Status"]

Status: TypeAlias = Literal["OK", "warning", "ERROR"]

_COLORS = {"OK": "green", "warning": "yellow", "ERROR": "bold red"}


@dataclass(frozen=True)
class Finding:
    """The answer to one question.

    Args:
        status: Whether all is well.
        what: What was looked at.
        found: What was found and, unless all is well, the way out.
    """

    status: Status
    what: str
    found: str


@dataclass
class Report:
    """The findings of a check; printing it shows a table.

    >>> report = Report()
    >>> report.add("OK", "gates", "2 gates.")
    >>> report.ok
    True
    """

    findings: list[Finding] = field(default_factory=list)

    def add(self, status: Status, what: str, found: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(status, what, found))

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return all(finding.status != "ERROR" for finding in self.findings)

    def to_json(self) -> str:
        """Return the findings as JSON."""
        content = {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}
        return json.dumps(content, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        """Return the findings as a table."""
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(title="Check", box=box.SIMPLE, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in self.findings:
            status = f"[{_COLORS[finding.status]}]{finding.status}[/]"
            table.add_row(status, escape(finding.what), escape(finding.found))
        console = Console()
        with console.capture() as capture:
            console.print(table)
        return capture.get().rstrip()
