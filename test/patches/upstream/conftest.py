"""These tests go upstream with their feature: upstream's style, no pytest in them.

They import SGLang on top, which takes long; ``test_upstream_unit_tests.py`` runs them.
"""

collect_ignore_glob = ["test_*.py"]
