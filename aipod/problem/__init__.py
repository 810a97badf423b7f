"""The problem: two objectives, two sets, two sources of samples."""
