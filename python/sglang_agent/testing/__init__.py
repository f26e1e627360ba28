"""Stand-ins for a model server, to try a set-up or test a harness without a GPU."""
