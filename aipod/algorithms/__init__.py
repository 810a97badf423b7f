"""The named algorithms, all of them compositions of three slots."""
