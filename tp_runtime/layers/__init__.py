"""Layers that are split over the ranks of a tensor-parallel group."""
