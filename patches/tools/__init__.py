"""Builds, checks, refreshes and renders the patch series over the pinned wheel."""
