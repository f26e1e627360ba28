"""The package that SGLANG_EXTERNAL_MODEL_PACKAGE names in a virtual worker.

Naming it keeps SGLang from importing its own models, which is a third of the start-up.
"""
