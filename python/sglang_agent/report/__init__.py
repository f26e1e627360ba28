"""What a batch did with its time: numbers, a table, pictures, timelines.

``build_report`` turns the records of a run into one :class:`Report`; everything
else here shows it.
"""

from sglang_agent.report.build import build_report
from sglang_agent.report.model import Report
from sglang_agent.report.text import render_text

__all__ = ["Report", "build_report", "render_text"]
