"""Copying batches to an accelerator while the previous ones are in use."""
