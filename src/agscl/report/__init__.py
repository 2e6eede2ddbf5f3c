"""One self-contained HTML page of a run or a comparison: what was learned, forgotten, frozen, free, and proven."""

from agscl.report.page import MAX_BYTES, make_page, write_page
from agscl.report.read import NothingToShow, ReportData, read_report

__all__ = ["MAX_BYTES", "NothingToShow", "ReportData", "make_page", "read_report", "write_page"]
