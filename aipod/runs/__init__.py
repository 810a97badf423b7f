"""The run folder, its results and environment.

`aipod run` and Flower write it; the report reads it.
"""
