"""Weights in few bits: how they are rounded, kept on disk, and taken from checkpoints that are quantized already.

Must not know models, layers or machines; the form of a quantized matrix is `ops.formats`.
"""
