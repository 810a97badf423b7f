"""Figures and the HTML report, made from run folders alone."""
