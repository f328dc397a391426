"""The hot operations, with the same names on each backend (see `interface`), and the choice of backend."""
