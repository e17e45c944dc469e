"""How long tests wait for what surely comes, on however busy a machine: only what hangs takes so long."""

PATIENCE_S = 150.0  # a little less than pytest's own limit, so that a test can still say what it waited for
