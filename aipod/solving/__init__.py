"""From a problem and a solver to a solution."""
