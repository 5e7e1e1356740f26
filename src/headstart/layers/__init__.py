"""The layers of a decoder, made of `ops`. Must not know checkpoints, files, requests or schedulers."""
