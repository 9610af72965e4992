"""What `moonpool doctor` looks at: each file holds the checks of one subject, as functions that return
checks.
"""

from moonpool.cli.checks.check import Check, Level
from moonpool.cli.checks.report import Report, TransportState, examine

__all__ = ["Check", "Level", "Report", "TransportState", "examine"]
