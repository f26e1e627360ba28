"""Architectures that the platform's own models use, so that they load quickly.

SGLang imports each module here and reads its ``EntryClass``; any other architecture
still finds its place, at the price of importing every model.
"""
