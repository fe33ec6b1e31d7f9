"""Readers: a buffer's rows as the datasets of a training framework."""
