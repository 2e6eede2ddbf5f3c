"""One self-contained HTML page of a run or a comparison: what was learned, forgotten, frozen, free, and proven."""

from agscl.report.page import MAX_BYTES, make_page, write_page
from agscl.report.read import NothingToShow, read_report
from agscl.report.report_data import ReportData

__all__ = ["MAX_BYTES", "NothingToShow", "ReportData", "make_page", "read_report", "write_page"]
