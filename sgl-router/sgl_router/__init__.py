"""Gateway that keeps every trajectory on its home worker within a load bound."""
