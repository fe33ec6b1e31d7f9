"""Stores on disk: columns, chunks and files. Knows no reinforcement learning and no TensorFlow."""
