"""The command line of diskbuf; knows nothing that the package doesn't, and works without TensorFlow."""
