"""What a trajectory acts on: one module per kind, found by name in the registry."""
