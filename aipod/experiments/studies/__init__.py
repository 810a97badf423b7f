"""The paper's complexity claims, measured."""
