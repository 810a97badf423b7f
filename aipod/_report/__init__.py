"""Figures and the HTML report: of run folders, and of solutions."""

from aipod._report.solutions import report as report
