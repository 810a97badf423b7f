"""One file per experiment; `facts/` and `published/` hold the tables that they read."""
